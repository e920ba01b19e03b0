"""What followed the last two tokens when they last occurred in the same text: a draft in a few microseconds.

Knows the text's ids only.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from foredraft.contracts import EMPTY_DRAFT, Draft, TokenIds
from foredraft.graph.tree import FloatArray, IntArray, chain_parents

_MOST_READ = 8192
"""Tokens of the text's end that are searched."""
_LONGEST = 64
"""Tokens by which two places are compared."""
_DOUBT = 4.0
"""What n tokens have in common with an earlier place, the next one has too at a rate of about n / (n + 4)."""
_CHAIN = chain_parents(64)  # sliced, not made: behind a pass nothing is cached, and each call into NumPy takes long


def copied(ids: TokenIds, source: npt.NDArray[np.uint8]) -> Draft:
    """Return what followed the last two tokens when they last occurred, as a chain.

    Args:
        ids: int64[n].
        source: uint8[N], the number of the nodes' source, 1 to 64 times: so many are drafted.

    Returns:
        A chain with scores; empty where the last two tokens have not occurred before.
    """
    tokens, score = latest_continuation(ids, len(source))
    return Draft(tokens, _CHAIN[: len(source)], score, source=source) if len(tokens) else EMPTY_DRAFT


@njit(cache=True)
def latest_continuation(ids: npt.NDArray[np.int64], count: int) -> tuple[IntArray, FloatArray]:
    """Return the `count` tokens behind the latest earlier occurrence of the last two, int32; none where there is none.

    Behind the text's end, what was copied is copied on: a loop goes round. With the tokens come estimates that so far
    all are right, float32, by how many tokens the two places have in common.
    """
    n = len(ids)
    for end in range(n - 1, max(1, n - _MOST_READ), -1):
        if ids[end - 1] != ids[n - 1] or ids[end - 2] != ids[n - 2]:
            continue
        common = 2
        while common < min(end, _LONGEST) and ids[end - 1 - common] == ids[n - 1 - common]:
            common += 1
        tokens, score, chance = np.empty(count, np.int32), np.empty(count, np.float32), 1.0
        for i in range(count):
            tokens[i] = ids[end + i] if end + i < n else tokens[end + i - n]
            chance *= (common + i) / (common + i + _DOUBT)
            score[i] = chance
        return tokens, score
    return np.empty(0, np.int32), np.empty(0, np.float32)
