"""Sampling on the device: noise, filters and texts equal the host's; and recorded on a GPU."""

from functools import partial

import numpy as np
import pytest
import torch

from foredraft.api import Generator
from foredraft.contracts import Scores
from foredraft.engine.batch import write_all
from foredraft.errors import ForedraftWarning, NumericsError
from foredraft.model import device_draw
from foredraft.model.device_draw import SETTINGS, DrawnRows, RowDraws, drawn_rows, gumbel_rows
from foredraft.model.recordings import recorded
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from foredraft.sampling.chooser import Sampler, drawn
from foredraft.sampling.noise import gumbel_noise
from support.families import prompt_of
from support.filters import UNUSABLE, WITH_FILTERS
from support.llamas import small_model
from support.recorded import Watch, begun, caches_of, finished, finished_in_store, our_warnings_alone, recorded_target

SEED = 0xFEDCBA9876543210
NO_FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def settings_of(seed=SEED, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return torch.tensor([seed & 0xFFFFFFFF, seed >> 32, temperature, top_k, top_p, min_p], dtype=torch.float64)


def assert_drawn_as_on_the_host(device, dtype, options, rows=96, vocabulary=1003):
    rng = np.random.default_rng(5)
    spreads = rng.choice([0.5, 3.0, 12.0], (rows, 1))
    logits = torch.from_numpy((rng.standard_normal((rows, vocabulary)) * spreads).astype(np.float32)).to(dtype)
    positions = torch.from_numpy(rng.integers(0, 100_000, rows))
    wanted = NO_FILTERS | options
    expected = [
        drawn(row, np.uint64(SEED), at + 1, **wanted)
        for row, at in zip(logits.float().numpy(), positions.tolist(), strict=True)
    ]
    held, places, draws = logits.to(device), positions.to(device), RowDraws()
    stream, pool = (torch.cuda.Stream(), torch.cuda.graph_pool_handle()) if held.is_cuda else (None, None)
    after = DrawnRows(places, partial(recorded, stream=stream, pool=pool))
    after.logits = held
    with our_warnings_alone():
        assert draws.draw(after, rows - 1, SEED, **wanted) == expected[:-1]
        other = wanted | {"temperature": 2.0}
        assert draws.draw(after, rows, SEED + 1, **other) == [
            drawn(row, np.uint64(SEED + 1), at + 1, **other)
            for row, at in zip(logits.float().numpy(), positions.tolist(), strict=True)
        ]
        for changed in (held, places):
            changed.copy_(changed.flip(0))
        assert draws.draw(after, rows, SEED, **wanted) == expected[::-1]
    assert len(set(expected)) > 1 or options.get("top_k") == 1


@pytest.mark.parametrize("width", [1, 4, 1003])
def test_noise_is_that_of_the_host(width):
    positions = torch.tensor([0, 1, 77_777, 2**32 - 1])
    expected = [gumbel_noise(SEED, at, np.arange(width)) for at in positions.tolist()]
    given = gumbel_rows(positions, torch.arange((width + 3) // 4), settings_of())[:, :width]
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-12, atol=1e-12)


@WITH_FILTERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_drawn_as_on_the_host(options, dtype):
    assert_drawn_as_on_the_host("cpu", dtype, options)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"min_p": 0.2}, {"top_k": 3, "min_p": 0.5}, {"top_k": 7}])
def test_ties_with_the_last_survivor_survive(options):
    row, wanted = np.array([2, 1, 5, 2, 2, 0, 5], np.float32), NO_FILTERS | options | {"temperature": 3.0}
    positions = np.arange(400)
    tokens = drawn_rows(
        torch.from_numpy(np.tile(row, (400, 1))), torch.from_numpy(positions), settings_of(**wanted), filters=True
    )
    assert tokens.tolist() == [drawn(row, np.uint64(SEED), at + 1, **wanted) for at in positions.tolist()]


@pytest.mark.parametrize("row", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("filters", [False, True])
def test_a_row_that_cannot_be_used_is_told_and_spoils_no_other(row, filters):
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0], row, [0.0, 0.0, 0.0, 90.0]])
    settings = settings_of(top_k=2) if filters else settings_of(temperature=0.1)
    tokens = drawn_rows(logits, torch.arange(3), settings, filters=filters)
    assert tokens.tolist()[1:] == [-1, 3]


def test_rows_are_drawn_alike_few_at_a_time(monkeypatch):
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    whole = drawn_rows(logits, torch.arange(9), settings_of(), filters=False)
    monkeypatch.setattr(device_draw, "_MOST_AT_ONCE", 100)
    assert drawn_rows(logits, torch.arange(9), settings_of(), filters=False).tolist() == whole.tolist()


@pytest.mark.parametrize("filters", [False, True])
def test_what_is_recorded_neither_waits_for_values_nor_copies_from_the_host(filters):
    logits, positions = torch.empty(8, 97, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    settings = torch.empty(SETTINGS, dtype=torch.float64, device="meta")
    with torch.inference_mode(), Watch() as watch:
        assert drawn_rows(logits, positions, settings, filters=filters).shape == (8,)
    assert not watch.seen


def test_sampling_reads_the_tokens_that_the_device_drew():
    asked = []

    def draw(*law):
        asked.append(law)
        return [3, -1]

    options = SamplingOptions(do_sample=True, temperature=0.5, top_k=7, top_p=0.9, min_p=0.01, seed=SEED)
    scores = Scores(torch.zeros(2, 5), best=np.array([1, 1]), draw=draw)
    choose = Sampler(options).chooser(scores, at=0)
    assert choose(0, []) == 3
    with pytest.raises(NumericsError, match="position 2"):
        choose(1, [3])
    assert asked == [(SEED, 0.5, 7, 0.9, 0.01)]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.05}])
def test_a_text_is_drawn_without_a_row_of_scores_leaving_the_device(options, monkeypatch):
    sampling = {"do_sample": True, "temperature": 0.8, "seed": 3, **options}
    expected = finished(begun(TorchTarget(small_model()), 25, **sampling))
    monkeypatch.setattr("foredraft.sampling.chooser.Sampler._row", None)
    assert finished(begun(recorded_target(small_model()), 25, **sampling)) == expected


def test_texts_of_a_batch_are_drawn_from_their_own_rows():
    sampling, lengths = {"do_sample": True, "temperature": 0.8, "seed": 3}, (20, 25)
    expected = [finished(begun(TorchTarget(small_model()), length, **sampling)) for length in lengths]
    generator = Generator(recorded_target(small_model()), None, method="adaptix", options={"table": "none"}, nodes=12)
    runs = [generator.begin(prompt_of(length), SamplingOptions(**sampling), max_new_tokens=48) for length in lengths]
    found = write_all(generator.batch(), runs, most=2)
    assert [tuple(run.seq.emitted.tolist()) for run in found] == expected


@pytest.mark.parametrize("other", [{"repetition_penalty": 1.3}])
def test_what_looks_at_the_text_reads_rows(other):
    sampling = {"do_sample": True, "seed": 3, **other}
    expected = finished(begun(TorchTarget(small_model()), 25, **sampling))
    assert finished(begun(recorded_target(small_model()), 25, **sampling)) == expected


def assert_told_once(sentence):
    sampling = {"do_sample": True, "seed": 3}
    target = recorded_target(small_model())
    caches, runs = caches_of(target), [begun(target, length, **sampling) for length in (20, 25)]
    with pytest.warns(ForedraftWarning, match="Tokens cannot be drawn on this device") as told:
        ended = [finished_in_store(run, caches) for run in runs]
    assert len(told) == 1
    assert sentence in str(told[0].message)
    assert ended[-1][1] is not None  # passes are still recorded
    assert [text for text, _ in ended] == [
        finished(begun(TorchTarget(small_model()), length, **sampling)) for length in (20, 25)
    ]


def test_a_failure_is_told_once_and_the_host_draws(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no compiler for this device")

    monkeypatch.setattr(device_draw, "drawn_rows", fails)
    assert_told_once("(RuntimeError: no compiler for this device); the host draws them")


def test_what_cannot_be_recorded_is_drawn_unrecorded():
    def refuses(_):
        raise RuntimeError("operation not permitted when stream is capturing")

    logits, positions = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    after = DrawnRows(positions, refuses)
    after.logits = logits
    expected = drawn_rows(logits, positions, settings_of(), filters=False).tolist()
    assert [RowDraws().draw(after, 5, SEED, **NO_FILTERS) for _ in range(2)] == [expected] * 2


def test_a_fused_draw_that_gives_other_tokens_is_not_used(monkeypatch):
    def wrong(*rows, filters):
        return drawn_rows(*rows, filters=filters) + 1

    monkeypatch.setattr(device_draw, "quickest_draw", wrong)
    assert_told_once("fused into one kernel, drawing gives other tokens")


@pytest.mark.gpu
@WITH_FILTERS
def test_a_gpu_draws_as_the_host_does(options):
    assert_drawn_as_on_the_host("cuda", torch.bfloat16, options)
