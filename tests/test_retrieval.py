"""Retrieval: the rows after the longest context that occurs anywhere, and the best tree of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive.index_text
from foredraft.graph.tree import check_tree
from foredraft.index.recent_text import END
from foredraft.index.retrieval import best_nodes, followers
from support.documents import grown, random_documents, ranges_after, some_tokens, sort
from support.drafts import paths_of

pytestmark = pytest.mark.kernels


def as_rows(rows, depth):
    tokens = np.full((len(rows), depth), -1, np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return tokens


def row_tuples(tokens):
    """Rows in the form of the slow twins; checks that nothing follows a document's end."""
    rows = tokens.tolist()
    for row in rows:
        length = row.index(-1) if -1 in row else len(row)
        assert all(token == -1 for token in row[length:])
    return [tuple(token for token in row if token >= 0) for row in rows]


# --- rows


def asked(segments, own, context, samples, depth, vocabulary, longest=4, shortest=1, **options):
    """The rows found by the compiled function."""
    texts = [sort(documents, vocabulary) for documents in segments]
    ranges = np.array([ranges_after(text, context, longest) for text in texts]).reshape(len(texts), longest + 1, 2)
    ids = np.array(context, np.int64)
    return row_tuples(followers(texts, ranges, grown([own]), ids, shortest, samples, depth, **options))


@pytest.mark.parametrize("vocabulary", [3, 256, 70_000])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_spread_evenly_over_the_occurrences_of_all_segments(vocabulary, count):
    segments = [random_documents(11 + n, vocabulary) for n in range(count)]
    rng, sampled = np.random.default_rng(count), 0
    for _ in range(8):
        document = segments[0][int(rng.integers(6))]
        end = int(rng.integers(1, len(document) + 1))
        context = document[max(0, end - int(rng.integers(1, 4))) : end]
        expected = [
            row for documents in segments for row in naive.index_text.followers(documents, context, 4, vocabulary)
        ]
        assert expected
        for taken in {1, len(expected) // 3 or 1, len(expected) // 2 or 1, len(expected)}:
            rows = asked(segments, [], context, taken, 4, vocabulary)
            assert rows == naive.index_text.spread(expected, taken)
            sampled += 1 < taken < len(expected)
    assert sampled > 4


def test_a_segment_without_the_context_gives_none_of_the_rows():
    segments = [[[2, 2]], [[0, 1, 2], [0, 1]], [[1, 1]], [[2, 0, 1, 0]]]
    assert asked(segments, [], [0, 1], 9, 2, 3) == [(2,), (), (0,)]


def test_rows_stop_at_the_documents_end_and_at_the_depth():
    documents = [[0, 1, 2], [0, 1, 2, 2, 2, 2], [0]]
    assert asked([documents], [], [0], 9, 3, 3) == [(1, 2, 2), (1, 2), ()]
    assert asked([documents], [], [0], 9, 1, 3) == [(1,), (1,), ()]


@given(
    own=st.lists(st.sampled_from([0, 1, 2, END]), max_size=30),
    context=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    shortest=st.integers(1, 3),
    depth=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_the_longest_context_that_occurs_anywhere_is_asked_alone(own, context, shortest, depth):
    documents = [[0, 1, 1, 0, 1], [1, 1, 0]]
    found = asked([documents], own, context, 999, depth, 3, shortest=shortest)
    expected = []
    for length in range(min(4, len(context)), shortest - 1, -1):
        matches = [place for place, size in naive.index_text.occurrences(own, context, 4, 999) if size >= length]
        followed = [own[place : place + depth] for place in matches]
        expected += [tuple(row[: row.index(END)] if END in row else row) for row in followed]
        expected += naive.index_text.followers(documents, context[-length:], depth, 3)
        if expected:
            break
    assert found == expected


# --- the best nodes


def assert_best(rows, depth, limit, doubt):
    tokens, parents, scores = best_nodes(as_rows(rows, depth), limit, doubt)
    weights = [1 / max(len(rows), 1)] * len(rows)
    exact = naive.index_text.prefix_scores(rows, weights, doubt)
    paths = paths_of(tokens, parents)
    check_tree(tokens, parents, 1 << 31)
    assert (tokens.dtype, parents.dtype, scores.dtype) == (np.int32, np.int32, np.float32)
    assert len(paths) == len(tokens) == min(limit, len(exact))
    for path, node in paths.items():
        assert scores[node] == pytest.approx(exact[path], rel=1e-5), path
    worst = min((exact[path] for path in paths), default=0)
    assert all(score <= worst * (1 + 1e-5) for path, score in exact.items() if path not in paths)


@given(
    rows=st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), max_size=24),
    limit=st.integers(1, 30),
    doubt=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
)
@settings(max_examples=250, deadline=None)
def test_the_best_nodes_are_those_of_the_twin(rows, limit, doubt):
    assert_best(rows, 4, limit, doubt)


@pytest.mark.parametrize("vocabulary", [4, 300, 70_000])
@pytest.mark.parametrize("doubt", [0.0, 3.0])
def test_the_best_nodes_of_many_rows_are_those_of_the_twin(vocabulary, doubt):
    rng = np.random.default_rng(vocabulary)
    alphabet = some_tokens(vocabulary) + rng.integers(0, vocabulary, 40).tolist()
    rows = [tuple(rng.choice(alphabet, rng.integers(0, 6)).tolist()) for _ in range(150)]
    rows += [rows[n][:3] + rows[0][:2] for n in rng.integers(0, 150, 50)]
    for limit in (1, 7, 64, 500):
        assert_best(rows, 5, limit, doubt)


def test_without_doubt_scores_are_shares_and_with_doubt_long_guesses_of_few_rows_lose():
    rows = [(1, 2, 3), (1, 2, 3), (1, 4, 4), (5, 6, 7)]
    tokens, parents, scores = best_nodes(as_rows(rows, 3), 99, 0.0)
    shares = {path: float(scores[node]) for path, node in paths_of(tokens, parents).items()}
    assert shares == {
        (1,): 0.75, (1, 2): 0.5, (1, 2, 3): 0.5, (1, 4): 0.25, (1, 4, 4): 0.25, (5,): 0.25, (5, 6): 0.25,
        (5, 6, 7): 0.25,
    }  # fmt: skip
    tokens, parents, scores = best_nodes(as_rows(rows, 3), 99, 1.0)
    doubted = {path: float(scores[node]) for path, node in paths_of(tokens, parents).items()}
    assert doubted[1,] == 0.75
    assert doubted[1, 2] == pytest.approx(0.75 * 2 / 3 * 3 / 4)
    assert doubted[5, 6] == pytest.approx(0.25 * 1 / 2)
    assert doubted[5, 6, 7] == pytest.approx(0.25 * 1 / 2 * 1 / 2)


def test_no_rows_and_rows_without_tokens_give_no_nodes():
    for rows in ([], [()], [(), ()]):
        tokens, parents, scores = best_nodes(as_rows(rows, 3), 8, 1.0)
        assert (len(tokens), len(parents), len(scores)) == (0, 0, 0)


# --- the released code's rule
