"""Noise determined by (seed, position, token), transformers' filters, and samples of the softmax."""

import functools
import math

import numba
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft.contracts import Scores
from foredraft.errors import NumericsError, UsageError
from foredraft.sampling import SamplingOptions
from foredraft.sampling.chooser import Sampler
from foredraft.sampling.filters import filter_row, penalize
from foredraft.sampling.noise import gumbel_noise, gumbel_value, perturbed_argmax, philox
from support.filters import UNUSABLE, WITH_FILTERS

pytestmark = pytest.mark.kernels

DRAWS = 250 if numba.config.DISABLE_JIT else 20_000
LEAST_P = 1e-4
"""Seeds are fixed, so a test either always passes or always fails; a sound sampler had a chance of 1e-4 to fail."""

ALL = np.uint32(0xFFFFFFFF)


def words_of(counter, key):
    """The four words of Philox."""
    return np.array(philox(*np.array([*counter, *key], np.uint64)), np.uint64).view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ALL] * 4, [ALL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert words_of(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31])
def test_noise_of_a_subset_equals_noise_of_the_whole(seed, position):
    whole = gumbel_noise(seed, position, np.arange(1000))
    assert np.isfinite(whole).all()
    rng = np.random.default_rng(0)
    for size in (1, 7, 500):
        subset = rng.permutation(1000)[:size]
        np.testing.assert_array_equal(gumbel_noise(seed, position, subset), whole[subset])


def test_noise_is_the_philox_word_of_its_counter_and_key():
    seed, position, token = (7 << 32) | 3, 21, 4 * 5 + 2
    words = words_of([5, position, 0, 0], [3, 7])
    expected = -math.log(-math.log((float(words[2]) + 0.5) / 2**32))
    assert gumbel_noise(seed, position, np.array([token]))[0] == pytest.approx(expected, rel=1e-14)


def test_one_gumbel_value_is_that_of_the_array():
    tokens = np.array([0, 1, 2, 3, 48_001])
    values = [gumbel_value(np.uint64(2**63 + 5), 77, token) for token in tokens.tolist()]
    assert values == gumbel_noise(2**63 + 5, 77, tokens).tolist()


def noise_grid(seeds, positions, tokens):
    gumbel = [[gumbel_noise(s, p, np.arange(tokens)) for p in range(positions)] for s in range(seeds)]
    return np.exp(-np.exp(-np.array(gumbel)))  # uniform


def test_noise_is_uniform_and_gumbel():
    noise = noise_grid(10, 20, 100).ravel()
    assert stats.kstest(noise, "uniform").pvalue > LEAST_P
    gumbel = np.concatenate([gumbel_noise(3, p, np.arange(100)) for p in range(100)])
    assert stats.kstest(gumbel, "gumbel_r").pvalue > LEAST_P


@functools.cache
def _grid():
    return noise_grid(12, 40, 60)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
@pytest.mark.parametrize("distance", [1, 2, 3, 4])
def test_neighbours_do_not_share_noise(axis, distance):
    noise = np.moveaxis(_grid(), axis, 0)
    near, far = noise[:-distance].ravel(), noise[distance:].ravel()
    assert not (near == far).any()
    assert stats.pearsonr(near, far).pvalue > LEAST_P
    cells, _, _ = np.histogram2d(near, far, bins=5, range=[[0, 1], [0, 1]])
    assert stats.chisquare(cells.ravel()).pvalue > LEAST_P


def logits(rng, vocabulary, spread=3.0):
    return (rng.standard_normal(vocabulary) * spread).astype(np.float32)


def filtered_by_transformers(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    scores = torch.from_numpy(row.copy())[None]
    warpers = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0].softmax(-1).numpy()


def weights_of(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return filter_row(row, temperature, top_k, top_p, min_p)


@WITH_FILTERS
@pytest.mark.parametrize("vocabulary", [2, 97, 3000])
def test_survivors_and_probabilities_equal_transformers(options, vocabulary):
    rng = np.random.default_rng(vocabulary)
    for spread in (0.3, 3.0, 12.0):
        for _ in range(4):
            row = logits(rng, vocabulary, spread)
            expected, weights = filtered_by_transformers(row, **options), weights_of(row, **options)
            expected[expected < np.finfo(np.float32).tiny] = 0
            np.testing.assert_array_equal(weights > 0, expected > 0)
            np.testing.assert_allclose(weights / weights.sum(dtype=np.float64), expected, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"min_p": 0.2}, {"top_k": 3, "min_p": 0.5}])
def test_ties_with_the_last_survivor_survive_as_in_transformers(options):
    row = np.array([2, 1, 5, 2, 2, 0, 5], np.float32)
    np.testing.assert_array_equal(weights_of(row, **options) > 0, filtered_by_transformers(row, **options) > 0)


def test_masked_tokens_are_dropped_and_the_rest_keeps_its_proportions():
    row = np.array([1.0, -np.inf, 0.0, -np.inf], np.float32)
    weights = weights_of(row)
    np.testing.assert_allclose(weights, [1, 0, math.exp(-1), 0], rtol=1e-6)
    assert {perturbed_argmax(weights, np.uint64(1), p) for p in range(200)} == {0, 2}


def obvious_argmax(weights, seed, position):
    tokens = np.flatnonzero(weights > 0)
    return int(tokens[np.argmax(np.log(weights[tokens].astype(np.float64)) + gumbel_noise(seed, position, tokens))])


@WITH_FILTERS
@pytest.mark.parametrize("vocabulary", [1, 3, 97, 601])
def test_perturbed_argmax_equals_the_obvious_one(options, vocabulary):
    rng = np.random.default_rng(vocabulary)
    for draw in range(20):
        weights = weights_of(logits(rng, vocabulary, rng.choice([0.0, 0.5, 4.0])), **options)
        seed, position = int(rng.integers(2**63)), int(rng.integers(10_000))
        expected = obvious_argmax(weights, seed, position)
        assert perturbed_argmax(weights, np.uint64(seed), position) == expected, draw


@pytest.mark.parametrize("over", ["positions", "seeds"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_softmax(over, options):
    weights = weights_of(logits(np.random.default_rng(4), 12, 1.0), **options)
    draws = [
        perturbed_argmax(weights, np.uint64(99), n)
        if over == "positions"
        else perturbed_argmax(weights, np.uint64(n), 5)
        for n in range(DRAWS)
    ]
    counts = np.bincount(draws, minlength=len(weights))
    alive = weights > 0
    assert not counts[~alive].any()
    expected = weights[alive].astype(np.float64) / weights.sum(dtype=np.float64) * DRAWS
    assert stats.chisquare(counts[alive], expected).pvalue > LEAST_P


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_draws_at_neighbouring_positions_are_independent(distance):
    weights = weights_of(logits(np.random.default_rng(6), 6, 0.7))
    draws = np.array([perturbed_argmax(weights, np.uint64(1), p) for p in range(DRAWS)])
    table = np.zeros((6, 6))
    np.add.at(table, (draws[:-distance], draws[distance:]), 1)
    assert stats.chi2_contingency(table).pvalue > LEAST_P


def test_draws_of_neighbouring_seeds_are_independent():
    weights = weights_of(logits(np.random.default_rng(7), 6, 0.7))
    table = np.zeros((6, 6))
    for position in range(DRAWS // 2):
        table[perturbed_argmax(weights, np.uint64(8), position), perturbed_argmax(weights, np.uint64(9), position)] += 1
    assert stats.chi2_contingency(table).pvalue > LEAST_P


def chosen(row, options, prefix=(1, 2, 3), processors=(), path=()):
    sampler, scores = Sampler(options, processors), Scores(torch.from_numpy(np.atleast_2d(row)))
    ids = np.array(prefix, np.int64) if sampler.needs_prefix else None
    return sampler.chooser(scores, len(prefix) - 1, ids)(0, path)


@pytest.mark.parametrize("row", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(), SamplingOptions(repetition_penalty=1.2), SamplingOptions(do_sample=True),
        SamplingOptions(do_sample=True, top_k=2, top_p=0.9, min_p=0.1),
    ],
    ids=["greedy", "penalised", "sampled", "filtered"],
)  # fmt: skip
def test_unusable_rows_are_refused_with_their_position(row, options):
    with pytest.raises(NumericsError, match="position 5"):
        chosen(np.array(row, np.float32), options, path=(0, 2))


def test_a_processor_that_leaves_nothing_is_refused():
    nothing = lambda ids, scores: torch.full_like(scores, -torch.inf)  # noqa: E731  # one line says it
    for options in (SamplingOptions(), SamplingOptions(do_sample=True)):
        with pytest.raises(NumericsError, match="filter left none"):
            chosen(np.zeros(4, np.float32), options, processors=[nothing])


def test_greedy_takes_the_most_probable_token_in_any_float_type():
    row = np.array([[0, 3, 1], [9, 3, 1]], np.float32)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        sampler = Sampler(SamplingOptions())
        choose = sampler.chooser(Scores(torch.from_numpy(row).to(dtype)), at=0)
        assert [choose(0, []), choose(1, [4])] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_draw_depends_on_seed_and_position_alone_and_not_on_the_row_or_the_split_of_the_path(dtype):
    row = torch.from_numpy(logits(np.random.default_rng(1), 50)).to(dtype)
    scores = Scores(torch.stack([row] * 3))
    texts = set()
    for seed in (5, 6):
        options = SamplingOptions(do_sample=True, seed=seed)
        split = [
            [Sampler(options).chooser(scores, at)(line, [9] * (position - at - 1)) for position in range(4, 30)]
            for at, line in ((0, 0), (2, 1), (3, 2))
        ]
        assert split[0] == split[1] == split[2]
        texts.add(tuple(split[0]))
    assert len(texts) == 2


@pytest.mark.parametrize("path", [(), (4,), (4, 4, 4)])
def test_the_noise_is_that_of_the_position_where_the_token_will_stand(path):
    row, prefix = logits(np.random.default_rng(8), 30, 1.0), (1, 2, 3, 4, 5)
    for seed in range(40):
        token = chosen(row, SamplingOptions(do_sample=True, seed=seed), prefix, path=path)
        assert token == obvious_argmax(weights_of(row), seed, len(prefix) + len(path))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty_equals_transformers(penalty):
    rng = np.random.default_rng(2)
    for _ in range(20):
        row, seen = logits(rng, 40), rng.integers(0, 40, 25)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(seen)[None], torch.from_numpy(row)[None])
        changed = row.copy()
        penalize(changed, seen, penalty)
        np.testing.assert_allclose(changed, expected[0].numpy(), rtol=1e-6)


def test_the_penalty_counts_the_drafted_path_and_leaves_the_scores_alone():
    row = np.array([[5, 4, 3, 2]], np.float32)
    options = SamplingOptions(repetition_penalty=10.0)
    assert chosen(row, options, prefix=(3,)) == 0
    assert chosen(row, options, prefix=(3,), path=(0,)) == 1
    assert chosen(row, options, prefix=(3,), path=(0, 1)) == 2
    assert row.tolist() == [[5, 4, 3, 2]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.0}, "temperature is 0.0.*do_sample=False"),
        ({"temperature": -1.0}, "at least 1e-06"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1.*0 to keep all"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0.*1 is off"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, r"2\*\*64 - 1"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        SamplingOptions(**options)


def test_the_edges_of_every_range_are_accepted():
    for options in (
        {"temperature": 1e-3}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}, {"min_p": 1.0}, {"seed": 2**64 - 1},
    ):  # fmt: skip
        assert 0 <= chosen(np.array([0.0, 1.0], np.float32), SamplingOptions(do_sample=True, **options)) <= 1
