"""The frozen records that flow through a step, and the protocols of who makes and who reads them.

Data flows one way: ids, draft, layout, forward, verify, commit; `observe` is the only arrow back. Knows no model,
no text, no file, and no particular drafter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from foredraft.graph.layout import Layout
from foredraft.graph.tree import FloatArray, IntArray, check_tree, reindexed_parents

if TYPE_CHECKING:  # the records name tensors, but drafting needs no torch
    import torch

TokenIds = npt.NDArray[np.int64]

Verification = Literal["matched", "rejection"]
"""How drafts are verified: the text of plain decoding with the same seed, or a text with exactly the same law."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of guessed tokens, as flat arrays; may be empty.

    Attributes:
        tokens: int32[N].
        parents: int32[N], `parents[i] < i`, -1 for a child of the root. Siblings carry different tokens.
        score: float32[N] or None: the drafter's estimate that the node's whole path is accepted. Budgets cut by it.
        q: float32[N, V] or None: the distribution each node was drawn from; None when the drafter chose the nodes.
            Only rejection verification reads it. Its promise: node i was drawn from `q[i] / q[i].sum()` in float64; it
            is processed (temperature, filters) and gives 0 to the tokens of its earlier siblings, as siblings are drawn
            without replacement; they are numbered as they were drawn. Whether a node is drawn, and whether it is kept,
            may depend on nodes drawn before it, never on its own token or on later ones. A draw may stand under several
            prefixes (a merged graph), each time with the q of the prefix that it was drawn for, but not twice on one
            path. Draws are fresh for each draft and share no noise with the verifier.
        source: uint8[N] or None: which drafter proposed the node, when several are mixed.
    """

    tokens: IntArray
    parents: IntArray
    score: FloatArray | None = None
    q: FloatArray | None = None
    source: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        """Return the number of drafted nodes."""
        return len(self.tokens)

    def check(self) -> None:
        """Assert every property that the attributes promise.

        Raises:
            ValueError: naming the property that does not hold.
        """
        check_tree(self.tokens, self.parents)
        if self.score is not None:
            if self.score.dtype != np.float32 or self.score.shape != self.tokens.shape:
                raise ValueError(f"score must be float32[{len(self)}], not {self.score.dtype}{list(self.score.shape)}.")
            if not np.isfinite(self.score).all():
                raise ValueError("score must be finite.")
        if self.q is not None:
            _check_q(self.q, self.tokens, self.parents)
        if self.source is not None and (self.source.dtype != np.uint8 or self.source.shape != self.tokens.shape):
            raise ValueError(f"source must be uint8[{len(self)}], not {self.source.dtype}{list(self.source.shape)}.")

    def child_of(self) -> dict[tuple[int, int], int]:
        """Return each node by its parent and token, which is how a walk down the tree finds its next node."""
        return {edge: node for node, edge in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))}

    def take(self, kept: IntArray) -> "Draft":
        """Return the sub-tree of the nodes `kept`, int32[K], ascending and prefix-closed."""
        first = len(kept) > 0 and kept[-1] == len(kept) - 1  # as of drafts that were made best first
        taken = slice(len(kept)) if first else kept  # which takes a tenth of the time
        return Draft(
            self.tokens[taken],
            self.parents[taken] if first else reindexed_parents(self.parents, kept),
            None if self.score is None else self.score[taken],
            None if self.q is None else self.q[taken],
            None if self.source is None else self.source[taken],
        )


def _check_q(q: FloatArray, tokens: IntArray, parents: IntArray) -> None:
    """Assert that each node can have been drawn from its row, after its earlier siblings.

    Raises:
        ValueError: naming the node.
    """
    if q.dtype != np.float32 or q.ndim != 2 or len(q) != len(tokens):
        raise ValueError(f"q must be float32[{len(tokens)}, V], not {q.dtype}{list(q.shape)}.")
    earlier: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        row, total = q[node], float(q[node].sum(dtype=np.float64))
        if not (row.min() >= 0 and abs(total - 1) < 1e-3):  # NaN included
            raise ValueError(f"The q of node {node} must be probabilities; they sum to {total:g}, or one is negative.")
        if not row[token] > 0:
            raise ValueError(f"Node {node} is token {token}, to which its q gives 0; q is what it was drawn from.")
        siblings = earlier.setdefault(parent, [])
        if row[siblings].any():
            raise ValueError(f"The q of node {node} allows the token of an earlier sibling; they are drawn to differ.")
        siblings.append(token)


_NO_NODES = np.empty(0, np.int32)  # writable, as other drafts' are: compiled code would be compiled anew for read-only
EMPTY_DRAFT = Draft(_NO_NODES, _NO_NODES)


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be drafted in a step.

    Attributes:
        nodes: at most this many nodes; 0 asks for no draft.
        depth: no node deeper than this; limits and the window's end make it shrink.
        more: for drafters that draft level by level: asked once after each level, whether to draft the next one; None
            and True mean to go on. The argument is the drafter's estimate that the best path down to this level is
            accepted, 0 to 1, or None without one. The estimate of the last token alone is this level's over the last
            one's: a calibrated head gives the product of its estimates, and the control finds each again. Drafters
            that know the whole draft at once do not ask; the control then asks itself, and cuts.
    """

    nodes: int
    depth: int
    more: Callable[[float | None], bool] | None = field(default=None, compare=False)


NO_BUDGET = Budget(0, 0)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What a drafter may read of a sequence.

    Attributes:
        ids: int64[n], prompt and emitted tokens, the root last; read-only.
        prompt_length: how many of `ids` are the prompt.
    """

    ids: TokenIds
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants to see of each verification beyond the emitted tokens, and by what it is best run.

    The top tokens are told only where a draft was asked for: in a rest, finding them is not worth its time.

    Attributes:
        top_k: the target's `top_k` most probable tokens after a row; 0 for none.
        top_rows: after this many rows at most: the root and the accepted path, then the nodes with the best scores.
        hidden: the target's last hidden state after every row.
        every_step: whether the drafter is asked and told also where the control allows no node, as in a rest. Where
            not, such a step hardly takes longer than plain decoding's, and the next `propose` shows its tokens.
        control: the control that suits it where none is asked for; None for the usual one.
        target: for a drafter that drafts with the target's own layers: the target that goes on from what the drafting
            left in the cache; None for the generator's.
        models: the models that drafting runs, which are worth compiling as the target is.
    """

    top_k: int = 0
    top_rows: int = 4
    hidden: bool = False
    every_step: bool = True
    control: str | None = None
    target: "Target | None" = None
    models: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """What the target says after every row (root first).

    Attributes:
        logits: float[R, V], unprocessed, on the target's device.
        hidden: float[R, D], the last hidden state, when asked for.
        best: int64[R], on the CPU, the most probable token after every row, -1 where its score is not finite; where the
            forward found it already, so that greedy decoding copies R numbers off the device and no scores.
        draw: the same for sampling, where the device can be asked for it until the next pass.
    """

    logits: "torch.Tensor"
    hidden: "torch.Tensor | None" = None
    best: "torch.Tensor | None" = None
    draw: "RowDraw | None" = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification decided.

    Attributes:
        tokens: the tokens emitted: the accepted path and, unless the text ended in it, one token of the target's own.
        path: the accepted nodes of `draft`, from the root's child down.
        draft: what was verified.
        at: absolute position of the root.
        top_rows: int32[S], rows (0 is the root, i + 1 is node i) whose top tokens follow, when a drafter needs them.
        top_tokens: int32[S, K], the target's most probable tokens after each of them.
        top_probabilities: float32[S, K], theirs under the plain softmax, descending, to 3 in 100.
        hidden: float[R, D], when a drafter needs it.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    draft: Draft
    at: int
    top_rows: IntArray | None = None
    top_tokens: IntArray | None = None
    top_probabilities: FloatArray | None = None
    hidden: "torch.Tensor | None" = None

    @property
    def last_row(self) -> int:
        """The row that gave the last token that the target chose by itself: the accepted path's end, or the root's."""
        return self.path[-1] + 1 if self.path else 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as it is reported.

    Attributes:
        emitted: tokens that the step added to the text.
        accepted: how many of them were drafted.
        drafted: nodes verified.
        sources: for each emitted token, the name of the drafter that guessed it, or None.
        nanoseconds: time by part: draft, layout, forward, verify, commit, observe; the drafter and the control observe.
    """

    emitted: tuple[int, ...]
    accepted: int
    drafted: int
    sources: tuple[str | None, ...]
    nanoseconds: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What one forward pass costs by its number of rows, measured.

    Attributes:
        rows: ascending row counts that were measured, the first one 1.
        seconds: the time of each.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def table(self, most_rows: int) -> npt.NDArray[np.float64]:
        """Return float64[most_rows + 1]: seconds by rows, interpolated, never falling; entry 0 repeats entry 1."""
        seconds = np.interp(np.arange(most_rows + 1), self.rows, self.seconds)
        if most_rows > self.rows[-1] and len(self.rows) > 1:  # beyond what was measured: the last slope goes on
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            beyond = np.arange(self.rows[-1], most_rows + 1)
            seconds[self.rows[-1] :] = self.seconds[-1] + np.maximum(slope, 0) * (beyond - self.rows[-1])
        return np.maximum.accumulate(seconds)


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter is told when it is opened for a sequence.

    Attributes:
        vocabulary: number of ids the target scores; no drafted token may reach it.
        seed: for drafters that draw; the same seed gives the same drafts.
        max_nodes: the most nodes any step of this sequence will ask for.
        settings: how the target will choose tokens, for drafters that imitate it: `verification`, and of the sampling
            `do_sample, temperature, top_k, top_p, min_p, repetition_penalty`, each at the value in force. What is not
            told stands at its default: matched, greedy. Logits processors are not told.
        cache: the target's of this sequence, for drafters that draft with the target's own layers; else None will do.
    """

    vocabulary: int
    seed: int = 0
    max_nodes: int = 64
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache: Any = None


class Drafting(Protocol):
    """One sequence's state in a drafter."""

    def propose(self, view: SequenceView, budget: Budget) -> Draft:
        """Guess what follows `view`, within `budget`; an empty draft is an answer."""

    def observe(self, verdict: Verdict) -> None:
        """Learn from what the target made of the last draft.

        Of it the control may have left a part. `auto` blends it with others', and shows steps in which it did not ask.
        """

    def close(self) -> None:
        """Forget the sequence."""


class Drafter(Protocol):
    """Shared knowledge (tables, indexes, weights) from which per-sequence draftings are opened."""

    name: ClassVar[str]
    needs: Needs
    source_names: Sequence[str]
    """Names for `Draft.source`; the first one is meant where a draft has no `source`."""

    def open(self, context: DraftContext) -> Drafting:
        """Begin drafting for one sequence."""


@runtime_checkable
class Learner(Protocol):
    """A drafter whose texts teach it something that outlives them."""

    @property
    def saves(self) -> bool:
        """Whether it was given a place to keep it in, which `save` writes."""

    def save(self, path: str | None = None) -> None:
        """Write what is kept, to `path` or to the place that the options name."""

    def forget(self) -> None:
        """Forget what was learned and not saved."""


class Control(Protocol):
    """Decides how much to draft next."""

    def budget(self, depth: int) -> Budget:
        """Say how much to draft when at most `depth` more drafted tokens can be of use."""

    def trim(self, draft: Draft, budget: Budget) -> Draft:
        """Cut a draft to what is worth verifying."""

    def observe(
        self, verdict: Verdict, forward_seconds: float, other_seconds: float, draft_seconds: float = 0.0
    ) -> None:
        """Learn what the step gave, and what it cost: its forward pass, all the rest, and of that rest the drafting."""


class KeyValueCache(Protocol):
    """The target's memory of one sequence."""

    @property
    def length(self) -> int:
        """How many tokens are committed."""

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, in order, and forget its others."""


class Target(Protocol):
    """A causal language model that scores the rows of a layout."""

    vocabulary: int
    window: int | None

    def new_cache(self) -> Any:
        """Return an empty `KeyValueCache` for one sequence."""

    def prefill(self, token_ids: TokenIds, cache: Any) -> None:
        """Put `token_ids`, int64[n], into the cache and commit them."""

    def forward(self, layout: Layout, cache: Any, *, hidden: bool = False) -> Scores:
        """Score every row of `layout` against the committed cache; nothing is committed. `hidden` asks for states."""


class Policy(Protocol):
    """How one sequence's tokens are chosen, and when it ends."""

    def chooser(self, scores: Scores, at: int, draft: Draft) -> "Chooser":
        """Prepare to choose tokens after the rows of one verification of `draft`, whose root stands at `at`."""

    def ends(self, tokens: Sequence[int]) -> bool:
        """Say whether the text ends with the last of `tokens`, the ones this step emitted so far."""


class RowDraw(Protocol):
    """Draws the token after every row of a pass where the scores lie."""

    def __call__(self, seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int] | None:
        """Return the tokens, -1 where a row's scores cannot be used; None where the device does not draw after all."""


class Chooser(Protocol):
    """Chooses the target's token after a row; called once for each row that the accepted path visits."""

    def __call__(self, row: int, path: Sequence[int]) -> int:
        """Return the token after `row`, which lies after the emitted tokens `path`."""
