"""Compiled functions on logits: a row in float32, and the most probable tokens of some rows.

After a pass the CPU caches hold weights, so logits are processed in few, small loops. Does not depend on how a token is
chosen, nor on what the rows are.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit

from foredraft.contracts import TOP
from foredraft.graph.tree import FloatArray, IntArray

_BLOCK = 64  # logits of a block, of which only the maximum is compared first; chosen
_LINE = np.float32(127 - 0.0436775)  # float32's exponent bias, minus the shift that balances the errors of `rough_sum`


def rows_of(logits: torch.Tensor) -> FloatArray:
    """Return logits, float[R, V] on the CPU, as float32[R, V]; a view of those that are, as after compiled passes."""
    if logits.requires_grad or not logits.is_contiguous() or logits.dtype != torch.float32:
        logits = logits.detach().float().contiguous()  # each call into torch takes some 15 us after a pass
    found: FloatArray = logits.numpy()
    return found


def top_probabilities(logits: torch.Tensor, k: int) -> tuple[IntArray, FloatArray]:
    """Return the `k`, at most V, most probable tokens after each row, and their plain softmax probabilities.

    They are int32[R, k] and float32[R, k], by descending probability, with an error of up to 3 %; NaN if a row holds
    NaN. `logits` are float[R, V].
    """
    k = min(k, logits.shape[-1])
    if logits.device.type != "cpu":
        tokens, bits = top_on_device(logits, k).cpu().numpy()
        return tokens, bits.view(np.float32)
    found = np.empty((len(logits), k), np.int32), np.empty((len(logits), k), np.float32)
    top_of_rows(rows_of(logits), *found)
    return found


def best_on_device(logits: torch.Tensor) -> torch.Tensor:
    """Return the most probable token after each row, int32[R], -1 where its logit is not finite."""
    largest, best = logits.max(dim=-1)
    return best.to(torch.int32).masked_fill(~largest.isfinite(), -1)


def top_on_device(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return what `top_probabilities` does, but exact, in one tensor, int32[2, R, k]: tokens, and bits of floats.

    Blocks of tokens are chosen by their maximum before tokens are, because a device takes long to sort a vocabulary.
    """
    width, rows = logits.shape[1], logits
    tokens = torch.arange(width, device=logits.device).expand_as(logits)
    if width > k * _BLOCK:
        padded = torch.nn.functional.pad(logits, (0, -width % _BLOCK), value=-torch.inf)
        blocks = block_maxima(padded).topk(k, dim=-1).indices
        places = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
        rows, tokens = padded.gather(1, places), places.clamp(max=width - 1)  # no token is beyond the last
    largest, places = rows.topk(k, dim=-1)
    probabilities = (largest.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
    return torch.stack([tokens.gather(1, places).to(torch.int32), probabilities.view(torch.int32)])


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each block of 64 logits of a row, float[R, V / 64 rounded up], from float[R, V]."""
    if missing := -logits.shape[1] % _BLOCK:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    maxima: torch.Tensor = logits.unflatten(1, (-1, _BLOCK)).amax(dim=-1)
    return maxima


def top_by_blocks(
    logits: torch.Tensor, maxima: torch.Tensor, totals: torch.Tensor
) -> tuple[IntArray, tuple[IntArray, FloatArray]]:
    """Return `best` and `top` of `Scores` from logits, float32[R, V] on the CPU, that a pass has summarised.

    `maxima` is from `block_maxima`, and `totals`, float32[R], are the logarithms of the sums of exponentials. The
    probabilities of a row that cannot be used are NaN.
    """
    return _top_by_blocks(logits.numpy(), maxima.numpy(), totals.numpy())


@njit(cache=True)
def _top_by_blocks(
    logits: FloatArray, maxima: FloatArray, totals: FloatArray
) -> tuple[IntArray, tuple[IntArray, FloatArray]]:
    shape = logits.shape[0], min(TOP, logits.shape[1])
    best, tokens, probabilities = np.empty(shape[0], np.int32), np.empty(shape, np.int32), np.empty(shape, np.float32)
    for row in range(len(logits)):
        _largest(logits[row], maxima[row], np.float32(-np.inf), tokens[row], probabilities[row])
        usable = np.isfinite(probabilities[row, 0]) and not has_nan(maxima[row])
        if not usable:
            best[row], probabilities[row] = -1, np.nan
            continue
        best[row] = tokens[row, 0]
        for i in range(tokens.shape[1]):
            probabilities[row, i] = np.exp(probabilities[row, i] - totals[row])
    return best, (tokens, probabilities)


@njit(cache=True)
def top_of_rows(logits: FloatArray, tokens: IntArray, probabilities: FloatArray) -> None:
    """Set `tokens` and `probabilities`, [R, k], to those of each row; ties go to the lower token."""
    for place in range(len(logits)):
        row = logits[place]
        largest_of_row(row, tokens[place], probabilities[place])
        largest = probabilities[place, 0]
        total = rough_sum(row, largest)
        for j in range(tokens.shape[1]):
            probabilities[place, j] = math.exp(probabilities[place, j] - largest) / total


@njit(cache=True)
def _block_maxima(row: FloatArray) -> IntArray:
    """Return the maximum of each block as an integer whose order is that of the floats.

    Compilers vectorise the maximum of integers but not of floats, and best in loops of constant length.
    """
    bits, whole = row.view(np.int32), len(row) // _BLOCK
    maxima = np.full((len(row) + _BLOCK - 1) // _BLOCK, np.int32(-0x80000000))
    for block in range(whole):
        largest = np.int32(-0x80000000)
        for i in range(block * _BLOCK, block * _BLOCK + _BLOCK):
            largest = max(largest, bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        maxima[block] = largest
    for i in range(whole * _BLOCK, len(row)):
        maxima[whole] = max(maxima[whole], bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return maxima


@njit(cache=True)
def _insert(tokens: IntArray, values: Any, token: int, value: Any) -> None:
    """Insert a value above the last one into a descending list, and drop the last one."""
    place = len(tokens) - 1
    while place > 0 and values[place - 1] < value:
        values[place], tokens[place] = values[place - 1], tokens[place - 1]
        place -= 1
    values[place], tokens[place] = value, token


@njit(cache=True)
def largest_of_row(row: FloatArray, tokens: IntArray, values: FloatArray) -> None:
    """Set `tokens`, int32[k], and `values`, float32[k], to the k largest of a row, float32[V], descending."""
    _largest(row, _block_maxima(row), np.int32(-0x80000000), tokens, values)


@njit(cache=True)
def _largest(row: FloatArray, maxima: Any, lowest: Any, tokens: IntArray, values: FloatArray) -> None:
    """Do the same by the `maxima` of blocks, floats or integers in their order, none below `lowest`.

    Only blocks whose maximum is among the k largest maxima are read.
    """
    k = len(tokens)
    of_blocks = np.full(k, lowest)
    for block in range(len(maxima)):
        if maxima[block] > of_blocks[k - 1]:
            _insert(tokens, of_blocks, block, maxima[block])
    least = of_blocks[k - 1]
    tokens[:], values[:] = 0, -np.inf
    for block in range(len(maxima)):
        if maxima[block] >= least:  # false for NaN
            for token in range(block * _BLOCK, min((block + 1) * _BLOCK, len(row))):
                if row[token] > values[k - 1]:
                    _insert(tokens, values, token, row[token])


@njit(cache=True)
def has_nan(row: FloatArray) -> bool:
    """Return whether a row, float32[V], holds NaN."""
    missing = np.int32(0)
    for i in range(len(row)):  # compilers vectorise a count
        missing += np.int32(np.isnan(row[i]))
    return bool(missing > 0)


@njit(cache=True)
def most_probable(row: FloatArray) -> int:
    """Return the first maximum of a row, float32[V]; -1 if it holds NaN or +inf, or nothing finite."""
    tokens, values = np.empty(1, np.int32), np.empty(1, np.float32)
    largest_of_row(row, tokens, values)
    return -1 if not np.isfinite(values[0]) or has_nan(row) else int(tokens[0])


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def exponentials(row: FloatArray, largest: float, temperature: float) -> FloatArray:
    """Return exp((score - largest) / temperature) of a row, float32[V], to float32's precision; 0 below 2^-126.

    The row has no NaN and a finite maximum `largest`. exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, where seven terms of
    the series suffice. Compilers vectorise this, but not their own exponential.
    """
    series, powers = np.empty(len(row), np.float32), np.empty(len(row), np.int32)
    for i in range(len(row)):
        halves = (row[i] - np.float32(largest)) / np.float32(temperature) * np.float32(1.4426950408889634)
        above = np.int32(halves >= np.float32(-126.0))
        halves = max(halves, np.float32(-126.0))
        n = np.floor(halves + np.float32(0.5))
        r = (halves - n) * np.float32(0.6931471805599453)
        tail = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * np.float32(1 / 720))
        series[i] = np.float32(1) + r * (np.float32(1) + r * (np.float32(0.5) + r * (np.float32(1 / 6) + r * tail)))
        powers[i] = above * ((np.int32(n) + np.int32(127)) << np.int32(23))
    scale = powers.view(np.float32)  # 2^n, from its exponent bits
    for i in range(len(row)):
        series[i] *= scale[i]
    return series


@njit(cache=True, fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def rough_sum(row: FloatArray, largest: float) -> float:
    """Return the sum of exp(score - largest) over a row, float32[V], with an error of up to 3 %; NaN if it holds NaN.

    The exponential is linear between powers of two, like the bits of a float32 (Schraudolph, "A Fast, Compact
    Approximation of the Exponential Function", 1999), in a third of the time of `exponentials`.
    """
    if not np.isfinite(largest) or has_nan(row):
        return np.nan
    lines, total = np.empty(len(row), np.int32), np.float32(0)
    for i in range(len(row)):
        halves = max((row[i] - np.float32(largest)) * np.float32(1.4426950408889634), np.float32(-126.0))
        lines[i] = np.int32((halves + _LINE) * np.float32(1 << 23))
    values = lines.view(np.float32)
    for i in range(len(row)):
        total += values[i]
    return max(float(total), 1.0)  # the largest score contributes 1
