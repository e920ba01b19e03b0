"""Rows of logits in float32, and their most probable tokens."""

import numpy as np
import pytest
import torch

from foredraft.contracts import TOP
from foredraft.sampling.logits import (
    block_maxima,
    largest_of_row,
    rough_sum,
    top_by_blocks,
    top_on_device,
    top_probabilities,
)

pytestmark = pytest.mark.kernels


def copied_from_device(logits, k):
    tokens, bits = top_on_device(logits, min(k, logits.shape[1])).numpy()
    return tokens, bits.view(np.float32)


def of_blocks(logits, k):
    """Of a compiled pass, which summarises its logits in float32."""
    logits = logits.float()
    best, (tokens, probabilities) = top_by_blocks(logits, block_maxima(logits), logits.logsumexp(-1))
    assert best.tolist() == logits.argmax(-1).tolist()
    return tokens[:, :k], probabilities[:, :k]


def some_logits(rows, vocabulary, dtype=torch.float32):
    return (3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "k"), [(7, 3), (64, 6), (65, 6), (1000, 1), (1000, 8), (5, 9)])
@pytest.mark.parametrize("found", [top_probabilities, copied_from_device, of_blocks])
def test_top_probabilities_are_those_of_the_softmax(found, dtype, vocabulary, k):
    logits = (3 * torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary))).to(dtype)
    tokens, probabilities = found(logits, k)
    softmax = logits.float().softmax(dim=-1)
    expected = softmax.topk(min(k, vocabulary), dim=-1).values.numpy()
    assert tokens.shape == probabilities.shape == (4, min(k, vocabulary))
    np.testing.assert_allclose(probabilities, expected, rtol=0.031)
    assert probabilities.max() <= 1 + 1e-6
    np.testing.assert_allclose(np.take_along_axis(softmax.numpy(), tokens.astype(np.int64), 1), expected, rtol=1e-5)
    assert all(len(set(row)) == len(row) for row in tokens.tolist())


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 200])
def test_the_largest_are_found_and_of_equal_ones_the_first(vocabulary):
    row = np.random.default_rng(vocabulary).integers(-4, 4, vocabulary).astype(np.float32)
    k = min(7, vocabulary)
    tokens, values = np.empty(k, np.int32), np.empty(k, np.float32)
    largest_of_row(row, tokens, values)
    expected = np.argsort(-row, kind="stable")[:k]
    assert tokens.tolist() == expected.tolist()
    assert values.tolist() == row[expected].tolist()


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_the_sum_of_exponentials_is_right_to_hundredths(spread):
    row = (spread * np.random.default_rng(1).standard_normal(300)).astype(np.float32)
    row[7] = -np.inf
    expected = np.exp(row.astype(np.float64) - row.max()).sum()
    assert rough_sum(row, row.max()) == pytest.approx(expected, rel=0.031)


def test_of_a_row_that_cannot_be_used_there_is_no_best_token():
    logits = some_logits(6, 150)
    logits[0, 100] = logits[1, 140] = torch.nan
    logits[2, 70] = torch.inf
    logits[3] = -torch.inf
    logits[4, 8] = -torch.inf
    best, (tokens, probabilities) = top_by_blocks(logits, block_maxima(logits), logits.logsumexp(-1))
    assert np.isnan(probabilities[:4]).all()
    assert np.isfinite(probabilities[4:]).all()
    assert best[:4].tolist() == [-1] * 4
    assert best[4:].tolist() == logits[4:].argmax(-1).tolist()
    assert tokens.shape == (6, TOP)
    equal = torch.zeros(1, 150)
    assert top_by_blocks(equal, block_maxima(equal), equal.logsumexp(-1))[1][0].tolist() == [list(range(TOP))]


def test_a_row_with_nan_has_no_probabilities():
    logits = some_logits(2, 30)
    logits[0, 3] = torch.nan
    probabilities = top_probabilities(logits, 3)[1]
    assert np.isnan(probabilities[0]).any()
    assert np.isfinite(probabilities[1]).all()
