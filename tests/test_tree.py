"""Token trees, their layout, and the draft record: compared with slow twins, and refused when they are broken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive.graph
from foredraft.contracts import EMPTY_DRAFT, Draft
from foredraft.graph import layout, tree
from support.drafts import path_to

pytestmark = pytest.mark.kernels


def ints(*values):
    return np.array(values, np.int32)


def random_parents(rng, nodes):
    return np.array([rng.integers(-1, node) for node in range(nodes)], np.int32)


def random_draft(rng, nodes):
    """A draft with every optional array, whose siblings differ because all tokens do."""
    tokens = rng.permutation(1000)[:nodes].astype(np.int32)
    return Draft(
        tokens,
        random_parents(rng, nodes),
        rng.random(nodes).astype(np.float32),
        rng.integers(0, 3, nodes).astype(np.uint8),
    )


def path_scores(rng, parents):
    """Scores that never rise from parent to child, as products of probabilities do not."""
    score = rng.random(len(parents)).astype(np.float32)
    for node, parent in enumerate(parents):
        if parent >= 0:
            score[node] *= score[parent]
    return score


def prefix_closed(parents, kept):
    return all(parents[node] == -1 or parents[node] in kept for node in kept)


@st.composite
def trees(draw, most=24):
    nodes = draw(st.integers(0, most))
    return np.array([draw(st.integers(-1, node - 1)) for node in range(nodes)], np.int32)


SEEDS = pytest.mark.parametrize("seed", range(20))


@SEEDS
def test_children_are_found_by_their_tokens(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(0, 40)))
    tokens = rng.integers(0, 5, len(parents)).astype(np.int32)
    for node in range(-1, len(parents)):
        for token in range(-1, 6):
            found = tree.child_with(tokens, parents, node, token)
            assert found == naive.graph.child_with(tokens.tolist(), parents.tolist(), node, token)


@SEEDS
def test_depths_and_mask_equal_their_twins(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(0, 65)))
    depth, mask = tree.depths(parents), tree.ancestor_mask(parents)
    assert depth.dtype == np.int32
    assert mask.dtype == np.bool_
    np.testing.assert_array_equal(depth, naive.graph.depths(parents))
    np.testing.assert_array_equal(mask, naive.graph.ancestor_mask(parents))


@SEEDS
def test_top_nodes_equals_its_twin_for_any_scores(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(0, 50)))
    score = rng.integers(0, 6, len(parents)).astype(np.float32)  # few values, so that there are ties
    for limit in (0, 1, 7, 100):
        for max_depth in (0, 1, 3, 100):
            kept = tree.top_nodes(parents, score, limit, max_depth)
            assert kept.dtype == np.int32
            np.testing.assert_array_equal(kept, naive.graph.top_nodes(parents, score, limit, max_depth))


@SEEDS
def test_top_nodes_of_path_probabilities_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, 40)
    score = path_scores(rng, parents)
    best = sorted(np.argsort(-score, kind="stable")[:12])
    np.testing.assert_array_equal(tree.top_nodes(parents, score, 12, 100), best)


@given(trees(), st.integers(0, 30), st.integers(0, 6), st.randoms(use_true_random=False))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_top_nodes_keep_parents_and_limits(parents, limit, max_depth, random):
    score = np.array([random.random() for _ in parents], np.float32)
    kept = tree.top_nodes(parents, score, limit, max_depth)
    reachable = int((tree.depths(parents) <= max_depth).sum())
    assert len(kept) == min(limit, reachable)
    assert prefix_closed(parents, set(kept.tolist()))
    assert (np.diff(kept) > 0).all()
    assert (tree.depths(parents)[kept] <= max_depth).all()


def test_ties_go_to_the_earlier_node():
    np.testing.assert_array_equal(tree.top_nodes(ints(-1, -1, -1), np.ones(3, np.float32), 2, 1), [0, 1])


def test_a_good_child_waits_for_its_parent():
    score = np.array([0.5, 0.1, 0.9], np.float32)
    np.testing.assert_array_equal(tree.top_nodes(ints(-1, -1, 1), score, 2, 9), [0, 1])


def test_mask_of_a_small_tree_by_hand():
    #    root -> 0 -> 1, root -> 2
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    np.testing.assert_array_equal(tree.ancestor_mask(ints(-1, 0, -1)), np.array(expected, bool))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_chain_is_the_causal_triangle(length):
    parents = tree.chain_parents(length)
    assert parents.dtype == np.int32
    assert len(parents) == length
    np.testing.assert_array_equal(tree.depths(parents), np.arange(1, length + 1))
    np.testing.assert_array_equal(tree.ancestor_mask(parents), np.tri(length + 1, dtype=bool))


@given(trees())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_path_leads_from_the_root_to_its_node(parents):
    assert path_to(parents, tree.ROOT) == []
    for node in range(len(parents)):
        path = path_to(parents, node)
        assert path[-1] == node
        assert len(path) == tree.depths(parents)[node]
        assert [int(parents[step]) for step in path] == [-1, *path[:-1]]


@pytest.mark.parametrize(("one", "other", "length"), [((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (5,), 0)])
def test_sequences_are_compared_up_to_the_first_other_token_or_where_one_ends(one, other, length):
    assert tree.common_length(one, other) == tree.common_length(other, one) == length


@SEEDS
def test_a_kept_sub_tree_has_the_same_paths(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, 30)
    kept = tree.top_nodes(parents, rng.random(30).astype(np.float32), 11, 100)
    smaller = tree.reindexed_parents(parents, kept)
    assert smaller.dtype == np.int32
    for new, old in enumerate(kept):
        assert kept[path_to(smaller, new)].tolist() == path_to(parents, int(old))


BROKEN = {
    "tokens of 64 bits": (np.array([1, 2], np.int64), ints(-1, 0), "tokens must be"),
    "parents of two dimensions": (ints(1, 2), ints(-1, 0)[None], "parents must be"),
    "one parent missing": (ints(1, 2), ints(-1), "one parent per token"),
    "a parent below -1": (ints(1, 2), ints(-1, -2), "below -1"),
    "a node as its own parent": (ints(1, 2), ints(-1, 1), "must come before"),
    "a parent after its child": (ints(1, 2, 3), ints(-1, 2, -1), "Node 1 has parent 2"),
    "siblings alike under the root": (ints(7, 8, 7), ints(-1, -1, -1), "siblings"),
    "siblings alike further down": (ints(1, 7, 7), ints(-1, 0, 0), "siblings"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tree_is_refused(name):
    tokens, parents, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        tree.check_tree(tokens, parents)
    with pytest.raises(ValueError, match=message):
        Draft(tokens, parents).check()


@SEEDS
def test_the_wrong_node_is_that_of_its_twin(seed):
    rng = np.random.default_rng(seed)
    said = []
    for _ in range(200):
        nodes = int(rng.integers(0, 7))
        tokens, parents = rng.integers(0, 12, nodes).astype(np.int32), random_parents(rng, nodes)
        if nodes and rng.random() < 0.5:  # spoil one number, sometimes only just
            array, value = [(tokens, -1), (tokens, 12), (parents, -2), (parents, nodes - 1)][rng.integers(4)]
            array[rng.integers(nodes)] = value
        said.append(tree.wrong_node(tokens, parents, 12))
        assert said[-1] == naive.graph.wrong_node(tokens, parents, 12)
    assert 20 < said.count(-1) < 180
    assert max(said) > 2


def test_tokens_of_a_tree_are_below_the_vocabulary():
    tree.check_tree(ints(0, 9), ints(-1, 0), 10)
    for tokens, vocabulary in ((ints(0, 9), 9), (ints(-1, 9), 10)):
        with pytest.raises(ValueError, match=f"token 9 .* below {vocabulary}"):
            tree.check_tree(tokens, ints(-1, 0), vocabulary)


WHOLE = (ints(5, 6), ints(-1, 0))
BROKEN_EXTRAS = {
    "score of 64 bits": ({"score": np.ones(2)}, "score must be"),
    "score too short": ({"score": np.ones(1, np.float32)}, "score must be"),
    "score not a number": ({"score": np.array([1, np.nan], np.float32)}, "finite"),
    "source of 64 bits": ({"source": np.zeros(2, np.int64)}, "source must be"),
    "source too long": ({"source": np.zeros(3, np.uint8)}, "source must be"),
}


@pytest.mark.parametrize("name", BROKEN_EXTRAS)
def test_a_broken_draft_is_refused(name):
    Draft(*WHOLE).check()
    extra, message = BROKEN_EXTRAS[name]
    with pytest.raises(ValueError, match=message):
        Draft(*WHOLE, **extra).check()


def test_cousins_may_carry_the_same_token():
    """The same token under two parents, and under its own parent, is two different continuations."""
    tree.check_tree(ints(1, 2, 7, 7, 7), ints(-1, -1, 0, 1, 3))


def test_the_empty_draft_is_whole():
    EMPTY_DRAFT.check()
    assert len(EMPTY_DRAFT) == 0


@SEEDS
def test_take_keeps_each_node_with_all_that_belongs_to_it(seed):
    rng = np.random.default_rng(seed)
    draft = random_draft(rng, 25)
    draft.check()
    kept = tree.top_nodes(draft.parents, draft.score, 9, 4)
    taken = draft.take(kept)
    taken.check()
    assert len(taken) == len(kept) > 0
    for new, old in enumerate(kept):
        path, old_path = path_to(taken.parents, new), path_to(draft.parents, int(old))
        assert taken.tokens[path].tolist() == draft.tokens[old_path].tolist()
    for name in ("score", "source"):
        np.testing.assert_array_equal(getattr(taken, name), getattr(draft, name)[kept])


def test_take_of_everything_and_of_nothing():
    draft = random_draft(np.random.default_rng(3), 10)
    everything, nothing = draft.take(np.arange(10, dtype=np.int32)), draft.take(ints())
    np.testing.assert_array_equal(everything.tokens, draft.tokens)
    np.testing.assert_array_equal(everything.parents, draft.parents)
    assert len(nothing) == 0
    nothing.check()


def test_take_leaves_absent_arrays_absent():
    taken = Draft(ints(5, 6, 7), ints(-1, 0, -1)).take(ints(2))
    assert taken.tokens.tolist() == [7]
    assert taken.score is taken.source is None


@SEEDS
def test_a_layout_puts_each_row_behind_its_own_path(seed):
    rng = np.random.default_rng(seed)
    draft, at = random_draft(rng, int(rng.integers(0, 30))), int(rng.integers(0, 5000))
    rows = layout.lay_out(99, draft.tokens, draft.parents, at)
    assert rows.token_ids.dtype == rows.positions.dtype == np.int64
    assert rows.rows == len(draft) + 1
    assert rows.at == rows.positions[0] == at
    assert rows.token_ids.tolist() == [99, *draft.tokens.tolist()]
    # A row attends to itself and to one row per token between it and the committed text.
    np.testing.assert_array_equal(rows.ancestors.sum(axis=1), rows.positions - at + 1)
    for node in range(len(draft)):
        seen = np.flatnonzero(rows.ancestors[node + 1]).tolist()
        assert seen == [0, *(step + 1 for step in path_to(draft.parents, node))]


def test_text_is_laid_out_as_a_chain():
    rows = layout.lay_out_text(np.array([4, 5, 6], np.int64), 10)
    assert rows.token_ids.tolist() == [4, 5, 6]
    assert rows.positions.tolist() == [10, 11, 12]
    assert rows.positions.dtype == np.int64
    assert rows.ancestors is None
    assert (rows.rows, rows.at) == (3, 10)
