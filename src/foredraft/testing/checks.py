"""Conformance checks for drafters; each function is named after the property that it checks.

`check_drafter` runs all of `CHECKS`; parametrise a test over them to see each by name. Texts are decoded on the toy
target, or on the drafter's own. Does not depend on any particular drafter, on text, or on a model with weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from foredraft.contracts import NO_BUDGET, Budget, Draft, Drafter, Drafting, SequenceView, TokenIds
from foredraft.control import FixedControl
from foredraft.drafters.none import NoDrafter
from foredraft.engine.batch import steps
from foredraft.graph.tree import depths
from foredraft.sampling import SamplingOptions
from foredraft.testing.recording import NEW_TOKENS, Recorder, Step, begun, written
from foredraft.testing.toy import VOCABULARY, ToyTarget

MakeDrafter = Callable[[], Drafter]  # returns a new drafter for a target of `VOCABULARY` ids

_PROMPT: TokenIds = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 3, 1, 4, 1, 5], np.int64)
_OTHER_PROMPT: TokenIds = np.array([2, 7, 1, 8, 2, 8, 1, 4, 1, 6, 5, 3, 1, 4], np.int64)
_PROMPT.flags.writeable = _OTHER_PROMPT.flags.writeable = False
_GREEDY = SamplingOptions()


def check_drafter(make: MakeDrafter, *, shared: bool = False) -> None:
    """Run every check on drafters that `make` returns; AssertionError names the property that does not hold.

    Set `shared` if they learn across sequences by design.
    """
    for check in CHECKS:
        if not (shared and check is sequences_do_not_influence_each_other):
            check(make)


def proposals_are_valid_trees(make: MakeDrafter) -> None:
    """Parents come before children, siblings differ, dtypes are right, tokens are the target's, sources have names."""
    with _must(f"Proposals must be valid trees of a vocabulary of {VOCABULARY}", ValueError):
        for step in _steps(make()):  # the engine checks tokens and sources
            step.draft.check()


def proposals_stay_within_the_budget(make: MakeDrafter) -> None:
    """A draft has at most `budget.nodes` nodes, none deeper than `budget.depth`; if either is 0, it is empty."""
    for nodes, depth in ((0, 0), (0, 8), (8, 0), (1, 1), (1, 9), (3, 2), (7, 7), (20, 3), (64, 64)):
        for each in _steps(make(), _Limited(Budget(nodes, depth))):
            drafted, deepest, must = len(each.draft), _depth(each.draft), f"Proposals must stay within {each.budget}"
            _require(drafted <= each.budget.nodes, f"{must}; this one has {drafted} nodes.")
            _require(deepest <= each.budget.depth, f"{must}; this one is {deepest} deep.")


def steps_not_shown_change_no_draft(make: MakeDrafter) -> None:
    """A drafter with `needs.every_step` False drafts the same whether or not it sees the steps without a budget."""
    if make().needs.every_step:
        return
    shown, not_shown = (
        [step for step in _steps(make(), _Limited(Budget(8, 99), one_in=3), every_step=each) if len(step.draft)]
        for each in (True, False)
    )
    _require(
        _figures(shown) == _figures(not_shown),
        "needs.every_step is False, so drafts must not depend on whether steps without a budget are shown.",
    )


def budget_more_is_obeyed(make: MakeDrafter) -> None:
    """A drafter that calls `Budget.more` calls it once after each level, and stops drafting when it returns False.

    Drafters that do not call it are cut by the control.
    """
    for allowed in (0, 1, 3):
        asked: list[float | None] = []

        def more(chance: float | None, asked: list[float | None] = asked, allowed: int = allowed) -> bool:
            asked.append(chance)
            return len(asked) <= allowed

        drafting = _opened(make())
        depth = _depth(drafting.propose(SequenceView(_PROMPT, len(_PROMPT)), Budget(16, 8, more)))
        drafting.close()
        # if not refused, the draft may be deeper: merged nodes of a graph need no call
        _require(
            len(asked) <= allowed or (len(asked) == allowed + 1 and depth <= len(asked)),
            f"Budget.more must be obeyed; with {allowed} more levels allowed, this drafter called it {len(asked)} "
            f"times and drafted {depth} levels.",
        )
        known = all(chance is None or 0 <= chance <= 1 for chance in asked)
        _require(known, f"Estimates given to Budget.more must be 0 to 1, or None; these are {asked}.")


def a_draft_may_be_dropped(make: MakeDrafter) -> None:
    """`propose` is called again for the same view if its draft was not verified; decoding continues afterwards."""
    run = begun(make(), _PROMPT)
    for _ in steps(run):
        if run.seq.finish is None:
            with _must("propose must be callable again for the same view"):
                run.drafting.propose(run.seq.view(), Budget(8, 8)).check(VOCABULARY)
    same = np.array_equal(run.seq.emitted, ToyTarget().greedy(_PROMPT, NEW_TOKENS))
    _require(same, "The text must be that of plain decoding also after drafts were dropped.")


def the_view_is_left_as_it_was(make: MakeDrafter) -> None:
    """A drafter does not change the sequence that it reads."""
    drafting = _opened(make(), _PROMPT[:1])
    for length in range(1, len(_PROMPT) + 1):
        ids = _PROMPT[:length].copy()
        view = ids.view()
        view.flags.writeable = False
        with _must("The view must not be written to", ValueError):
            drafting.propose(SequenceView(view, length), Budget(8, 8))
        _require(np.array_equal(ids, _PROMPT[:length]), f"The view must not be written to; {length} ids were changed.")
    drafting.close()


def the_same_seed_gives_the_same_drafts(make: MakeDrafter) -> None:
    """Two new drafters propose the same for the same sequence and seed."""
    first, second = (_figures(_steps(make())) for _ in range(2))
    _require(first == second, "The same seed must give the same drafts; two new drafters differ.")


def sequences_do_not_influence_each_other(make: MakeDrafter) -> None:
    """A sequence's drafts are the same alone, after another sequence, and interleaved with one."""
    alone, drafter = _figures(_steps(make())), make()
    _steps(drafter, prompt=_OTHER_PROMPT)
    after, drafter = _figures(_steps(drafter)), make()
    _require(after == alone, "Sequences do not influence each other; one drafts differently after another one.")
    interleaved = Recorder(drafter)
    both = begun(interleaved, _PROMPT), begun(Recorder(drafter), _OTHER_PROMPT)
    for _ in zip(*map(steps, both), strict=False):
        pass
    found = _figures(interleaved.steps)
    _require(found == alone[: len(found)], "Sequences do not influence each other, but two open ones do.")


def a_sequence_of_one_token_is_drafted_for(make: MakeDrafter) -> None:
    """A prompt of one token works like any other."""
    with _must("A sequence of one token must be drafted for"):
        same = _equals_plain(make(), _PROMPT[:1], _GREEDY)
    _require(same, "A sequence of one token must be drafted for; its text differs from plain decoding.")


def greedy_text_equals_plain_decoding(make: MakeDrafter) -> None:
    """Without sampling, the text is the target's most probable continuation."""
    same = _equals_plain(make(), _PROMPT, _GREEDY)
    _require(same, "Greedy text equals plain decoding; this text differs.")


def sampled_text_equals_plain_decoding(make: MakeDrafter) -> None:
    """With the same seed, the text is the same as without drafting."""
    for options in (SamplingOptions(do_sample=True, seed=7), SamplingOptions(True, temperature=0.6, top_p=0.9, seed=8)):
        same = _equals_plain(make(), _PROMPT, options)
        _require(same, f"Sampled text equals plain decoding; with {options} it differs.")


def close_can_be_called_twice(make: MakeDrafter) -> None:
    """Closing twice is safe, also before the first proposal."""
    drafter = make()
    for proposes in (False, True):
        drafting = _opened(drafter)
        if proposes:
            drafting.propose(SequenceView(_PROMPT, len(_PROMPT)), Budget(8, 8))
        with _must("close() must be callable twice"):
            drafting.close()
            drafting.close()


CHECKS: list[Callable[[MakeDrafter], None]] = [
    the_view_is_left_as_it_was,
    proposals_are_valid_trees,
    proposals_stay_within_the_budget,
    steps_not_shown_change_no_draft,
    budget_more_is_obeyed,
    a_draft_may_be_dropped,
    the_same_seed_gives_the_same_drafts,
    sequences_do_not_influence_each_other,
    a_sequence_of_one_token_is_drafted_for,
    greedy_text_equals_plain_decoding,
    sampled_text_equals_plain_decoding,
    close_can_be_called_twice,
]
"""All checks; each takes `make` and raises AssertionError if its property does not hold."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


@contextmanager
def _must(what: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn an exception of this kind in the block into an AssertionError that says what must hold."""
    try:
        yield
    except kind as error:
        raise AssertionError(f"{what}; this raised {error!r}.") from error


def _opened(drafter: Drafter, prompt: TokenIds = _PROMPT) -> Drafting:
    """Return a drafter's drafting for a text."""
    run = begun(drafter, prompt)
    run.open(run.target.new_cache())
    return run.drafting


def _depth(draft: Draft) -> int:
    return int(depths(draft.parents).max(initial=0))


class _Limited(FixedControl):
    """Allows drafts within `limit`, in one of `one_in` steps."""

    def __init__(self, limit: Budget, one_in: int = 1) -> None:
        super().__init__(limit.nodes)
        self._limit, self._one_in, self._steps = limit, one_in, 0

    def budget(self, depth: int, _lanes: int = 1) -> Budget:
        self._steps += 1
        return super().budget(min(depth, self._limit.depth)) if self._steps % self._one_in == 0 else NO_BUDGET


def _steps(
    drafter: Drafter, control: _Limited | None = None, prompt: TokenIds = _PROMPT, *, every_step: bool = True
) -> list[Step]:
    """Decode greedily; return the steps in which the drafter was called."""
    recorder = Recorder(drafter, every_step=every_step)
    written(begun(recorder, prompt, control=control))
    return recorder.steps


def _figures(steps: list[Step]) -> list[tuple[list[int], list[int], list[int]]]:
    """Return texts and drafts in a form that can be compared."""
    return [(step.ids.tolist(), step.draft.tokens.tolist(), step.draft.parents.tolist()) for step in steps]


def _equals_plain(drafter: Drafter, prompt: TokenIds, options: SamplingOptions) -> bool:
    """Return whether the text with `drafter` is the text that its target writes without drafts."""
    text = written(begun(drafter, prompt, options)).emitted
    if not options.do_sample:
        return np.array_equal(text, ToyTarget().greedy(prompt, NEW_TOKENS))  # without any of the engine
    return np.array_equal(text, written(begun(NoDrafter(), prompt, options)).emitted)
