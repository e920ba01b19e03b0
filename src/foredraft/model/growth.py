"""Drafting with a causal language model: a chain, a tree, or a graph whose repeated n-grams are expanded once.

Gong et al., "Graph-Structured Speculative Decoding" (ACL Findings 2024), section 4.2. A tree is a graph without merged
nodes, and a chain is a tree of out-degree 1. Each step grows a graph level by level, pruned by probability, in a KV
cache that follows the sequence. Does not depend on the target, nor on where the draft model comes from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.graph.dag import DraftGraph, add_level, empty_graph, leaves, unmerge
from foredraft.graph.layout import Layout, lay_out_text
from foredraft.graph.tree import IntArray, ancestor_mask, child_with, depths
from foredraft.model.candidates import Candidates, Imitation, candidates
from foredraft.model.layers import LAST
from foredraft.model.target import TorchTarget
from foredraft.options import check_range

Calibrate = Callable[[Candidates, int, torch.Tensor | None], Candidates]
"""Corrects the probabilities of a level's candidates; the first level is 1. Takes the target's states, as in
`SequenceView`."""


# tokens that are run in the pass that begins a tree. A step often emits two without a row, the last of the draft and
# the one after it, and skipped steps more; chosen: 4 rows take the first layers of SmolLM2 0.01 ms longer than one
_SCORED_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class GrowthRules:
    """Limits of a graph. The defaults of the first four are those of the paper's appendix B."""

    out_degree: int = 4  # maximum children of a node; k in the paper
    least_probability: float = 0.2  # a node below this probability is not expanded; theta_prob
    least_share: float = 0.3  # a node below this share of its best sibling's probability is not; theta_sib
    levels: int = 10  # maximum depth
    tau: int = 0  # length of the n-grams that are expanded once; 0 merges nothing

    def __post_init__(self) -> None:
        check_range(self, "levels", least=1, most=64)
        check_range(self, "out_degree", least=1, most=32)
        check_range(self, "tau", least=0, most=8)
        check_range(self, "least_probability", "least_share", least=0, most=1)


class Growing(Protocol):
    """One sequence's tree in the cache of what drafts: begins with `start`, grows with `expand` and ends with `keep`.

    Its rows, at most `most_rows`, are numbered from 0 in the order of expansion; -1 is the root.
    """

    most_rows: int

    @property
    def limits(self) -> tuple[int, int | None]:
        """The number of ids that it knows, and the maximum tokens of a sequence, or None."""

    def start(self, view: SequenceView) -> torch.Tensor | None:
        """Read a sequence; begin a tree and return the root's logits, float[1, V].

        None if nothing can be drafted from what the view shows of the target.
        """

    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:
        """Run the next rows, int32[R] tokens and parent rows, and return the logits after each, float[R, V]."""

    def keep(self, path: Sequence[int]) -> None:
        """End the tree, of which the rows `path`, from the root's child downwards, are part of the text."""

    def close(self) -> None:
        """Release the memory of the cache."""


def laid_out(tokens: IntArray, above: IntArray, at: int) -> Layout:
    """Lay out the last rows of a tree, int32[R] tokens, after `at` committed tokens and the tree's other rows.

    `above` are the parent rows of all its rows, int32[H + R].
    """
    held = len(above) - len(tokens)
    positions = at - 1 + depths(above).astype(np.int64)
    sees = ancestor_mask(above)[held + 1 :, 1:]
    return Layout(tokens.astype(np.int64), positions[held:], sees, at, positions[:held])


class Rollout:
    """One sequence's tree in a draft model's KV cache, as `Growing`; reads no states of the target.

    While it grows, its rows are held uncommitted, so that accepted ones are not computed twice. With `hidden`, the
    model's last hidden states are kept.
    """

    def __init__(self, model: TorchTarget, most_rows: int, *, hidden: bool = False) -> None:
        self._model, self.most_rows, self._asks = model, max(most_rows, 1), hidden
        self.limits = model.vocabulary, model.window
        self.hidden: torch.Tensor | None = None  # float[R, D], of the last pass
        self._cache = model.new_cache()
        self._parents: IntArray = np.empty(0, np.int32)
        self._root: tuple[torch.Tensor, torch.Tensor | None] | None = None  # logits and hidden states of the last start

    @torch.inference_mode()
    def start(self, view: SequenceView) -> torch.Tensor:
        ids = view.ids
        if len(self._parents):
            self.keep([])
        if self._root is not None and self._cache.length == len(ids):  # the last draft was not verified
            logits, self.hidden = self._root
            return logits
        new = ids[self._cache.length :].copy()  # torch rejects read-only arrays
        before, last = new[:-_SCORED_TOGETHER], new[-_SCORED_TOGETHER:]
        self._model.prefill(before, self._cache)
        self._cache.reserve(self.most_rows + _SCORED_TOGETHER)
        logits = self._scored(lay_out_text(last, self._cache.length))
        self._cache.commit(range(len(last)))
        self.hidden = None if self.hidden is None else self.hidden[-1:]
        self._root = logits[-1:], self.hidden
        return logits[-1:]

    @torch.inference_mode()
    def expand(self, tokens: IntArray, parents: IntArray) -> torch.Tensor:
        above = np.concatenate([self._parents, parents])
        assert len(above) <= self.most_rows, "room for so many rows is reserved"
        logits = self._scored(laid_out(tokens, above, self._cache.length))
        self._cache.hold()
        self._parents = above
        return logits

    def _scored(self, layout: Layout) -> torch.Tensor:
        scores = self._model.forward(layout, self._cache, hidden=(LAST,) if self._asks else ())
        self.hidden = scores.hidden
        return scores.logits

    def keep(self, path: Sequence[int]) -> None:
        self._cache.commit(path)
        self._parents = self._parents[:0]

    def close(self) -> None:
        self._cache, self._root = self._model.new_cache(), None


class RolloutDrafter:
    """Any drafter that grows trees level by level, of the tokens `ids`, int32[N], or all.

    `begin` begins a sequence's tree, given how many rows it has at most.
    """

    def __init__(
        self, sources: tuple[str, ...], rules: GrowthRules, needs: Needs, begin: Callable[[int], Growing],
        ids: IntArray | None = None,
    ) -> None:  # fmt: skip
        self.name, self.source_names, self.needs = sources[0], sources, needs
        self._rules, self._begin, self._ids = rules, begin, ids

    def open(self, context: DraftContext) -> "RolloutDrafting":
        imitation = Imitation.of(context.settings, context.seed, context.vocabulary, self._ids)
        return RolloutDrafting(self._begin(context.max_nodes), self._rules, imitation)


def model_drafter(
    sources: tuple[str, ...], rules: GrowthRules, model: Any, ids: IntArray | None = None
) -> RolloutDrafter:
    """Return the drafter of a causal language model, whose logits are of the tokens `ids`, int32[N], or all."""
    # skipped steps are read at the next `propose`
    return RolloutDrafter(sources, rules, Needs(every_step=False, models=(model,)), partial(Rollout, model), ids)


class RolloutDrafting:
    """Drafting for one sequence by graphs that a rollout grows; its cache follows the sequence."""

    def __init__(
        self, rollout: Growing, rules: GrowthRules, imitation: Imitation, calibrate: Calibrate | None = None
    ) -> None:
        self.rollout, self._rules, self._imitation, self._calibrate = rollout, rules, imitation, calibrate
        self._checked, self._unknown = 0, False  # ids of the text so far, and whether one is unknown to the model
        self.graph: DraftGraph | None = None  # of the last draft, if there was one
        self.rows: IntArray = np.empty(0, np.int32)  # the rollout's row of each of its nodes; -1 for a node without one

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Return the best paths of a graph; none if the window is full or the sequence has ids unknown to the model.

        Nodes of source 1 were reached through a merged node. Raises NumericsError for logits without a token to choose.
        """
        (vocabulary, window), ids = self.rollout.limits, view.ids
        self.graph, depth = None, budget.depth if window is None else min(budget.depth, window - len(ids))
        self._unknown |= bool(ids[self._checked :].max(initial=0) >= vocabulary)
        self._checked = len(ids)
        if budget.nodes <= 0 or depth <= 0 or self._unknown or (logits := self.rollout.start(view)) is None:
            return EMPTY_DRAFT
        self.graph, depth = self._grow(view, logits, replace(budget, depth=depth))
        tree = unmerge(self.graph, budget.nodes, depth)
        return Draft(tree.tokens, tree.parents, tree.score, source=tree.merged.astype(np.uint8))

    def _grow(self, view: SequenceView, logits: torch.Tensor, budget: Budget) -> tuple[DraftGraph, int]:
        """Grow a graph after a text; return it, and the depth of a draft of it.

        `logits` are those of the root, float[1, V]. It ends at the depth of the budget or the rules, when no node is
        left to expand, when `budget.more` returns False, or after `most_rows` rows of the model; the most probable
        nodes of a level are expanded first. Merged nodes can lead deeper than the levels that were grown, which is not
        wanted if `budget.more` ended the growth.
        """
        rules, ids = self._rules, view.ids
        most_rows, k = min(self.rollout.most_rows, budget.nodes), min(rules.out_degree, budget.nodes)
        graph = empty_graph(ids[-max(rules.tau, 1) :], rules.tau, (most_rows + 1) * k)
        self.rows = np.full(len(graph.tokens), -1, np.int32)
        frontier = np.full(1, -1, np.int32)
        used = 0
        depth = min(budget.depth, rules.levels)
        if rules.out_degree == 1:
            depth = min(depth, budget.nodes)  # further levels of a chain would be cut
        for level in range(depth):
            found = candidates(logits, k, self._imitation, np.full(len(frontier), len(ids) + level, np.int64))
            if self._calibrate is not None:
                found = self._calibrate(found, level + 1, view.states)
            leaf = leaves(found.probabilities, rules.least_probability, rules.least_share)
            parents = frontier.repeat(found.tokens.shape[1])
            start, most_open = graph.size, most_rows - used if level + 1 < depth else 0
            children = found.tokens.ravel(), found.probabilities.ravel(), leaf.ravel()
            opened = add_level(graph, parents, *children, most_open)
            if budget.more is not None and not budget.more(float(graph.score[start : graph.size].max(initial=0.0))):
                return graph, level + 1
            if not len(opened):
                break
            above = graph.parents[opened]
            rows = np.where(above < 0, -1, self.rows[above]).astype(np.int32)
            logits = self.rollout.expand(graph.tokens[opened], rows)
            self.rows[opened] = used + np.arange(len(opened))
            used, frontier = used + len(opened), opened
        return graph, budget.depth

    def observe(self, verdict: Verdict) -> None:
        """Keep the rows on the path of the emitted tokens, up to the first token without a row."""
        if self.graph is None:
            return
        drafted, parents = self.graph.tokens[: self.graph.size], self.graph.parents[: self.graph.size]
        kept: list[int] = []
        node = -1
        for token in verdict.tokens[:-1]:
            node = child_with(drafted, parents, node, token)
            if node < 0 or self.rows[node] < 0:
                break
            kept.append(int(self.rows[node]))
        self.rollout.keep(kept)
        self.graph = None

    def close(self) -> None:
        self.rollout.close()
        self.graph = None
