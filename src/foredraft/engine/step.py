"""What one text does before and after a pass: draft, verify, commit, observe. Does not depend on models or text."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, Drafter, Scores, StepRecord, Verdict
from foredraft.engine.run import Run
from foredraft.sampling.logits import top_probabilities
from foredraft.verify import verify

PARTS = ("draft", "layout", "forward", "verify", "commit", "observe")  # of a step, in order


def proposed(run: Run, budget: Budget) -> Draft:
    """Return the drafting's checked draft; without a budget it is called only if it needs every step."""
    if budget.nodes <= 0 and not run.drafter.needs.every_step:
        return EMPTY_DRAFT
    view = run.seq.view()
    if run.drafter.needs.keys:
        view = replace(view, attended=run.seq.cache.attended)
    draft = run.drafting.propose(view, budget)
    draft.check(run.target.vocabulary, len(run.drafter.source_names))
    return draft


def settle(run: Run, budget: Budget, draft: Draft, scores: Scores) -> tuple[Verdict, tuple[int, int, int]]:
    """Verify a draft, commit what is accepted, and show the verdict to the drafting; return also the nanoseconds.

    Without a budget nothing that the drafting needs is computed for it.
    """
    began, seq, needs = perf_counter_ns(), run.seq, run.drafter.needs
    verdict = verify(draft, seq.chooser(scores), seq.ends, seq.length - 1)
    verified = perf_counter_ns()
    seq.commit(verdict, scores.hidden if needs.hidden else None)
    committed = perf_counter_ns()
    if budget.nodes > 0:
        run.drafting.observe(_with_top_tokens(verdict, scores, needs.top_k))
    elif needs.every_step:
        run.drafting.observe(verdict)
    return verdict, (verified - began, committed - verified, perf_counter_ns() - committed)


def record_of(verdict: Verdict, drafter: Drafter, nanoseconds: Sequence[int]) -> StepRecord:
    """Return the record of a step; `nanoseconds` are those of its `PARTS`."""
    names, source = drafter.source_names, verdict.draft.source
    drafted = tuple(names[0] if source is None else names[source[node]] for node in verdict.path)
    sources = (*drafted, *(None,) * (len(verdict.tokens) - len(drafted)))
    parts = dict(zip(PARTS, nanoseconds, strict=True))
    return StepRecord(verdict.tokens, len(verdict.path), len(verdict.draft), sources, parts)


def _with_top_tokens(verdict: Verdict, scores: Scores, top_k: int) -> Verdict:
    if not top_k:
        return verdict
    if scores.top is not None and top_k <= scores.top[0].shape[1]:
        tokens, probabilities = scores.top[0][:, :top_k], scores.top[1][:, :top_k]
    else:
        tokens, probabilities = top_probabilities(scores.logits, top_k)
    return replace(verdict, top_tokens=tokens, top_probabilities=probabilities)
