"""The search for skipped sub-layers: its counts, and its results."""

import functools
import json
from collections import deque

import numpy as np
import pytest

from foredraft.cli import main
from foredraft.contracts import CostCurve
from foredraft.model.skipping import Skipped, skipping
from foredraft.sampling import SamplingOptions
from layer_search import (
    SkippingCosts,
    SkippingFigures,
    WrittenText,
    accepted_by_step,
    agreements,
    measure_skipping,
    predicted,
    search,
)
from skipped_layers import layer_skip
from support.families import plain, prompt_of, target_of
from support.toys import TOY, TOY_DRAFT

CURVE = CostCurve((1, 16), (1.0, 1.0))


def marks(text):
    return np.array([each == "+" for each in text], np.bool_)


@pytest.mark.parametrize(
    ("agreed", "levels", "accepted"),
    [
        ("+++++", 2, [2, 2]),  # three tokens, then two: the second step's bonus token is after the end of the text
        ("---", 4, [0, 0, 0]),
        ("++-+", 4, [2, 1]),
        ("+-+", 1, [1, 1]),
        ("+", 8, [1]),
    ],
)
def test_steps_are_those_that_drafting_would_take(agreed, levels, accepted):
    assert accepted_by_step(marks(agreed), levels) == accepted


def test_what_is_promised_counts_draft_passes_and_verification():
    sure = predicted([marks("+" * 30)], CURVE, 0.0, 4)
    assert (sure.levels, sure.agreement) == (4, 1.0)
    assert sure.speed_up == pytest.approx(30 / 6)
    # 4 levels: 6 steps, of 4 draft passes each, and one more for each fully accepted draft
    dear = predicted([marks("+" * 30)], CURVE, 0.5, 4)
    assert dear.speed_up == pytest.approx(30 / (6 + 0.5 * (6 * 4 + 6)))
    never = predicted([marks("-" * 10)], CURVE, 0.5, 4)
    assert (never.levels, never.speed_up, never.agreement) == (1, pytest.approx(10 / 15), 0.0)


@pytest.mark.slow
def test_costs_are_shares_of_a_pass():
    costs = SkippingCosts(CURVE, attention=0.1, mlp=0.05)
    assert costs.draft_cost(Skipped((0, 1), (0, 1, 2))) == pytest.approx(0.65)
    measured = measure_skipping(target_of("llama"))
    assert 0 <= measured.attention <= 0.5
    assert 0 <= measured.mlp <= 0.5
    assert measured.draft_cost(Skipped((0, 1), (0, 1))) >= 0


@pytest.mark.parametrize("sampling", [SamplingOptions(), SamplingOptions(do_sample=True, seed=12)])
def test_a_model_agrees_with_its_own_texts_and_less_where_layers_are_missing(sampling):
    target, prompt = target_of("llama"), prompt_of(40)
    text = plain("llama", 40, "T=1" if sampling.do_sample else "greedy")
    written = WrittenText(np.concatenate([prompt, text]), len(prompt), sampling)
    own = agreements(target, [written])[0].mean()
    assert own > 0.9 if sampling.do_sample else own == 1.0  # drafts are among the most probable tokens
    assert agreements(skipping(target, Skipped((0,), (0,))), [written])[0].mean() < 0.9


def planted(good):
    """Return figures that increase with the similarity of a set to `good`."""
    wanted = [set(good.attention), set(good.mlp)]

    def figures(skipped):
        missed = sum(len(each ^ set(got)) for each, got in zip(wanted, (skipped.attention, skipped.mlp), strict=True))
        return SkippingFigures(2.0 - 0.1 * missed, 1, 0.5, 0.5)

    return figures


def last(searched):
    return deque(searched, maxlen=1).pop()


def test_a_search_finds_what_was_planted_and_depends_on_the_seed_only():
    good = Skipped((1, 4, 5), (2, 5))
    found = [last(search(planted(good), 6, trials=400, seed=seed)) for seed in (1, 1, 2)]
    assert found[0].skipped == found[2].skipped == good
    assert found[0] == found[1]
    few = [last(search(planted(good), 6, trials=5, seed=seed)).skipped for seed in (1, 1)]
    assert few[0] == few[1]


def test_a_search_of_whole_layers_finds_the_best_of_those():
    good = Skipped((1, 4, 5), (1, 4))
    found = list(search(planted(good), 6, trials=200, seed=1, whole_layers=True))
    assert all(each.skipped.attention == each.skipped.mlp for each in found)
    assert {1, 4} <= set(found[-1].skipped.attention) <= {1, 4, 5}


def test_a_search_yields_the_best_set_so_far_after_each_trial():
    found = list(search(planted(Skipped((1,), ())), 6, trials=50, seed=0))
    assert [each.trials for each in found] == list(range(1, 51))
    gains = [each.figures.speed_up for each in found]
    assert gains == sorted(gains)
    assert all(planted(Skipped((1,), ()))(each.skipped) == each.figures for each in found)


def test_a_search_ends_with_its_trials_or_its_sets():
    assert last(search(planted(Skipped((1,), ())), 6, trials=7, seed=0)).trials == 7
    assert last(search(planted(Skipped((1,), ())), 2, trials=10_000, seed=0)).trials == 14  # 2^4 without all and none
    assert last(search(planted(Skipped((0,), ())), 1, trials=9, seed=0)).trials == 2


# --- the command


@functools.cache
def documents():
    return "".join(json.dumps({"text": f"{name} went to the market and bought"}) + "\n" for name in "ABCDEFGH")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(documents())
    return path


@pytest.mark.slow
def test_the_script_writes_a_file_that_the_method_takes(data, tmp_path, capsys):
    out = tmp_path / "skipped.json"
    layer_skip([data], out, TOY, trials=3, texts=4, max_new_tokens=8, prompt_tokens=6)
    said = capsys.readouterr().out
    assert "of 8 layers, attention of" in said
    assert "texts held out from the search of 3 sets" in said
    content = json.loads(out.read_text())
    assert content["trials"] == 3
    assert content["settings"]["seed"] == 0
    options = json.dumps({"skipped": str(out), "num_speculative_tokens": 2})
    generate = ["generate", "--method", "layer_skip", "--speculative-config", options, "--max-new-tokens", "8"]
    assert main([*generate, "--model", TOY, "--json", "A fox"]) == 0
    assert json.loads(capsys.readouterr().out)["statistics"]["drafted"] > 0
    assert main([*generate, "--model", TOY_DRAFT, "A fox"]) == 1
    assert "was made for another model" in capsys.readouterr().err
