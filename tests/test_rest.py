"""REST as a drafter: retrieval from a store and from the text itself; damaged stores are safe."""

import math

import numpy as np
import pytest

import naive.index_text
from foredraft.contracts import Draft, Verdict
from foredraft.drafters import Resources, make_drafter
from foredraft.drafters.rest import RestDrafter, RestOptions
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index.datastore import (
    MANIFEST,
    Datastore,
    open_datastore,
    segment_path,
    write_datastore,
)
from foredraft.index.library import Library
from foredraft.index.storage import open_store
from foredraft.index.suffix_array import SuffixArrays
from foredraft.testing import CHECKS, ToyTarget
from foredraft.testing import VOCABULARY as TOY
from support.documents import random_documents, text_of
from support.drafts import opened, paths_of, propose, scored
from support.stores import VOCABULARY, built

pytestmark = pytest.mark.kernels

SEGMENTS = [random_documents(seed, VOCABULARY, 30, 30) for seed in (21, 22, 23)]
EVERYTHING = {"samples": 1 << 16, "doubt": 0.0}
PAPER = {"learn": "off", **EVERYTHING}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return built(tmp_path_factory.mktemp("stores") / "rest", *SEGMENTS)


def drafter(folder=None, vocabulary=VOCABULARY, **options):
    store = "none" if folder is None else str(folder)
    return make_drafter("rest", {"store": store, **options}, Resources(vocabulary))


def contexts(seed, count, longest=12):
    """Contexts that end in a piece of the corpus, some with a token in between that occurs nowhere."""
    rng = np.random.default_rng(seed)
    documents = [ids for documents in SEGMENTS for ids in documents]
    for _ in range(count):
        first, second = (documents[int(rng.integers(len(documents)))] for _ in range(2))
        ids = first[: int(rng.integers(0, len(first) + 1))] + second[: int(rng.integers(1, len(second) + 1))]
        yield [*ids[:-2], 299 - int(rng.integers(3)), *ids[-2:]] if rng.random() < 0.2 else ids[-longest - 8 :]


def by_the_paper(ids, longest, shortest, depth):
    """{prefix: score} of all rows after the longest context that occurs anywhere in the segments."""
    for length in range(min(longest, len(ids)), shortest - 1, -1):
        rows = [row for each in SEGMENTS for row in naive.index_text.followers(each, ids[-length:], depth, VOCABULARY)]
        if rows:
            return naive.index_text.prefix_scores(rows, [1 / len(rows)] * len(rows), 0.0)
    return {}


def assert_best(draft, expected, nodes):
    found = scored(draft)
    assert len(found) == min(nodes, len(expected))
    assert found == pytest.approx({path: expected[path] for path in found}, rel=1e-4)
    assert sorted(found.values()) == pytest.approx(sorted(expected.values())[-len(found) :] if found else [], rel=1e-4)


# --- the paper's rule


@pytest.mark.parametrize(("longest", "shortest", "depth", "nodes"), [(16, 2, 10, 64), (4, 1, 3, 5), (1, 1, 2, 9)])
def test_the_papers_rule_takes_what_follows_the_longest_context_that_occurs(store, longest, shortest, depth, nodes):
    made = drafter(store, **PAPER, longest=longest, shortest=shortest, continuation=depth)
    drafted = 0
    for ids in contexts(longest, 60):
        draft = propose(opened(made), ids, nodes, 64)
        assert_best(draft, by_the_paper(ids, longest, shortest, depth), nodes)
        drafted += len(draft) > 2
    assert drafted > 20


def test_a_sequence_read_step_by_step_is_drafted_for_as_one_read_at_once(store):
    made = drafter(store, **PAPER, longest=5)
    rng = np.random.default_rng(4)
    ids = [token for context in contexts(9, 12) for token in context]
    drafting, end, drafted = opened(made), 1, 0
    while end <= len(ids):
        draft, fresh = propose(drafting, ids[:end]), opened(made)
        assert scored(draft) == scored(propose(fresh, ids[:end]))
        drafted += len(draft) > 0
        end += int(rng.integers(1, 9))
    assert drafted > 10


def test_steps_without_a_budget_are_read_all_the_same(store):
    drafting = opened(drafter(store, **PAPER))
    ids = SEGMENTS[0][0][:4]
    assert len(propose(drafting, ids[:1], nodes=0)) == len(propose(drafting, ids[:3], depth=0)) == 0
    assert scored(propose(drafting, ids)) == scored(propose(opened(drafter(store, **PAPER)), ids)) != {}


def test_contexts_shorter_than_the_shortest_are_not_looked_up(store):
    made = drafter(store, **PAPER, shortest=3)
    ids = SEGMENTS[0][0][:3]
    assert len(propose(opened(made), ids[:1])) == len(propose(opened(made), ids[:2])) == 0
    assert len(propose(opened(made), ids)) > 0


def test_merged_segments_are_drafted_from_as_separate_ones_and_as_one(store, tmp_path):
    whole = built(tmp_path / "whole", [ids for documents in SEGMENTS for ids in documents])
    merged = built(tmp_path / "merged", *SEGMENTS)
    with write_datastore(merged) as writer:
        writer.merge(1 << 20)
        writer.commit()
    for options in (PAPER, {"samples": 50}):
        separate, one, other = (drafter(folder, **options) for folder in (store, whole, merged))
        for ids in contexts(13, 25):
            drafts = [scored(propose(opened(made), ids, 10_000)) for made in (one, other)]
            assert drafts[0] == drafts[1]
            if options is PAPER:
                assert drafts[0] == pytest.approx(scored(propose(opened(separate), ids, 10_000)), rel=1e-4)


def test_fewer_samples_give_fewer_rows_spread_over_all(tmp_path):
    """Half of 200 occurrences continue with 5 and half with 6; a sample of the first ones would miss 6."""
    folder = built(tmp_path / "s", [[1, 2, 5, n] for n in range(100)], [[1, 2, 6, n] for n in range(100)])
    made = drafter(folder, learn="off", samples=20, doubt=0.0)
    found = scored(propose(opened(made), [1, 2], 100, 2))
    assert (found[5,], found[6,]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert len(found) == 2 + 20
    assert max(path[1] for path in found if path[0] == 6 and len(path) == 2) > 80


def verdict(token):
    return Verdict((token,), (), Draft(np.empty(0, np.int32), np.empty(0, np.int32)), 0)


# --- the sequence itself


def test_without_a_store_what_the_text_itself_said_is_drafted():
    ids = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2]
    draft = propose(opened(drafter(**EVERYTHING)), ids, nodes=99, depth=3)
    paths = set(paths_of(draft.tokens, draft.parents))
    assert paths == {(3,), (3, 4), (3, 4, 5), (3, 6), (3, 6, 7)}
    assert len(propose(opened(drafter(learn="off")), ids)) == 0
    for nothing in ([1], [1, 2], [1, 2, 3]):
        assert len(propose(opened(drafter()), nothing)) == 0


def test_the_text_itself_is_asked_as_if_it_were_in_the_store(store):
    """By the paper's rule all occurrences count equally; in the text itself at least two tokens must match."""
    made = drafter(store, **PAPER | {"learn": "request"}, longest=6, shortest=2, continuation=4)
    drafted = 0
    for context in contexts(31, 40):
        ids = context + context[-5:]
        followers = {}
        for length in range(6, 1, -1):
            rows = [row for each in SEGMENTS for row in naive.index_text.followers(each, ids[-length:], 4, VOCABULARY)]
            places = [
                place for place, matched in naive.index_text.occurrences(ids, ids[-16:], 6, 999) if matched >= length
            ]
            rows += [tuple(ids[place : place + 4]) for place in places]
            if rows:
                followers = naive.index_text.prefix_scores(rows, [1 / len(rows)] * len(rows), 0.0)
                break
        draft = propose(opened(made), ids, 12)
        assert_best(draft, followers, 12)
        drafted += len(draft) > 0
    assert drafted > 20


def test_a_prompt_longer_than_everything_that_is_kept_is_read():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 40, 5000).tolist()
    drafting = opened(drafter(longest=4))
    for end in (1, 2, 1023, 1024, 1025, 4999, 5000):
        propose(drafting, ids[:end])
    at_once = opened(drafter(longest=4))
    assert scored(propose(at_once, ids)) == scored(propose(drafting, ids)) != {}


def test_what_one_request_said_does_not_surface_in_another():
    made = drafter(learn="request")
    one, other = opened(made), opened(made)
    for end in range(2, 9):
        propose(one, [1, 2, 3, 4, 1, 2, 3, 4][:end])
        propose(other, [5, 6, 1, 2, 5, 6, 1, 2][:end])
    assert propose(one, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 2).tokens.tolist() == [3, 4]
    assert propose(other, [5, 6, 1, 2, 5, 6, 1, 2, 5, 6], 3).tokens.tolist() == [1, 2, 5]
    assert 3 not in propose(other, [5, 6, 1, 2, 5, 6, 1, 2, 5, 6, 7, 1, 2], 99).tokens
    one.close()
    other.close()
    assert len(propose(opened(made), [1, 2])) == 0


# --- the store changes


def test_new_segments_are_taken_up_by_the_next_sequence_while_one_at_work_goes_on(tmp_path):
    folder = built(tmp_path / "s", [[1, 2, 3]])
    made = drafter(folder, learn="off")
    at_work = opened(made)
    assert propose(at_work, [1]).tokens.tolist() == [2, 3]
    with write_datastore(folder) as writer:
        writer.add([text_of([[7, 8, 9]], VOCABULARY)])
        writer.merge(1 << 20)
        writer.commit()
    assert propose(at_work, [1, 2]).tokens.tolist() == [3]
    assert len(propose(at_work, [1, 2, 7])) == 0
    assert propose(opened(made), [7]).tokens.tolist() == [8, 9]
    assert propose(opened(made), [1]).tokens.tolist() == [2, 3]
    with write_datastore(folder) as writer:
        writer.remove(writer.manifest.segments[0].name)
        writer.commit()
    assert len(propose(opened(made), [7])) == 0
    assert propose(at_work, [1, 2, 7, 1]).tokens.tolist() == [2, 3]


def test_a_store_that_is_another_tokenizers_by_now_is_not_taken_up(tmp_path):
    folder = built(tmp_path / "s", [[1, 2, 3]])
    made = drafter(folder)
    at_work = opened(made)
    built(folder, [[4, 5]], tokenizer_hash="other", overwrite=True)
    with pytest.warns(ForedraftWarning, match="the store as it was: .*another tokenizer"):
        later = opened(made)
    for drafting in (at_work, later):
        assert propose(drafting, [1]).tokens.tolist() == [2, 3]


# --- damage


def damaged(text, rng):
    """A segment with one fault: a flipped bit, or an arbitrary entry."""
    arrays = {name: array.copy() for name, array in text._asdict().items()}
    array = arrays[("symbols", "suffixes", "first")[int(rng.integers(3))]]
    for _ in range(int(rng.integers(1, 12))):
        at = int(rng.integers(len(array))) if len(array) != VOCABULARY + 1 else int(rng.integers(12))
        bits = np.iinfo(array.dtype)
        if rng.random() < 0.5:
            array.view(f"u{array.itemsize}")[at] ^= array.dtype.type(1).view(f"u{array.itemsize}") << int(
                rng.integers(bits.bits)
            )
        else:
            array[at] = rng.integers(bits.min, bits.max, dtype=array.dtype)
    return SuffixArrays(**arrays)


def test_damaged_segments_neither_crash_nor_give_what_is_no_draft(store):
    sound = open_datastore(store)
    rng = np.random.default_rng(0)
    asked = list(contexts(41, 40))
    drafted = 0
    for number in range(240):
        segments = tuple(damaged(text, rng) for text in sound.segments)
        store = Datastore(sound.folder, sound.manifest, segments, sound.version)
        made = RestDrafter(RestOptions(), Library([store]))
        drafting = opened(made)
        for ids in (asked[number % 40], asked[number % 40] + asked[(number + 7) % 40]):
            drafted += len(propose(drafting, ids, 20)) > 0
            drafting.observe(verdict(ids[0]))
    assert drafted > 200


def test_a_bit_that_flips_in_a_file_is_not_noticed_and_harms_nothing(tmp_path):
    folder = built(tmp_path / "s", [[1, 2, 3, 1, 2, 4], [1, 2]], vocabulary=5)
    path = segment_path(folder, open_datastore(folder).manifest.segments[0].name)
    entries = open_store(path, check=True).entries
    data, rng = bytearray(path.read_bytes()), np.random.default_rng(0)
    for entry in entries:
        for at in range(entry.offset, entry.end):
            data[at] ^= 1 << (bit := int(rng.integers(8)))
            path.write_bytes(data)
            drafting = opened(drafter(folder, 5), vocabulary=5)
            for ids in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 1, 2]):
                propose(drafting, ids, vocabulary=5)
            data[at] ^= 1 << bit


# --- options and resources


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learn": "all"}, "learn of method 'rest' is 'all'; it must be one of request, off."),
        ({"longest": 0}, "longest is 0; it must be 1 to 64."),
        ({"longest": 65}, "longest is 65; it must be 1 to 64."),
        ({"continuation": 0}, "continuation is 0; it must be 1 to 64."),
        ({"continuation": 65}, "continuation is 65; it must be 1 to 64."),
        ({"samples": 0}, "samples is 0; it must be 1 to 65536."),
        ({"samples": 65_537}, "samples is 65537; it must be 1 to 65536."),
        ({"shortest": 0}, "shortest is 0; it must be 1 to longest, which is 16."),
        ({"shortest": 5, "longest": 4}, "shortest is 5; it must be 1 to longest, which is 4."),
        ({"doubt": -0.5}, "doubt is -0.5; it must be a number from 0 on."),
        ({"doubt": math.inf}, "doubt is inf; it must be a number from 0 on."),
        ({"doubt": math.nan}, "doubt of method 'rest' is nan; it must be a number that float64 can hold."),
    ],
)
def test_options_that_mean_nothing_are_refused(options, sentence):
    with pytest.raises(UsageError) as refusal:
        drafter(**options)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(("given", "meant"), [("sample", "samples"), ("stor", "store")])
def test_an_unknown_option_is_refused_with_a_hint(given, meant):
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'"):
        drafter(**{given: 1})


def test_the_default_store_is_the_resources_own(store):
    ids = SEGMENTS[0][0][:3]
    resources = Resources(VOCABULARY, "words", default_store=lambda: store)
    made = make_drafter("rest", {"learn": "off"}, resources)
    assert scored(propose(opened(made), ids)) == scored(propose(opened(drafter(store, learn="off")), ids)) != {}
    for nothing in (
        make_drafter("rest", {"learn": "off"}, Resources(VOCABULARY)),
        make_drafter("rest", {"learn": "off", "store": "none"}, resources),
    ):
        assert len(propose(opened(nothing), ids)) == 0


def test_stores_that_do_not_fit_the_model_are_refused(store, tmp_path):
    with pytest.raises(StoreError, match="made with another tokenizer"):
        make_drafter("rest", {"store": str(store)}, Resources(VOCABULARY, "other"))
    with pytest.raises(StoreError, match="vocabulary of 300 tokens and this model scores 299"):
        drafter(store, VOCABULARY - 1)
    with pytest.raises(StoreError, match="is not a datastore"):
        drafter(tmp_path)


# --- the laws, with a store


@pytest.fixture(scope="module")
def toy_store(tmp_path_factory):
    """Texts of the toy target, so that drafts are accepted."""
    target, rng = ToyTarget(), np.random.default_rng(0)
    starts = [rng.integers(0, TOY, 2) for _ in range(12)] + [np.array([1, 5]), np.array([4, 1, 5])]
    texts = [[*start.tolist(), *target.greedy(start, 40)] for start in starts]
    return built(tmp_path_factory.mktemp("stores") / "toy", texts[:7], texts[7:], vocabulary=TOY)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_law_holds_with_a_store(toy_store, check):
    check(lambda: drafter(toy_store, TOY))


def test_a_store_that_goes_away_serves_on_as_it_was(tmp_path):
    folder = built(tmp_path / "rest", *SEGMENTS)
    made = drafter(folder)
    before = propose(opened(made), SEGMENTS[0][0][:3])
    (folder / MANIFEST).unlink()
    with pytest.warns(ForedraftWarning, match="Drafts come from the store as it was"):
        drafting = opened(made)
    assert scored(propose(drafting, SEGMENTS[0][0][:3])) == scored(before)
