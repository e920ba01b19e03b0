"""`auto` as a drafter: it uses every source, learns own words, and keeps, shares or drops them by its options."""

from pathlib import Path

import numba
import numpy as np
import pytest

import foredraft
from foredraft.contracts import Verdict
from foredraft.corpus.trigrams import count_trigrams
from foredraft.drafters import Resources, auto, make_drafter
from foredraft.drafters.auto import AutoDrafter, AutoOptions
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index import library, storage
from foredraft.index.datastore import MANIFEST, check_datastore, open_datastore, write_datastore
from foredraft.index.library import Library
from foredraft.index.own_words import NO_WORDS, empty_words, words_of_table
from foredraft.index.sources import NEURAL, OWN, SHARED, STORE, WORDS_2
from foredraft.model.growth import RolloutDrafting
from foredraft.testing import CHECKS, check_drafter, sequences_do_not_influence_each_other
from foredraft.testing import VOCABULARY as TOY_IDS
from support.documents import random_documents
from support.drafts import opened, propose, scored
from support.stores import built
from support.tables import static_table
from support.tiny_models import tiny_draft_model
from support.toys import TOY, TOY_DRAFT
from support.worth import asked

pytestmark = pytest.mark.kernels

VOCABULARY = 300
TOP_ID = 3000  # vocabulary of longer texts without a repetition
SEGMENTS = [random_documents(seed, VOCABULARY, 30, 30) for seed in (31, 32)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return built(tmp_path_factory.mktemp("stores") / "auto", *SEGMENTS)


def drafter(folder=None, **options):
    chosen = {"store": "none" if folder is None else str(folder), "table": "none", **options}
    return make_drafter("auto", chosen, Resources(VOCABULARY))


def verdict(draft, *tokens, path=(), at=0, top=None):
    """`top` are {token: probability} of the first rows."""
    if top is None:
        return Verdict(tokens, path, draft, at)
    words = np.array([list(each) for each in top], np.int32)
    chances = np.array([list(each.values()) for each in top], np.float32)
    return Verdict(tokens, path, draft, at, words, chances)


def best(draft):
    return draft.tokens[0] if len(draft) else None


def teach(made, ids, top, tokens=(9,)):
    """One step of a text, with the target's `top` tokens after each row of the draft. Returns the open drafting."""
    drafting = opened(made)
    draft = propose(drafting, ids)
    drafting.observe(verdict(draft, *tokens, at=len(ids) - 1, top=top))
    return drafting


def say(made, ids):
    """A text without observed rows."""
    drafting = opened(made, vocabulary=max(VOCABULARY, *ids))
    propose(drafting, ids)
    drafting.close()


# --- what it knows


@pytest.mark.slow
def test_each_source_is_found_and_named(store):
    document = next(ids for ids in SEGMENTS[0] if len(ids) > 12)
    draft = propose(opened(drafter(store, learn="off")), document[:10], 16)
    assert best(draft) == document[10]
    assert set(draft.source.tolist()) == {STORE}

    own = propose(opened(drafter()), [7, 8, 9, 10, 11, 7, 8, 9])
    assert (best(own), own.source[0]) == (10, OWN)

    made = drafter(learn="shared")
    first = opened(made)
    propose(first, [20, 21, 22, 23])
    first.close()
    shared = propose(opened(made), [20, 21, 22])
    assert (best(shared), shared.source[0]) == (23, SHARED)

    table = words_of_table(static_table([[1, 2, 3]] * 9))
    draft = propose(opened(AutoDrafter(AutoOptions(learn="off"), table, Library(vocabulary=11))), [1, 2])
    assert (best(draft), draft.source[0]) == (3, WORDS_2)
    names = AutoDrafter.source_names
    assert [names[source] for source in (STORE, OWN, SHARED, NEURAL, WORDS_2)] == [
        "auto, datastore", "auto, own text", "auto, shared text", "auto, draft model", "auto, two tokens"
    ]  # fmt: skip


def test_what_the_target_says_behind_rows_that_were_not_accepted_is_learned_too():
    made = drafter()
    drafting = opened(made)
    ids = [1, 2, 3, 9, 1, 2]
    draft = propose(drafting, ids, 1)
    assert draft.tokens.tolist() == [3]
    drafting.observe(verdict(draft, 5, at=5, top=[{5: 0.8}, {77: 0.9}]))
    propose(drafting, [*ids, 5])
    found = scored(propose(drafting, [*ids, 5, 2, 3]))
    assert (77,) in found


def test_steps_without_a_budget_are_read_all_the_same():
    drafting = opened(drafter())
    draft = propose(drafting, [7, 8, 9, 10, 7, 8], nodes=0)
    assert len(draft) == 0
    drafting.observe(verdict(draft, 9))
    assert best(propose(drafting, [7, 8, 9, 10, 7, 8, 9])) == 10


def test_the_number_of_steps_does_not_matter_to_what_is_read(store):
    ids = [token for document in SEGMENTS[1][:6] for token in document]
    at_once, in_steps = opened(drafter(store)), opened(drafter(store))
    for end in range(1, len(ids)):
        propose(in_steps, ids[:end], nodes=0)
    assert scored(propose(at_once, ids)) == pytest.approx(scored(propose(in_steps, ids)))


# --- whom it learns for


@pytest.mark.parametrize(("learn", "later"), [(None, 5), ("shared", 5), ("request", None), ("off", None)])
def test_own_words_outlive_a_text_where_that_is_wanted(learn, later):
    made = drafter(learn=learn)
    drafting = teach(made, [1, 2], [{5: 0.9}])
    drafting.close()
    assert best(propose(opened(made), [30, 1, 2], 1)) == later


def test_own_words_get_more_room_for_all_texts_that_use_them(monkeypatch):
    monkeypatch.setattr(auto, "empty_words", lambda: empty_words(64))
    monkeypatch.setattr(auto, "_ENLARGED_EVERY", 16)
    made = drafter()
    first, second, ids = opened(made), opened(made), [1, 2]
    for step in range(60):
        draft = propose(first, ids)
        first.observe(verdict(draft, 100 + step, at=len(ids) - 1, top=[{5: 0.9}]))
        ids = [*ids, 100 + step]
    assert len(made.kept.words.keys) > 64
    draft = propose(second, [3, 4])
    second.observe(verdict(draft, 9, at=1, top=[{7: 0.9}]))
    second.close()
    assert best(propose(opened(made), [30, 3, 4], 1)) == 7
    made.forget()
    first.observe(verdict(propose(first, ids), 9, at=len(ids) - 1, top=[{5: 0.9}]))
    first.close()
    assert not made.kept.words.clock[0], "an open text keeps the words that were dropped"


@pytest.mark.parametrize("learn", ["request", "off"])
def test_a_text_that_is_alone_leaves_the_words_of_others(monkeypatch, learn):
    monkeypatch.setattr(auto, "_ENLARGED_EVERY", 4)
    made = drafter(learn=learn)
    drafting, ids = opened(made), [1, 2]
    for step in range(20):
        drafting.observe(verdict(propose(drafting, ids), 9, at=len(ids) - 1, top=[{5: 0.9}]))
        ids = [*ids, 100 + step]
    drafting.close()
    assert not made.kept.words.clock[0]
    assert not NO_WORDS.clock[0]


def test_texts_themselves_are_shared_only_on_request():
    made = drafter()
    drafting = opened(made)
    propose(drafting, [20, 21, 22, 23])
    drafting.close()
    assert best(propose(opened(made), [20, 21, 22])) is None


def test_what_is_shared_surfaces_after_the_text_is_closed():
    made = drafter(learn="shared")
    one, other = opened(made), opened(made)
    one.observe(verdict(propose(one, [20, 21]), 22, 23))  # its last step
    assert len(propose(other, [30, 20, 21])) == 0
    one.close()
    one.close()
    assert (22,) in scored(propose(other, [30, 20, 21, 31, 20, 21]))
    other.close()
    assert int(made.library.shared.length[0]) == 4 + 1 + 6 + 1, "closing twice shares once"
    assert len(propose(opened(made), [40, 22, 23])) == 0, "no continuation crosses from one text to the next"
    assert len(propose(opened(drafter(learn="shared")), [20, 21])) == 0, "nor from one drafter to another"


def test_the_older_half_is_dropped_when_too_much_is_shared(monkeypatch):
    monkeypatch.setattr(library, "MOST_SHARED", 40)
    made = drafter(learn="shared")
    for number in range(12):
        say(made, [10 * number + digit for digit in range(6)])
        assert int(made.library.shared.length[0]) <= 40
        assert best(propose(opened(made), [10 * number, 10 * number + 1])) == 10 * number + 2
    kept = [number for number in range(12) if len(propose(opened(made), [10 * number + 3, 10 * number + 4]))]
    assert kept == list(range(kept[0], 12)), "the newest are kept"
    assert 3 <= len(kept) < 7


def test_a_text_in_progress_finds_what_others_share_meanwhile():
    """The text that is shared is replaced by a larger one several times."""
    made = make_drafter("auto", {"table": "none", "learn": "shared"}, Resources(TOP_ID))
    in_progress, ids, rooms = opened(made, vocabulary=TOP_ID), [0, 0], set()
    for number in range(1, 200):
        said = list(range(11 * number, 11 * number + 11))
        say(made, said)
        ids += said[:2]
        assert best(propose(in_progress, ids, 3, vocabulary=TOP_ID)) == said[2]
        rooms.add(len(made.library.shared.symbols))
    assert len(rooms) > 1


def test_what_was_learned_is_forgotten():
    made = drafter(learn="shared")
    drafting = teach(made, [1, 2], [{5: 0.9}])
    propose(drafting, [1, 2, 9, 10])
    drafting.close()
    assert best(propose(opened(made), [30, 1, 2])) is not None
    made.forget()
    assert best(propose(opened(made), [30, 1, 2])) is None


def test_rates_are_kept_apart_for_sampling():
    made = drafter()
    drafting, ids = opened(made), [1, 2, 3]
    for step in range(5):
        draft = propose(drafting, ids, 4)
        drafting.observe(verdict(draft, 50 + step))
        ids = [*ids, 50 + step, 1, 2]
    propose(drafting, ids)
    untouched = drafter()
    assert np.array_equal(made.rates[True].hits, untouched.rates[True].hits)
    assert not np.array_equal(made.rates[False].seen, untouched.rates[False].seen)


@pytest.mark.slow
@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="drafts over a whole vocabulary take minutes without the compiler")
def test_texts_are_the_same_with_words_of_other_texts():
    generator = foredraft.load(TOY, method="none", dtype="float32", compile=False)
    prompts = ["The old lighthouse", "Tom has 4 apples", "The old lighthouse", "def add(a, b):"]
    settings = {"max_new_tokens": 32, "do_sample": True, "temperature": 0.7}
    plain = [generator.generate(prompt, seed=seed, **settings).token_ids for seed, prompt in enumerate(prompts)]
    generator.use("auto", {"table": "none"}, nodes=12)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        for seed in order:
            assert generator.generate(prompts[seed], seed=seed, **settings).token_ids == plain[seed]


# --- what it keeps on disk


@pytest.mark.slow
def test_what_was_shared_is_saved_and_found_again(tmp_path):
    memory = str(tmp_path / "memory")
    made = drafter(memory=memory)
    assert made.options.shares
    drafting = teach(made, [1, 2], [{5: 0.9}])
    propose(drafting, [1, 2, 41, 42, 43, 44])
    drafting.close()
    made.save()
    made.save()  # nothing new
    assert len(open_datastore(memory).segments) == 1
    assert list(check_datastore(memory))
    again = drafter(memory=memory)
    draft = propose(opened(again), [41, 42, 43])
    assert (best(draft), draft.source[0]) == (44, STORE)
    assert best(propose(opened(again), [30, 1, 2], 1)) in (5, 41)
    assert 5 in propose(opened(again), [30, 1, 2], 4, 1).tokens
    assert best(propose(opened(made), [41, 42, 43])) == 44
    again.forget()
    again.save()
    for each in (again, drafter(memory=memory)):
        assert 5 in propose(opened(each), [30, 1, 2], 4, 1).tokens, "what is saved is not forgotten"


def test_a_damaged_table_is_refused_however_large(tmp_path, monkeypatch):
    path = tmp_path / "t.trigrams"
    symbols = np.concatenate([np.append(each, VOCABULARY) for each in SEGMENTS[0]])
    count_trigrams([symbols], "", VOCABULARY, path)
    monkeypatch.setattr(storage, "EAGER_CHECK_BYTES", 0)
    data = bytearray(path.read_bytes())
    data[-5] ^= 255
    path.write_bytes(data)
    with pytest.raises(StoreError, match="does not match its checksum"):
        drafter(table=str(path))


def test_a_table_of_wrong_offsets_is_refused_though_its_checksums_are_right(tmp_path):
    path, wrong = tmp_path / "t.trigrams", tmp_path / "wrong.trigrams"
    symbols = np.concatenate([np.append(each, VOCABULARY) for each in SEGMENTS[0]])
    count_trigrams([symbols], "", VOCABULARY, path)
    with storage.write_store(wrong, "trigram-table", tokenizer_hash="", vocabulary=VOCABULARY) as writer:
        for name, stored in storage.open_store(path).arrays.items():
            array = stored.copy()
            array[5] = 1 << 31 if name == "first" else array[5]
            writer.append(name, array)
    with pytest.raises(StoreError, match="its array 'first' is not in ascending order"):
        drafter(table=str(wrong))


def test_a_store_of_more_segments_than_rows_is_still_drafted_from(tmp_path):
    folder = built(tmp_path / "many", *([[number, number + 1, 290, 291]] for number in range(3, 123)))
    assert best(propose(opened(drafter(folder, learn="off")), [50, 51, 290])) == 291


def say_and_save(made, start):
    say(made, list(range(start, start + 10)))
    made.save()


def test_a_memory_forgets_its_oldest_part_when_it_is_full(tmp_path):
    memory = str(tmp_path / "memory")
    made = drafter(memory=memory, memory_tokens=40)
    for start in range(100, 200, 10):
        say_and_save(made, start)
        manifest = open_datastore(memory).manifest
        assert sum(entry.tokens for entry in manifest.segments) <= 40
    assert list(check_datastore(memory))
    fresh = drafter(memory=memory)
    assert best(propose(opened(fresh), [191, 192, 193])) == 194
    assert 104 not in propose(opened(fresh), [101, 102, 103]).tokens


def test_a_memory_keeps_the_end_of_a_text_that_is_longer_than_it(tmp_path):
    memory = str(tmp_path / "memory")
    say_and_save(drafter(memory=memory, memory_tokens=4), 100)
    assert open_datastore(memory).manifest.tokens == 4
    assert best(propose(opened(drafter(memory=memory, memory_tokens=4)), [106, 107])) == 108


def test_a_memory_that_holds_more_than_it_may_is_refused(store):
    with pytest.raises(UsageError, match=r"holds [0-9]+ tokens and memory_tokens is 9, .* Raise memory_tokens"):
        drafter(memory=str(store), memory_tokens=9)
    assert len(open_datastore(store).segments) == len(SEGMENTS)


def test_a_folder_of_other_things_is_refused_as_memory_before_a_text(tmp_path):
    (tmp_path / "todo.txt").write_text("x")
    with pytest.raises(StoreError, match=r"holds other things \(todo\.txt\)"):
        drafter(memory=str(tmp_path))


def test_a_memory_that_lost_its_manifest_can_be_saved_to(tmp_path):
    memory = tmp_path / "memory"
    made = drafter(memory=str(memory))
    teach(made, [1, 2], [{5: 0.9}]).close()
    made.save()
    (memory / MANIFEST).unlink()
    again = drafter(memory=str(memory))
    say_and_save(again, 100)
    again = drafter(memory=str(memory))
    assert best(propose(opened(again), [101, 102, 103])) == 104
    assert best(propose(opened(again), [30, 1, 2], 1)) == 5


def test_a_folder_that_is_store_and_memory_is_searched_once(store):
    made = drafter(store, memory=str(store.parent / "." / store.name))
    assert len(made.library.segments()) == len(SEGMENTS)


def test_a_memory_that_another_drafter_made_meanwhile_is_searched(tmp_path):
    memory = str(tmp_path / "a" / "memory")
    made, other = drafter(memory=memory), drafter(memory=memory)
    say_and_save(made, 100)
    say_and_save(other, 200)
    assert best(propose(opened(other), [101, 102, 103])) == 104
    assert best(propose(opened(other), [201, 202, 203])) == 204


def test_small_parts_of_a_memory_are_sorted_together(tmp_path):
    memory = str(tmp_path / "memory")
    made = drafter(memory=memory, memory_tokens=1600)
    for start in range(100, 200, 10):
        say_and_save(made, start)
    assert len(open_datastore(memory).segments) == 1
    assert best(propose(opened(drafter(memory=memory)), [101, 102, 103])) == 104


def test_a_memory_of_another_tokenizer_or_a_damaged_one_is_refused(tmp_path):
    memory = built(tmp_path / "memory", [[4, 5]], tokenizer_hash="b")
    with pytest.raises(StoreError, match="tokenizer"):
        make_drafter("auto", {"store": "none", "table": "none", "memory": str(memory)}, Resources(VOCABULARY, "a"))
    (memory / "datastore.json").write_text("{")
    with pytest.raises(StoreError, match=r"datastore\.json"):
        drafter(memory=str(memory))


def test_what_is_saved_lies_beside_the_store_that_is_searched(store, tmp_path):
    made = drafter(store, memory=str(tmp_path / "memory"))
    ids = SEGMENTS[0][0][:2]
    say(made, [*ids, 298, 297])
    made.save()
    found = scored(propose(opened(made), ids, 64, 1)).keys()
    assert (298,) in found, "the memory is searched"
    assert found > {(298,)}, "and so is the store"
    assert len(open_datastore(store).segments) == len(SEGMENTS), "the store that was given is only read"


def test_a_memory_whose_segments_a_user_merged_loses_its_oldest_texts_only(tmp_path):
    memory = str(tmp_path / "memory")
    made = drafter(memory=memory, memory_tokens=80)
    for start in range(100, 200, 10):
        say(made, [*range(start, start + 7)])
    made.save()
    with write_datastore(memory) as writer:
        writer.merge(1000)
        writer.commit()
    made = drafter(memory=memory, memory_tokens=80)
    say(made, [*range(10, 27)])
    made.save()
    texts = [token for segment in open_datastore(memory).segments for token in segment.symbols[segment.symbols < 300]]
    assert texts[-17:] == [*range(10, 27)]
    assert texts[:-17] == [token for start in range(120, 200, 10) for token in range(start, start + 7)]
    assert list(check_datastore(memory))


def test_saved_tokens_that_a_smaller_memory_cannot_hold_end_a_document(tmp_path):
    memory = built(tmp_path / "memory", [[5, 6]], vocabulary=10, tokenizer_hash="")
    made = drafter(memory=str(memory))
    say(made, [1, 2, 10, 3, 4, 250, 5])
    made.save()
    (text,) = open_datastore(memory).segments
    assert text.symbols.tolist() == [5, 6, 10, 1, 2, 10, 3, 4, 10, 5, 10]
    assert list(check_datastore(memory))


def test_a_memory_that_cannot_be_saved_to_loses_nothing(tmp_path):
    memory = tmp_path / "memory"
    made = make_drafter("auto", {"table": "none", "memory": str(memory)}, Resources(VOCABULARY, "a"))
    say(made, [1, 2, 3])
    built(memory, [[4, 5]], tokenizer_hash="b")
    with pytest.raises(StoreError, match="another tokenizer"):
        made.save()
    built(memory, [[4, 5]], tokenizer_hash="a", overwrite=True)
    with write_datastore(memory), pytest.raises(StoreError, match="being written by another process"):
        made.save()
    assert best(propose(opened(made), [1, 2])) == 3
    made.save()
    assert open_datastore(memory).manifest.tokens == 5


def test_a_memory_that_cannot_be_written_is_refused_before_a_text(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match=r"file/memory cannot be written later: .*file is a file, not a folder"):
        drafter(memory=str(tmp_path / "file" / "memory"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that shows the right to write and has none")
def test_a_folder_that_takes_no_file_is_refused_before_a_text_whatever_its_rights_say():
    with pytest.raises(StoreError, match=r"/proc/memory cannot be written later: /proc is not writable"):
        drafter(memory="/proc/memory")


def test_a_tilde_in_a_path_is_a_home_folder(tmp_path, monkeypatch):
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    built(tmp_path / "store", *SEGMENTS)
    made = drafter("~/store", memory="~/memory")
    say(made, [1, 2, 3])
    made.save()
    assert (tmp_path / "memory" / MANIFEST).is_file()
    for option in ("store", "table", "memory"):
        with pytest.raises(UsageError, match="There is no folder or file ~nobody-of-this-name/a"):
            drafter(**{option: "~nobody-of-this-name/a"})


# --- a neural drafter among its sources


def test_a_draft_models_foresight_is_blended_in_and_followed(monkeypatch):
    """The model drafts in every step here; its drafts are what it would generate, and its cache stays in sync."""
    monkeypatch.setattr(auto, "Worth", asked(True))
    model = tiny_draft_model()
    chosen = {"store": "none", "table": "none", "model": "tiny", "learn": "off"}
    made = make_drafter("auto", chosen, Resources(TOY_IDS, draft_model=lambda _: model))
    alone = make_drafter(
        "draft_tree",
        {"levels": 4, "out_degree": 3, "model": "tiny"},
        Resources(TOY_IDS, draft_model=lambda _: model),
    )
    drafting, other, ids = opened(made, vocabulary=TOY_IDS), opened(alone, vocabulary=TOY_IDS), [1, 2, 3]
    for _ in range(6):
        draft, expected = propose(drafting, ids, 16, vocabulary=TOY_IDS), propose(other, ids, 16, vocabulary=TOY_IDS)
        assert set(draft.source.tolist()) == {NEURAL}
        assert scored(draft).keys() >= {path for path, score in scored(expected).items() if score > 0.1}
        written = (*max(scored(expected), key=len), 5)
        for each in (drafting, other):
            each.observe(verdict(draft, *written))
        ids += written


def test_a_draft_model_needs_a_target():
    with pytest.raises(UsageError, match=r"No target is loaded that .* could draft for"):
        drafter(model=TOY_DRAFT)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learn": "all"}, "learn of method 'auto' is 'all'; it must be one of request, shared, off, or None."),
        ({"depth": 0}, "depth is 0; it must be 1 to 64."),
        ({"levels": 65}, "levels is 65; it must be 1 to 64."),
        ({"memory_tokens": 0}, "memory_tokens is 0; it must be at least 1."),
        ({"memory": "m", "learn": "request"}, "memory keeps shared texts"),
        ({"model": TOY_DRAFT, "drafter": "eesd"}, "model and drafter both name a drafter to blend in; give one"),
        ({"drafter": 7}, 'drafter is 7; give the name of a method to blend in, such as "medusa"'),
        ({"drafter": {"levels": 3}}, "drafter is {'levels': 3}; give the name of a method to blend in"),
        ({"drafter": "auto"}, "drafter is 'auto'; give the name of a method to blend in"),
        ({"drafter": "medsa"}, "There is no method 'medsa'. Did you mean 'medusa'?"),
        ({"drafter": {"method": "eesd", "level": 3}}, "Method 'eesd' has no option 'level'"),
        ({"drafter": "lookahead"}, "Method 'lookahead' learns from the target's tokens after its own drafts"),
        ({"drafter": "eesd"}, "no model is loaded here"),
        ({"drafter": {"method": "adaptix", "feedback": "off", "share": True}}, "Method 'adaptix' must see every step"),
    ],
)
def test_options_out_of_range_are_refused(options, sentence):
    with pytest.raises(UsageError) as caught:
        drafter(**options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_laws_hold_with_a_store(tmp_path, check):
    rng = np.random.default_rng(0)
    folder = built(tmp_path / "s", [rng.integers(0, TOY_IDS, 40).tolist() for _ in range(20)], vocabulary=TOY_IDS)
    chosen = {"store": str(folder), "table": "none", "learn": "request"}
    check(lambda: make_drafter("auto", chosen, Resources(TOY_IDS)))


@pytest.mark.slow
def test_it_passes_the_drafters_checks_as_a_whole():
    kept = {"store": "none", "table": "none"}
    check_drafter(lambda: make_drafter("auto", kept, Resources(TOY_IDS)), shared=True)
    check_drafter(lambda: make_drafter("auto", {**kept, "learn": "request"}, Resources(TOY_IDS)))
    with pytest.raises(AssertionError, match="influence"):
        sequences_do_not_influence_each_other(lambda: make_drafter("auto", kept, Resources(TOY_IDS)))


# --- sources that fail


def raising(*_args):
    raise RuntimeError("disk on fire")


def step(drafting):
    draft = propose(drafting, [1, 2, 3, 4, 1, 2])
    drafting.observe(verdict(draft, 3))


@pytest.mark.parametrize("fails", ["propose", "observe"])
def test_a_draft_model_that_fails_is_left_out(monkeypatch, fails):
    made = make_drafter(
        "auto", {"store": "none", "table": "none", "model": "tiny"},
        Resources(TOY_IDS, draft_model=lambda _name: tiny_draft_model()),
    )  # fmt: skip
    drafting = opened(made)
    monkeypatch.setattr(RolloutDrafting, fails, raising)
    with pytest.warns(ForedraftWarning, match="source 'auto, draft model' failed .*disk on fire.*the text is the same"):
        step(drafting)
    assert best(propose(drafting, [1, 2, 3, 4, 1, 2, 3])) == 4
    drafting.close()
