"""Rules that stop drafting between levels: what they decide, what they learn, and that the text stays the same."""

import functools
import itertools
import math

import numpy as np
import pytest

from foredraft.contracts import (
    EMPTY_DRAFT,
    NO_BUDGET,
    Budget,
    CostCurve,
    Draft,
    DraftContext,
    Needs,
    SequenceView,
    Verdict,
)
from foredraft.control import CONTROLS, MOST_NODES, FixedControl, MeasuredControl, choose_control
from foredraft.control.levels import (
    BetaOptions,
    BetaRule,
    ExitThresholdOptions,
    ExitThresholdRule,
    LevelControl,
    Outcome,
    level_chances,
)
from foredraft.control.payoff import PATIENCE
from foredraft.engine.batch import steps
from foredraft.engine.run import Run
from foredraft.engine.state import SequenceState
from foredraft.errors import UsageError
from foredraft.graph.tree import chain_parents, depths
from foredraft.sampling import SamplingOptions
from foredraft.speculation import parse_speculation
from foredraft.testing import VOCABULARY, ToyTarget, check_drafter, checks
from support.controls import OfOne, measured
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, ScriptedDrafting


def tree(parents, score=None):
    score = None if score is None else np.array(score, np.float32)
    return Draft(np.arange(len(parents), dtype=np.int32), np.array(parents, np.int32), score)


def chain(length, rate=None):
    return tree(chain_parents(length), None if rate is None else rate ** np.arange(1, length + 1))


def verdict(draft, path=(), ended=False):
    """The verdict that accepted `path`, and emitted a token of the target's own unless the text ended in the draft."""
    return Verdict(tuple(range(len(path) + (not ended))), tuple(path), draft, 0)


class ScriptedRule:
    """Allows the first `levels` levels, and records its calls."""

    def __init__(self, levels):
        self.levels = self.left = levels
        self.asked = []
        self.outcomes = []

    def more(self, token):
        self.asked.append(token)
        self.left -= 1
        return self.left > 0

    def observe(self, outcome):
        self.outcomes.append(outcome)
        self.left = self.levels


# --- who is asked, and when


class StepwiseDrafter:
    """Proposes chains level by level, and asks `budget.more` after each level, as a draft model does.

    The first `right` tokens of each draft are what the target will write, and each is estimated at `chance`.
    """

    name = "stepwise"
    source_names = ("stepwise",)
    needs = Needs()

    def __init__(self, continuation_of, chance=0.8, right=1024):
        self._continuation_of, self._chance, self._right = continuation_of, chance, right

    def open(self, context):
        return ScriptedDrafting(self._chain)

    def _chain(self, view, budget):
        tokens = []
        for token in list(self._continuation_of(view.ids))[: min(budget.nodes, budget.depth)]:
            tokens.append((token + (len(tokens) >= self._right)) % VOCABULARY)
            if budget.more is not None and not budget.more(self._chance ** len(tokens)):
                break
        score = np.power(self._chance, np.arange(1, len(tokens) + 1)).astype(np.float32)
        return Draft(np.array(tokens, np.int32), chain_parents(len(tokens)), score)


def deepest(draft):
    return int(depths(draft.parents).max()) if len(draft) else 0


@pytest.mark.parametrize("levels", range(1, 7))
def test_a_whole_draft_is_cut_behind_the_level_where_the_rule_stops(levels):
    rule = ScriptedRule(levels)
    control = OfOne(LevelControl(rule, 20))
    offered = tree([-1, -1, 0, 0, 1, 2, 5, 6], [0.9, 0.5, 0.8, 0.1, 0.4, 0.6, 0.3, 0.2])
    kept = control.trim(offered, control.budget(9))
    kept.check()
    np.testing.assert_array_equal(kept.tokens, np.flatnonzero(depths(offered.parents) <= levels))
    tokens = [
        pytest.approx(each) for each in (0.9, 0.8 / 0.9, 0.6 / 0.8, 0.3 / 0.6)
    ]  # the last level is not asked about
    assert rule.asked == tokens[: min(levels, 4)]


def test_a_drafter_that_drafts_step_by_step_is_asked_once_a_level_and_obeys():
    text = list(range(10, 30))
    for levels in (1, 2, 5, 99):
        rule = ScriptedRule(levels)
        control = OfOne(LevelControl(rule, 8))
        drafting = StepwiseDrafter(lambda ids: text, chance=0.5).open(DraftContext(VOCABULARY))
        budget = control.budget(6)
        draft = drafting.propose(SequenceView(np.array([1]), 1), budget)
        assert len(draft) == min(levels, 6)
        kept = control.trim(draft, budget)
        assert kept is draft
        assert rule.asked == [0.5] * len(draft)
        control.observe(verdict(kept, path=(0,)), 1.0, 0.5, 0.25)
        assert rule.outcomes == [Outcome(len(draft), 1, rejected=len(draft) > 1)]


def test_levels_that_the_drafter_did_not_ask_about_are_asked_about_afterwards():
    rule = ScriptedRule(4)
    control = OfOne(LevelControl(rule, 8))
    budget = control.budget(8)
    assert budget.more(0.9)
    assert budget.more(None)
    assert len(control.trim(chain(7, 0.5), budget)) == 4
    assert rule.asked == [0.9, None, 0.125, 0.5]


def test_a_refusal_holds_for_the_step_and_for_a_drafter_that_does_not_listen():
    rule = ScriptedRule(2)
    control = OfOne(LevelControl(rule, 8))
    budget = control.budget(8)
    assert [budget.more(1.0) for _ in range(5)] == [True, False, False, False, False]
    assert len(rule.asked) == 2
    assert len(control.trim(chain(7), budget)) == 2
    control.observe(verdict(chain(2)), 1.0, 0.5)
    assert control.budget(8).more(1.0), "the next step begins anew"


def test_without_room_nothing_is_drafted():
    control = OfOne(LevelControl(ScriptedRule(3), 8))
    assert control.budget(0) == NO_BUDGET
    assert control.budget(0).more is None
    assert control.trim(EMPTY_DRAFT, NO_BUDGET) is EMPTY_DRAFT


def test_estimates_that_are_no_numbers_are_refused_and_rounding_is_not():
    rule = ScriptedRule(9)
    budget = OfOne(LevelControl(rule, 8)).budget(8)
    assert budget.more(1.0000001)
    assert budget.more(np.float32(-1e-9))
    assert rule.asked == [1.0, 0.0]
    with pytest.raises(ValueError, match="estimate is nan; it must be a number from 0 to 1, or None"):
        budget.more(math.nan)


def test_a_levels_chance_is_its_best_score_between_0_and_1():
    assert level_chances(tree([-1, -1, 0, 1], [0.25, 0.5, 0.125, 0.0625])) == [0.5, 0.125]
    assert level_chances(tree([-1, 0], [7.0, -1.0])) == [1.0, 0.0]
    assert level_chances(chain(3)) == [None] * 3
    assert level_chances(EMPTY_DRAFT) == []


CURVE = CostCurve((1, 2, 16, 64), (1.0, 1.05, 1.4, 4.0))


def made(name, nodes=8, seed=3, curve=CURVE, **options):
    return OfOne(choose_control(nodes, name, options).make(lambda: curve, seed))


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("nodes", [0, 1, 2, 7])
@pytest.mark.parametrize("depth", [-1, 0, 1, 3, 30])
def test_every_control_keeps_to_the_cap_and_the_depth(name, nodes, depth):
    control = made(name, nodes)
    for step in range(12):
        budget = control.budget(depth)
        assert budget.nodes <= (nodes if depth > 0 else 0)
        assert budget.depth == min(depth, 8 if name == "exit_threshold" else depth) or budget == NO_BUDGET
        draft = control.trim(chain(20, 0.99) if step % 2 else tree([-1] * 20, [0.9] * 20), budget)
        assert len(draft) <= budget.nodes
        assert deepest(draft) <= depth or not len(draft)
        control.observe(verdict(draft, range(deepest(draft) // 2)), 1.0, 0.0)


# --- Beta-TS


def test_the_posterior_counts_accepted_tokens_and_the_first_rejection():
    rule = BetaRule(BetaOptions(alpha0=2.5, beta0=0.5), seed=0)
    control = OfOne(LevelControl(rule, 20))
    forked = tree([-1, -1, 0, 2])  # 0 - 2 - 3, and 1 alone
    script = [  # verdict, accepted, rejected
        (verdict(chain(5), path=()), 0, 1),
        (verdict(chain(5), path=(0, 1)), 2, 1),
        (verdict(chain(5), path=range(5)), 5, 0),  # all accepted: nothing was rejected
        (verdict(chain(1), path=(0,)), 1, 0),
        (verdict(chain(5), path=(0, 1, 2), ended=True), 3, 0),  # the end was accepted: nothing after it was tried
        (verdict(EMPTY_DRAFT), 0, 0),  # a plain step
        (verdict(forked), 0, 1),  # neither of two siblings: one failure, not two
        (verdict(forked, path=(1,)), 1, 0),  # nothing was drafted after it
        (verdict(forked, path=(0,)), 1, 1),
    ]
    alpha, beta = 2.5, 0.5
    for said, accepted, rejected in script:
        control.budget(9)
        control.observe(said, 1.0, 0.0)
        alpha, beta = alpha + accepted, beta + rejected
        assert (rule.alpha, rule.beta) == (alpha, beta)
    assert (alpha, beta) == (15.5, 4.5)


def test_the_posterior_finds_the_acceptance_rate_however_many_are_drafted():
    """The paper's literal counts turn alpha negative at these rates."""
    for rate, drafted in ((0.2, 4), (0.5, 3), (0.9, 8)):
        rule = BetaRule(BetaOptions(), seed=0)
        control = OfOne(LevelControl(rule, 20))
        rng = np.random.default_rng(5)
        for _ in range(2000):
            right = min(int(rng.geometric(1 - rate)) - 1, drafted)
            control.observe(verdict(chain(drafted), path=range(right)), 1.0, 0.0)
        assert rule.alpha / (rule.alpha + rule.beta) == pytest.approx(rate, abs=0.02)


def lengths(rule, steps=200, longest=30):
    control = OfOne(LevelControl(rule, longest))
    return [len(control.trim(chain(longest), control.budget(longest))) for _ in range(steps)]


def test_the_number_of_levels_is_geometric_with_the_posteriors_mean():
    found = np.array(lengths(BetaRule(BetaOptions(alpha0=3.0, beta0=1.0), seed=2), steps=4000, longest=60))
    assert found.min() == 1
    assert found.mean() == pytest.approx(1 / (1 - 0.75), rel=0.05)
    assert (found > 1).mean() == pytest.approx(0.75, abs=0.03)
    assert (found > 2).mean() == pytest.approx(0.75**2, abs=0.03)


def test_the_same_seed_draws_the_same_lengths_and_another_seed_others():
    for seed in (0, 7, 2**64 - 1):
        assert lengths(BetaRule(BetaOptions(), seed)) == lengths(BetaRule(BetaOptions(), seed))
    assert lengths(BetaRule(BetaOptions(), 1)) != lengths(BetaRule(BetaOptions(), 2))


def test_a_drafter_that_asks_gets_the_lengths_of_one_that_does_not():
    whole, asking = (OfOne(LevelControl(BetaRule(BetaOptions(2.0, 1.0), 4), 30)) for _ in range(2))
    for _ in range(100):
        budget = asking.budget(30)
        levels = next(level for level in itertools.count(1) if level == 30 or not budget.more(None))
        assert len(asking.trim(chain(levels), budget)) == levels
        assert len(whole.trim(chain(30), whole.budget(30))) == levels


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_no_draft_is_longer_than_the_cap(cap):
    control = OfOne(LevelControl(BetaRule(BetaOptions(alpha0=50.0, beta0=0.001), seed=0), 30, cap))
    for _ in range(20):
        budget = control.budget(30)
        assert budget.depth == cap
        assert len(control.trim(chain(30), budget)) == cap


# --- the text


@functools.cache
def what_follows(last):
    return ToyTarget().greedy(np.array(last, np.int64), 8)


def continuation_of(ids):
    return what_follows(tuple(ids[-3:].tolist()))  # the toy target looks back no further


DRAFTERS = {
    "oracle": lambda: OracleDrafter(continuation_of),
    "oracle with siblings": lambda: OracleDrafter(continuation_of, distractors=1),
    "adversary": lambda: AdversaryDrafter(continuation_of),
    "random": lambda: RandomTreeDrafter(3),
    "stepwise": lambda: StepwiseDrafter(continuation_of, right=3),
}
PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5], np.int64)


def written(drafter, control, sampling, tokens=24):
    target = ToyTarget()
    seq = SequenceState(PROMPT, sampling, max_new_tokens=tokens)
    records = list(steps(Run(seq, drafter, control, DraftContext(VOCABULARY, seed=5), target)))
    return seq.emitted.tolist(), [record.drafted for record in records]


SAMPLING = {"greedy": SamplingOptions(), "sampled": SamplingOptions(True, temperature=0.8, seed=11)}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_that_of_plain_decoding_under_every_control(drafter, sampling, monkeypatch):
    ticks = itertools.count(step=100_000)  # all parts of a step take equally long, so drafts do not depend on the clock
    monkeypatch.setattr("foredraft.engine.step.perf_counter_ns", lambda: next(ticks))
    plain, _ = written(DRAFTERS["oracle"](), FixedControl(0), SAMPLING[sampling])
    drafted = {}
    for name in CONTROLS:
        text, sizes = written(DRAFTERS[drafter](), made(name).control, SAMPLING[sampling])
        assert text == plain, name
        drafted[name] = sum(sizes)
    assert min(drafted.values()) > 0, "every control drafted something"


def test_the_same_seed_gives_the_same_steps_and_another_seed_others():
    runs = [
        written(DRAFTERS["stepwise"](), made("beta_ts", seed=seed).control, SAMPLING["greedy"])[1]
        for seed in (1, 1, 2, 3)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) > 1


def test_the_stepwise_drafter_keeps_the_laws():
    check_drafter(DRAFTERS["stepwise"])


def test_the_checker_catches_drafters_that_do_not_obey():
    class Deaf(StepwiseDrafter):
        def _chain(self, view, budget):
            budget.more(0.5)
            return super()._chain(view, Budget(budget.nodes, budget.depth))

    class Nagging(StepwiseDrafter):
        def _chain(self, view, budget):
            return super()._chain(
                view, Budget(budget.nodes, budget.depth, lambda chance: budget.more(chance) or budget.more(chance))
            )

    class Boastful(StepwiseDrafter):
        def _chain(self, view, budget):
            return super()._chain(view, Budget(budget.nodes, budget.depth, lambda chance: budget.more(2.0)))

    for kind, says in ((Deaf, "must be obeyed"), (Nagging, "called it 2 times"), (Boastful, "must be 0 to 1")):
        with pytest.raises(AssertionError, match=says):
            checks.budget_more_is_obeyed(lambda kind=kind: kind(continuation_of))


# --- Self-SD's threshold


def drafted_under(rule, chances):
    """Ask after each level, whose path has these chances; return how many levels are drafted."""
    control = LevelControl(rule, len(chances))
    more = control.budget(len(chances)).more
    return next((level for level, chance in enumerate(chances, start=1) if not more(chance)), len(chances))


def test_the_threshold_looks_at_the_last_token_alone():
    rule = ExitThresholdRule(ExitThresholdOptions(threshold=0.7, cap=None))
    assert drafted_under(rule, [0.8, 0.64, 0.512, 0.2, 0.19]) == 4  # the path's probability falls below it much earlier
    assert drafted_under(rule, [0.6, 0.6]) == 1
    assert drafted_under(rule, [0.0, 0.0]) == 1
    assert drafted_under(rule, [None] * 5) == 5
    assert drafted_under(ExitThresholdRule(ExitThresholdOptions(threshold=0.0)), [0.5] * 9) == 9
    assert made("exit_threshold", 9, cap=3).budget(9).depth == 3


def outcome(levels, accepted):
    return Outcome(levels, accepted, accepted < levels)


def test_the_threshold_rises_while_too_little_is_accepted_and_falls_while_enough_is():
    rule = ExitThresholdRule(ExitThresholdOptions(threshold=0.5, acceptance=0.8, cap=4))
    rule.observe(outcome(2, 0))
    assert math.isclose(rule.threshold, 0.501)  # 0.9 * 0.5 + 0.1 * (0.5 + 0.01)
    rule.observe(outcome(0, 0))
    assert math.isclose(rule.threshold, 0.501)  # a plain step says nothing
    for _ in range(4):
        rule.observe(outcome(4, 4))
    risen = rule.threshold
    rule.observe(outcome(4, 4))
    assert rule.threshold == risen > 0.501  # the cap ended the draft, not the threshold
    rule.observe(outcome(3, 3))
    assert rule.threshold < risen
    for _ in range(20_000):
        rule.observe(outcome(1, 0))
    assert rule.threshold == 1.0


# --- whole drafts


@pytest.mark.parametrize(("seconds", "pays"), [(2.0, True), (4.0, False), (9.0, False)])
def test_whole_drafts_go_on_only_while_they_write_more_a_second(seconds, pays):
    """Three tokens for these seconds, against one for one."""
    control, drafted = measured(CostCurve((1, 2, 9), (1.0, seconds, seconds)), 8, whole=True), []
    for _ in range(300):
        budget = control.budget(30)
        drafted.append(budget.nodes > 0)
        draft = control.trim(tree([-1, -1, 0], [0.1, 0.01, 0.001]) if budget.nodes else EMPTY_DRAFT, budget)
        assert len(draft) == (3 if budget.nodes else 0)  # improbable nodes stay
        control.observe(verdict(draft, (0, 2) if budget.nodes else ()), seconds if budget.nodes else 1.0, 0.0)
    assert drafted[:PATIENCE] == [True] * PATIENCE
    assert all(drafted) if pays else sum(drafted) < 15
    assert any(drafted[-70:]), "it is tried again now and then"


def test_whole_drafts_that_pay_only_later_come_back():
    """A drafter that has to learn first is tried again at growing intervals."""
    control, drafted = measured(CostCurve((1, 2, 9), (1.0, 2.0, 2.0)), 8, whole=True), []
    for step in range(300):
        budget = control.budget(30)
        drafted.append(budget.nodes > 0)
        draft = chain(5) if budget.nodes else EMPTY_DRAFT
        right = range(5 if step > 40 and len(draft) else 0)
        control.observe(verdict(draft, right), 2.0 if budget.nodes else 1.0, 0.0)
    assert all(drafted[-100:])


# --- what is asked for


def test_a_control_is_chosen_by_name_or_by_the_number_of_tokens():
    assert choose_control().name == "measured"
    assert choose_control(5).name == "fixed"
    assert choose_control(5, "measured").name == "measured"
    assert choose_control().most_nodes == MOST_NODES
    assert choose_control(5, "beta_ts").most_nodes == 5
    assert isinstance(made("measured", None).control, MeasuredControl)
    assert made("measured", 5).budget(99).nodes == 5
    assert made("beta_ts", None).budget(99).nodes == MOST_NODES
    options = {"control": "beta_ts", "control_options": {"alpha0": 4}, "num_speculative_tokens": 6, "table": "none"}
    asked = parse_speculation("adaptix", options)
    assert asked.options == {"table": "none"}
    choice = choose_control(**asked.amount)
    assert (choice.name, choice.options, choice.most_nodes) == ("beta_ts", BetaOptions(alpha0=4), 6)


@pytest.mark.parametrize("name", CONTROLS)
def test_the_cost_of_passes_is_asked_for_only_where_it_is_needed(name):
    def unmeasured():
        raise RuntimeError("measured")

    choice = choose_control(6, name)
    if choice.needs_cost:
        with pytest.raises(RuntimeError, match="measured"):
            choice.make(unmeasured, 0)
    else:
        assert choice.make(unmeasured, 0).budget(9).nodes == 6
    nothing = choose_control(0, name)
    assert not nothing.needs_cost
    assert nothing.make(unmeasured, 0).budget(9).nodes == 0


REFUSALS = [
    ("beta_tss", {}, "no control 'beta_tss'. Did you mean 'beta_ts'\\? Controls are: measured, fixed,"),
    (3, {}, "no control 3. Controls are"),
    ("fixed", {}, "'fixed' needs a number of nodes; give num_speculative_tokens"),
    (None, {"cap": 3}, "Control 'measured' has no option 'cap'"),
    ("beta_ts", ["cap"], r"options of control 'beta_ts' are \['cap'\]; give a mapping"),
    ("beta_ts", {"alpha": 1}, "Control 'beta_ts' has no option 'alpha'. Did you mean 'alpha0'"),
    ("beta_ts", {"alpha0": 0}, "alpha0 is 0.0; it must be above 0"),
    ("beta_ts", {"beta0": math.inf}, "beta0 is inf; it must be a finite number, above 0 and at most 1000000"),
    ("exit_threshold", {"cap": 2.5}, "cap of control 'exit_threshold' is 2.5; it must be a whole number"),
    ("exit_threshold", {"threshold": 1.5}, "threshold is 1.5; it must be 0 to 1"),
    ("exit_threshold", {"acceptance": 1.5}, "acceptance is 1.5; it must be 0 to 1"),
    ("exit_threshold", {"cap": 0}, "cap is 0; it must be at least 1, or None"),
]


@pytest.mark.parametrize(("control", "options", "says"), REFUSALS)
def test_what_a_control_cannot_honour_is_refused(control, options, says):
    with pytest.raises(UsageError, match=says):
        parse_speculation("none", {"control": control, "control_options": options})
    with pytest.raises(UsageError, match="num_speculative_tokens is -1"):
        choose_control(-1, control)
