"""Retrieval: which levels are asked, which rows they give, how they are weighed, and which tree is the best."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from foredraft.graph.heap import pop, sift_up
from foredraft.graph.tree import depths, is_tree
from foredraft.index.backoff import COUNT_BINS, UNFORESEEN, learn_trust, prior_trust, weigh
from foredraft.index.lookup import Question, retrieve
from foredraft.index.prefixes import best_nodes
from foredraft.index.published import published_tree
from foredraft.index.recent_text import END
from foredraft.index.retrieval import (
    OWN,
    SHARED,
    STORE,
    Levels,
    Rows,
    allot,
    count_lengths,
    gather_from_store,
    gather_from_text,
    levels_of,
    rows_for,
)
from test_recent_text import grown
from test_suffix_array import random_documents, ranges_after, some_tokens, sort

pytestmark = pytest.mark.kernels


def as_rows(rows, weights, depth):
    tokens = np.full((len(rows), depth), -1, np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return Rows(tokens, np.array(weights, np.float64))


def row_tuples(tokens):
    """Rows as the slow twins have them; nothing may stand behind a document's end."""
    rows = tokens.tolist()
    for row in rows:
        length = row.index(-1) if -1 in row else len(row)
        assert all(token == -1 for token in row[length:])
    return [tuple(token for token in row if token >= 0) for row in rows]


def paths_of(tokens, parents):
    """{path: node} of a tree."""
    paths = {}
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        above = next((path for path, other in paths.items() if other == parent), ())
        paths[*above, token] = node
    return paths


def levels(*entries):
    """Levels from (source, length, count), with shares by count and no rows yet."""
    source, length, count = (np.array(column, np.int64) for column in zip(*entries, strict=True))
    return Levels(source, length, count, np.zeros(len(source) + 1, np.int64), count / count.sum())


# --- levels


@given(
    drops=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=3, max_size=3),
    shortest=st.integers(1, 4),
    only_longest=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_levels_are_those_of_the_twin(drops, shortest, only_longest):
    """Counts never grow with the length."""
    counts = np.array([[9, *np.cumsum(row)[::-1]] for row in drops], np.int64)
    found = levels_of(counts, shortest, only_longest)
    entries = list(zip(found.source.tolist(), found.length.tolist(), found.occurrences.tolist(), strict=True))
    assert entries == naive.levels_of(counts.tolist(), shortest, only_longest)
    assert len(found.start) == len(entries) + 1
    assert not found.start.any()
    if entries:
        assert found.share.tolist() == pytest.approx((found.occurrences / found.occurrences.sum()).tolist())


def test_the_longest_context_that_occurs_anywhere_is_asked_alone():
    counts = np.zeros((3, 6), np.int64)
    counts[STORE] = [0, 9, 5, 2, 0, 0]
    counts[OWN] = [0, 2, 2, 1, 0, 0]
    counts[SHARED] = [0, 8, 1, 0, 0, 0]
    found = levels_of(counts, 1, True)
    assert (found.source.tolist(), found.length.tolist(), found.occurrences.tolist()) == ([OWN, STORE], [3, 3], [1, 2])
    assert found.share.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert len(levels_of(counts, 4, True).source) == len(levels_of(counts, 4, False).source) == 0
    every = levels_of(counts, 1, False)
    assert list(zip(every.source, every.length, strict=True)) == [
        (OWN, 3), (STORE, 3), (OWN, 2), (SHARED, 2), (STORE, 2), (SHARED, 1), (STORE, 1)
    ]  # fmt: skip


@given(
    counts=st.lists(st.integers(1, 500), min_size=1, max_size=6),
    shares=st.lists(st.floats(0, 1), min_size=6, max_size=6),
    samples=st.integers(1, 300),
)
@settings(max_examples=100, deadline=None)
def test_no_level_gets_more_rows_than_it_can_fill(counts, shares, samples):
    asked = levels(*((STORE, 9 - n, count) for n, count in enumerate(counts)))
    asked.share[:] = np.array(shares[: len(counts)]) / max(sum(shares[: len(counts)]), 1)
    allot(asked, samples)
    assert asked.start.tolist() == naive.allot(asked.share.tolist(), counts, samples)
    given_rows = np.diff(asked.start)
    assert given_rows.tolist() == [
        min(count, round(share * samples)) for count, share in zip(counts, asked.share.tolist(), strict=True)
    ]
    assert asked.start[-1] <= samples + len(counts)
    rows = rows_for(asked, 3)
    assert rows.tokens.shape == (asked.start[-1], 3)
    assert (rows.tokens == -1).all()
    for m, taken in enumerate(given_rows):
        part = rows.weights[asked.start[m] : asked.start[m + 1]]
        assert part.sum() == pytest.approx(asked.share[m] if taken else 0)
        assert len(set(part.tolist())) <= 1
    assert rows.weights.tolist() == pytest.approx(naive.rows_for(asked.share.tolist(), asked.start.tolist()))


# --- rows


def stored_rows(segments, context, taken, depth, vocabulary):
    """What `taken` rows of the last tokens of `context` are, over several segments."""
    length = len(context)
    texts = [sort(documents, vocabulary) for documents in segments]
    ranges = [ranges_after(text, context, length) for text in texts]
    count = sum(int(found[length, 1] - found[length, 0]) for found in ranges)
    asked = levels((OWN, 9, 5), (STORE, length, count), (SHARED, 1, 7))
    asked.start[:] = [0, 2, 2 + taken, 4 + taken]
    rows, before = rows_for(asked, depth), np.zeros(length + 1, np.int64)
    for text, found in zip(texts, ranges, strict=True):
        gather_from_store(text, found, before, asked, rows)
    assert before[length] == count
    tokens = row_tuples(rows.tokens)
    assert tokens[:2] == tokens[2 + taken :] == [(), ()], "rows of other sources are left alone"
    return tokens[2 : 2 + taken]


@pytest.mark.parametrize("vocabulary", [3, 256, 70_000])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_spread_evenly_over_the_occurrences_of_all_segments(vocabulary, count):
    segments = [random_documents(11 + n, vocabulary) for n in range(count)]
    rng, sampled = np.random.default_rng(count), 0
    for _ in range(8):
        document = segments[0][int(rng.integers(6))]
        end = int(rng.integers(1, len(document) + 1))
        context = document[max(0, end - int(rng.integers(1, 4))) : end]
        expected = [row for documents in segments for row in naive.followers(documents, context, 4, vocabulary)]
        assert expected
        for taken in {1, len(expected) // 3 or 1, len(expected) // 2 or 1, len(expected)}:
            rows = stored_rows(segments, context, taken, 4, vocabulary)
            assert rows == naive.gather_from_store(segments, context, taken, 4, vocabulary)
            sampled += 1 < taken < len(expected)
        assert naive.spread(expected, len(expected)) == expected, "where there is room for all, each comes once"
    assert sampled > 4


def test_a_segment_without_the_context_gives_none_of_the_rows():
    segments = [[[2, 2]], [[0, 1, 2], [0, 1]], [[1, 1]], [[2, 0, 1, 0]]]
    assert stored_rows(segments, [0, 1], 3, 2, 3) == [(2,), (), (0,)]


def test_rows_stop_at_the_documents_end_and_at_the_depth():
    documents = [[0, 1, 2], [0, 1, 2, 2, 2, 2], [0]]
    assert stored_rows([documents], [0], 3, 3, 3) == [(1, 2, 2), (1, 2), ()]
    assert stored_rows([documents], [0], 3, 1, 3) == [(1,), (1,), ()]


@given(
    ids=st.lists(st.sampled_from([0, 1, 2, END]), min_size=2, max_size=40),
    context=st.lists(st.integers(0, 2), min_size=2, max_size=6),
    taken=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    depth=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_rows_of_a_recent_text_are_the_newest_first(ids, context, taken, depth):
    matches = naive.occurrences(ids, context, 4, 99)
    places = np.array([place for place, _ in matches], np.int32)
    lengths = np.array([length for _, length in matches], np.int32)
    wanted = [naive.gather_from_text(ids, matches, length, 99, depth) for length in (4, 3, 2)]
    asked = levels((OWN, 4, 9), (SHARED, 4, 1), (OWN, 3, 9), (OWN, 2, 9))
    sizes = [min(some, len(rows)) for some, rows in zip(taken, wanted, strict=True)]
    asked.start[:] = np.cumsum([0, sizes[0], 1, sizes[1], sizes[2]])
    rows = rows_for(asked, depth)
    gather_from_text(grown([ids]), OWN, places, lengths, asked, rows)
    tokens = row_tuples(rows.tokens)
    expected = [row for rows, size in zip(wanted, sizes, strict=True) for row in rows[:size]]
    assert tokens[: sizes[0]] + tokens[sizes[0] + 1 :] == expected
    assert tokens[sizes[0]] == (), "a level of another source is left alone"


@given(lengths=st.lists(st.integers(2, 6), max_size=12))
@settings(max_examples=50, deadline=None)
def test_lengths_are_counted_from_the_longest_down(lengths):
    counts = np.full(7, 99, np.int64)
    count_lengths(np.array(lengths, np.int32), counts)
    assert counts.tolist() == naive.count_lengths(lengths, 6)


# --- the best nodes


def assert_best(rows, weights, depth, limit, doubt):
    tokens, parents, scores = best_nodes(as_rows(rows, weights, depth), limit, doubt)
    exact = naive.prefix_scores(rows, weights, doubt)
    paths = paths_of(tokens, parents)
    assert is_tree(tokens, parents, 1 << 31)
    assert (tokens.dtype, parents.dtype, scores.dtype) == (np.int32, np.int32, np.float32)
    assert len(paths) == len(tokens) == min(limit, len(exact))
    for path, node in paths.items():
        assert scores[node] == pytest.approx(exact[path], rel=1e-5), path
        assert scores[node] <= 1
    ranked = sorted(naive.best_nodes(rows, weights, limit, doubt).values(), reverse=True)
    assert sorted(scores.tolist(), reverse=True) == pytest.approx(ranked, rel=1e-5)
    if paths:
        worst = min(exact[path] for path in paths)
        assert all(score <= worst * (1 + 1e-5) for path, score in exact.items() if path not in paths)


@given(
    rows=st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), max_size=24),
    weights=st.lists(st.floats(0.01, 1), min_size=24, max_size=24),
    limit=st.integers(1, 30),
    doubt=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    total=st.sampled_from([0.3, 1.0, 3.0]),
)
@settings(max_examples=250, deadline=None)
def test_the_best_nodes_are_those_of_the_twin(rows, weights, limit, doubt, total):
    weights = weights[: len(rows)]
    assert_best(rows, [weight / sum(weights) * total for weight in weights], 4, limit, doubt)


@pytest.mark.parametrize("vocabulary", [4, 300, 70_000])
@pytest.mark.parametrize("doubt", [0.0, 3.0])
def test_the_best_nodes_of_many_rows_are_those_of_the_twin(vocabulary, doubt):
    """Equal weights give many ties; large ids collide in the table of tokens."""
    rng = np.random.default_rng(vocabulary)
    alphabet = some_tokens(vocabulary) + rng.integers(0, vocabulary, 40).tolist()
    rows = [tuple(rng.choice(alphabet, rng.integers(0, 6)).tolist()) for _ in range(150)]
    rows += [rows[n][:3] + rows[0][:2] for n in rng.integers(0, 150, 50)]
    for limit in (1, 7, 64, 500):
        assert_best(rows, [1 / len(rows)] * len(rows), 5, limit, doubt)


def test_without_doubt_scores_are_shares_and_with_doubt_long_guesses_of_few_rows_lose():
    rows = [(1, 2, 3), (1, 2, 3), (1, 4, 4), (5, 6, 7)]
    weights = [0.25] * 4
    tokens, parents, scores = best_nodes(as_rows(rows, weights, 3), 99, 0.0)
    shares = {path: float(scores[node]) for path, node in paths_of(tokens, parents).items()}
    assert shares == {
        (1,): 0.75, (1, 2): 0.5, (1, 2, 3): 0.5, (1, 4): 0.25, (1, 4, 4): 0.25, (5,): 0.25, (5, 6): 0.25,
        (5, 6, 7): 0.25,
    }  # fmt: skip
    tokens, parents, scores = best_nodes(as_rows(rows, weights, 3), 99, 1.0)
    doubted = {path: float(scores[node]) for path, node in paths_of(tokens, parents).items()}
    assert doubted[1,] == 0.75
    assert doubted[1, 2] == pytest.approx(0.75 * 2 / 3 * 3 / 4)
    assert doubted[5, 6] == pytest.approx(0.25 * 1 / 2)
    assert doubted[5, 6, 7] == pytest.approx(0.25 * 1 / 2 * 1 / 2)


def test_no_rows_and_rows_without_tokens_give_no_nodes():
    for rows in ([], [()], [(), ()]):
        tokens, parents, scores = best_nodes(as_rows(rows, [1.0] * len(rows), 3), 8, 1.0)
        assert (len(tokens), len(parents), len(scores)) == (0, 0, 0)


@given(scores=st.lists(st.integers(0, 20), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_heap_gives_the_largest_first(scores):
    heap, values = np.empty(len(scores), np.int32), np.array(scores, np.float32)
    for size in range(len(scores)):
        heap[size] = size
        sift_up(heap, size + 1, values)
    popped = [pop(heap, size, values) for size in range(len(scores), 0, -1)]
    assert sorted(popped) == list(range(len(scores)))
    assert [scores[item] for item in popped] == sorted(scores, reverse=True)


# --- trust


def trusted(trust, source, length, count):
    at = (source, length, min(int(np.log2(count)), COUNT_BINS - 1))
    return trust.hits[at] / (trust.hits[at] + trust.passes[at])


@given(
    entries=st.lists(
        st.tuples(st.sampled_from([STORE, OWN, SHARED]), st.integers(1, 8), st.integers(1, 1 << 40)),
        min_size=1, max_size=12,
    ),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_each_level_takes_its_trust_of_what_the_longer_ones_left(entries):
    trust, asked = prior_trust(8, 20.0), levels(*entries)
    weigh(asked, trust)
    assert asked.share.tolist() == pytest.approx(naive.weigh([trusted(trust, *entry) for entry in entries]))
    assert 0 < asked.share.sum() <= 1
    assert (asked.share > 0).all()


@given(
    own=st.lists(st.sampled_from([0, 1, END]), max_size=30),
    shared=st.lists(st.sampled_from([0, 1, 2, END]), max_size=30),
    context=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    drops=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    asked=st.builds(
        Question, st.integers(2, 3), st.booleans(), st.booleans(), samples=st.integers(1, 20), depth=st.integers(1, 4)
    ),
)
@settings(max_examples=200, deadline=None)
def test_what_is_retrieved_is_what_the_twin_retrieves(own, shared, context, drops, asked):
    """Ranges of one segment, as wide as its counts; its rows are for another to fill in."""
    stored = [9, *np.cumsum(drops)[::-1].tolist()]
    ranges = np.array([[(5, 5 + count) for count in stored]], np.int64)
    trust = prior_trust(4, 20.0)
    found, rows = retrieve(ranges, grown([own]), grown([shared]), np.array(context, np.int64), trust, asked)
    expected = naive.retrieve(stored, own, shared, context, partial(trusted, trust), asked)
    kinds = zip(found.source.tolist(), found.length.tolist(), found.occurrences.tolist(), strict=True)
    assert list(kinds) == [level[:3] for level in expected]
    assert found.share.tolist() == pytest.approx([level[3] for level in expected])
    assert row_tuples(rows.tokens) == [row for *_, followed in expected for row in followed]


def test_longer_contexts_are_trusted_more_to_begin_with():
    trust = prior_trust(16, 20.0)
    assert (trust.hits > 0).all()
    assert (trust.passes > 0).all()
    assert np.allclose(trust.hits + trust.passes, 20.0)
    for source in (STORE, OWN, SHARED):
        assert trusted(trust, source, 16, 4) > trusted(trust, source, 4, 4)


@pytest.mark.parametrize("right", [0, 1])
def test_trust_moves_toward_the_level_that_foresees(right):
    """Two levels, one row each, which name different tokens; the same one is right at every step."""
    trust = prior_trust(4, 20.0)
    before = trust.hits.copy(), trust.passes.copy()
    asked = levels((STORE, 4, 1), (OWN, 2, 1))
    asked.start[:] = [0, 1, 2]
    history = []
    for _ in range(60):
        weigh(asked, trust)
        history.append(asked.share.copy())
        learn_trust(trust, asked, as_rows([(7,), (8,)], asked.share, 1), (7, 8)[right], UNFORESEEN)
    shares = np.array(history)[:, right]
    assert (np.diff(shares) > 0).all()
    assert shares[-1] > 0.75
    assert np.array(history).sum(axis=1).max() <= 1
    touched = (before[0] != trust.hits) | (before[1] != trust.passes)
    assert {tuple(map(int, at)) for at in np.argwhere(touched)} <= {(STORE, 4, 0), (OWN, 2, 0)}


@given(
    foreseen=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6),
    empty=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_each_level_is_credited_with_its_part_in_what_was_foreseen(foreseen, empty):
    """Level m has so many rows, so many of which name the token; one may have no rows at all."""
    sizes = [0 if m == empty else size for m, (size, _) in enumerate(foreseen)]
    right = [min(size, some) for size, (_, some) in zip(sizes, foreseen, strict=True)]
    asked = levels(*((STORE, 8 - m, 4) for m in range(len(sizes))))
    asked.start[:] = np.cumsum([0, *sizes])
    trust, prior = prior_trust(8, 20.0), prior_trust(8, 20.0)
    weigh(asked, trust)
    rows = [(7,) if n < some else (8,) for size, some in zip(sizes, right, strict=True) for n in range(size)]
    learn_trust(trust, asked, as_rows(rows, [1.0] * len(rows), 1), 7, UNFORESEEN)
    parts = [some / max(size, 1) for size, some in zip(sizes, right, strict=True)]
    hits, passes = naive.learn_trust(asked.share.tolist(), parts)
    for m in range(len(sizes)):
        at = (STORE, 8 - m, 2)
        assert trust.hits[at] - prior.hits[at] == pytest.approx(hits[m], abs=1e-9)
        assert trust.passes[at] - prior.passes[at] == pytest.approx(passes[m], abs=1e-9)


def test_a_token_that_no_level_foresees_lowers_the_trust_of_all():
    trust, asked = prior_trust(4, 20.0), levels((STORE, 4, 3), (OWN, 2, 9))
    asked.start[:] = [0, 1, 3]
    weigh(asked, trust)
    before = [trusted(trust, STORE, 4, 3), trusted(trust, OWN, 2, 9)]
    learn_trust(trust, asked, as_rows([(7,), (8,), ()], [0.1] * 3, 1), 9, UNFORESEEN)
    assert trusted(trust, STORE, 4, 3) < before[0]
    assert trusted(trust, OWN, 2, 9) < before[1]


def test_a_longer_level_is_not_blamed_by_a_shorter_one_and_a_shorter_one_not_by_a_longer():
    """The longer one foresees: the shorter one was not reached, so its counters hardly move."""
    trust, asked = prior_trust(4, 20.0), levels((STORE, 4, 1), (STORE, 2, 1))
    asked.start[:] = [0, 1, 2]
    weigh(asked, trust)
    learn_trust(trust, asked, as_rows([(7,), (8,)], asked.share, 1), 7, UNFORESEEN)
    prior = prior_trust(4, 20.0)
    assert trust.hits[STORE, 4, 0] == pytest.approx(prior.hits[STORE, 4, 0] + 1, abs=0.01)
    assert trust.passes[STORE, 2, 0] == pytest.approx(prior.passes[STORE, 2, 0], abs=0.01)
    assert trust.hits[STORE, 2, 0] == pytest.approx(prior.hits[STORE, 2, 0])


# --- the released code's rule


def lexicographic(rows, depth):
    """As the drafter hands them over: sorted, a row that ends before those that go on."""
    tokens = as_rows(rows, [1.0] * len(rows), depth).tokens
    return tokens[np.lexsort(tokens.T[::-1])]


def test_the_published_tree_is_that_of_the_released_code_wherever_chance_has_no_part():
    rng, compared, cut = np.random.default_rng(0), 0, 0
    for _ in range(150):
        alphabet, depth, nodes = int(rng.integers(2, 6)), int(rng.integers(1, 5)), int(rng.integers(1, 12))
        shares = rng.dirichlet(np.full(alphabet, 0.7))
        rows = [
            tuple(rng.choice(alphabet, rng.integers(0 if depth > 1 else 1, depth + 1), p=shares).tolist())
            for _ in range(int(rng.integers(20, 400)))
        ]
        expected = naive.published_paths(rows, nodes)
        if expected is None:
            continue
        tokens, parents, scores = published_tree(lexicographic(rows, depth), nodes, 0)
        paths = paths_of(tokens, parents)
        assert set(paths) == expected
        assert is_tree(tokens, parents, alphabet)
        having = {path: sum(row[: len(path)] == path for row in rows) / len(rows) for path in paths}
        assert {path: float(scores[node]) for path, node in paths.items()} == pytest.approx(having)
        compared += 1
        cut += len(paths) < nodes
    assert compared > 60
    assert cut > 30


@given(
    rows=st.lists(st.lists(st.integers(0, 1), max_size=6).map(tuple), min_size=1, max_size=20),
    nodes=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_the_published_tree_stays_within_the_budget_whatever_the_order_of_equals(rows, nodes, seed):
    tokens, parents, scores = published_tree(lexicographic(rows, 6), nodes, seed)
    assert len(tokens) == len(scores) <= nodes
    assert is_tree(tokens, parents, 2)
    assert len(tokens) == 0 or depths(parents).max() <= 6
