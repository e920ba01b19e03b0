"""Budgets: fixed ones, cuts, cost curves, and the measured control under simulated targets and clocks."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.contracts import EMPTY_DRAFT, Budget, CostCurve, Draft, Verdict
from foredraft.control import MOST_NODES, FixedControl, MeasuredControl, StepCosts, cut
from foredraft.control.payoff import (
    PATIENCE,
    Evidence,
    Rests,
    best_number,
    bin_of,
    corrections,
    credit,
    expected_tokens,
)
from foredraft.graph.tree import chain_parents, depths
from support.clock import Clock
from support.controls import OfOne, measured


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
    control = OfOne(FixedControl(5))
    assert control.budget(30) == Budget(5, 30)
    assert control.budget(0).nodes == control.budget(-1).nodes == 0
    assert control.budget(-1).depth == 0
    control.observe(Verdict((1,), (), EMPTY_DRAFT, 0), math.nan, math.nan)
    assert control.budget(2) == Budget(5, 2)
    assert len(control.trim(chain(9), Budget(5, 30))) == 5
    assert FixedControl(0).budget(9).nodes == 0


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


def decide(control, accepted, seconds, other=lambda asked: 0.0, steps=300, offered=16, rate=0.8):
    """Drive a control; return each step's number of verified nodes. `accepted` says how much of a draft is right."""
    sizes = []
    for number in range(steps):
        budget = control.budget(50)
        draft = control.trim(chain(min(offered, budget.nodes), rate), budget) if budget.nodes else EMPTY_DRAFT
        right = min(accepted(number), len(draft))
        new = range(100 * number, 100 * number + right + 1)
        control.observe(
            Verdict(tuple(new), tuple(range(right)), draft, 0), seconds(number, len(draft) + 1),
            other(budget.nodes), other(budget.nodes),
        )  # fmt: skip
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
        sizes[name] = np.mean(decide(measured(curve), accepted, honest(curve))[100:])
    assert sizes["cheap"] > 15.5  # of 16: a plain step now and then is the reference
    assert sizes["cheap"] > sizes["moderate"] > sizes["dear"]
    assert sizes["moderate"] > 1


def test_a_budget_never_exceeds_its_limits():
    control = measured(CHEAP, most_nodes=7)
    assert control.budget(3) == Budget(7, 3)
    assert control.budget(0).nodes == 0
    assert len(control.trim(chain(64), Budget(7, 64))) <= 7
    kept = control.trim(chain(64), Budget(7, 2))
    assert len(kept) <= 2
    assert control.trim(EMPTY_DRAFT, Budget(7, 3)) is EMPTY_DRAFT


def test_nothing_is_drafted_where_verification_costs_what_it_gains():
    """Each further row costs a whole plain step, so not even a sure token is worth it."""
    sizes = decide(measured(DEAR), lambda number: 0, honest(DEAR))
    assert sum(sizes[20:]) < 10
    rng = np.random.default_rng(1)
    sizes = decide(measured(DEAR), lambda number: int(rng.random() < 0.5), honest(DEAR))
    assert np.mean(np.array(sizes[50:]) > 0) < 0.2


def test_a_rest_ends_though_every_text_is_shorter_than_it():
    """After long stretches without acceptance, texts of 60 steps are drafted again and stay drafted."""
    costs, worthless = StepCosts(), lambda number: 0
    decide(measured(MODERATE, costs=costs), worthless, honest(MODERATE), steps=2000)
    texts = [decide(measured(MODERATE, costs=costs), lambda number: 9, honest(MODERATE), steps=60) for _ in range(12)]
    drafted = [np.mean(np.array(sizes) > 0) for sizes in texts]
    assert drafted[-1] > 0.9


def test_dear_passes_of_one_text_do_not_keep_the_next_from_drafting():
    """After a long prompt drafted passes take far more than the curve says; after the next prompt they match it."""
    costs, long = StepCosts(), lambda number, rows: float(MODERATE.table(64)[rows]) * (1 if rows == 1 else 3)
    decide(measured(MODERATE, costs=costs), lambda number: 3, long, steps=200)
    sizes = decide(measured(MODERATE, costs=costs), lambda number: 3, honest(MODERATE), steps=150)
    assert np.mean(np.array(sizes[100:]) > 0) > 0.9


def test_texts_that_wait_in_a_batch_do_not_change_what_it_learned():
    """Prompts of a server are prefilled in pieces of as many rows as the control says: 60 short ones change nothing."""
    costs = StepCosts()
    batch = MeasuredControl(lambda: MODERATE, 16, costs, most_rows=64)
    costs.wide_pace = 6.0
    before = batch.rows_within(10.0)
    for _ in range(60):
        measured(MODERATE, costs=costs)
    assert batch.rows_within(10.0) == before


def test_a_machine_that_was_busy_for_a_while_does_not_keep_one_control_from_drafting():
    """Beside other processes, wide passes take ten times as long for 400 steps; a server has one control for all."""
    curve = CostCurve((1, 2, 4, 8, 16, 64), (1.0, 1.25, 1.6, 2.4, 4.0, 15.0))
    table, random = curve.table(MOST_NODES + 1), np.random.default_rng(0)
    busy = lambda number, rows: float(table[rows]) * (10 if 300 <= number < 700 and rows > 1 else 1)  # noqa: E731  # one line
    right = lambda number: int(random.geometric(0.45)) - 1  # noqa: E731  # one line
    sizes = np.array(decide(measured(curve), right, busy, lambda asked: 0.05, 2000, offered=6, rate=0.55))
    assert (sizes[700:800] > 0).mean() < 0.5, "it did not pay"
    assert (sizes[-500:] > 0).mean() > 0.9, "and does again"


@pytest.mark.parametrize(("rows", "slow"), [(1, 40.0), (64, 40.0), (1, 1 / 40), (64, 1 / 40)])
def test_no_pass_takes_less_than_no_time_however_slow_some_of_them_are(rows, slow):
    """Beside other processes, only passes of one row are run for a while, or only pieces of prompts."""
    costs, curve = StepCosts(), MODERATE.table(MOST_NODES)
    for _ in range(500):
        costs.observe(curve, rows, slow * float(curve[rows]), 0.0, None)
    assert (costs.passes(curve)[1:] > 0).all()


def test_a_batch_that_shrinks_leaves_a_pace_that_recovers():
    """A batch of 16 long texts takes 4 times what the curve says, then 4 short ones what it says, then one."""
    costs, curve = StepCosts(), MODERATE.table(MOST_NODES)
    for rows, slow in ((16, 4.0), (4, 1.0), (1, 1.0)):
        for _ in range(60):
            costs.observe(curve, rows, slow * float(curve[rows]), 0.0, None)
            assert min(costs.pace, costs.wide_pace) > 0.4
    assert costs.pace == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("asking", "accepted", "grow"), [(0.1, 0, True), (5.0, 1, False)], ids=["cheap tries", "dear tries"]
)
def test_drafting_rests_when_it_loses_and_is_tried_again(asking, accepted, grow):
    """At growing intervals, and from the start so seldom that tries take 2 % of the time at most."""
    took = lambda drafted: asking if drafted else 0.0  # noqa: E731  # one line says it
    sizes = np.array(decide(measured(MODERATE), lambda number: accepted, honest(MODERATE), took, steps=600))
    drafted = np.flatnonzero(sizes)
    assert len(drafted) > 2, "it was tried"
    assert (sizes[300:] > 0).mean() < 0.25, "it was found not to pay"
    assert drafted[-1] > 200, "it is tried again"
    rests = np.diff(drafted)
    rests = rests[rests > 1]
    assert rests.min() >= asking / 0.02
    assert not grow or rests[-1] > 4 * rests[0]


def test_drafting_comes_back_when_it_pays_again():
    control = measured(CHEAP)
    slow = decide(control, lambda number: 0, honest(CHEAP), lambda drafted: 3.0 if drafted else 0.0, steps=200)
    assert np.mean(np.array(slow[20:]) > 0) < 0.3
    quick = decide(control, lambda number: 8, honest(CHEAP), steps=800)
    assert np.mean(np.array(quick[-50:]) > 0) >= 0.98  # one plain step for reference


JUMPS = [0.0, -5.0, math.inf, -math.inf, math.nan, 3600.0]


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("where", ["forward", "other"])
def test_a_clock_that_jumps_changes_nothing_for_long(jump, where):
    control = measured(CHEAP)
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
    sizes = decide(measured(MODERATE), lambda number: number % 3, lambda number, rows: jump, steps=200)
    assert all(0 <= size <= 16 for size in sizes)
    assert sum(sizes) > 0


def test_drafting_rests_where_only_drafted_passes_cost_more_than_the_curve_says():
    """Plain passes as measured, drafted ones eight times a plain one: five tokens a step do not repay that."""
    control = measured(CHEAP)
    plain = honest(CHEAP)(0, 1)
    sizes = decide(control, lambda number: 4, lambda number, rows: plain if rows == 1 else 8 * plain, steps=1000)
    assert np.mean(np.array(sizes[200:]) > 0) < 0.35


def test_one_hopeless_draft_among_good_ones_does_not_stop_drafting():
    control = measured(CHEAP)
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


def deepest(control, clock, chance, level_seconds, right=4):
    """How many levels of a chain are drafted whose tokens each have this chance and take these seconds."""
    budget, levels, draft = control.budget(20), 0, EMPTY_DRAFT
    while budget.nodes > levels and (levels == 0 or budget.more(chance**levels)):
        clock.now += level_seconds
        levels += 1
    if levels:
        score = (chance ** np.arange(1, levels + 1)).astype(np.float32)
        draft = control.trim(Draft(np.arange(levels, dtype=np.int32), chain_parents(levels), score), budget)
    right = range(min(right, len(draft)))
    seconds = level_seconds * levels
    control.observe(
        Verdict(tuple(range(len(right) + 1)), tuple(right), draft, 0),
        honest(CHEAP)(0, len(draft) + 1),
        seconds,
        seconds,
    )
    return levels


def test_a_draft_goes_as_deep_as_its_levels_repay():
    found = []
    for level_seconds in (0.01, 0.1, 0.3):
        clock = Clock()
        control = measured(CHEAP, clock=clock)
        found.append([deepest(control, clock, 0.8, level_seconds) for _ in range(60)][-1])
    assert found[0] > found[1] > found[2]
    assert found[2] >= 1


def test_unsure_drafts_are_shorter_than_sure_ones():
    clock = Clock()
    control = measured(CHEAP, clock=clock)
    sure = [(deepest(control, clock, 0.9, 0.1, 9), deepest(control, clock, 0.4, 0.1, 1)) for _ in range(40)][-1]
    assert sure[0] > sure[1] > 0


@pytest.mark.parametrize("first", [0.5, 30.0])
def test_a_first_level_that_compiles_something_is_forgotten(first):
    clock = Clock()
    control = measured(CHEAP, clock=clock)
    more = control.budget(20).more
    more(0.9)
    clock.now += first
    more(0.8)
    assert [deepest(control, clock, 0.9, 0.05) for _ in range(300)][-1] > 4


def test_levels_that_became_cheaper_are_drafted_again_and_dear_ones_seldom():
    clock = Clock()
    control = measured(CHEAP, clock=clock)
    dear = [deepest(control, clock, 0.9, 1.0) for _ in range(400)]
    assert 0 < np.mean(np.array(dear[100:]) > 1) < 0.05
    cheap = [deepest(control, clock, 0.9, 0.02) for _ in range(1200)]
    assert np.mean(cheap[-50:]) > 4


def test_levels_without_estimates_end_too():
    control = measured(CHEAP, clock=Clock())
    more = control.budget(30).more
    assert more(None)
    assert not all(more(None) for _ in range(9))


def test_the_cost_of_passes_is_not_measured_for_nothing():
    def unmeasured():
        raise RuntimeError("measured")

    control = MeasuredControl(unmeasured, 16, most_rows=64)
    assert control.trim([], [], 3) == []
    assert control.trim([EMPTY_DRAFT], [Budget(4, 9)], 0) == [EMPTY_DRAFT]


@pytest.mark.parametrize("jump", [0.0, -5.0, math.inf, math.nan, 3600.0])
def test_a_level_whose_clock_jumps_changes_no_depth_for_long(jump):
    clock = Clock()
    control = measured(CHEAP, clock=clock)
    before = [deepest(control, clock, 0.8, 0.05) for _ in range(60)][-1]
    more = control.budget(20).more
    more(0.9)
    clock.now += jump
    more(0.9)
    clock.now = 0.0
    after = [deepest(control, clock, 0.8, 0.05) for _ in range(60)][-1]
    assert before == after > 1


def random_evidence(rng, most):
    promised = rng.random(12) * most * 0.5 ** np.arange(12)
    return Evidence(promised * rng.random(12), promised)


@pytest.mark.kernels
def test_scores_are_believed_until_there_is_evidence():
    found = corrections(StepCosts().evidence)
    np.testing.assert_allclose(found, 1.0)
    evidence = StepCosts().evidence
    evidence.accepted[1], evidence.promised[1] = 1_000, 3_500
    doubted = corrections(evidence)
    assert doubted[1] == pytest.approx(1_000 / 3_500, abs=0.01), "what was seen outweighs what was promised"
    assert (np.delete(doubted, 1) < 0.5).all(), "scores that promised too much are believed less everywhere"
    score = np.full(3, 0.9, np.float32)
    assert expected_tokens(score, Evidence(np.full(12, 90.0), np.full(12, 30.0)), 9)[-1] == 3, "none counts twice"


@pytest.mark.kernels
def test_a_score_lies_in_the_bin_of_its_power_of_two():
    assert [bin_of(score) for score in (1.0, 0.6, 0.4, 0.3, 0.2, 0.1, 1e-9, 0.0)] == [0, 0, 1, 1, 2, 3, 11, 11]


@pytest.mark.kernels
@settings(deadline=None)  # the first call compiles
@given(seed=st.integers(0, 10_000))
def test_the_best_nodes_come_first_in_what_is_expected(seed):
    rng = np.random.default_rng(seed)
    evidence, score = random_evidence(rng, 420), rng.random(rng.integers(1, 40)).astype(np.float32) ** 3
    most = int(rng.integers(1, 50))
    kept = corrections(evidence)
    score = np.sort(score)[::-1]
    likely = [min(kept[bin_of(each)] * each, 1.0) for each in score][:most]
    np.testing.assert_allclose(expected_tokens(score, evidence, most), [0.0, *np.cumsum(likely)], rtol=1e-6)


@pytest.mark.kernels
@settings(deadline=None)  # the first call compiles
@given(seed=st.integers(0, 10_000))
def test_the_best_number_has_the_most_tokens_a_second_of_all(seed):
    rng = np.random.default_rng(seed)
    count, least = int(rng.integers(2, 40)), int(rng.integers(0, 12))
    tokens, seconds = 1 + np.cumsum(rng.random(count)), np.cumsum(rng.random(count) + 0.1)
    rates = tokens / seconds
    assert best_number(tokens, seconds) == int(rates.argmax())
    few = min(least, count - 1)
    best = max(range(few, count), key=rates.__getitem__)
    best = best if rates[best] > 1.05 * rates[few] else few
    assert best_number(tokens, seconds, least, 1.05) == (best if rates[best] > rates[0] else 0)


@pytest.mark.kernels
@settings(deadline=None)  # the first call compiles
@given(seed=st.integers(0, 10_000))
def test_every_node_is_counted_once_and_what_is_old_counts_for_less_at_the_same_rates(seed):
    rng = np.random.default_rng(seed)
    score = rng.random(rng.integers(1, 40)).astype(np.float32) ** 3
    path = rng.permutation(len(score))[: rng.integers(0, len(score) + 1)].astype(np.int32)
    evidence = random_evidence(rng, 300)
    before = [each.sum() for each in evidence]
    credit(evidence, score, path)
    added = [each.sum() - old for each, old in zip(evidence, before, strict=True)]
    assert added == pytest.approx([len(path), float(score.sum())], abs=1e-5)
    full = Evidence(np.full(12, 100.0), np.full(12, 399.0) * 0.5 ** np.arange(12))
    credit(full, np.full(5, 0.3, np.float32), np.array([], np.int32))
    assert full.promised[1] == pytest.approx((399 / 2 + 1.5) / 2)
    assert full.accepted[1] == 50
    assert (np.delete(full.accepted, 1) == 100).all()


def test_rests_double_until_something_pays():
    rests, tried = Rests(), []
    for step in range(300):
        if rests.left:
            rests.passed()
        else:
            tried.append(step)
            rests.tried(paid=False)
    gaps = np.diff(tried)
    assert gaps[: PATIENCE - 1].tolist() == [1] * (PATIENCE - 1)
    assert gaps[PATIENCE - 1 :].tolist()[:7] == [2, 3, 5, 9, 17, 33, 65]
    assert rests.tried(paid=False)  # the first try after a pause is made
    assert rests.tried(paid=True)
    assert rests.left == 0
    assert not rests.tried(paid=False)


def test_tries_that_pay_little_do_not_make_up_for_many_that_did_not():
    def tries_of(steps, gain, paying, rests=None):
        """Return the steps with a try, of which `paying` of four pay: `gain` times what one costs that does not."""
        rests, tried = Rests() if rests is None else rests, []
        for step in range(steps):
            if rests.left:
                rests.passed()
            else:
                tried.append(step)
                rests.tried(paid=len(tried) % 4 < paying, gain=gain)
        return tried

    assert len(tries_of(400, 0.5, 3)) == len(tries_of(400, 2.0, 2)) == 400
    assert len(tries_of(400, 0.5, 2)) < 40
    assert len(tries_of(400, 2.0, 1)) < 40
    tired = Rests()
    tries_of(1000, 0.0, 0, tired)
    assert len(tries_of(400, 0.5, 4, tired)) > 80  # small gains end pauses


def test_drafts_without_scores_are_sized_by_what_was_accepted_at_their_depth():
    control, draft = measured(MODERATE), tree(chain_parents(20))
    size = len(control.trim(draft, Budget(64, 50)))
    assert 0 < size < 20
    for _ in range(30):
        kept = control.trim(draft, control.budget(50))
        control.observe(Verdict((0, 1), (0,) if len(kept) else (), kept, 0), 1.0, 0.0)
    assert 0 < len(control.trim(draft, Budget(64, 50))) < size


def test_as_many_nodes_as_hardly_cost_anything_are_verified_and_more_where_they_repay_it():
    """Eight rows cost as much as one, sixteen half as much again."""
    stairs = CostCurve((1, 8, 9, 16, 17, 64), (1.0, 1.05, 1.5, 1.55, 3.0, 9.0))
    assert len(measured(stairs).trim(chain(16, 0.5), Budget(16, 50))) == 7
    assert len(measured(stairs).trim(chain(16, 0.95), Budget(16, 50))) == 15
    assert len(measured(stairs).trim(chain(16, 0.01), Budget(16, 50))) == 0


def test_budgets_follow_what_was_worth_verifying():
    assert measured(CHEAP).budget(30).nodes == MOST_NODES
    control = measured(DEAR)
    decide(control, lambda number: 1, honest(DEAR), steps=60)
    assert control.budget(30).nodes < 16 or control.budget(30).nodes == 0
    control = measured(CHEAP)
    decide(control, lambda number: 64, honest(CHEAP), offered=64)
    assert control.budget(90).nodes == MOST_NODES


def hopeless_steps(control, steps):
    """Offer drafts never worth verifying; return the steps in which a draft was requested."""
    asked = []
    for number in range(steps):
        budget = control.budget(50)
        asked += [number] if budget.nodes else []
        draft = control.trim(chain(1, 1e-5), budget) if budget.nodes else EMPTY_DRAFT
        control.observe(Verdict((number,), (), draft, 0), 1.0, 0.02 * bool(budget.nodes), 0.02 * bool(budget.nodes))
    return asked


def test_useless_drafts_are_asked_for_at_intervals_that_double_and_stay_long_in_the_next_text():
    costs = StepCosts()
    asked = hopeless_steps(measured(MODERATE, costs=costs), 400)
    gaps = np.diff(asked)
    assert gaps[0] == 1, "one poor draft tells nothing"
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] >= 64
    assert len(hopeless_steps(measured(MODERATE, costs=costs), 400)) <= 7
    assert hopeless_steps(measured(MODERATE), 10)[:2] == [0, 1]


def test_a_draft_that_pays_ends_the_rests():
    costs = StepCosts()
    hopeless_steps(measured(MODERATE, costs=costs), 100)
    sizes = decide(measured(MODERATE, costs=costs), lambda number: 8, honest(MODERATE), steps=400)
    assert min(sizes[-50:]) > 0
    assert costs.rests.unpaid == 0


def test_what_a_drafted_step_takes_beside_its_pass_is_known_to_the_next_text():
    costs, draft = StepCosts(), chain(1, 0.5)
    for _ in range(100):
        control = measured(MODERATE, costs=costs)
        control.budget(50)
        control.observe(Verdict((1, 2), (0,), draft, 0), 1.1, 3.0, 3.0)
    for known, rests in ((StepCosts(), False), (costs, True)):
        control = measured(MODERATE, costs=known)
        for _ in range(4):  # a draft that is there is verified where that pays, whatever it took to make it
            assert len(control.trim(draft, control.budget(50))) == 1
        assert (control.budget(50).nodes == 0) is rests


PROCESSORS = {  # milliseconds of SmolLM2's passes by rows, as `foredraft compile` printed them
    "Xeon, integers by AVX-512": CostCurve((1, 4, 8, 16), (5.0, 7.1, 10.4, 16.8)),
    "Xeon, pairs of bfloat16": CostCurve((1, 4, 8, 16), (4.4, 10.1, 18.1, 34.3)),
    "Zen 3, a quarter of a pass for each further row": CostCurve((1, 16), (7.2, 34.2)),
}


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("curve", PROCESSORS.values(), ids=PROCESSORS)
def test_drafts_cost_at_most_a_fiftieth_on_any_processor_however_few_are_right(curve, rate):
    costs, rng, table = StepCosts(), np.random.default_rng(0), curve.table(MOST_NODES + 1)
    took = plain = 0.0
    for _ in range(10):
        found, spent = [], []

        def right(_number, found=found):
            found.append(int(rng.geometric(1 - rate)) - 1)
            return found[-1]

        def drafting(asked, spent=spent):
            spent.append(0.15 * bool(asked))
            return spent[-1]

        control = measured(curve, costs=costs)
        sizes = decide(control, right, honest(curve), drafting, steps=150, offered=8)
        took += sum(table[size + 1] for size in sizes) + sum(spent) / 2  # which is asked for twice in a step
        plain += sum(1 + min(each, size) for each, size in zip(found, sizes, strict=True)) * table[1]
    assert took < plain / 0.98


@pytest.mark.parametrize("slow", [2.0, 0.5])
def test_a_machine_that_changes_its_pace_is_followed_by_passes_of_any_size(slow):
    costs, rng = StepCosts(), np.random.default_rng(0)
    told = lambda number, rows: slow * honest(MODERATE)(0, rows)  # noqa: E731  # one line says it
    sizes = decide(measured(MODERATE, costs=costs), lambda number: int(rng.integers(0, 6)), told)
    rows = np.array(sizes[-50:]) + 1
    paces = costs.passes(np.ones(70))[rows]
    np.testing.assert_allclose(paces, slow, rtol=0.1)


def test_wide_passes_that_cost_more_than_the_curve_says_make_drafts_smaller():
    truth, sizes = honest(MODERATE), []
    for more in (0.0, 0.4):
        rng = np.random.default_rng(0)
        accepted = lambda number: int(rng.geometric(0.2)) - 1  # noqa: B023, E731  # used within this turn of the loop
        seconds = partial(lambda more, number, rows: truth(0, rows) * (1 + more * (rows - 1)), more)
        sizes.append(np.mean(decide(measured(MODERATE), accepted, seconds)[100:]))
    assert sizes[1] < 0.8 * sizes[0]
