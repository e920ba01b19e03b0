"""How far each length of context is trusted: weights of the levels of retrieval, learned from what the target wrote.

The levels of a step form a chain from the longest context to the shortest. A level that is trusted with probability a
takes that part of the weight that the longer ones left, as in the escape probabilities of PPM (Cleary and Witten
1984), and the trust of each kind of level is a ratio of two counters. Knows levels and rows; not where they come from.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.index.retrieval import OWN, SHARED, STORE, Levels, Rows

F64 = npt.NDArray[np.float64]

COUNT_BINS = 12
"""Occurrences are told apart by their logarithm to base 2, up to 2,048 and more."""
UNFORESEEN = 1e-4
"""What a token that nothing foresees is taken to have had as probability."""


class Trust(NamedTuple):
    """Counters by source, length and logarithm of the count: float64[3, longest + 1, COUNT_BINS] each.

    Attributes:
        hits: how often a level of that kind explained the next token (in parts: levels share an observation).
        passes: how often a shorter one, or none, did.
    """

    hits: F64
    passes: F64


PRIOR = {STORE: (-2.4, 0.48, 0.09, 1.12), OWN: (-0.77, 0.42, 0.22, 0.0), SHARED: (-2.4, 0.48, 0.09, 1.12)}
"""Log-odds of trust: constant, per doubling of the length, per doubling of the count, up to two tokens. Fitted on every
fourth of the recorded answers; see docs/log.md."""


def prior_trust(longest: int, strength: float, prior: Mapping[int, tuple[float, ...]] = PRIOR) -> Trust:
    """Return the trust to begin with, worth `strength` observations; `prior` is in the form of `PRIOR`."""
    lengths = np.arange(longest + 1)[None, :, None]
    constant, doubling, count, short = np.array([prior[source] for source in (STORE, OWN, SHARED)]).T[:, :, None, None]
    log_odds = constant + doubling * np.log2(np.maximum(lengths, 1)) + count * np.arange(COUNT_BINS)
    trusted = 1 / (1 + np.exp(-log_odds - short * (lengths <= 2)))
    return Trust(strength * trusted, strength * (1 - trusted))


@njit(cache=True)
def _bin(count: int) -> int:
    return min(int(np.log2(count)), COUNT_BINS - 1)


@njit(cache=True)
def weigh(levels: Levels, trust: Trust) -> None:
    """Set the levels' shares: of what the longer levels left, each takes its trust."""
    rest = 1.0
    for m in range(len(levels.share)):
        at = (levels.source[m], levels.length[m], _bin(levels.occurrences[m]))
        trusted = trust.hits[at] / (trust.hits[at] + trust.passes[at])
        levels.share[m] = rest * trusted
        rest *= 1.0 - trusted


@njit(cache=True)
def learn_trust(trust: Trust, levels: Levels, rows: Rows, token: int, otherwise: float) -> None:
    """Credit the levels with the token that was written, each with its part in having foreseen it.

    One step of expectation maximisation for the mixture of the levels' distributions, and of what comes behind them,
    which gave the token the probability `otherwise`, above 0.
    """
    count = len(levels.share)
    part = np.empty(count + 1, np.float64)
    rest = 1.0
    for m in range(count):
        low, high = levels.start[m], levels.start[m + 1]
        same = 0
        for row in range(low, high):
            same += rows.tokens[row, 0] == token
        part[m] = levels.share[m] * same / max(high - low, 1)
        rest -= levels.share[m]
    part[count] = max(rest, 1e-9) * otherwise
    total = part.sum()
    behind = part[count] / total
    for m in range(count - 1, -1, -1):
        at = (levels.source[m], levels.length[m], _bin(levels.occurrences[m]))
        trust.hits[at] += part[m] / total
        trust.passes[at] += behind
        behind += part[m] / total
