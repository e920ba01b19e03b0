"""Noise determined by (seed, position, token), and sampling with it.

Sampling is the Gumbel-max trick with Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC11); docs/explanation/sampling.md has the definition. Each value depends on its token alone, so any subset of the
vocabulary, on any machine, gets the same noise. Does not depend on where the weights come from, nor on drafts.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import F64, I64, FloatArray

_TOKENS = 256  # of a part of the vocabulary whose noise is computed, or skipped, together; chosen
_MARGIN = 1.0 - 1e-6  # on bounds that are compared in float32, which rounds by at most 6e-8
_LEAST = 0.5 / 4294967296.0 * _MARGIN  # 1 - u of the largest u, below -log(u)


@njit(cache=True, inline="always")
def philox(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Return Philox-4x32-10 of a counter under a key: four words, two to an integer, the first in its lower half.

    Words are the lower halves of 64 bits, because compilers vectorise these products best; what is above is ignored.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * (c0 & low), np.uint64(0xCD9E8D57) * (c2 & low)
        c0, c1, c2, c3 = p1 >> half ^ c1 ^ k0, p1, p0 >> half ^ c3 ^ k1, p0
        k0, k1 = k0 + np.uint64(0x9E3779B9), k1 + np.uint64(0xBB67AE85)
    return c0 & low | c1 << half, c2 & low | c3 << half


@njit(cache=True)
def _words(first: int, position: int, seed: np.uint64, pairs: npt.NDArray[np.uint64]) -> None:
    """Set `pairs`, uint64[2 n], to the words of 4 n tokens from 4 `first` on, two to an integer; vectorised."""
    k0, k1, zero = seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32), np.uint64(0)
    for i in range(len(pairs) // 2):
        pairs[2 * i], pairs[2 * i + 1] = philox(np.uint64(first + i), np.uint64(position), zero, zero, k0, k1)


@njit(cache=True, inline="always")
def _uniform(word: np.uint32) -> float:
    """Return the uniform value u of a word, above 0 and below 1."""
    return (np.float64(word) + 0.5) / 4294967296.0


@njit(cache=True)
def gumbel_value(seed: np.uint64, position: int, token: int) -> float:
    """Return g(seed, position, token), a standard Gumbel value, for compiled code."""
    pairs = np.empty(2, np.uint64)
    _words(token // 4, position, seed, pairs)
    return float(-np.log(-np.log(_uniform(pairs.view(np.uint32)[token % 4]))))


@njit(cache=True)
def _gumbel_values(seed: np.uint64, position: int, tokens: I64) -> F64:
    noise = np.empty(len(tokens), np.float64)
    for i in range(len(tokens)):
        noise[i] = gumbel_value(seed, position, tokens[i])
    return noise


def gumbel_noise(seed: int, position: int, tokens: I64) -> F64:
    """Return g(seed, position, token) for each of `tokens`: standard Gumbel values, float64[n]."""
    return _gumbel_values(np.uint64(seed), position, tokens)  # numba itself takes no int above 2^63


@njit(cache=True)
def _any_above(weights: FloatArray, least: float) -> bool:
    """Return whether a weight, float32[n], exceeds `least`; vectorised."""
    above, bar = np.int32(0), np.float32(least)
    for i in range(len(weights)):
        above += np.int32(weights[i] > bar)
    return bool(above > 0)


@njit(cache=True)
def _may_win(weights: FloatArray, words: npt.NDArray[np.uint32], bar: float) -> bool:
    """Return whether a token with one of these weights, float32[n], may exceed `bar`; vectorised."""
    hits, per_word = np.int32(0), np.float32(bar / 4294967296.0 * _MARGIN)
    for i in range(len(weights)):  # ~word is (1 - u) * 2^32, less 0.5
        hits += np.int32(weights[i] >= per_word * np.float32(words[i] ^ np.uint32(0xFFFFFFFF)))
    return bool(hits > 0)


@njit(cache=True)
def perturbed_argmax(weights: FloatArray, seed: np.uint64, position: int) -> int:
    """Return argmax over tokens of log(weight) + g(seed, position, token).

    A token can win only if its weight exceeds (1 - u) times the best exp(score) so far, as -log(u) >= 1 - u. So few
    tokens need a logarithm, and parts of the vocabulary whose weights are too small for any u need no noise.
    """
    best_token, best_score, bar = -1, -np.inf, 0.0
    pairs = np.empty(_TOKENS // 2, np.uint64)
    words = pairs.view(np.uint32)
    for start in range(0, len(weights), _TOKENS):
        part = weights[start : start + _TOKENS]
        if not _any_above(part, bar * _LEAST):
            continue
        _words(start // 4, position, seed, pairs)
        if bar > 0 and not _may_win(part, words, bar):
            continue
        for i in range(len(part)):
            weight, u = np.float64(part[i]), _uniform(words[i])
            if weight <= 0 or weight < bar * (1.0 - u):
                continue
            score = np.log(weight) - np.log(-np.log(u))
            if score > best_score:
                best_token, best_score = start + i, score
                bar = np.exp(score) * (1.0 - 1e-9)
    return best_token
