"""Budgets: fixed ones, cuts, cost curves, and the measured control under simulated targets and clocks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from foredraft.contracts import EMPTY_DRAFT, NO_BUDGET, Budget, CostCurve, Draft, Verdict
from foredraft.control import MOST_NODES, Beside, FixedControl, MeasuredControl, cut
from foredraft.control import evidence as kernels
from foredraft.control.evidence import Evidence
from foredraft.errors import UsageError
from foredraft.graph.tree import chain_parents, depths


def tree(parents, score=None):
    parents = np.array(parents, np.int32)
    return Draft(np.arange(len(parents), dtype=np.int32), parents, score)


def chain(length, rate=0.8):
    return tree(chain_parents(length), (rate ** np.arange(1, length + 1)).astype(np.float32))


@st.composite
def scored_trees(draw):
    nodes = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)]
    own = [draw(st.floats(0.0625, 1, width=32)) for _ in range(nodes)]
    score = np.ones(nodes, np.float32)
    for node, parent in enumerate(parents):
        score[node] = own[node] * (score[parent] if parent >= 0 else 1)
    return tree(parents, score)


@settings(deadline=None)  # the first call compiles
@given(scored_trees(), st.integers(0, 24), st.integers(0, 6))
def test_a_cut_is_a_prefix_closed_tree_of_the_best_nodes(draft, nodes, depth):
    taken = cut(draft, Budget(nodes, depth))
    taken.check()
    allowed = depths(draft.parents) <= depth if len(draft) else np.zeros(0, bool)
    assert len(taken) == (min(nodes, int(allowed.sum())) if depth else 0)
    if len(taken):
        assert depths(taken.parents).max() <= depth
        # tokens number the nodes of the whole tree, and a path keeps its parents
        for node, parent in enumerate(taken.parents):
            whole = int(draft.parents[taken.tokens[node]])
            assert whole == (-1 if parent < 0 else taken.tokens[parent])
        best = np.sort(draft.score[allowed])[::-1][: len(taken)]
        np.testing.assert_array_equal(np.sort(taken.score)[::-1], best)


def test_a_cut_without_scores_keeps_the_first_nodes_and_given_scores_override_the_drafts():
    assert cut(tree([-1, -1, 0, 1]), Budget(2, 9)).tokens.tolist() == [0, 1]
    draft = tree([-1, -1], np.array([0.9, 0.1], np.float32))
    assert cut(draft, Budget(1, 9)).tokens.tolist() == [0]
    assert cut(draft, Budget(1, 9), np.array([0.1, 0.9], np.float32)).tokens.tolist() == [1]


@pytest.mark.parametrize("budget", [Budget(0, 5), Budget(5, 0), Budget(0, 0), Budget(-1, 3)])
def test_a_cut_to_nothing_is_empty(budget):
    assert len(cut(chain(3), budget)) == 0


def test_the_fixed_control_asks_for_the_same_at_every_step():
    control = FixedControl(5)
    assert control.budget(30) == Budget(5, 30)
    assert control.budget(0).nodes == control.budget(-1).nodes == 0
    assert control.budget(-1).depth == 0
    control.observe(Verdict((1,), (), EMPTY_DRAFT, 0), math.nan, math.nan)
    assert control.budget(2) == Budget(5, 2)
    assert len(control.trim(chain(9), Budget(5, 30))) == 5
    assert FixedControl(0).budget(9).nodes == 0
    with pytest.raises(UsageError, match="num_speculative_tokens is -1"):
        FixedControl(-1)


def test_a_cost_table_interpolates_and_goes_on_with_the_last_slope():
    table = CostCurve((1, 3, 5), (1.0, 3.0, 4.0)).table(8)
    np.testing.assert_allclose(table, [1, 1, 2, 3, 3.5, 4, 4.5, 5, 5.5])
    assert table.dtype == np.float64


def test_a_cost_table_of_one_measurement_is_flat_and_may_end_before_the_last_measurement():
    np.testing.assert_allclose(CostCurve((1,), (2.0,)).table(4), [2.0] * 5)
    np.testing.assert_allclose(CostCurve((1, 100), (1.0, 100.0)).table(3), [1, 1, 2, 3])


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=8), st.integers(1, 100))
def test_a_cost_table_never_falls(seconds, most):
    rows = tuple(1 + 5 * n for n in range(len(seconds)))
    table = CostCurve(rows, tuple(seconds)).table(most)
    assert len(table) == most + 1
    assert (np.diff(table) >= 0).all()
    assert (table > 0).all()


CHEAP = CostCurve((1, 64), (1.0, 1.0))
MODERATE = CostCurve((1, 2, 64), (1.0, 1.1, 7.3))
DEAR = CostCurve((1, 2, 64), (1.0, 2.0, 64.0))


def decide(control, accepted, seconds, other=lambda drafted: 0.0, steps=300, offered=16):
    """Drive a control; return each step's number of verified nodes. `accepted` says how much of a draft is right."""
    sizes = []
    for number in range(steps):
        budget = control.budget(50)
        draft = control.trim(chain(min(offered, budget.nodes)), budget) if budget.nodes else EMPTY_DRAFT
        right = min(accepted(number), len(draft))
        new = range(100 * number, 100 * number + right + 1)
        control.observe(
            Verdict(tuple(new), tuple(range(right)), draft, 0), seconds(number, len(draft) + 1), other(len(draft))
        )
        sizes.append(len(draft))
    return sizes


def honest(curve):
    table = curve.table(MOST_NODES + 1)
    return lambda number, rows: float(table[rows])


def test_more_is_drafted_where_verification_is_cheaper():
    sizes = {}
    for name, curve in (("cheap", CHEAP), ("moderate", MODERATE), ("dear", DEAR)):
        rng = np.random.default_rng(0)
        accepted = lambda number: int(rng.geometric(0.3)) - 1  # noqa: B023, E731  # used within this turn of the loop
        sizes[name] = np.mean(decide(MeasuredControl(curve), accepted, honest(curve))[100:])
    assert sizes["cheap"] > 15.5  # of 16: a plain step now and then is the reference
    assert sizes["cheap"] > sizes["moderate"] > sizes["dear"]
    assert sizes["moderate"] > 1


def test_a_budget_never_exceeds_its_limits():
    control = MeasuredControl(CHEAP, most_nodes=7)
    assert control.budget(3) == Budget(7, 3)
    assert control.budget(0).nodes == 0
    assert len(control.trim(chain(64), Budget(7, 64))) <= 7
    kept = control.trim(chain(64), Budget(7, 2))
    assert len(kept) <= 2
    assert control.trim(EMPTY_DRAFT, Budget(7, 3)) is EMPTY_DRAFT


def test_nothing_is_drafted_where_verification_costs_what_it_gains():
    """Each further row costs a whole plain step, so not even a sure token is worth it."""
    sizes = decide(MeasuredControl(DEAR), lambda number: 0, honest(DEAR))
    assert sum(sizes[20:]) < 10
    rng = np.random.default_rng(1)
    sizes = decide(MeasuredControl(DEAR), lambda number: int(rng.random() < 0.5), honest(DEAR))
    assert np.mean(np.array(sizes[50:]) > 0) < 0.2


def test_drafts_without_scores_are_sized_by_what_was_accepted_at_their_depth():
    control = MeasuredControl(MODERATE)
    draft = tree(chain_parents(20))
    size = len(control.trim(draft, Budget(64, 50)))
    assert 0 < size < 20
    for _ in range(30):
        kept = control.trim(draft, Budget(64, 50))
        control.observe(Verdict((0, 1), (0,) if len(kept) else (), kept, 0), 1.0, 0.0)
    assert 0 < len(control.trim(draft, Budget(64, 50))) < size


def test_drafting_rests_when_it_loses_and_is_tried_again_at_growing_intervals():
    dear_drafts = lambda drafted: 5.0 if drafted else 0.0  # noqa: E731  # one line says it
    sizes = np.array(decide(MeasuredControl(MODERATE), lambda number: 1, honest(MODERATE), dear_drafts, steps=600))
    drafted = np.flatnonzero(sizes)
    assert len(drafted) > 2, "it was tried"
    assert (sizes[300:] > 0).mean() < 0.25, "and found not to pay"
    assert drafted[-1] > 200, "it is tried again"
    rests = np.diff(drafted)
    rests = rests[rests > 1]
    assert rests[-1] > rests[0], "at growing intervals"


def test_drafting_comes_back_when_it_pays_again():
    control = MeasuredControl(CHEAP)
    slow = decide(control, lambda number: 0, honest(CHEAP), lambda drafted: 3.0 if drafted else 0.0, steps=200)
    assert np.mean(np.array(slow[20:]) > 0) < 0.3
    quick = decide(control, lambda number: 8, honest(CHEAP), steps=800)
    assert np.mean(np.array(quick[-50:]) > 0) >= 0.98  # one plain step for reference


JUMPS = [0.0, -5.0, math.inf, -math.inf, math.nan, 3600.0]


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("where", ["forward", "other"])
def test_a_clock_that_jumps_changes_nothing_for_long(jump, where):
    control = MeasuredControl(CHEAP)
    truth = honest(CHEAP)
    count = iter(range(1000))
    forward = (
        (lambda number, rows: jump if number in (20, 40) else truth(number, rows)) if where == "forward" else truth
    )
    other = (lambda drafted: jump if next(count) in (20, 40) else 0.0) if where == "other" else (lambda drafted: 0.0)
    with np.errstate(all="raise"):
        sizes = decide(control, lambda number: 16, forward, other)
    assert set(sizes[-100:]) <= {0, 16}
    assert sizes[-100:].count(0) <= 2  # the plain steps taken for reference


@pytest.mark.parametrize("jump", JUMPS)
def test_a_clock_that_always_says_nonsense_is_survived(jump):
    sizes = decide(MeasuredControl(MODERATE), lambda number: number % 3, lambda number, rows: jump, steps=200)
    assert all(0 <= size <= 16 for size in sizes)
    assert sum(sizes) > 0


def test_drafting_rests_where_only_drafted_passes_cost_more_than_the_curve_says():
    """Plain passes as measured, drafted ones eight times a plain one: five tokens a step do not repay that."""
    control = MeasuredControl(CHEAP)
    plain = honest(CHEAP)(0, 1)
    sizes = decide(control, lambda number: 4, lambda number, rows: plain if rows == 1 else 8 * plain, steps=1000)
    assert np.mean(np.array(sizes[200:]) > 0) < 0.35


def test_one_hopeless_draft_among_good_ones_does_not_stop_drafting():
    control = MeasuredControl(CHEAP)
    for number in range(200):
        budget = control.budget(50)
        hopeless = number % 5 == 0
        score = np.array([1e-5 if hopeless else 0.9], np.float32)
        offered = Draft(np.array([7], np.int32), np.array([-1], np.int32), score)
        draft = control.trim(offered, budget) if budget.nodes else EMPTY_DRAFT
        right = len(draft) and not hopeless
        control.observe(Verdict((7, 8)[: 1 + right], (0,) * right, draft, 0), honest(CHEAP)(0, len(draft) + 1), 0.0)
        if number > 20 and not hopeless:
            assert len(draft) == 1 or budget.nodes == 0
    assert control.budget(50).nodes > 0


def test_about_twice_as_many_nodes_are_asked_for_as_were_worth_it():
    """At first as many as usual drafts repay under the curve; where all of them are worth it, more are asked for."""
    assert MeasuredControl(CHEAP).budget(30).nodes == MOST_NODES
    assert MeasuredControl(DEAR).budget(30).nodes < MeasuredControl(MODERATE).budget(30).nodes + 1 < MOST_NODES
    control = MeasuredControl(CHEAP)
    for _ in range(60):
        budget = control.budget(30)
        kept = control.trim(chain(budget.nodes, 0.5), budget)
        control.observe(Verdict((0,), (), kept, 0), honest(DEAR)(0, len(kept) + 1), 0.0)
    assert control.budget(30).nodes < 32
    control = MeasuredControl(CHEAP)
    control.trim(chain(4, 0.3), Budget(64, 30))
    for _ in range(8):
        budget = control.budget(90)
        kept = control.trim(chain(budget.nodes, 0.999), budget)
        path = tuple(range(len(kept)))
        control.observe(Verdict((*path, 0), path, kept, 0), honest(CHEAP)(0, len(kept) + 1), 0.0)
    assert control.budget(90).nodes == MOST_NODES


@pytest.mark.kernels
@settings(deadline=None)  # the first call compiles
@given(seed=st.integers(0, 10_000))
def test_the_measured_controls_kernels_do_what_their_twins_do(seed):
    rng = np.random.default_rng(seed)
    seen = rng.integers(0, 420, 12).astype(np.float64)
    evidence = Evidence(seen, np.floor(seen * rng.random(12)), seen * rng.random(12))
    score = rng.random(rng.integers(1, 40)).astype(np.float32) ** 3
    np.testing.assert_allclose(kernels.chances(evidence), naive.chances(evidence))
    assert [kernels.halvings(one) for one in score] == [naive.halvings(float(one)) for one in score]
    cost = np.cumsum(rng.random(34))
    told = (score, evidence, cost, 0.5 + rng.random(), rng.random(), cost[1] + rng.random(), int(rng.integers(1, 9)))
    assert kernels.best_count(*told) == naive.best_count(*told)
    path = rng.permutation(len(score))[: rng.integers(0, len(score) + 1)].astype(np.int32)
    expected = naive.credit(evidence, score, path)
    kernels.credit(evidence, score, path)
    np.testing.assert_allclose(np.stack(evidence), np.array(expected))


def test_what_a_step_takes_beside_its_pass_is_known_to_the_next_sequence():
    beside = Beside()
    first = MeasuredControl(MODERATE, beside=beside)
    decide(first, lambda number: 0, honest(MODERATE), lambda nodes: 5.0 * (nodes > 0))
    assert beside.drafted > beside.plain == 0.0
    later = MeasuredControl(MODERATE, beside=beside)
    draft = Draft(np.array([3], np.int32), np.array([-1], np.int32), np.array([0.5], np.float32))
    assert len(MeasuredControl(MODERATE).trim(draft, Budget(4, 4))) == 1
    assert len(later.trim(draft, Budget(4, 4))) == 0


def test_asking_for_drafts_that_are_worth_nothing_counts_as_time():
    """Every other draft is worth a node that just pays; the others are worth none, and asking takes half a step."""
    control, asked = MeasuredControl(MODERATE), 0
    for number in range(400):
        budget = control.budget(50)
        asked += budget.nodes > 0
        score = np.array([0.9 if number % 2 else 1e-5], np.float32)
        offered = Draft(np.array([7], np.int32), np.array([-1], np.int32), score)
        draft = control.trim(offered, budget) if budget.nodes else EMPTY_DRAFT
        right = len(draft) and number % 10 < 3
        drafting = 0.5 if budget.nodes else 0.0
        seconds = honest(MODERATE)(0, len(draft) + 1)
        tokens = (1000 + number, number)[: 1 + right]
        control.observe(Verdict(tokens, (0,) * right, draft, 0), seconds, drafting, drafting)
    assert asked < 100


def test_a_text_behind_one_in_which_drafting_did_not_pay_gives_up_sooner():
    hopeless = Draft(np.array([7], np.int32), np.array([-1], np.int32), np.array([1e-5], np.float32))

    def times_asked(beside):
        control, asked = MeasuredControl(MODERATE, beside=beside), 0
        for _ in range(100):
            budget = control.budget(50)
            asked += budget.nodes > 0
            draft = control.trim(hopeless, budget) if budget.nodes else EMPTY_DRAFT
            control.observe(Verdict((7,), (), draft, 0), honest(MODERATE)(0, 1), 0.0)
        return asked

    beside = Beside()
    first = times_asked(beside)
    assert beside.unpaid == 1
    assert times_asked(beside) < first
    decide(MeasuredControl(MODERATE, beside=beside), lambda number: 8, honest(MODERATE))
    assert beside.unpaid == 0
    assert times_asked(beside) == first


def test_worthless_drafts_are_borne_with_longer_where_drafting_has_been_saving_steps():
    """A chain of four that is all accepted, some steps long, and then nothing worth verifying."""

    def worthless_before_resting(good_steps):
        control = MeasuredControl(MODERATE)
        for number in range(good_steps + 20):
            budget = control.budget(50)
            good = number < good_steps
            if not good and budget.nodes == 0 and control.budget(50).nodes == 0:
                return number - good_steps
            draft = control.trim(chain(4, 0.95 if good else 1e-5), budget) if budget.nodes else EMPTY_DRAFT
            path = tuple(range(len(draft))) if good else ()
            tokens = tuple(range(10 * number, 10 * number + len(path) + 1))  # nothing repeats itself, which ends rests
            beside = 0.3 * MODERATE.seconds[0] if budget.nodes else 0.0  # what asking takes
            control.observe(Verdict(tokens, path, draft, 0), honest(MODERATE)(0, len(draft) + 1), beside, beside)
        return 20

    assert 2 <= worthless_before_resting(0) < worthless_before_resting(40) <= 9


def test_a_run_of_drafted_steps_is_begun_only_for_more_than_it_is_gone_on_with_for():
    """Beginning costs a plain step more, and as yet half of the drafted steps are the last of a run."""
    just_worth = chain(1, 0.5)
    beside = Beside(cold=2.0)
    control = MeasuredControl(MODERATE, beside=beside)
    assert len(MeasuredControl(MODERATE).trim(just_worth, Budget(4, 4))) == 1
    assert len(control.trim(just_worth, Budget(4, 4))) == 0
    control.budget(50)
    control.observe(Verdict((7, 8), (0,), chain(1, 0.9), 0), honest(MODERATE)(0, 2), 0.0)
    assert len(control.trim(just_worth, Budget(4, 4))) == 1
    runs = Beside(cold=2.0, goes_on=1.0)
    assert len(MeasuredControl(MODERATE, beside=runs).trim(just_worth, Budget(4, 4))) == 1


def test_what_beginning_costs_is_learned_from_the_first_steps_of_runs():
    beside = Beside()
    control, last = MeasuredControl(CHEAP, beside=beside), 0
    for _ in range(300):
        budget = control.budget(50)
        draft = control.trim(chain(min(8, budget.nodes)), budget) if budget.nodes else EMPTY_DRAFT
        path = tuple(range(len(draft)))
        begins = 0.5 * (len(draft) > 0 and last == 0)
        control.observe(Verdict((*path, 0), path, draft, 0), honest(CHEAP)(0, len(draft) + 1) + begins, 0.1)
        last = len(draft)
    assert 0.1 < beside.cold < 0.5
    assert beside.goes_on > 0.95


def first_asked(beside, steps):
    """The step of a text of so many steps in which the drafter is first asked, and found useless; None if in none."""
    control, asked = MeasuredControl(MODERATE, beside=beside), None
    for number in range(steps):
        budget = control.budget(50)
        asked = number if asked is None and budget.nodes else asked
        draft = control.trim(chain(1, 1e-5), budget) if budget.nodes else EMPTY_DRAFT
        control.observe(Verdict((number,), (), draft, 0), honest(MODERATE)(0, 1), 0.0)
    return asked


def test_the_more_texts_in_which_drafting_did_not_pay_the_later_it_is_tried():
    beside = Beside()
    assert [first_asked(beside, 200) for _ in range(5)] == [0, 16, 32, 64, 64]


def test_short_texts_are_tried_too_once_together_they_have_rested_enough():
    beside = Beside(unpaid=9)
    assert [first_asked(beside, 30) for _ in range(3)] == [None, None, 4]


@pytest.mark.parametrize("trying_takes", [0.5, 1.0, 100.0])
def test_what_trying_takes_makes_rests_long_and_they_go_on_in_the_text_behind(trying_takes):
    """Trying in vain once may take half a hundredth of the rest behind it, which is 64 to 256 plain steps."""
    plain, asked = MODERATE.seconds[0], []
    beside, steps = Beside(unpaid=9), 0
    for _ in range(20):
        control = MeasuredControl(MODERATE, beside=beside)
        for number in range(100):
            budget = control.budget(50)
            asked += [steps] if budget.nodes else []
            draft = control.trim(chain(1, 1e-5), budget) if budget.nodes else EMPTY_DRAFT
            took = trying_takes * plain if budget.nodes else 0.0
            control.observe(Verdict((number,), (), draft, 0), plain, took, took)
            steps += 1
    rests = np.diff(asked)[3:]
    expected = min(max(200 * trying_takes, 64), 256)
    assert all(rest >= 0.9 * expected for rest in rests if rest > 40), rests
    assert np.median(rests) <= 1.1 * expected + 1


def test_a_text_too_short_to_tell_speaks_neither_for_drafting_nor_against_it():
    beside = Beside()
    for _ in range(5):
        assert first_asked(beside, 5) == 0


def test_where_drafts_are_useless_a_text_that_goes_on_repeating_itself_ends_ever_fewer_rests():
    control, asked = MeasuredControl(MODERATE), []
    for number in range(400):
        budget = control.budget(50)
        asked += [number] if budget.nodes else []
        draft = control.trim(chain(1, 1e-5), budget) if budget.nodes else EMPTY_DRAFT
        control.observe(Verdict((number % 3,), (), draft, 0), honest(MODERATE)(0, 1), 0.0)
    assert 0 < sum(number >= 100 for number in asked) < 8


def test_a_text_that_begins_to_repeat_itself_or_its_prompt_ends_a_rest():
    """Behind texts in which drafting did not pay, the first 64 steps would be plain."""

    def first_asked_behind(text, prompt=None):
        control = MeasuredControl(MODERATE, beside=Beside(unpaid=3), prompt=prompt)
        for number, token in enumerate(text):
            budget = control.budget(50)
            if budget.nodes:
                return number
            control.observe(Verdict((token,), (), EMPTY_DRAFT, 0), honest(MODERATE)(0, 1), 0.0)
        return None

    new = list(range(100, 160))
    assert first_asked_behind(new) is None
    assert 26 <= first_asked_behind([*new[:20], *new[:15]]) < 30, "four behind the two that are found, read by fours"
    assert 6 <= first_asked_behind(new, np.array(new)) < 10
    assert first_asked_behind(new, np.arange(50)) is None


@pytest.mark.parametrize("first", [1.0, 50.0, 1e4])
def test_a_first_step_that_loads_something_speaks_neither_for_drafting_nor_against_it_for_long(first):
    """In the first plain step of a process; whatever it took, drafts that are accepted whole are soon drafted."""
    beside, drafted = Beside(), 0
    for text in range(3):
        control = MeasuredControl(MODERATE, beside=beside)
        for number in range(80):
            budget = control.budget(50) if text or number else NO_BUDGET
            draft = control.trim(chain(4, 0.95), budget) if budget.nodes else EMPTY_DRAFT
            path = tuple(range(len(draft)))
            seconds, other = honest(MODERATE)(0, len(draft) + 1), 0.1
            if not text and not number:
                seconds, other = first * seconds, first
            control.observe(Verdict((*path, 5 * number), path, draft, 0), seconds, other)
            drafted += text > 0 and len(draft) > 0
    assert drafted > 120
    assert beside.plain_seconds(MODERATE.seconds[0]) == pytest.approx(MODERATE.seconds[0] + 0.1, rel=0.1)


def test_a_slow_first_step_has_no_text_drafted_in_vain():
    """Drafts of four of which none is right: where plain steps seemed slow, they would be verified on and on."""
    beside, drafted = Beside(), 0
    for text in range(4):
        control = MeasuredControl(MODERATE, beside=beside)
        for number in range(80):
            budget = control.budget(50)
            draft = control.trim(chain(4, 0.5), budget) if budget.nodes else EMPTY_DRAFT
            slow = 100.0 if text == 0 and number == 0 else 1.0
            seconds, other = slow * honest(MODERATE)(0, len(draft) + 1), slow * (0.3 if budget.nodes else 0.1)
            control.observe(Verdict((100 * text + number,), (), draft, 0), seconds, other, other if budget.nodes else 0)
            drafted += len(draft) > 0
    assert drafted < 40


def test_a_machine_that_was_busy_in_a_run_does_not_speak_against_drafting_behind_it():
    beside = Beside()
    for number in range(40):
        beside.see_plain(1.0, 1.0, 0.1, runs=False) if number < 8 else None
        beside.see_drafted(1.5, 4.5, 0.3, runs=True)
    assert beside.drafted_pace > 2
    for _ in range(40):
        beside.see_plain(1.0, 1.0, 0.1, runs=False)
    assert beside.drafted_pace < 1.1


def test_a_repetition_that_broke_lets_the_next_one_end_a_rest_as_soon():
    """Where drafts are useless, loops of three tokens that go on end ever fewer rests; new ones each end theirs."""

    def times_asked(text):
        control, asked = MeasuredControl(MODERATE, beside=Beside(unpaid=9)), 0
        for token in text:
            budget = control.budget(50)
            asked += budget.nodes > 0
            draft = control.trim(chain(1, 1e-5), budget) if budget.nodes else EMPTY_DRAFT
            control.observe(Verdict((token,), (), draft, 0), honest(MODERATE)(0, 1), 0.0)
        return asked

    same = [number % 3 for number in range(300)]
    new = [3 * (number // 30) + number % 3 for number in range(300)]
    assert times_asked(new) > 2 * times_asked(same) > 0


def test_first_drafts_that_load_something_do_not_speak_against_drafting_for_long():
    """Asking takes a pass at first and a tenth of one later; half of the nodes of short drafts are right."""
    beside, drafted = Beside(), 0
    for text in range(4):
        control = MeasuredControl(MODERATE, beside=beside)
        for number in range(60):
            budget = control.budget(50)
            draft = control.trim(chain(3, 0.7), budget) if budget.nodes else EMPTY_DRAFT
            path = tuple(range(len(draft))) if number % 2 else ()
            other = (1.5 if text == 0 and number < 8 else 0.15) * MODERATE.seconds[0] if budget.nodes else 0.1
            tokens = tuple(range(1000 * text + 10 * number, 1000 * text + 10 * number + len(path) + 1))
            control.observe(Verdict(tokens, path, draft, 0), honest(MODERATE)(0, len(draft) + 1), other, other)
            drafted += text > 0 and len(draft) > 0
    assert beside.drafted < 0.4 * MODERATE.seconds[0]
    assert drafted > 20
