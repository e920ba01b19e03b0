"""One step: draft, lay out, forward, verify, commit, observe. Everything else in foredraft serves these calls.

Knows ids and arrays only.
"""

import dataclasses
from time import perf_counter_ns
from typing import Any

from foredraft.contracts import Control, Draft, Drafting, Needs, StepRecord, Target, Verdict
from foredraft.engine.state import SequenceState
from foredraft.graph.layout import lay_out
from foredraft.graph.tree import is_tree
from foredraft.sampling import top_probabilities
from foredraft.verify import verify


def step(
    seq: SequenceState, drafting: Drafting, control: Control, target: Target, needs: Needs, names: tuple[str, ...]
) -> StepRecord:
    """Advance one sequence by at least one token.

    Args:
        seq: not finished.
        drafting: guesses; opened for this sequence.
        control: says how much to guess.
        target: scores.
        needs: what `drafting` wants to see of the verdict.
        names: what the numbers in `Draft.source` stand for.

    Raises:
        ValueError: the drafter proposed something that is no tree of tokens.
        NumericsError: the target's scores are unusable.
    """
    clock = [perf_counter_ns()]
    budget = control.budget(seq.useful_depth)
    draft = control.trim(drafting.propose(seq.view(), budget), budget)
    _check(draft, target.vocabulary)
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
    drafting.observe(_with_needs(verdict, scores, needs))
    clock.append(perf_counter_ns())
    control.observe(verdict, (clock[-1] - clock[0]) / 1e9)
    parts = ("draft", "layout", "forward", "verify", "commit", "observe")
    nanoseconds = {part: clock[i + 1] - clock[i] for i, part in enumerate(parts)}
    return StepRecord(verdict.tokens, len(verdict.path), len(draft), _sources(verdict, names), nanoseconds)


def _check(draft: Draft, vocabulary: int) -> None:
    if is_tree(draft.tokens, draft.parents, vocabulary):
        return
    draft.check()
    raise ValueError(
        f"The draft holds token {int(draft.tokens.max())} (or a negative one); the target scores ids below {vocabulary}."
    )


def _with_needs(verdict: Verdict, scores: Any, needs: Needs) -> Verdict:
    if not needs.top_k:
        return verdict
    tokens, probabilities = top_probabilities(scores.logits, needs.top_k)
    return dataclasses.replace(verdict, top_tokens=tokens, top_probabilities=probabilities)


def _sources(verdict: Verdict, names: tuple[str, ...]) -> tuple[str | None, ...]:
    source = verdict.draft.source
    drafted = tuple(names[0] if source is None else names[source[node]] for node in verdict.path)
    return (*drafted, *(None,) * (len(verdict.tokens) - len(drafted)))
