"""Filters of a row of logits: repetition penalty, temperature, top-k, top-p and min-p, and the resulting distribution.

Does not depend on how tokens are drawn, nor on where the logits come from.
"""

import numpy as np
from numba import njit

from foredraft.contracts import TokenIds
from foredraft.graph.tree import FloatArray
from foredraft.sampling import Probabilities, SamplingOptions
from foredraft.sampling.logits import exponentials, most_probable


@njit(cache=True)
def _smallest_kept(values: FloatArray, weights: FloatArray, needed: float) -> float:
    """Return the largest v such that the `weights` of the `values` >= v sum to at least `needed`; both float32[V].

    The high half of its bits is found first, then the low half. If rounding never reaches the sum, v is the minimum.
    """
    keys = values.view(np.uint32).copy()
    for token in range(len(keys)):  # flipped so that bits are in the order of values: negative floats are reversed
        keys[token] ^= np.uint32(0xFFFFFFFF if keys[token] >> np.uint32(31) else 0x80000000)
    low, mass = np.uint32(0), 0.0
    for shift in (16, 0):
        masses = np.zeros(1 << 16, np.float64)
        for token in range(len(keys)):
            if shift == 16 or keys[token] >> np.uint32(16) == low >> np.uint32(16):
                masses[(keys[token] >> np.uint32(shift)) & np.uint32(0xFFFF)] += weights[token]
        half = len(masses) - 1
        while half > 0 and mass + masses[half] < needed:
            mass += masses[half]
            half -= 1
        low |= np.uint32(half) << np.uint32(shift)
    smallest = np.inf
    for token in range(len(keys)):
        if keys[token] >= low:
            smallest = min(smallest, values[token])
    return smallest


@njit(cache=True)
def filter_row(row: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> FloatArray:
    """Return softmax weights relative to the most probable token, float32[V], 0 for filtered tokens.

    The order is transformers': temperature, top-k, top-p of the remaining tokens, min-p. A temperature of 0 leaves only
    the most probable token. Returns an empty array for an unusable row (NaN, +inf, or nothing finite).
    """
    best = most_probable(row)
    if best < 0:
        return np.empty(0, np.float32)
    if temperature == 0.0:
        certain = np.zeros(len(row), np.float32)
        certain[best] = 1.0
        return certain
    weights = exponentials(row, row[best], temperature)
    if 0 < top_k < len(row):
        _drop_below(weights, row, _smallest_kept(row, np.ones(len(row), np.float32), float(top_k)))
    if top_p < 1.0:
        needed = top_p * weights.sum(dtype=np.float64)
        _drop_below(weights, weights, _smallest_kept(weights, weights, needed))
    if min_p > 0.0:
        _drop_below(weights, weights, min_p)
    return weights


@njit(cache=True)
def _drop_below(weights: FloatArray, values: FloatArray, least: float) -> None:
    """Set the weights of tokens whose values, float32[V], are below `least` to 0."""
    for token in range(len(weights)):
        if values[token] < least:
            weights[token] = 0.0


def penalize(row: FloatArray, seen: TokenIds, penalty: float) -> None:
    """Apply transformers' repetition penalty in place to `row float32[V]` for the token ids `seen`."""
    seen = np.unique(seen)
    values = row[seen]
    row[seen] = np.where(values < 0, values * penalty, values / penalty)


def distribution(row: FloatArray, options: SamplingOptions) -> Probabilities:
    """Return the distribution from which `options` choose a token, float64[V]; one-hot for greedy decoding.

    The `row`, float32[V], is taken after the penalty, which is not applied here, and the processors. An unusable one
    (NaN, +inf, or nothing finite) gives an empty array.
    """
    weights: Probabilities = filter_row(row, *options.filters).astype(np.float64)
    weights /= weights.sum()  # of nothing, which stays empty, too
    return weights
