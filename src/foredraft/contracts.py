"""The frozen records that a step passes on, and the protocols of drafters, controls and targets.

Data flows one way: ids, draft, layout, forward, verify, commit; only `observe` flows back. Does not depend on any
model, text, file or drafter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from foredraft.errors import OutOfMemoryError
from foredraft.graph.layout import Layout
from foredraft.graph.tree import MOST_IDS, FloatArray, IntArray, check_tree, reindexed_parents

if TYPE_CHECKING:  # the records name tensors, but drafting needs no torch
    import torch

TokenIds = npt.NDArray[np.int64]

TOP = 8  # most probable tokens of the target that are found after a row of a pass, as many as Token Recycling stores
Chooser = Callable[[int, Sequence[int]], int]
"""Returns the target's token after a row, given the tokens emitted before it in this step; called once for each row on
the accepted path."""

RowDraw = Callable[[int, float, int, float, float], list[int] | None]
"""Samples the token after every row of a pass on the device, given `seed, temperature, top_k, top_p, min_p`; -1 for an
unusable row, and None if the device cannot sample, or another pass has run since."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of guessed tokens, as flat arrays; may be empty.

    Attributes:
        tokens: int32[N].
        parents: int32[N], `parents[i] < i`, -1 for a child of the root. Siblings carry different tokens.
        score: float32[N] or None: estimated probability that the whole path to the node is accepted, by which the
            control cuts drafts.
        source: uint8[N] or None: index into the drafter's `source_names`, if it has several sources.
    """

    tokens: IntArray
    parents: IntArray
    score: FloatArray | None = None
    source: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, vocabulary: int = MOST_IDS, sources: int = 256) -> None:
        """Raise ValueError unless this is a tree of ids below `vocabulary`, with arrays as described; fast if it is.

        `sources` is the number of the drafter's source names.
        """
        check_tree(self.tokens, self.parents, vocabulary)
        nodes = len(self.tokens)
        for name, array, dtype in (("score", self.score, np.float32), ("source", self.source, np.uint8)):
            if array is not None and (array.dtype != dtype or array.shape != self.tokens.shape):
                raise ValueError(f"{name} must be {dtype.__name__}[{nodes}], not {array.dtype}{list(array.shape)}.")
        if self.score is not None and not math.isfinite(self.score.sum(dtype=np.float64)):
            raise ValueError("score must be finite.")
        if self.source is not None and nodes and (named := int(self.source.max())) >= sources:
            raise ValueError(f"The draft names source {named}; the drafter has {sources} source names.")

    def child_of(self) -> dict[tuple[int, int], int]:
        """Return a map from (parent, token) to node, for walks down the tree."""
        return {edge: node for node, edge in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))}

    def take(self, kept: IntArray) -> "Draft":
        """Return the sub-tree of the nodes `kept`, int32[K], ascending and prefix-closed."""
        first = len(kept) > 0 and kept[-1] == len(kept) - 1  # the first K nodes, as in drafts ordered best first
        taken = slice(len(kept)) if first else kept  # a slice takes a tenth of the time
        return Draft(
            self.tokens[taken],
            self.parents[taken] if first else reindexed_parents(self.parents, kept),
            None if self.score is None else self.score[taken],
            None if self.source is None else self.source[taken],
        )


_NO_NODES = np.empty(0, np.int32)  # writable like other drafts: numba would compile again for read-only arrays
EMPTY_DRAFT = Draft(_NO_NODES, _NO_NODES)


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one draft.

    Attributes:
        nodes: maximum number of nodes; 0 means no draft.
        depth: maximum depth of a node; it shrinks near the end of the text or of the window.
        more: for drafters that draft level by level: called once after each level with the estimated probability that
            the best path to this level is accepted (0 to 1, or None without an estimate); returns whether to draft the
            next level. None means always. For a draft made at once, the control asks when it cuts the draft.
    """

    nodes: int
    depth: int
    more: Callable[[float | None], bool] | None = field(default=None, compare=False)


NO_BUDGET = Budget(0, 0)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """The part of a sequence that a drafter may read."""

    ids: TokenIds  # int64[n], prompt and emitted tokens, the root last; read-only
    prompt_length: int
    # float[m, K * D], the target's states that `Needs.hidden` names, of the m tokens before the root that it has run;
    # m < n - 1 if the first ones' keys and values were there before. None without such a need
    states: "torch.Tensor | None" = None
    # returns the keys and values, float[1, heads, m, size] each, that a layer of the target keeps of the last m tokens
    # before the root; None without `Needs.keys`
    attended: "Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None" = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter needs from verification besides the emitted tokens, and how it is run."""

    top_k: int = 0  # most probable tokens of the target after every row, in steps with a draft
    # the target's hidden states that the view is to show, by layer as transformers' `hidden_states` numbers them: what
    # enters layer 0, 1, ..., the number of layers for the last norm, and -1 for the LM head, of rows that are scored
    hidden: tuple[int, ...] = ()
    keys: bool = False  # whether the view is to show the target's keys and values
    every_step: bool = True  # whether it is also called in steps without a budget, which are almost plain ones if not
    control: str | None = None  # the default control; None for the general default
    models: tuple[Any, ...] = ()  # that it runs, to be compiled like the target


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's output for every row of a pass, root first.

    With `best`, greedy decoding reads no logits, which may stay on the device.
    """

    logits: "torch.Tensor"  # float[R, V], unprocessed, on the target's device
    hidden: "torch.Tensor | None" = None  # float[R, K * D], the states of K layers side by side, if requested
    best: IntArray | None = None  # int32[R], the most probable token after every row, -1 where its logit is not finite
    top: tuple[IntArray, FloatArray] | None = None  # `top_tokens` and `top_probabilities` of a verdict, for every row
    draw: RowDraw | None = None  # for sampling; None where no device can


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one verification."""

    tokens: tuple[int, ...]  # emitted: the accepted path and, unless the text ended in it, one of the target's own
    path: tuple[int, ...]  # the accepted nodes of `draft`, from the root's child down
    draft: Draft  # as verified; beside a prediction, with its nodes, whose source is one after the drafter's own
    at: int  # absolute position of the root
    # int32[N + 1, K], the target's most probable tokens after the root and after each node, if needed
    top_tokens: IntArray | None = None
    top_probabilities: FloatArray | None = None  # float32[N + 1, K], at temperature 1, descending, within 3 % or exact


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The report of one step."""

    emitted: tuple[int, ...]  # tokens added to the text
    accepted: int  # number of emitted tokens that were drafted
    drafted: int  # number of nodes verified
    sources: tuple[str | None, ...]  # of each emitted token, the name of the source that drafted it
    nanoseconds: Mapping[str, int]  # by part: draft, layout, forward, verify, commit, observe (of drafter and control)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """The measured cost of a forward pass by its number of rows."""

    rows: tuple[int, ...]  # ascending, the first one 1
    seconds: tuple[float, ...]  # of a pass for each

    def table(self, most_rows: int) -> npt.NDArray[np.float64]:
        """Return float64[most_rows + 1]: seconds by rows, interpolated and non-decreasing; entry 0 repeats entry 1."""
        seconds = np.interp(np.arange(most_rows + 1), self.rows, self.seconds)
        if most_rows > self.rows[-1] and len(self.rows) > 1:  # extrapolate with the last slope
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            beyond = np.arange(self.rows[-1], most_rows + 1)
            seconds[self.rows[-1] :] = self.seconds[-1] + np.maximum(slope, 0) * (beyond - self.rows[-1])
        return np.maximum.accumulate(seconds)


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The arguments with which a drafter is opened for a sequence.

    `settings` are how the target chooses tokens, for drafters that imitate it: the sampling options `do_sample,
    temperature, top_k, top_p, min_p, repetition_penalty`, without logits processors. A missing one has its default,
    greedy decoding.
    """

    vocabulary: int  # number of ids the target scores; drafted tokens must be below it
    seed: int = 0  # of the noise that the target adds, and for drafters that draw; the same one gives the same drafts
    max_nodes: int = 64  # in any step of this sequence
    settings: Mapping[str, Any] = field(default_factory=dict)


class Drafting(Protocol):
    """One sequence's state in a drafter."""

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Draft a continuation of `view` within `budget`; the draft may be empty.

        It is called again for the same view if there was no memory to verify the draft.
        """

    def observe(self, verdict: Verdict) -> None:
        """Learn from a verification, whose draft may be a cut or a blend of what was proposed, if anything was."""

    def close(self) -> None:
        """Release the state of the sequence."""


class Drafter(Protocol):
    """State shared by all sequences (tables, indexes, weights), and the factory of per-sequence draftings."""

    name: ClassVar[str]
    needs: Needs
    source_names: Sequence[str]  # for `Draft.source`; a draft without `source` comes from the first one

    def open(self, context: DraftContext) -> Drafting:
        """Start drafting for one sequence."""


@runtime_checkable
class Learner(Protocol):
    """A drafter that learns from texts and keeps what it learned for later texts."""

    def forget(self) -> None:
        """Discard what was learned and not saved."""


@runtime_checkable
class Saver(Protocol):
    """A drafter that can save what it learned from texts."""

    def save(self) -> None:
        """Write what was learned to the path in its options, if they name one; StoreError if it cannot."""


class Control(Protocol):
    """Decides how much to draft in each step, for one text or for those of a batch that share it."""

    def budget(self, depth: int, lanes: int = 1, /) -> Budget:
        """Return the budget of one of `lanes` texts, whose next step can accept at most `depth` drafted tokens."""

    def trim(self, drafts: Sequence[Draft], budgets: Sequence[Budget], other_rows: int = 0, /) -> list[Draft]:
        """Cut drafts, one per text, to the nodes worth verifying; the pass has `other_rows` more rows."""

    def observe(
        self, verdicts: Sequence[Verdict], rows: int, forward: float, other: float, drafting: float = 0.0, /
    ) -> None:
        """Learn from a step with a pass of `rows` rows.

        Its seconds are those of the pass, 0 if not known, and of all `other`, which includes `drafting`.
        """


class Target(Protocol):
    """A causal language model that scores the rows of a layout."""

    vocabulary: int
    window: int | None

    @property
    def most_rows(self) -> int:
        """The most rows of a pass."""

    def new_cache(self, tokens: int = 0) -> Any:
        """Return an empty KV cache for one sequence, with room for so many tokens at once.

        Its `length` is the number of committed tokens; `commit(rows)` keeps these rows of the last pass, in order, and
        discards the others.
        """

    def run(self, layout: Layout, cache: Any, hidden: tuple[int, ...] = ()) -> "torch.Tensor | None":
        """Run rows of a prompt, which are not scored, and commit none.

        Returns the states, float[m, K * D], of the layers `hidden`, as `Needs.hidden` names them, of the last m rows.
        """

    def forward(self, layout: Layout, cache: Any, *, hidden: tuple[int, ...] = ()) -> Scores:
        """Score every row of `layout` against the committed cache, and commit none; with the states of `hidden`."""


class Rows(NamedTuple):
    """The rows of one sequence in a pass, after what its `cache` holds."""

    layout: Layout
    cache: Any
    scored: bool = True  # False for a piece of a prompt
    hidden: tuple[int, ...] = ()  # layers whose states are returned, as `Needs.hidden` names them


class PassResult(NamedTuple):
    """The result of one sequence's rows in a pass."""

    scores: Scores | OutOfMemoryError | None  # None if they are not scored, an error if the pass found no memory
    nanoseconds: int  # of the pass, which others may share
    states: "torch.Tensor | None" = None  # of rows that are not scored, as `Target.run` returns them


class Passes(Protocol):
    """Runs passes over the rows of any number of sequences of a target, and keeps their KV caches."""

    keeps_prefixes: bool  # whether sequences share passes, and a prefix that another one computed is not computed anew

    @property
    def target(self) -> Target:
        """The model that all sequences are of."""

    def returns(self, hidden: tuple[int, ...]) -> bool:
        """Return whether passes can return the states of these layers, as in `Needs`."""

    @property
    def most_rows(self) -> int:
        """The most rows of a pass."""

    @property
    def memory_use(self) -> float:
        """The used share of the memory for caches, 0 to 1."""

    def open(self, token_ids: TokenIds, capacity: int, owner: str) -> Any:
        """Return the cache of a sequence, int64[n], with a prefix that another one of its `owner` has computed.

        Its last token is the root, which is never committed. More tokens than `capacity` make it grow. Raises
        OutOfMemoryError if others take too much room, and PromptTooLongError if the prompt never finds room.
        """

    def close(self, cache: Any) -> None:
        """Take back the cache of a finished sequence."""

    def reserve(self, cache: Any, layout: Layout) -> None:
        """Make room for the rows of a pass; OutOfMemoryError if there is none."""

    def forward(self, rows: Sequence[Rows]) -> list[PassResult]:
        """Run the rows of each sequence; none is committed."""
