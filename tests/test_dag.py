"""Token graphs: merging, absence of cycles, and unmerging to a tree, compared with slow twins."""

import numpy as np
import pytest

import naive.graph
from foredraft.contracts import Draft
from foredraft.graph import dag, tree
from support.drafts import path_to

pytestmark = pytest.mark.kernels

SEEDS = pytest.mark.parametrize("seed", range(12))


def ints(*values):
    return np.array(values, np.int32)


def floats(*values):
    return np.array(values, np.float32)


def has_cycle(nodes, edges):
    """Removes nodes without an incoming edge until none is left; a cycle remains."""
    left = set(range(nodes))
    while left:
        entered = {to for start, to in edges if start in left}
        free = left - entered
        if not free:
            return True
        left -= free
    return False


def toy_children(rng, vocabulary, k):
    """Possible next tokens of a path and their probabilities, descending."""
    tokens = rng.permutation(vocabulary)[:k]
    return tokens, np.sort(rng.dirichlet(np.ones(vocabulary)))[::-1][:k].astype(np.float32)


def toy_levels(rng, vocabulary, k, levels, most_open, add):
    """Grow a toy: `add` takes a level as `add_level` does, and returns the nodes to expand."""
    frontier = [-1]
    for level in range(levels):
        rows = [toy_children(rng, vocabulary, k) for _ in frontier]
        if not rows:
            return
        probabilities = np.stack([row[1] for row in rows])
        frontier = add(
            np.repeat(np.array(frontier, np.int32), probabilities.shape[1]),
            np.concatenate([row[0] for row in rows]).astype(np.int32),
            probabilities.ravel(),
            dag.leaves(probabilities, 0.1, 0.2).ravel(),
            0 if level == levels - 1 else most_open,
        )


def toy_graph(seed, tau=None, levels=10, most_open=5):
    """A random graph, and its naive twin grown from the same levels."""
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.integers(2, 5))
    tau = int(rng.integers(1, 5)) if tau is None else tau
    context = rng.integers(0, vocabulary, rng.integers(0, 6))
    graph, twin = dag.empty_graph(context, tau, 400), naive.graph.empty_graph(context, tau)

    def add(*level):
        opened = dag.add_level(graph, *level)
        assert opened.dtype == np.int32
        assert opened.tolist() == naive.graph.add_level(twin, *level)
        return opened

    toy_levels(rng, vocabulary, int(rng.integers(2, 4)), levels, most_open, add)
    return graph, twin


def edges_of(graph):
    return naive.graph.edges_of(graph.parents[: graph.size], graph.lenders[: graph.size])


def paths_of(found):
    """{path as tokens: (score, origin, merged)} of an unmerged tree."""
    return {
        tuple(found.tokens[path_to(found.parents, node)].tolist()): (
            found.score[node],
            found.origin[node],
            bool(found.merged[node]),
        )
        for node in range(len(found.tokens))
    }


def assert_is_draft(found, limit, max_depth):
    Draft(found.tokens, found.parents, found.score).check()
    assert found.origin.dtype == np.int32
    assert found.merged.dtype == np.bool_
    assert len(found.tokens) <= limit
    assert (tree.depths(found.parents) <= max_depth).all()
    assert (np.diff(found.score) <= 0).all()


# --- merging


@SEEDS
def test_a_graph_grows_as_its_twin_does(seed):
    merged = 0
    for toy in range(4):
        graph, twin = toy_graph(100 * seed + toy)
        for name in ("tokens", "parents", "score", "lenders"):
            assert getattr(graph, name)[: graph.size].tolist() == twin[name], name
        opened = [node for node in range(graph.size) if twin["open"][node]]
        assert graph.opened[: len(opened)].tolist() == sorted(opened, key=lambda node: twin["open"][node])
        merged += int((graph.lenders[: graph.size] >= 0).sum())
    assert merged > 10


def test_no_graph_has_a_cycle():
    for seed in range(60):
        graph, _ = toy_graph(seed, tau=1 + seed % 4, most_open=4)
        assert not has_cycle(graph.size, edges_of(graph))


def as_released(rng, vocabulary, k, levels, tau):
    """The released code's graph: (number of nodes, edges). See the comment in each place for what it does."""
    context = rng.integers(0, vocabulary, 6)
    tokens, parents, borrowed = [], [], {}
    frontier = [-1]
    for _ in range(levels):
        found = []
        for father in frontier:
            for token in toy_children(rng, vocabulary, k)[0]:
                wanted = naive.graph.gram(tokens, parents, context, tau, father, token)
                above = path_to(parents, father)  # only these are excluded
                same = [
                    node
                    for node in range(len(tokens))
                    if node not in above
                    and naive.graph.gram(tokens, parents, context, tau, parents[node], tokens[node]) == wanted
                ]
                if same:
                    borrowed[father] = same[0]  # a second one overwrites the first
                else:
                    tokens.append(int(token))
                    parents.append(father)
                    found.append(len(tokens) - 1)
        frontier = found[:4]
    tree_edges = [(parent, node) for node, parent in enumerate(parents) if parent >= 0]
    return len(tokens), [*tree_edges, *((father, node) for father, node in borrowed.items() if father >= 0)]


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_the_released_rule_makes_cycles(tau):
    """The search for cycles finds them in a graph that has some."""
    toys = [as_released(np.random.default_rng(seed), 3, 2, 10, tau) for seed in range(20)]
    assert sum(has_cycle(*toy) for toy in toys) >= 9


def test_excluding_ancestors_in_the_tree_alone_makes_cycles():
    """Our rule with the released code's test in place of reachability, on toys where ours has no cycles."""

    def cyclic(seed, released):
        twin = naive.graph.empty_graph([0, 1, 2], 2)

        def add(*level):
            return naive.graph.add_level(twin, *level, only_tree_ancestors=released)

        toy_levels(np.random.default_rng(seed), 3, 3, 8, 4, add)
        return has_cycle(len(twin["tokens"]), naive.graph.edges_of(twin["parents"], twin["lenders"]))

    assert sum(cyclic(seed, True) for seed in range(30)) >= 10
    assert not any(cyclic(seed, False) for seed in range(30))


def add(graph, parents, tokens, probabilities, leaf=None, most_open=99):
    leaf = np.zeros(len(tokens), bool) if leaf is None else np.array(leaf)
    return dag.add_level(graph, ints(*parents), ints(*tokens), floats(*probabilities), leaf, most_open)


def small_graph(tau=2, most_open=99):
    """After the text 8 9, the tokens 1 (node 0) and 2 (node 1); returned with its open nodes."""
    graph = dag.empty_graph(np.array([8, 9]), tau, 20)
    return graph, add(graph, [-1, -1], [1, 2], [0.6, 0.4], most_open=most_open)


def test_a_redundant_node_is_kept_and_borrows_from_the_first_occurrence():
    graph, first = small_graph(tau=1)
    assert first.tolist() == [0, 1]
    # Token 1 again below node 1: a separate node with the continuations of node 0.
    assert add(graph, [0, 1], [5, 1], [0.9, 0.8]).tolist() == [2]
    assert graph.size == 4
    assert graph.lenders[:4].tolist() == [-1, -1, -1, 0]
    found = dag.unmerge(graph, 100, 100)
    assert paths_of(found).keys() == {(1,), (2,), (1, 5), (2, 1), (2, 1, 5)}
    assert found.score[found.tokens.tolist().index(5)] == np.float32(0.6) * np.float32(0.9)
    _, origin, merged = paths_of(found)[2, 1, 5]
    assert (origin, merged) == (2, True)
    assert not paths_of(found)[2, 1][2]  # the redundant node was drafted after its own path


def test_a_gram_reaches_back_into_the_text():
    """After the text ... 8 9, both 9 1 and 2 9 1 end in the gram 9 1."""
    graph, _ = small_graph(tau=2)
    add(graph, [0, 1], [5, 9], [0.9, 0.8])
    assert add(graph, [2, 3], [6, 1], [0.9, 0.8]).tolist() == [4]
    assert graph.lenders[5] == 0


def test_two_children_of_a_node_borrow_from_two_lenders():
    graph, _ = small_graph(tau=1)
    add(graph, [0, 1], [5, 6], [0.9, 0.9])
    add(graph, [2, 2], [2, 6], [0.5, 0.4])
    assert graph.lenders[4:6].tolist() == [1, 3]


def test_nothing_borrows_from_its_own_ancestor():
    graph = dag.empty_graph(np.array([9]), 1, 20)
    frontier = add(graph, [-1], [1], [1.0])
    for _ in range(5):  # 1 1 1 1 1 1
        frontier = add(graph, frontier, [1], [1.0])
        assert len(frontier) == 1
    assert (graph.lenders == -1).all()


def test_nothing_borrows_from_an_ancestor_through_a_loan():
    """Node 3 (2 1) borrows from node 0 (1), so no node below node 0 may borrow from an ancestor of node 3."""
    graph, _ = small_graph(tau=1)
    add(graph, [0, 1], [5, 1], [0.9, 0.8])
    assert graph.lenders[3] == 0
    assert add(graph, [2], [2], [0.7]).tolist() == [4]  # 1 5 2: node 1 leads to 3, and so to 0, and to 2
    assert graph.lenders[4] == -1


def test_where_the_first_occurrence_may_not_lend_the_next_one_does():
    graph = dag.empty_graph(np.array([9]), 1, 20)
    add(graph, [-1, -1], [1, 2], [0.6, 0.4])
    add(graph, [0, 1], [1, 3], [0.9, 0.9])  # node 2 is 1 1: an occurrence that could not be merged
    add(graph, [2, 3], [4, 5], [0.9, 0.9])
    add(graph, [4, 5], [6, 1], [0.9, 0.9])
    assert graph.lenders[7] == 0
    assert add(graph, [6], [1], [0.5]).tolist() == [8]  # below both
    graph, _ = small_graph(tau=1)
    add(graph, [0, 1], [5, 6], [0.9, 0.9])
    add(graph, [2, 3], [6, 5], [0.9, 0.9])
    assert graph.lenders[4:6].tolist() == [3, -1]  # the second would close 5 6 5


def test_within_a_level_the_most_probable_is_the_first_occurrence():
    graph, _ = small_graph(tau=1)
    assert add(graph, [0, 1], [7, 7], [0.1, 0.9]).tolist() == [3]
    assert graph.lenders[2:4].tolist() == [3, -1]
    add(graph, [3], [8], [1.0])  # both get the continuations that the lender gets later
    assert {(1, 7, 8), (2, 7, 8)} <= paths_of(dag.unmerge(graph, 100, 100)).keys()


def test_a_leaf_is_drafted_and_not_expanded_and_does_not_lend_but_may_borrow():
    graph, _ = small_graph(tau=1)
    assert add(graph, [0, 1], [7, 8], [0.9, 0.9], leaf=[True, False]).tolist() == [3]
    assert add(graph, [3, 3], [7, 1], [0.5, 0.1], leaf=[False, True]).tolist() == [4]
    assert graph.lenders[4:6].tolist() == [-1, 0]
    assert (1, 7) in paths_of(dag.unmerge(graph, 100, 100))


def test_only_the_most_probable_stay_open_and_none_in_the_last_level():
    graph, first = small_graph(tau=2, most_open=1)
    assert first.tolist() == [0]
    assert add(graph, [0, 0], [5, 6], [0.5, 0.5], most_open=0).tolist() == []
    assert add(graph, [], [], []).tolist() == []
    assert graph.size == 4


def test_without_a_tau_the_graph_is_a_tree():
    graph, twin = toy_graph(3, tau=0)
    assert (graph.lenders == -1).all()
    found = dag.unmerge(graph, 20, 6)
    kept = tree.top_nodes(graph.parents[: graph.size], graph.score[: graph.size], 20, 6)
    assert sorted(found.origin.tolist()) == kept.tolist()
    assert not found.merged.any()
    assert twin["lenders"] == [-1] * graph.size


def test_a_probability_just_above_one_is_taken_for_one():
    graph = dag.empty_graph(np.array([9]), 2, 4)
    add(graph, [-1], [1], [1.0001])
    assert graph.score[0] == graph.probability[0] == 1


# --- pruning


def test_pruning_by_hand():
    probabilities = floats(0.7, 0.2, 0.1, 0.3, 0.25, 0.19).reshape(2, 3)
    assert dag.leaves(probabilities, 0.2, 0.0).tolist() == [[False, False, True], [False, False, True]]
    assert dag.leaves(probabilities, 0.0, 0.3).tolist() == [[False, True, True], [False, False, False]]
    assert dag.leaves(probabilities, 0.2, 0.3).tolist() == [[False, True, True], [False, False, True]]


def test_what_is_not_a_number_is_not_expanded():
    assert dag.leaves(floats(np.nan, np.nan).reshape(1, 2), 0.0, 0.0).all()
    assert dag.leaves(np.empty((2, 0), np.float32), 0.2, 0.3).shape == (2, 0)


# --- unmerging


@SEEDS
def test_an_unmerged_tree_holds_exactly_the_best_paths(seed):
    graph, _ = toy_graph(seed, levels=5, most_open=3)
    size, borrowed = graph.size, 0
    arrays = [array[:size] for array in (graph.tokens, graph.parents, graph.probability, graph.lenders)]
    for limit in (0, 1, 12, 400):
        for max_depth in (0, 1, 3, 7):
            found = dag.unmerge(graph, limit, max_depth)
            assert_is_draft(found, limit, max_depth)
            expected = naive.graph.unmerge(*arrays, limit, max_depth)
            assert paths_of(found) == expected
            borrowed += int(found.merged.sum())
    assert borrowed or not (graph.lenders >= 0).any()


@SEEDS
def test_what_is_not_merged_has_the_path_of_its_origin(seed):
    """So keys and values computed for the origin are valid for it, but not for the others."""
    graph, _ = toy_graph(seed, tau=1 + seed % 2)
    found = dag.unmerge(graph, 200, 12)
    other_paths = 0
    for node, origin in enumerate(found.origin.tolist()):
        path = found.tokens[path_to(found.parents, node)].tolist()
        own = graph.tokens[path_to(graph.parents, origin)].tolist()
        assert path[-1] == own[-1]
        if found.merged[node]:
            other_paths += path != own
        else:
            assert path == own
            assert found.score[node] == graph.score[origin]
    assert other_paths == found.merged.sum()


def test_an_unmerged_tree_can_be_deeper_than_the_graph():
    graph, _ = small_graph(tau=1)
    add(graph, [0, 1], [5, 1], [0.9, 0.8])
    found = dag.unmerge(graph, 100, 100)
    assert tree.depths(graph.parents[: graph.size]).max() == 2
    assert tree.depths(found.parents).max() == 3


def test_paths_of_probability_zero_are_left_out():
    graph = dag.empty_graph(np.array([9]), 2, 4)
    add(graph, [-1, -1], [1, 2], [1.0, 0.0])
    assert dag.unmerge(graph, 10, 10).tokens.tolist() == [1]


def test_of_equal_paths_as_many_are_kept_as_there_is_room_for():
    graph = dag.empty_graph(np.array([9]), 2, 9)
    first = add(graph, [-1] * 3, [1, 2, 3], [0.25] * 3)
    add(graph, first, [1, 1, 1], [1.0] * 3)
    for limit in range(8):
        found = dag.unmerge(graph, limit, 5)
        assert_is_draft(found, limit, 5)
        assert len(found.tokens) == min(limit, 6)
