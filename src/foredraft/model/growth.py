"""How a draft model's graph grows: level by level, pruned by probability, until drafting more is not worth while.

Gong et al., "Graph-Structured Speculative Decoding" (ACL Findings 2024), section 4.2. A tree is a graph that merges
nothing, and a chain is a tree of out-degree 1. Knows a rollout and the rules of growth; not the target, nor how the
graph is cut to its budget afterwards.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foredraft.contracts import Budget, Draft, TokenIds
from foredraft.errors import UsageError
from foredraft.graph.dag import DraftGraph, add_level, empty_graph, leaves
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.graph.unmerge import unmerge
from foredraft.model.candidates import Candidates, Imitation, candidates
from foredraft.model.rollout import Rollout

Calibrate = Callable[[Candidates, int], Candidates]
"""Gives the candidates of a level, 1 for the first, other probabilities."""


@dataclass(frozen=True, slots=True)
class GrowthRules:
    """What limits a graph.

    Attributes:
        out_degree: children of a node at most; k in the paper.
        least_probability: a node below this is a leaf; theta_prob.
        least_share: a node below this share of its best sibling is a leaf; theta_sib.
        most_levels: levels at most.
        tau: length of the grams that are drafted once; 0 for none.
    """

    out_degree: int = 4
    least_probability: float = 0.2
    least_share: float = 0.3
    most_levels: int = 10
    tau: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range, by the names that the drafters' options have.

        Raises:
            UsageError: naming it.
        """
        counts = (("levels", self.most_levels, 1, 64), ("out_degree", self.out_degree, 1, 32), ("tau", self.tau, 0, 8))
        for name, number, least, most in counts:
            if not least <= number <= most:
                raise UsageError(f"{name} is {number}; it must be {least} to {most}.")
        for name, share in (("least_probability", self.least_probability), ("least_share", self.least_share)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name} is {share}; it must be 0 to 1.")


@dataclass(frozen=True, slots=True)
class Grown:
    """A graph as it grew.

    Attributes:
        graph: its nodes.
        rows: int32[N], the rollout's row of each node; -1 for one that was not put through the model.
        q: float32[V] for each node, the distribution that it was drawn from; empty where nodes were chosen.
        depth: how deep a draft of it may be: what loans add to the levels is not wanted where `budget.more` ended them.
    """

    graph: DraftGraph
    rows: IntArray
    q: list[FloatArray]
    depth: int

    def rows_along(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the rows on the path of `tokens` from the root, up to the first token that has none."""
        parents, drafted = (each[: self.graph.size].tolist() for each in (self.graph.parents, self.graph.tokens))
        child_of = {edge: node for node, edge in enumerate(zip(parents, drafted, strict=True))}
        found: list[int] = []
        node: int | None = -1
        for token in tokens:
            node = child_of.get((node, token))
            if node is None or self.rows[node] < 0:
                break
            found.append(int(self.rows[node]))
        return found

    def draft(self, limit: int) -> Draft:
        """Return the graph as a tree of at most `limit` nodes; those of source 1 were reached through a loan.

        Chosen nodes are cut by the probability of their paths. Drawn ones are cut in order: which of them are kept must
        not depend on what they are. They are drawn without loans, as a copy deeper in the tree would.
        """
        if self.q:
            graph, kept = self.graph, min(self.graph.size, limit)
            return Draft(
                graph.tokens[:kept].copy(),
                graph.parents[:kept].copy(),
                graph.score[:kept].copy(),
                np.array(self.q[:kept], np.float32),
            )
        tree = unmerge(self.graph, limit, self.depth)
        return Draft(tree.tokens, tree.parents, tree.score, source=tree.merged.astype(np.uint8))


def grow(
    rollout: Rollout,
    ids: TokenIds,
    rules: GrowthRules,
    budget: Budget,
    imitation: Imitation,
    most_rows: int,
    calibrate: Calibrate | None = None,
) -> Grown:
    """Grow a graph behind `ids`, int64[n].

    It ends when the budget's depth or `most_levels` is reached, no node is left to expand, `budget.more` says so, or
    `most_rows` rows have been put through the model; the most probable nodes of a level are expanded first.
    `calibrate` is asked about chosen candidates, never about drawn ones.

    Raises:
        NumericsError: scores from which no token can be chosen.
    """
    k = min(rules.out_degree, budget.nodes)
    graph = empty_graph(ids[-max(rules.tau, 1) :], rules.tau, (most_rows + 1) * k)
    grown = Grown(graph, np.full(len(graph.tokens), -1, np.int32), [], budget.depth)
    frontier = np.full(1, -1, np.int32)
    logits = rollout.start(ids)
    used = 0
    depth = min(budget.depth, rules.most_levels)
    if rules.out_degree == 1:
        depth = min(depth, budget.nodes)  # a chain's further levels would be cut
    for level in range(depth):
        positions = np.full(len(frontier), len(ids) + level, np.int64)
        found = candidates(logits, k, imitation, positions)
        if calibrate is not None and found.q is None:
            found = calibrate(found, level + 1)
        start, most_open = graph.size, most_rows - used if level + 1 < depth else 0
        opened = _add(grown, frontier, found, rules, most_open)
        if budget.more is not None and not budget.more(float(graph.score[start : graph.size].max(initial=0.0))):
            return dataclasses.replace(grown, depth=level + 1)
        if not len(opened):
            break
        above = graph.parents[opened]
        logits = rollout.expand(graph.tokens[opened], np.where(above < 0, -1, grown.rows[above]).astype(np.int32))
        grown.rows[opened] = used + np.arange(len(opened))
        used, frontier = used + len(opened), opened
    return grown


def _add(grown: Grown, frontier: IntArray, found: Candidates, rules: GrowthRules, most_open: int) -> IntArray:
    """Add the candidates as children of `frontier`; return which are to be expanded."""
    leaf = leaves(found.probabilities, rules.least_probability, rules.least_share)
    real = found.tokens >= 0  # a distribution may allow fewer tokens than were asked for
    parents = np.broadcast_to(frontier[:, None], found.tokens.shape)[real]
    opened = add_level(grown.graph, parents, found.tokens[real], found.probabilities[real], leaf[real], most_open)
    if found.q is not None:
        grown.q.extend(found.q[real])
    return opened
