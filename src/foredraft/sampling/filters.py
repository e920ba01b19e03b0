"""Filters of a row of logits: repetition penalty, temperature, top-k, top-p and min-p.

Does not depend on how tokens are drawn, nor on where the logits come from.
"""

import numpy as np
from numba import njit

from foredraft.contracts import TokenIds
from foredraft.graph.tree import I64, FloatArray
from foredraft.sampling.logits import exponentials, most_probable


@njit(cache=True)
def _smallest_kept(values: FloatArray, weights: FloatArray, needed: float) -> float:
    """Return the largest v such that the `weights` of the `values` >= v sum to at least `needed`; both float32[V].

    Its bits are found in three parts, the highest first. If rounding never reaches the sum, v is the minimum.
    """
    keys = values.view(np.uint32).copy()
    for token in range(len(keys)):  # flipped so that bits are in the order of values: negative floats are reversed
        keys[token] ^= np.uint32(0xFFFFFFFF if keys[token] >> np.uint32(31) else 0x80000000)
    low, mass, above = np.uint32(0), 0.0, np.uint32(0)  # `above` are the bits that are known
    for shift in (21, 10, 0):
        masses = np.zeros(1 << 11, np.float64)
        for token in range(len(keys)):
            if keys[token] & above == low:
                masses[(keys[token] & ~above) >> np.uint32(shift)] += weights[token]
        part = len(masses) - 1
        while part > 0 and mass + masses[part] < needed:
            mass += masses[part]
            part -= 1
        low |= np.uint32(part) << np.uint32(shift)
        above |= np.uint32(0x7FF) << np.uint32(shift)
    smallest = np.inf
    for token in range(len(keys)):
        if keys[token] >= low:
            smallest = min(smallest, values[token])
    return smallest


@njit(cache=True)
def _leading(weights: FloatArray, masses: FloatArray, needed: float) -> I64:
    """Return the tokens of the largest `weights`, ascending, whose `masses` sum to `needed` or more; all if none do.

    Few tokens hold nearly all of the weight, and `_smallest_kept` takes a fifth of the time for them alone.
    """
    tokens = np.empty(len(weights), np.int64)
    for power in (-10, -20, -40):
        bar, count, mass = np.float32(2.0**power), 0, 0.0
        for token in range(len(weights)):
            if weights[token] >= bar:
                tokens[count] = token
                count += 1
        for place in range(count):
            mass += masses[tokens[place]]
        if mass >= needed:
            return tokens[:count]
    return np.arange(len(weights))


@njit(cache=True)
def filter_row(row: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> FloatArray:
    """Return softmax weights relative to the most probable token, float32[V], 0 for filtered tokens.

    The order is transformers': temperature, above 0, top-k, top-p of the remaining tokens, min-p. Returns an empty
    array for an unusable row (NaN, +inf, or nothing finite).
    """
    best = most_probable(row)
    if best < 0:
        return np.empty(0, np.float32)
    weights = exponentials(row, row[best], temperature)
    if 0 < top_k < len(row):
        each, needed = np.ones(len(row), np.float32), float(top_k)
        values = row[_leading(weights, each, needed)]
        _drop_below(weights, row, _smallest_kept(values, each[: len(values)], needed))
    if top_p < 1.0:
        needed = top_p * weights.sum(dtype=np.float64)
        values = weights[_leading(weights, weights, needed)]
        _drop_below(weights, weights, _smallest_kept(values, values, needed))
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
