"""Blending: rows and counts in one search, as the slow twin finds it, and what it learns of their worth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from foredraft.graph.bar import FLOOR, above_bar, bar_height, new_bar, raise_bar
from foredraft.graph.tree import depths, is_tree
from foredraft.index.backoff import prior_trust
from foredraft.index.blend import (
    COUNTS,
    Counts,
    blend,
    foreseen,
    learn_inner,
    learn_written,
    prior_inner_trust,
    trust_in_rows,
    with_foresight,
)
from foredraft.index.prefixes import group_of, group_rows, room_for_groups, split_rows, weight_of
from foredraft.index.retrieval import FORESEEN, OWN, STORE, Levels
from test_retrieval import as_rows
from test_search import BLENDED, VOCABULARY, assert_same_paths, knowledge, paths

pytestmark = pytest.mark.kernels

REACH = 4


def counts_of(known):
    return Counts(known.table, known.learned, BLENDED)


def levels_of_rows(count):
    """Two levels: the first half of the rows is the sequence's own, the second half the datastore's."""
    half = count // 2
    return Levels(
        np.array([OWN, STORE]), np.array([5, 2]), np.array([max(half, 1), max(count - half, 1)]),
        np.array([0, half, count]), np.array([0.5, 0.3]),
    )  # fmt: skip


def some_rows(seed, count=24):
    rng = np.random.default_rng(seed)
    rows = [tuple(rng.integers(0, 4, rng.integers(0, REACH + 1)).tolist()) for _ in range(count)]
    return rows, (rng.dirichlet(np.ones(count)) * 0.8).tolist() if count else []


def blended(rows, weights, known, a, b, nodes, depth=6, vocabulary=VOCABULARY, inner=None):
    inner = prior_inner_trust(20.0) if inner is None else inner
    levels = levels_of_rows(len(rows))
    return blend(as_rows(rows, weights, REACH), levels, inner, counts_of(known), a, b, nodes, depth, vocabulary)


def trusted(inner=None):
    inner = prior_inner_trust(20.0) if inner is None else inner
    return lambda rows: naive.trust_in_rows(inner.hits, inner.passes, rows)


def slow(known):
    return known.tables, known.memory, BLENDED


# --- the bar


@given(scores=st.lists(st.floats(0.0, 1.0, width=32), max_size=60), most=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_the_bar_is_as_high_as_the_twins(scores, most):
    bar, twin = new_bar(most), naive.new_bar(most)
    for score in scores:
        assert above_bar(bar, score) == naive.above_bar(twin, score)
        if naive.above_bar(twin, score):
            raise_bar(bar, score)
            naive.raise_bar(twin, score)
        assert bar_height(bar) == pytest.approx(naive.bar_height(twin), rel=1e-6)
    assert not above_bar(bar, float("nan"))
    assert bar_height(bar) >= FLOOR


# --- groups of rows


@given(rows=st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=20), level=st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_rows_are_grouped_as_by_the_twin(rows, level):
    weights = [0.5 + n for n in range(len(rows))]
    made, members, groups = as_rows(rows, weights, 3), np.arange(len(rows), dtype=np.int32), room_for_groups(50, 4)
    for _ in range(2):  # working memory is as good as new
        number = group_rows(made, members, 0, len(rows), level, groups)
        tokens = groups.slot_token[groups.slot[:number]].tolist()
        expected = naive.group_rows([rows[n] for n in members], [weights[n] for n in members], level)
        found = zip(groups.rows[:number].tolist(), groups.weight[:number].tolist(), strict=True)
        assert dict(zip(tokens, found, strict=True)) == expected
        assert list(expected) == tokens
        order = naive.split_rows([rows[n] for n in members], level)
        expected_members = members[order].tolist()
        split_rows(members, 0, len(rows), groups, number)
        assert members.tolist() == (expected_members if number else list(range(len(rows))))
        for group, token in enumerate(tokens):
            first = groups.first[group]
            assert all(rows[n][level] == token for n in members[first : first + groups.rows[group]])
    assert weight_of(made, members, 0, len(rows)) == pytest.approx(naive.weight_of(rows, weights))


def test_tokens_are_numbered_in_order_of_appearance():
    groups, seen, twin = room_for_groups(0, 64), 0, naive.room_for_groups(0, 64)
    for token in (5, 70_000, 5, 9, 70_000 + (1 << 20), 9, 5):
        group = group_of(groups, seen, token)
        assert group == naive.group_of(twin, token)
        seen = max(seen, group + 1)


# --- the draft


@pytest.mark.parametrize("nodes", [1, 5, 16, 40])
@pytest.mark.parametrize("count", [0, 1, 24])
def test_the_blend_is_the_twins(nodes, count):
    for seed in range(6):
        known, (rows, weights) = knowledge(seed), some_rows(seed, count)
        made = blended(rows, weights, known, seed % VOCABULARY, 2, nodes)
        expected = naive.blend(rows, weights, trusted(), slow(known), seed % VOCABULARY, 2, nodes, 6, VOCABULARY)
        found = paths(made.tokens, made.parents, made.score)
        assert_same_paths(found, {path: score for path, (score, _) in expected.items()})
        for path, source in zip(found, made.source.tolist(), strict=True):
            if path in expected and rows:
                assert (source != COUNTS) == expected[path][1], path


def test_the_rows_of_a_node_are_those_that_begin_with_its_path():
    known, (rows, weights) = knowledge(3), some_rows(3, 30)
    made = blended(rows, weights, known, 1, 2, 40)
    with_rows = 0
    for path, low, high in zip(paths(made.tokens, made.parents, made.score), made.low, made.high, strict=True):
        expected = [n for n, row in enumerate(rows) if row[: len(path)] == path]
        assert sorted(made.members[low:high].tolist()) == expected
        with_rows += bool(expected)
    assert with_rows > 10


def test_a_node_is_credited_to_the_most_trusted_rows_that_hold_it():
    known = knowledge(0, static=False, learns=False)
    rows = [(1, 2), (3,), (1, 5), (4,)]  # two of the sequence's own, two of the datastore
    made = blended(rows, [0.3, 0.2, 0.2, 0.1], known, 0, 0, 20)
    source = dict(zip(paths(made.tokens, made.parents, made.score), made.source.tolist(), strict=True))
    assert source == {(1,): OWN, (1, 2): OWN, (1, 5): STORE, (3,): OWN, (4,): STORE}


def test_what_rows_leave_goes_to_the_counts():
    known = knowledge(0)
    alone = blended([], [], known, 1, 2, 8, depth=1)
    both = blended([(7,), (7,)], [0.3, 0.3], known, 1, 2, 8, depth=1)
    before = paths(alone.tokens, alone.parents, alone.score)
    after = paths(both.tokens, both.parents, both.score)
    assert after[7,] == pytest.approx(0.6 + 0.4 * before.get((7,), 0.0), abs=1e-4)
    for path in after.keys() & before.keys() - {(7,)}:
        assert after[path] == pytest.approx(0.4 * before[path], abs=1e-4)
    assert set(alone.source.tolist()) == {COUNTS}


@pytest.mark.parametrize("nodes", [1, 3, 64])
def test_a_draft_keeps_its_limits(nodes):
    for seed in range(5):
        known, (rows, weights) = knowledge(seed), some_rows(seed)
        for depth, vocabulary in ((1, VOCABULARY), (3, 2), (9, VOCABULARY)):
            made = blended(rows, weights, known, -1, 0, nodes, depth, vocabulary)
            assert is_tree(made.tokens, made.parents, vocabulary)
            assert len(made.tokens) <= nodes
            assert depths(made.parents).max(initial=0) <= depth
            assert ((made.score > 0) & (made.score <= 1)).all()
            above = np.where(made.parents < 0, np.float32(1), made.score[made.parents])
            assert (made.score <= above).all()


def test_children_share_at_most_what_their_parent_has():
    known, (rows, weights) = knowledge(5), some_rows(5)
    made = blended(rows, weights, known, 1, 2, 200)
    for node in range(-1, len(made.tokens)):
        children = made.score[made.parents == node].sum()
        assert children <= (1.0 if node < 0 else made.score[node]) * (1 + 1e-4)


# --- what it learns


def test_foreseen_is_what_counts_say():
    known = knowledge(2)
    for token in range(VOCABULARY):
        expected = naive.foreseen(*slow(known), 1, 2, token)
        assert foreseen(counts_of(known), 1, 2, token) == pytest.approx(expected, rel=1e-5)


def test_trust_in_rows_rises_with_their_number():
    inner = prior_inner_trust(20.0)
    levels, members = levels_of_rows(400), np.arange(400, dtype=np.int32)
    shares = [trust_in_rows(inner, levels, members, 0, rows) for rows in (1, 2, 4, 8, 64, 300)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    assert shares == pytest.approx([trusted(inner)(rows) for rows in (1, 2, 4, 8, 64, 300)])


def test_what_foresaw_a_token_is_credited_as_by_the_twin():
    learned = 0
    for seed in range(8):
        known, (rows, weights) = knowledge(seed), some_rows(seed, 40)
        inner = prior_inner_trust(20.0)
        made = blended(rows, weights, known, 1, 2, 60, inner=inner)
        drafted = paths(made.tokens, made.parents, made.score)
        written = (*max(drafted, key=len), 1)[: REACH + 2]
        expected = naive.learn_inner(rows, weights, trusted(inner), slow(known), 1, 2, drafted, written[:REACH])
        hits, passes = inner.hits.copy(), inner.passes.copy()
        made_rows = as_rows(rows, weights, REACH)
        levels = levels_of_rows(len(rows))
        learn_inner(inner, made, made_rows, levels, counts_of(known), 2, np.array(written, np.int64))
        for number, part in expected:
            hits[min(number.bit_length() - 1, len(hits) - 2)] += part
            passes[min(number.bit_length() - 1, len(hits) - 2)] += 1 - part
        assert inner.hits == pytest.approx(hits, rel=1e-4)
        assert inner.passes == pytest.approx(passes, rel=1e-4)
        learned += len(expected)
    assert learned > 5


def test_one_call_credits_all_that_its_parts_credit():
    known, (rows, weights) = knowledge(3), some_rows(3, 40)
    trust, inner, levels = prior_trust(5, 20.0), prior_inner_trust(20.0), levels_of_rows(40)
    made = blended(rows, weights, known, 1, 2, 60, inner=inner)
    drafted = paths(made.tokens, made.parents, made.score)
    written = next(row for row in rows if len(row) > 2 and row[:2] in drafted)
    shares = [(0.5, range(20)), (0.3, range(20, 40))]
    otherwise, (hits, passes), inner_gains = naive.learn_written(
        shares, rows, weights, trusted(inner), slow(known), 1, 2, drafted, written
    )
    made_rows, before, inner_before = as_rows(rows, weights, REACH), trust.hits.copy(), inner.hits.sum()
    asked, passes_before = (levels, made_rows), trust.passes.copy()
    tokens = np.array(written, np.int64)
    found = learn_written(trust, inner, made, asked, asked, counts_of(known), 1, 2, tokens)
    assert found == pytest.approx(otherwise, rel=1e-5)
    for place, hit, passed in zip([(OWN, 5, 4), (STORE, 2, 4)], hits, passes, strict=True):
        assert trust.hits[place] - before[place] == pytest.approx(hit, rel=1e-4)
        assert trust.passes[place] - passes_before[place] == pytest.approx(passed, rel=1e-4)
    assert inner.hits.sum() - inner_before == pytest.approx(sum(part for _, part in inner_gains), rel=1e-4)
    assert inner_gains


# --- what a draft model foresees


def test_foresight_stands_before_what_occurred_with_its_share():
    known = knowledge(0, static=False, learns=False)
    rows = as_rows([(1, 2), (3,)], [0.4, 0.2], REACH)
    paths_foreseen = as_rows([(5, 6), (5,), (1, 7)], [0.5, 0.2, 0.3], REACH)
    levels, both = with_foresight(levels_of_rows(2), rows, paths_foreseen.tokens, paths_foreseen.weights, 0.6)
    twin, expected = naive.with_foresight(
        [(OWN, 5, 1, 0.5, 1), (STORE, 2, 1, 0.3, 1)], zip(rows.tokens.tolist(), rows.weights.tolist(), strict=True),
        paths_foreseen.tokens.tolist(), [0.5, 0.2, 0.3], 0.6,
    )  # fmt: skip
    assert list(zip(levels.source, levels.length, levels.occurrences, strict=True)) == [level[:3] for level in twin]
    assert levels.share.tolist() == pytest.approx([level[3] for level in twin])
    assert np.diff(levels.start).tolist() == [level[4] for level in twin]
    assert [tuple(row) for row in both.tokens.tolist()] == [tokens for tokens, _ in expected]
    assert both.weights.tolist() == pytest.approx([weight for _, weight in expected])
    assert levels.source.tolist() == [FORESEEN, OWN, STORE]
    assert levels.start.tolist() == [0, 3, 4, 5]
    assert both.weights.sum() == pytest.approx(0.6 + 0.4 * 0.6)
    inner = prior_inner_trust(20.0)
    made = blend(both, levels, inner, counts_of(known), 0, 0, 20, 6, VOCABULARY)
    found = paths(made.tokens, made.parents, made.score)
    assert found[5,] == pytest.approx(0.6 * 0.7)
    assert found[1,] == pytest.approx(0.6 * 0.3 + 0.4 * 0.4)
    assert found[3,] == pytest.approx(0.4 * 0.2)
    trust = naive.trust_in_rows(inner.hits, inner.passes, 2, foreseen=True)
    assert found[5, 6] == pytest.approx(found[5,] * trust * 0.5 / 0.7), "where the model ends a path, counts go on"
    source = dict(zip(found, made.source.tolist(), strict=True))
    assert (source[5,], source[1, 7], source[1, 2], source[3,]) == (FORESEEN, FORESEEN, OWN, STORE)


def test_foresight_that_proves_right_is_trusted_more():
    known = knowledge(0, static=False, learns=False)
    nothing = as_rows([], [], REACH)
    foresight = as_rows([(5, 6, 7)], [1.0], REACH)
    levels, rows = with_foresight(levels_of_rows(0), nothing, foresight.tokens, foresight.weights, 0.9)
    inner = prior_inner_trust(20.0)
    made = blend(rows, levels, inner, counts_of(known), 0, 0, 20, 6, VOCABULARY)
    before = inner.hits.copy()
    learn_inner(inner, made, rows, levels, counts_of(known), 0, np.array([5, 6, 7, 1]))
    gained = inner.hits - before
    assert gained[-1] > 1.9
    assert gained[:-1].sum() == 0
