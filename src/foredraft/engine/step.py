"""One decoding step: draft, lay out, forward, verify, commit, observe. Does not depend on models or text."""

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter_ns

import numpy as np

from foredraft.contracts import (
    EMPTY_DRAFT,
    Budget,
    Control,
    Draft,
    Drafting,
    Needs,
    Scores,
    StepRecord,
    Target,
    Verdict,
)
from foredraft.engine.state import SequenceState
from foredraft.graph.layout import lay_out
from foredraft.graph.tree import IntArray, is_tree, top_nodes
from foredraft.sampling.logits import top_probabilities
from foredraft.verify import verify

PARTS = ("draft", "layout", "forward", "verify", "commit", "observe")
"""The parts of a step, in order."""


def step(
    seq: SequenceState, drafting: Drafting, control: Control, target: Target, needs: Needs, names: tuple[str, ...]
) -> StepRecord:
    """Advance one sequence by at least one token.

    Args:
        seq: not finished.
        drafting: opened for this sequence.
        control: decides how much to draft.
        target: scores the rows.
        needs: of `drafting`.
        names: source names, by the numbers in `Draft.source`.

    Raises:
        ValueError: the draft is not a tree of tokens.
        NumericsError: the target's scores are unusable.
    """
    clock = [perf_counter_ns()]
    budget = control.budget(seq.useful_depth)
    draft = control.trim(proposed(seq, drafting, budget, needs, target.vocabulary, len(names)), budget)
    clock.append(perf_counter_ns())
    at = seq.length - 1
    layout = lay_out(seq.root, draft.tokens, draft.parents, at)
    clock.append(perf_counter_ns())
    scores = target.forward(layout, seq.cache, hidden=needs.hidden)
    clock.append(perf_counter_ns())
    verdict = verify(draft, scores, seq, at)
    clock.append(perf_counter_ns())
    seq.commit(verdict)
    clock.append(perf_counter_ns())
    show_verdict(drafting, verdict, scores, budget, needs)
    now = perf_counter_ns()
    forward, drafting_took = clock[3] - clock[2], clock[1] - clock[0] + now - clock[5]
    control.observe(verdict, forward / 1e9, (now - clock[0] - forward) / 1e9, drafting_took / 1e9)
    clock.append(perf_counter_ns())
    return record_of(verdict, names, [later - earlier for earlier, later in pairwise(clock)])


def proposed(
    seq: SequenceState, drafting: Drafting, budget: Budget, needs: Needs, vocabulary: int, drafters: int
) -> Draft:
    """Return the drafting's checked draft; without a budget it is called only if it needs every step.

    Raises:
        ValueError: the draft is not a tree of tokens.
    """
    if budget.nodes <= 0 and not needs.every_step:
        return EMPTY_DRAFT
    draft = drafting.propose(seq.view(), budget)
    check_draft(draft, vocabulary, drafters)
    return draft


def show_verdict(drafting: Drafting, verdict: Verdict, scores: Scores, budget: Budget, needs: Needs) -> None:
    """Pass the verdict to the drafting, with what it needs; without a budget nothing is computed for it."""
    if budget.nodes > 0:
        drafting.observe(_with_needs(verdict, scores, needs))
    elif needs.every_step:
        drafting.observe(verdict)


def record_of(verdict: Verdict, names: tuple[str, ...], nanoseconds: Sequence[int]) -> StepRecord:
    """Return the record of a step; `nanoseconds` are those of its `PARTS`."""
    source = verdict.draft.source
    drafted = tuple(names[0] if source is None else names[source[node]] for node in verdict.path)
    sources = (*drafted, *(None,) * (len(verdict.tokens) - len(drafted)))
    parts = dict(zip(PARTS, nanoseconds, strict=True))
    return StepRecord(verdict.tokens, len(verdict.path), len(verdict.draft), sources, parts)


def check_draft(draft: Draft, vocabulary: int, drafters: int) -> None:
    """Raise ValueError for a draft that cannot be verified; fast for a valid one.

    Args:
        draft: of a drafter.
        vocabulary: number of ids the target scores.
        drafters: number of the drafter's source names.

    Raises:
        ValueError: not a tree of the target's tokens, scores that are not finite, a wrong shape of q, or a source
        without
            a name.
    """
    if not is_tree(draft.tokens, draft.parents, vocabulary):
        draft.check()
        raise ValueError(
            f"The draft holds token {int(draft.tokens.max())} (or a negative one); the target scores ids below "
            f"{vocabulary}."
        )
    if draft.q is not None and (draft.q.dtype != np.float32 or draft.q.shape != (len(draft), vocabulary)):
        raise ValueError(f"q must be float32[{len(draft)}, {vocabulary}], not {draft.q.dtype}{list(draft.q.shape)}.")
    if draft.score is not None and not (len(draft.score) == len(draft) and np.isfinite(draft.score).all()):
        draft.check()
    if draft.source is not None and len(draft) and int(draft.source.max()) >= drafters:
        raise ValueError(f"The draft names source {int(draft.source.max())}; the drafter has {drafters} source names.")


def _with_needs(verdict: Verdict, scores: Scores, needs: Needs) -> Verdict:
    if not needs.top_k:
        return verdict
    rows = _top_rows(verdict, needs.top_rows)
    tokens, probabilities = top_probabilities(scores.logits, needs.top_k, rows)
    return Verdict(  # ten times faster than dataclasses.replace
        verdict.tokens, verdict.path, verdict.draft, verdict.at, top_rows=rows, top_tokens=tokens,
        top_probabilities=probabilities, hidden=verdict.hidden,
    )  # fmt: skip


def _top_rows(verdict: Verdict, most: int) -> IntArray:
    """Return the rows whose top tokens are reported, int32[S], ascending: root, accepted path, best-scored nodes."""
    draft = verdict.draft
    if len(draft) + 1 <= most:
        return np.arange(len(draft) + 1, dtype=np.int32)
    worth = -np.arange(len(draft), dtype=np.float32) if draft.score is None else draft.score.copy()
    worth[list(verdict.path)] = np.inf
    return np.append(np.int32(0), top_nodes(draft.parents, worth, most - 1, len(draft)) + np.int32(1))
