"""Noise determined by (seed, position, token), and sampling with it.

Sampling is the Gumbel-max trick with Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC11); docs/explanation/sampling.md has the definition. Each value depends on its token alone, so any subset of the
vocabulary, on any machine, gets the same noise. Does not depend on where the weights come from, nor on drafts.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.graph.tree import F64, I64, FloatArray

_BLOCKS = 64  # Philox blocks computed together, four tokens each; chosen


@njit(cache=True, inline="always")
def _philox_round(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    p0 = np.uint64(0xD2511F53) * np.uint64(c0)
    p1 = np.uint64(0xCD9E8D57) * np.uint64(c2)
    hi0, lo0 = np.uint32(p0 >> np.uint64(32)), np.uint32(p0 & np.uint64(0xFFFFFFFF))
    hi1, lo1 = np.uint32(p1 >> np.uint64(32)), np.uint32(p1 & np.uint64(0xFFFFFFFF))
    return np.uint32(hi1 ^ c1 ^ k0), lo1, np.uint32(hi0 ^ c3 ^ k1), lo0


@njit(cache=True, inline="always")
def _philox(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    for _ in range(10):
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
        k0 = np.uint32(np.uint64(k0) + np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF))
        k1 = np.uint32(np.uint64(k1) + np.uint64(0xBB67AE85) & np.uint64(0xFFFFFFFF))
    return c0, c1, c2, c3


@njit(cache=True)
def philox(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return Philox-4x32-10 of one counter, uint32[4], under a key, uint32[2], as uint32[4]."""
    return np.array(_philox(counter[0], counter[1], counter[2], counter[3], key[0], key[1]), np.uint32)


@njit(cache=True)
def gumbel_value(seed: np.uint64, position: int, token: int) -> float:
    """Return g(seed, position, token), a standard Gumbel value, for compiled code."""
    zero = np.uint32(0)
    k0, k1 = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    words = _philox(np.uint32(token // 4), np.uint32(position), zero, zero, k0, k1)
    u = (np.float64(words[token % 4]) + 0.5) / 4294967296.0
    return float(-np.log(-np.log(u)))


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
def _noise_words(first: int, position: int, k0: np.uint32, k1: np.uint32, lanes: npt.NDArray[np.uint32]) -> None:
    """Set `lanes`, uint32[4, n], to Philox's output for the n blocks from `first` on, vectorised over the blocks."""
    c0, c1, c2, c3 = lanes[0], lanes[1], lanes[2], lanes[3]
    for i in range(len(c0)):
        c0[i], c1[i], c2[i], c3[i] = np.uint32(first + i), np.uint32(position), np.uint32(0), np.uint32(0)
    for _ in range(10):
        for i in range(len(c0)):
            c0[i], c1[i], c2[i], c3[i] = _philox_round(c0[i], c1[i], c2[i], c3[i], k0, k1)
        k0 = np.uint32(np.uint64(k0) + np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF))
        k1 = np.uint32(np.uint64(k1) + np.uint64(0xBB67AE85) & np.uint64(0xFFFFFFFF))


@njit(cache=True)
def _may_win(weights: FloatArray, lanes: npt.NDArray[np.uint32], bar: float) -> bool:
    """Return whether a token with one of these weights, float32[4n], may exceed `bar`; vectorised, without branches."""
    hits, per_word = np.int32(0), np.float32(bar / 4294967296.0 * (1.0 - 1e-6))  # a margin above float32's rounding
    c0, c1, c2, c3, ones = lanes[0], lanes[1], lanes[2], lanes[3], np.uint32(0xFFFFFFFF)
    for i in range(len(c0)):  # all four lanes together, so weights are read in order; ~word is (1 - u) * 2^32, less 0.5
        hits += np.int32(weights[4 * i] >= per_word * np.float32(c0[i] ^ ones))
        hits += np.int32(weights[4 * i + 1] >= per_word * np.float32(c1[i] ^ ones))
        hits += np.int32(weights[4 * i + 2] >= per_word * np.float32(c2[i] ^ ones))
        hits += np.int32(weights[4 * i + 3] >= per_word * np.float32(c3[i] ^ ones))
    return bool(hits > 0)


@njit(cache=True)
def perturbed_argmax(weights: FloatArray, seed: np.uint64, position: int) -> int:
    """Return argmax over tokens of log(weight) + g(seed, position, token).

    A token can win only if its weight exceeds (1 - u) times the best exp(score) so far, as -log(u) >= 1 - u. So few
    tokens need a logarithm, and fully filtered blocks need no noise.
    """
    k0, k1 = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    best_token, best_score, bar = -1, -np.inf, 0.0
    blocks = min(_BLOCKS, (len(weights) + 3) // 4)
    lanes = np.empty((4, blocks), np.uint32)
    for start in range(0, len(weights), max(4 * blocks, 1)):
        stop = min(start + 4 * blocks, len(weights))
        alive = np.int32(0)
        for token in range(start, stop):  # compilers vectorise a count
            alive += np.int32(weights[token] > 0)
        if alive == 0:
            continue
        _noise_words(start // 4, position, k0, k1, lanes)
        if bar > 0 and stop - start == 4 * blocks and not _may_win(weights[start:stop], lanes, bar):
            continue
        for token in range(start, stop):
            weight = np.float64(weights[token])
            u = (np.float64(lanes[token % 4, (token - start) // 4]) + 0.5) / 4294967296.0
            if weight <= 0 or weight < bar * (1.0 - u):
                continue
            score = np.log(weight) - np.log(-np.log(u))
            if score > best_score:
                best_token, best_score = token, score
                bar = np.exp(score) * (1.0 - 1e-9)
    return best_token
