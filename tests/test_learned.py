"""Learned counts equal those of a dictionary, and the contexts learned longest ago make room."""

import itertools

import numpy as np
import pytest

import naive.index_tables
from foredraft.index.learned import (
    ROW_WIDTH,
    empty_learned,
    learn,
    learn_distributions,
    learn_text,
    learned_row,
)
from support.learned import check_learned

pytestmark = pytest.mark.kernels

NO_CAP = float("inf")


def assert_same(arrays, memory):
    """The compiled table holds what the dictionary holds, up to the rounding of repeated float32 sums."""
    found = naive.index_tables.learned_memory(arrays)
    assert found.keys() == memory.keys()
    for context, row in memory.items():
        expected = {token: weight for token, weight in row["weights"].items() if weight > 0}
        assert found[context]["weights"] == pytest.approx(expected, rel=1e-4)
        assert found[context]["total"] == pytest.approx(row["total"], rel=1e-4)


def row_of(arrays, a, b):
    slot = learned_row(arrays, a, b)
    pairs = zip(arrays.tokens[slot].tolist(), arrays.weights[slot].tolist(), strict=True)
    return {token: weight for token, weight in pairs if weight > 0}


@pytest.mark.parametrize("seed", range(3))
def test_random_learning_matches_the_dictionary(seed):
    rng = np.random.default_rng(seed)
    arrays, memory = empty_learned(1024), {}
    for number in range(200):
        a, b, token = (int(n) for n in rng.integers(-1, 6, 3))
        b, token = max(b, 0), int(rng.integers(0, 30)) if number % 2 else max(token, 0)
        weight, cap = rng.random() + 0.1, rng.choice([NO_CAP, 1.5])
        learn(arrays, a, b, token, weight, cap)
        naive.index_tables.learn(memory, a, b, token, weight, cap)
        if number % 20 == 0:
            check_learned(arrays)
    check_learned(arrays)
    assert_same(arrays, memory)


@pytest.mark.parametrize("seed", range(2))
def test_texts_and_distributions_match_the_dictionary(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 7, 60)
    arrays, memory = empty_learned(1024), {}
    for start in (0, 20, 45):
        learn_text(arrays, ids[: start + 20], start)
        naive.index_tables.learn_text(memory, ids[: start + 20].tolist(), start)
    tokens, parents = np.array([3, 3, 3, 4], np.int32), np.array([-1, 0, -1, 1], np.int32)
    for text in ([3], [3, 3]):
        top = np.array([rng.permutation(40)[:4] for _ in range(5)], np.int32)
        shares = rng.dirichlet(np.ones(4), 5).astype(np.float32)
        learn_distributions(arrays, tokens, parents, np.array(text), top, shares, 2.0)
        draft = (tokens.tolist(), parents.tolist(), text)
        naive.index_tables.learn_distributions(memory, *draft, top.tolist(), shares.tolist(), 2.0)
    check_learned(arrays)
    assert_same(arrays, memory)


def test_a_text_learned_in_pieces_is_the_text_learned_at_once():
    ids = np.random.default_rng(0).integers(0, 5, 40)
    at_once, in_pieces = empty_learned(), empty_learned()
    learn_text(at_once, ids, 0)
    for start in range(0, 40, 7):
        learn_text(in_pieces, ids[: start + 7], start)
    assert naive.index_tables.learned_memory(at_once) == naive.index_tables.learned_memory(in_pieces)


def test_nothing_is_found_where_nothing_was_learned():
    arrays = empty_learned(8)
    learn(arrays, 1, 2, 3, 1.0, NO_CAP)
    for a, b in ((-1, 2), (2, 1), (1, 3), (1, -2), (-7, 2)):
        assert learned_row(arrays, a, b) == naive.index_tables.learned_row(arrays, a, b) == -1
    assert learned_row(arrays, 1, 2) == naive.index_tables.learned_row(arrays, 1, 2) >= 0


def test_a_new_successor_takes_the_place_of_the_weakest():
    arrays = empty_learned(8)
    for token in range(ROW_WIDTH):
        learn(arrays, 1, 2, token, 1.0 + (token - 5) ** 2, NO_CAP)
    learn(arrays, 1, 2, 99, 0.5, NO_CAP)
    row = row_of(arrays, 1, 2)
    assert row.keys() == {*range(ROW_WIDTH), 99} - {5}
    assert row[99] == 0.5
    total = sum(1.0 + (token - 5) ** 2 for token in range(ROW_WIDTH)) + 0.5
    assert arrays.totals[learned_row(arrays, 1, 2)] == pytest.approx(total)  # replaced successors still count


def test_a_weight_stops_at_the_cap():
    arrays = empty_learned(8)
    for _ in range(5):
        learn(arrays, 1, 2, 3, 0.8, 3.0)
    assert row_of(arrays, 1, 2) == {3: 3.0}


def test_token_0_is_a_successor_like_any_other():
    arrays = empty_learned(8)
    learn(arrays, 0, 0, 0, 1.0, NO_CAP)
    learn(arrays, 0, 0, 7, 1.0, NO_CAP)
    learn(arrays, 0, 0, 0, 0.5, NO_CAP)
    assert row_of(arrays, 0, 0) == {0: 1.5, 7: 1.0}


# --- room


def test_the_contexts_learned_longest_ago_make_room():
    arrays = empty_learned(64)
    for b in range(1000):
        learn(arrays, -1, b, b + 1, 1.0, NO_CAP)
        assert row_of(arrays, -1, b) == {b + 1: 1.0}
    check_learned(arrays)
    kept = [b for _, b in naive.index_tables.learned_memory(arrays)]
    assert 32 < len(kept) <= 64
    assert np.mean(kept) > 900


def test_contexts_spread_over_the_table():
    """Neighbouring ids, as in a text, must not fall into the same eight slots."""
    slots = set()
    for a, b in itertools.product(range(-1, 19), range(20)):
        arrays = empty_learned(8 * 1024)
        learn(arrays, a, b, 1, 1.0, 1.0)
        slots.add(learned_row(arrays, a, b))
    assert len(slots) > 0.7 * 400  # drawn at random, 83% would be distinct
