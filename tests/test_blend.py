"""Blending: every source is used, path scores are right, and rates follow the target's choices."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive.index_blend
from fit_rates import flat_rates
from foredraft.graph.tree import check_tree, depths
from foredraft.index.blend import (
    NO_TOP_TOKENS,
    Noise,
    advance,
    blend,
    chance,
    credit,
    learn_choices,
    prior_rates,
)
from foredraft.index.datastore import open_datastore
from foredraft.index.own_words import NO_WORDS, empty_words
from foredraft.index.recent_text import NO_TEXT, append, empty_text, newest_place
from foredraft.index.retrieval import StoredRows
from foredraft.index.sources import (
    ABSENT,
    LONGEST,
    NO_NEURAL_DRAFT,
    NO_ROWS,
    SOURCES,
    STORE,
    UNLISTED,
    NeuralDraft,
    Rows,
    Sources,
    room_to_draft,
)
from foredraft.sampling.noise import perturbed_argmax
from support.documents import random_documents
from support.drafts import path_to
from support.own_words import learn
from support.stores import built
from support.tables import assert_same_paths

pytestmark = pytest.mark.kernels

VOCABULARY = 40
SIZE = (16, 8, VOCABULARY)
NO_NOISE = Noise(known=False, seed=np.uint64(0))


def text_of(ids):
    text = empty_text(len(ids) + 1)
    append(text, np.array(ids, np.int64))
    return text


def sources(ids=(), words=NO_WORDS, table=NO_WORDS, began=0, shared=(), rows=NO_ROWS, neural=NO_NEURAL_DRAFT):
    return Sources(words, began, table, text_of(ids), text_of(shared), rows, neural)


def drafted(asked, ids, size=SIZE, rates=None, noise=NO_NOISE):
    room = room_to_draft(max(size[0], 1))
    blend(asked, flat_rates() if rates is None else rates, room, np.array(ids, np.int64), size, noise)
    kept = room.drafted[: room.made[1]]
    parents = [room.nodes[above] if above >= 0 else -1 for above in room.parents[kept]]
    return room.tokens[kept], np.array(parents, np.int32), room.score[kept]


def paths(tokens, parents, score):
    return {tuple(tokens[path_to(parents, node)].tolist()): float(score[node]) for node in range(len(tokens))}


def some_words(rng, count=60):
    words = empty_words(1 << 10)
    for _ in range(count):
        chances = np.sort(rng.dirichlet(np.ones(4)))[::-1]
        tokens = rng.permutation(VOCABULARY)[:4]
        learn(words, rng.integers(0, VOCABULARY, 3), [], [], [dict(zip(tokens.tolist(), chances, strict=True))])
    return words


def some_sources(rng):
    ids, began = rng.integers(0, VOCABULARY, 60) % 11, int(rng.integers(0, 180))
    rows = np.sort(rng.integers(0, VOCABULARY, (6, 4)).astype(np.int32).view("i4,i4,i4,i4"), axis=0).view(np.int32)
    stored = Rows(rows.reshape(6, 4).copy(), rng.random(6).astype(np.float32), rng.integers(1, 9, 6).astype(np.int32))
    order = np.lexsort(stored.tokens.T[::-1])
    stored = Rows(stored.tokens[order].copy(), stored.weights, stored.lengths)
    foreseen = NeuralDraft(
        np.array([3, 4, 5], np.int32), np.array([-1, 0, -1], np.int32), np.array([0.6, 0.3, 0.2], np.float32)
    )
    return ids, sources(ids, some_words(rng), some_words(rng), began, ids[::-1].copy(), stored, foreseen)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(1, 9))
def test_a_draft_is_a_tree_of_the_best_paths_within_its_limits(seed, most, deepest):
    ids, asked = some_sources(np.random.default_rng(seed))
    tokens, parents, score = drafted(asked, ids, (most, deepest, VOCABULARY), prior_rates(sampled=False))
    check_tree(tokens, parents, VOCABULARY)
    assert len(set(zip(parents.tolist(), tokens.tolist(), strict=True))) == len(tokens), "siblings differ"
    assert depths(parents).max() <= deepest
    assert (np.diff(score) <= 0).all(), "best first"
    above = np.where(parents >= 0, score[parents], 1.0)
    assert ((score > 0) & (score < above)).all()
    fewer = drafted(asked, ids, (max(most // 2, 1), deepest, VOCABULARY), prior_rates(sampled=False))
    for small, large in zip(fewer, (tokens, parents, score), strict=True):
        np.testing.assert_array_equal(small, large[: len(small)])


def known_to(words, began=-1):
    """Own words learned since the text began, in the form of the twins."""
    return {
        tuple(int(key >> shift & (1 << 21) - 1) - 1 for shift in (42, 21, 0) if key >> shift & (1 << 21) - 1): [
            (int(token), int(parts)) for token, parts in zip(tokens, chances, strict=True) if parts
        ]
        for key, tokens, chances, learned in zip(
            words.keys.tolist(), words.tokens, words.chances, words.learned, strict=True
        )
        if key and learned > began
    }


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_a_draft_is_what_the_slow_twin_finds(seed):
    ids, asked = some_sources(np.random.default_rng(seed))
    rates = prior_rates(sampled=bool(seed % 2))
    slow_rates = (
        {
            (source, cell): (float(rates.hits[source, cell]), float(rates.seen[source, cell]))
            for source in range(SOURCES)
            for cell in range(rates.hits.shape[1])
        },
        rates.weights.tolist(),
    )
    rows = [tuple(row) for row in asked.rows.tokens.tolist()], asked.rows.weights.tolist(), asked.rows.lengths.tolist()
    foreseen = paths(*asked.neural)
    texts = asked.own.symbols[: len(ids)].tolist(), asked.shared.symbols[: len(ids)].tolist()
    words = known_to(asked.words, asked.began), known_to(asked.table), known_to(asked.words)
    slow = words, *texts, rows, foreseen
    assert newest_place(asked.own, *ids[-2:]) == naive.index_blend.newest_place(texts[0], *ids[-2:])
    expected = naive.index_blend.blend(slow, slow_rates, ids.tolist(), SIZE)
    assert_same_paths(paths(*drafted(asked, ids, rates=rates)), expected)


def test_no_token_at_or_above_the_vocabulary_is_drafted():
    ids = [3, 39, 3, 39, 3]
    assert drafted(sources(ids), ids, (8, 4, 39))[0].tolist() == []
    assert drafted(sources(ids), ids, (8, 1, 40))[0].tolist() == [39]


def test_nothing_known_gives_no_draft():
    assert drafted(sources(), [1, 2, 3])[0].tolist() == []
    assert drafted(sources([7]), [7])[0].tolist() == []


def test_the_text_goes_on_as_it_went_on_before_by_its_last_two_tokens():
    ids = [1, 2, 3, 4, 5, 1, 2]
    found = paths(*drafted(sources(ids), ids))
    assert (3, 4, 5) in found
    assert drafted(sources(), [1, 2])[0].tolist() == []
    assert (3, 4, 5) in paths(*drafted(sources(shared=ids), [9, 1, 2]))


def test_longer_matches_are_believed_more_once_rates_say_so():
    phrase = [*range(10, 24), 1, 2]
    ids = [*phrase, 3, 9, 1, 2, 4, *phrase]
    found = paths(*drafted(sources(ids), ids, rates=prior_rates(sampled=False)))
    assert found[3,] > found[4,]


def test_words_of_the_text_go_before_the_table_and_the_table_before_words_of_other_texts():
    learned, table = empty_words(64), empty_words(64)
    learn(table, [1, 2], [], [], [{5: 0.9}])
    assert paths(*drafted(sources(table=table), [1, 2], (4, 1, VOCABULARY))).keys() == {(5,)}
    learn(learned, [1, 2], [], [], [{6: 0.9}])
    assert paths(*drafted(sources(words=learned, table=table), [1, 2], (4, 1, VOCABULARY))).keys() == {(6,)}
    later = sources(words=learned, table=table, began=int(learned.clock[0]))
    assert paths(*drafted(later, [1, 2], (4, 1, VOCABULARY))).keys() == {(5,)}, "the table, before what others taught"
    alone = sources(words=learned, began=int(learned.clock[0]))
    assert paths(*drafted(alone, [1, 2], (4, 1, VOCABULARY))).keys() == {(6,)}


def test_what_several_sources_say_counts_for_more_than_what_one_does():
    words = empty_words(64)
    learn(words, [1, 2], [], [], [{5: 0.5, 6: 0.5}])
    ids = [1, 2, 6, 7, 1, 2]
    found = paths(*drafted(sources(ids, words), ids, rates=prior_rates(sampled=False)))
    assert found[6,] > found[5,]


def test_a_neural_draft_is_gone_on_with_behind_its_own_nodes():
    foreseen = NeuralDraft(
        np.array([3, 4, 5], np.int32), np.array([-1, 0, 1], np.int32), np.array([0.9, 0.8, 0.7], np.float32)
    )
    assert {(3,), (3, 4), (3, 4, 5)} <= paths(*drafted(sources(neural=foreseen), [1])).keys()


# --- rates


def cells(**by_source):
    found = np.full(SOURCES, ABSENT, np.uint8)
    for source, cell in by_source.items():
        found[int(source[1:])] = cell
    return found


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_cells_chance_becomes_the_share_of_its_candidates_that_come_true(share):
    rates, rng = flat_rates(), np.random.default_rng(0)
    for _ in range(3000):
        credit(rates, cells(s2=5), 1 << 2, bool(rng.random() < share))
    assert chance(rates, cells(s2=5), 1 << 2) == pytest.approx(share, rel=0.2, abs=0.02)


def test_of_two_sources_the_one_that_tells_something_is_heard():
    """Source 0 gives an uninformative cell; source 1 one of two cells, accepted at rates 0.8 and 0.1."""
    rates, rng = flat_rates(), np.random.default_rng(0)
    for _ in range(20_000):
        good, noise = bool(rng.random() < 0.5), int(rng.integers(1, 5))
        credit(rates, cells(s0=noise, s1=3 if good else 4), 3, bool(rng.random() < (0.8 if good else 0.1)))
    for noise in range(1, 5):
        assert chance(rates, cells(s0=noise, s1=3), 3) == pytest.approx(0.8, abs=0.1)
        assert chance(rates, cells(s0=noise, s1=4), 3) == pytest.approx(0.1, abs=0.06)


def test_fitted_rates_are_chances_and_those_for_sampling_are_their_own():
    greedy, sampled = prior_rates(sampled=False), prior_rates(sampled=True)
    for rates in (greedy, sampled):
        assert ((rates.hits > 0) & (rates.hits < rates.seen)).all()
        assert np.isfinite(rates.weights).all()
    assert not np.array_equal(greedy.hits, sampled.hits)
    sure, unsure = cells(s1=9), cells(s1=20)
    assert chance(greedy, sure, 2) > 0.6
    assert chance(greedy, unsure, 2) < 0.3


def test_only_choices_that_the_target_came_to_are_counted():
    """The target emitted 3 and then 9: the child of 3 was compared with 9; the children of 4 were not tried."""
    room = room_to_draft(3)  # the last candidate was not drafted, and counts too
    room.made[:] = 4, 3
    room.tokens[:4], room.parents[:4] = [3, 4, 5, 6], [-1, -1, 0, 1]
    room.cells[:4], room.known[:4], room.margin[:4] = ABSENT, 1, -1
    room.cells[:4, 0] = [1, 2, 3, 4]
    rates = flat_rates()
    before = [rates.hits.copy(), rates.seen.copy()]
    learn_choices(rates, room, np.array([3, 9], np.int64))
    tried = (rates.seen - before[1])[0, 1:5]
    won = (rates.hits - before[0])[0, 1:5]
    assert (tried > 0.5).tolist() == [True, True, True, False]
    assert (won > 0.5).tolist() == [True, False, False, False]
    assert UNLISTED == 0


def test_a_source_that_misleads_is_trusted_less():
    """The stored rows continue every text with 4, and the target emits 5."""
    rows = Rows(np.array([[4, 4]], np.int32), np.ones(1, np.float32), np.full(1, 3, np.int32))
    rates, room, ids, last = prior_rates(sampled=False), room_to_draft(4), np.arange(3), 0
    scores = []
    asked = Sources(NO_WORDS, 0, NO_WORDS, empty_text(1000), NO_TEXT, rows, NO_NEURAL_DRAFT)
    for _ in range(200):
        tokens, _, score, source = advance(
            asked, rates, room, ids, last, NO_TOP_TOKENS, (1, 1, VOCABULARY), NO_NOISE, True
        )
        assert (tokens.tolist(), source.tolist()) == ([4], [STORE])
        scores.append(score[0])
        last, ids = len(ids), np.append(ids, 100 + len(ids))
    assert scores[-1] < 0.5 * scores[0]


def test_known_noise_tells_which_of_several_tokens_will_be_drawn():
    """A context with three equally probable tokens: blindly one draw in three is guessed, with the noise most."""
    words, law, hits = empty_words(64), np.zeros(VOCABULARY, np.float32), {}
    learn(words, [1, 2], [], [], [{5: 0.33, 6: 0.33, 7: 0.33}])
    law[5:8] = 1 / 3
    for known in (False, True):
        noise, rates, room = Noise(known, np.uint64(11)), flat_rates(), room_to_draft(1)
        asked, guessed = sources(words=words), []
        for position in range(3, 403):
            ids = np.array([0] * (position - 2) + [1, 2], np.int64)
            blend(asked, rates, room, ids, (1, 1, VOCABULARY), noise)
            drawn = perturbed_argmax(law, np.uint64(11), position)
            guessed.append(room.tokens[room.drafted[0]] == drawn)
            learn_choices(rates, room, np.array([drawn], np.int64))
        hits[known] = np.mean(guessed[200:])
    assert hits[False] < 0.5
    assert hits[True] > 0.8


def test_a_draft_outlives_the_arrays_that_it_was_made_from_and_keeps_none_of_them():
    ids = np.array([1, 2, 3, 1, 2, 3, 1, 2], np.int64)
    asked, rates, room = sources(ids), prior_rates(sampled=False), room_to_draft(16)
    arrays = [*asked.own, *asked.words, *rates, *room]
    before = [sys.getrefcount(array) for array in arrays]
    given = asked, rates, room, ids, len(ids), NO_TOP_TOKENS, SIZE, NO_NOISE, False
    draft = advance(*given)
    assert [sys.getrefcount(array) for array in arrays] == before
    kept = [part.tolist() for part in draft]
    assert len(kept[0]) == SIZE[1]  # the only path, as deep as it may be
    for array in room:
        array.fill(7)
    assert [part.tolist() for part in draft] == kept


# --- stored rows


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    segments = [random_documents(seed, 12, 30, 30) for seed in (1, 2)]
    folder = built(tmp_path_factory.mktemp("stores") / "rows", *segments, vocabulary=12)
    return open_datastore(str(folder)), [document for segment in segments for document in segment]


def test_stored_rows_are_what_followed_and_in_order(store):
    opened, documents = store
    everything = [tuple(document) for document in documents]

    def occurs(sequence):
        width = len(sequence)
        return any(sequence == document[i : i + width] for document in everything for i in range(len(document)))

    reader, ids = StoredRows(list(opened.segments)), np.array(documents[3][:12], np.int64)
    for end in range(1, len(ids) + 1):
        rows = reader.read(ids[:end], 1)
        listed = [tuple(row.tolist()) for row in rows.tokens]
        assert listed == sorted(listed)
        assert len(rows.weights) == len(rows.lengths) == len(listed) > 0
        assert (rows.weights > 0).all()
        for row, length in zip(listed, rows.lengths.tolist(), strict=True):
            assert 1 <= length <= min(end, LONGEST)
            assert occurs((*ids[end - length : end].tolist(), *(token for token in row if token >= 0)))
    longest = rows.lengths.max()
    assert longest == len(ids), "the document itself"


def test_reading_at_once_and_token_by_token_is_the_same(store):
    opened, documents = store
    segments, ids = list(opened.segments), np.array(documents[5][:9], np.int64)
    reader = StoredRows(segments)
    for end in range(1, len(ids) + 1):
        rows = reader.read(ids[:end], 1)
    for one, other in zip(rows, StoredRows(segments).read(ids, len(ids)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_texts_there_are_no_rows():
    assert len(StoredRows(()).read(np.arange(5), 5).tokens) == 0
