"""Cali-TS: the posterior of equations 6 and 7, plain counts, and the predictor's use in drafting."""

from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.control import CONTROLS, choose_control
from foredraft.control.levels import CaliOptions, CaliRule, Outcome
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import UsageError
from foredraft.model.head_files import card_for, save_head
from foredraft.model.heads import POSITIONS, PREDICTOR_FOLDER, AgreementPredictor, load_exit_head, load_predictor
from support.exits import plain, target_of, written
from support.families import VOCABULARY


def outcome(accepted, rejected, levels=None):
    levels = accepted + rejected if levels is None else levels
    return Outcome(levels, accepted, bool(rejected))


def test_the_posterior_is_that_of_a_gaussian_mean():
    rule = CaliRule(CaliOptions(sigma_model=0.2, sigma_sample=0.5, theta0=0.4), seed=0)
    assert rule.posterior(0.9) == pytest.approx((0.9, 0.04))  # nothing counted: the prediction and its error
    rule.observe(outcome(3, 1))
    theta = (0.4 + 3) / (1 + 4)
    assert rule.theta == pytest.approx(theta)
    # equations 6 and 7, and the same from precisions
    precision = 1 / 0.04 + 1 / 0.25
    assert rule.posterior(0.9) == pytest.approx(((0.9 / 0.04 + theta / 0.25) / precision, 1 / precision))
    for _ in range(5000):
        rule.observe(outcome(3, 1))
    mean, variance = rule.posterior(0.1)
    assert mean == pytest.approx(0.75, abs=0.01)  # in the limit the counts alone
    assert variance < 1e-4


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_accepted_tends_to_the_acceptance_rate(rate):
    """The paper's equation 8 tends to 1 whatever is accepted."""
    rng, rule = np.random.default_rng(0), CaliRule(CaliOptions(), seed=0)
    for _ in range(3000):
        accepted = 0
        while accepted < 4 and rng.random() < rate:
            accepted += 1
        rule.observe(outcome(accepted, int(accepted < 4), 4))
    assert rule.theta == pytest.approx(rate, abs=0.03)


def test_a_level_follows_as_often_as_the_last_one_is_predicted_to_be_accepted():
    rule = CaliRule(CaliOptions(sigma_model=0.01), seed=1)
    went_on = np.zeros(2)
    for _ in range(4000):
        went_on += rule.more(0.8), rule.more(0.3)
    assert went_on / 4000 == pytest.approx([0.8, 0.3], abs=0.03)


def test_without_an_estimate_the_counts_decide_and_draws_stay_chances():
    rule = CaliRule(CaliOptions(sigma_model=5.0, theta0=1.0), seed=2)
    assert {rule.more(None) for _ in range(200)} == {True, False}  # wide draws are clipped, not rejected
    sure = CaliRule(CaliOptions(sigma_model=1e-6, theta0=1.0), seed=2)
    assert all(sure.more(None) for _ in range(8))
    assert not sure.more(0.0)


def test_a_plain_step_is_no_verification():
    rule = CaliRule(CaliOptions(), seed=0)
    rule.observe(outcome(0, 0))
    assert rule.verifications == 0
    rule.observe(outcome(2, 0))
    assert rule.verifications == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma_model": 0}, "sigma_model is 0"),
        ({"sigma_sample": 2000.0}, "sigma_sample is 2000"),
        ({"sigma_model": 1e-200, "sigma_sample": 1e-200}, "sigma_model is 1e-200"),  # their squares are 0
        ({"theta0": 1.5}, "theta0 is 1.5"),
        ({"sigma": 1}, "has no option 'sigma'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        choose_control(None, "cali_ts", options)


def test_its_name_makes_a_control():
    assert "cali_ts" in CONTROLS
    control = choose_control(6, "cali_ts").make(lambda: None, 3)
    assert control.budget(4).nodes == 6


def test_a_predictor_begins_as_the_heads_own_estimate():
    predictor, hidden = AgreementPredictor(8), torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    estimate, level = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([4, 1, 99])
    torch.testing.assert_close(predictor(hidden, hidden, level, estimate).sigmoid(), estimate)
    assert predictor(hidden, hidden, level, torch.tensor([0.0, 1.0, 0.5])).isfinite().all()


def test_a_predictor_looks_at_both_states_and_the_level():
    predictor = AgreementPredictor(4)
    with torch.no_grad():
        for weight in predictor.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    target, draft = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(0))

    def chance(target, draft, level):
        return predictor(target, draft, torch.tensor([level]), torch.tensor([0.7])).sigmoid().item()

    first = chance(target, draft, 1)
    others = [chance(target, draft, 2), chance(target + 1, draft, 1), chance(target, draft + 1, 1)]
    assert not any(np.isclose(first, other) for other in others)
    assert np.isclose(chance(target, draft, POSITIONS), chance(target, draft, POSITIONS + 5))


def with_predictor(tmp_path, chance, more=()):
    """A head of the tiny llama with a predictor of a constant probability, and in its file `more` weights."""
    model = target_of("llama").model
    _, head = load_exit_head(with_predictor.heads("llama", 1), model)
    folder = tmp_path / "head"
    save_head(folder, card_for(model, "eesd", "llama", layers=1, dtype="float32"), head.state_dict())
    predictor = AgreementPredictor(model.config.hidden_size)
    with torch.no_grad():
        predictor.estimate.weight.zero_()
        predictor.target.bias.fill_(float(np.log(chance / (1 - chance))))
    weights = predictor.state_dict()
    weights["estimate.weight"] = torch.tensor([[*weights["estimate.weight"][0].tolist(), *more]])
    save_head(folder / PREDICTOR_FOLDER, card_for(model, "cali", "llama", layers=1, dtype="float32"), weights)
    return str(folder)


def test_a_predictor_of_an_older_file_is_read_without_its_weights_for_sampled_texts(tmp_path, heads):
    with_predictor.heads = heads
    predictor = load_predictor(Path(with_predictor(tmp_path, 0.6, more=(0.5, 0.25))), target_of("llama").model, 1)
    state = torch.ones(1, 32)
    assert np.isclose(predictor(state, state, torch.tensor([1]), torch.tensor([0.2])).sigmoid().item(), 0.6)


def watched_drafts(drafter):
    """Return a list to which every later draft of `drafter` is added."""
    drafts, opened = [], drafter.open

    def watched(context):
        drafting = opened(context)
        propose = drafting.propose
        drafting.propose = lambda view, budget: drafts.append(propose(view, budget)) or drafts[-1]
        return drafting

    drafter.open = watched
    return drafts


@pytest.mark.parametrize("out_degree", [1, 3])
def test_drafts_go_by_the_predictor_and_the_text_is_the_same(out_degree, tmp_path, heads):  # the fixture imported above
    with_predictor.heads = heads
    options = {
        "head": with_predictor(tmp_path, 0.6),
        "out_degree": out_degree,
        "least_share": 0.0,
        "least_probability": 0.0,
    }
    if out_degree > 1:
        options["calibrated"] = True  # by default, only chains go by the predictor
    drafter = make_drafter("eesd", options, Resources(VOCABULARY, target=target_of("llama")))
    drafts = watched_drafts(drafter)
    text, _ = written(target_of("llama"), "llama", "greedy", drafter)
    assert text == plain("llama", "greedy")
    best = [draft.score.max() for draft in drafts if len(draft)]
    assert np.allclose(best, 0.6, atol=1e-4)
    if out_degree == 1:
        assert np.allclose(drafts[1].score, 0.6 ** np.arange(1, len(drafts[1]) + 1), atol=1e-4)


def test_a_sampled_chain_goes_by_the_heads_own_estimate(tmp_path, heads):  # the fixture imported above
    with_predictor.heads = heads
    options = {"head": with_predictor(tmp_path, 0.6), "out_degree": 1, "calibrated": True}
    drafter = make_drafter("eesd", options, Resources(VOCABULARY, target=target_of("llama")))
    for setting, predicts in (("greedy", True), ("T=1", False)):
        drafts = watched_drafts(drafter)
        text, _ = written(target_of("llama"), "llama", setting, drafter)
        assert text == plain("llama", setting)
        best = [draft.score.max() for draft in drafts[1:] if len(draft)]
        assert np.allclose(best, 0.6, atol=1e-4) == predicts


def test_a_predictor_that_is_asked_for_and_missing_is_refused(tmp_path, heads):  # the fixture imported above
    with_predictor.heads = heads
    resources = Resources(VOCABULARY, target=target_of("llama"))
    with pytest.raises(UsageError, match="has no predictor; train one with `foredraft train cali"):
        make_drafter("eesd", {"head": heads("llama", 1), "calibrated": True}, resources)
    head = with_predictor(tmp_path, 0.5)
    assert make_drafter("eesd", {"head": head, "out_degree": 1}, resources).needs.hidden
    for options in ({}, {"out_degree": 1, "calibrated": False}):
        assert not make_drafter("eesd", {"head": head, **options}, resources).needs.hidden
    with pytest.raises(UsageError, match="whose weights are not this model's"):
        load_predictor(tmp_path / "head", target_of("qwen3").model, 1)
