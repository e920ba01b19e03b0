"""Logits as compiled functions read them: one row in float32, and the most probable tokens of some rows.

Between two passes every cache is full of weights, so what is done with the scores is done in few, small loops. Does not
know how a token is chosen, nor what the rows stand for.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from foredraft.graph.tree import FloatArray, IntArray

RowReader = Callable[[int], FloatArray]
"""Returns a row's scores, float32[V], to be read only."""

_BLOCK = 64  # logits looked at together


def row_reader(logits: torch.Tensor) -> RowReader:
    """Return what reads the rows of `logits`, float[R, V] on any device."""
    if logits.dtype == torch.bfloat16 and logits.device.type == "cpu":  # torch takes longer to convert a row than this
        bits = logits.detach().view(torch.uint16).numpy()
        return lambda row: widened(bits[row])
    return lambda row: logits[row].detach().float().cpu().numpy()


@njit(cache=True)
def widened(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """Return the float32 values of bfloat16 numbers, which are their upper halves."""
    words = np.empty(len(bits), np.uint32)
    for i in range(len(bits)):
        words[i] = np.uint32(bits[i]) << np.uint32(16)
    return words.view(np.float32)


def top_probabilities(logits: torch.Tensor, k: int, rows: IntArray | None = None) -> tuple[IntArray, FloatArray]:
    """Return the `k` most probable tokens after each of `rows` and their probabilities under the plain softmax.

    Args:
        logits: float[R, V].
        k: how many; at most V are returned.
        rows: int32[S]; None for all.

    Returns:
        int32[S, k] and float32[S, k], by descending probability; NaN where a row holds NaN.
    """
    k = min(k, logits.shape[-1])
    if logits.device.type != "cpu":
        chosen = logits if rows is None else logits[torch.from_numpy(rows).to(logits.device)]
        probabilities, tokens = chosen.softmax(dim=-1, dtype=torch.float32).topk(k, dim=-1)
        return tokens.to(torch.int32).cpu().numpy(), probabilities.cpu().numpy()  # few numbers leave the device
    read, wanted = row_reader(logits), range(len(logits)) if rows is None else rows.tolist()
    found = np.empty((len(wanted), k), np.int32), np.empty((len(wanted), k), np.float32)
    for place, row in enumerate(wanted):
        top_of_row(read(row), found[0][place], found[1][place])
    return found


@njit(cache=True)
def top_of_row(row: FloatArray, tokens: IntArray, probabilities: FloatArray) -> None:
    """Set `tokens`, int32[k], to the most probable ones of a row, float32[V], and `probabilities` to theirs.

    Of equal ones, those with the lower number count as more probable.
    """
    largest_of_row(row, tokens, probabilities)
    largest = probabilities[0]
    total = sum_of_exponentials(row, largest)
    for j in range(len(tokens)):
        probabilities[j] = math.exp(probabilities[j] - largest) / total


@njit(cache=True, fastmath={"nnan", "nsz"})
def _block_maximum(row: FloatArray, start: int, stop: int) -> np.float32:
    largest: np.float32 = row[start]
    for i in range(start, stop):
        largest = max(largest, row[i])
    return largest


@njit(cache=True)
def _insert(tokens: IntArray, values: FloatArray, token: int, value: np.float32) -> None:
    """Put a value that is above the last one in its place of a falling list."""
    place = len(tokens) - 1
    while place > 0 and values[place - 1] < value:
        values[place], tokens[place] = values[place - 1], tokens[place - 1]
        place -= 1
    values[place], tokens[place] = value, token


@njit(cache=True)
def largest_of_row(row: FloatArray, tokens: IntArray, values: FloatArray) -> None:
    """Set `tokens`, int32[k], and `values`, float32[k], to the k largest of a row, float32[V], falling.

    Only blocks of the row are looked into whose largest value is among the k largest of all blocks.
    """
    k, blocks = len(tokens), (len(row) + _BLOCK - 1) // _BLOCK
    maxima = np.empty(blocks, np.float32)
    tokens[:], values[:] = 0, -np.inf
    for block in range(blocks):
        maxima[block] = _block_maximum(row, block * _BLOCK, min((block + 1) * _BLOCK, len(row)))
        if maxima[block] > values[k - 1]:
            _insert(tokens, values, block, maxima[block])
    least = values[k - 1]
    tokens[:], values[:] = 0, -np.inf
    for block in range(blocks):
        if maxima[block] < least:
            continue
        for token in range(block * _BLOCK, min((block + 1) * _BLOCK, len(row))):
            if row[token] > values[k - 1]:
                _insert(tokens, values, token, row[token])


@njit(cache=True, fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def sum_of_exponentials(row: FloatArray, largest: float) -> float:
    """Return the sum of exp(score - largest) over a row, float32[V], to float32's precision; NaN if it holds NaN.

    exp(x) = 2^n exp(r), r being at most ln(2) / 2 from 0, where seven terms of its series are enough. Written so that
    compilers turn it into vector instructions, which they do not do with their own exponential.
    """
    missing = np.int32(not np.isfinite(largest))
    for i in range(len(row)):  # a count, as compilers turn it into vector instructions too
        missing += np.int32(np.isnan(row[i]))
    if missing:
        return np.nan
    series, powers = np.empty(len(row), np.float32), np.empty(len(row), np.int32)
    for i in range(len(row)):
        halves = max((row[i] - np.float32(largest)) * np.float32(1.4426950408889634), np.float32(-126.0))
        n = np.floor(halves + np.float32(0.5))
        r = (halves - n) * np.float32(0.6931471805599453)
        tail = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * np.float32(1 / 720))
        series[i] = np.float32(1) + r * (np.float32(1) + r * (np.float32(0.5) + r * (np.float32(1 / 6) + r * tail)))
        powers[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    scale = powers.view(np.float32)  # 2^n, by its exponent's bits
    total = np.float32(0)
    for i in range(len(row)):
        total += series[i] * scale[i]
    return float(total)
