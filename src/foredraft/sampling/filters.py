"""Filters of a row of logits: repetition penalty, temperature, top-k, top-p and min-p, and the resulting distribution.

Does not depend on how tokens are drawn, nor on where the logits come from.
"""

import math

import numpy as np
from numba import njit

from foredraft.contracts import TokenIds
from foredraft.graph.tree import FloatArray
from foredraft.sampling import Probabilities, SamplingOptions
from foredraft.sampling.logits import exponentials, most_probable


@njit(cache=True)
def _weight_above(weights: FloatArray, share: float, total: float) -> float:
    """Return the largest w such that the weights >= w sum to at least `share` of `total`: the nucleus's last weight."""
    # weights are in [0, 1]; bins by powers of two find the few that need sorting
    bins = np.zeros(160, np.float64)
    for weight in weights:
        if weight > 0:
            bins[min(159, int(-np.log2(weight)))] += weight
    mass = 0.0
    last = 0
    while last < 159 and mass + bins[last] < share * total:
        mass += bins[last]
        last += 1
    edge = weights[(weights > 0.5 ** (last + 1) * 0.999) & (weights < 0.5**last * 1.001)]
    inside = weights[weights >= 0.5**last * 1.001]
    mass = 0.0
    for weight in inside:
        mass += weight
    cut = 2.0
    for weight in np.sort(edge)[::-1]:
        if mass >= share * total:
            break
        mass += weight
        cut = weight
    if cut > 1.5:  # all needed weights are above the edge bin
        cut = inside.min()
    return cut


@njit(cache=True)
def _kth_largest(row: FloatArray, k: int) -> float:
    """Return the k-th largest value of float32[V], 1 <= k <= V, by the high half of its bits, then the low half."""
    keys = row.view(np.uint32).copy()
    for token in range(len(keys)):  # flipped so that bits are in the order of values: negative floats are reversed
        keys[token] ^= np.uint32(0xFFFFFFFF if keys[token] >> np.uint32(31) else 0x80000000)
    low, missing = np.uint32(0), k
    for shift in (16, 0):
        counts = np.zeros(1 << 16, np.int64)
        for key in keys:
            if shift == 16 or key >> np.uint32(16) == low >> np.uint32(16):
                counts[(key >> np.uint32(shift)) & np.uint32(0xFFFF)] += 1
        half = len(counts) - 1
        while counts[half] < missing:
            missing -= counts[half]
            half -= 1
        low |= np.uint32(half) << np.uint32(shift)
    token = 0
    while keys[token] != low:
        token += 1
    return float(row[token])


@njit(cache=True)
def filter_row(row: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> FloatArray:
    """Return softmax weights relative to the most probable token, float32[V], 0 for filtered tokens.

    The order is transformers': temperature, top-k, top-p of the remaining tokens, min-p. Returns an empty array for an
    unusable row (NaN, +inf, or nothing finite).
    """
    best = most_probable(row)
    if best < 0:
        return np.empty(0, np.float32)
    weights = exponentials(row, row[best], temperature)
    if 0 < top_k < len(row):
        smallest_kept = _kth_largest(row, top_k)
        for token in range(len(row)):
            if row[token] < smallest_kept:
                weights[token] = 0.0
    if top_p < 1.0:
        total = 0.0
        for weight in weights:
            total += weight
        cut = _weight_above(weights, top_p, total)
        for token in range(len(row)):
            if weights[token] < cut:
                weights[token] = 0.0
    if min_p > 0.0:
        for token in range(len(row)):
            if weights[token] < min_p:
                weights[token] = 0.0
    return weights


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
    if options.do_sample:
        weights = filter_row(row, options.temperature, options.top_k, options.top_p, options.min_p).astype(np.float64)
    else:
        weights = np.zeros(len(row) if math.isfinite(row.max()) else 0, np.float64)
        weights[row.argmax() : row.argmax() + 1] = 1.0
    return weights / weights.sum() if len(weights) else weights
