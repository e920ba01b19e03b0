"""Best-first search: the most probable paths after a pair of tokens, up to a number of nodes.

Knows the successor function. Does not know where the budget comes from.
"""

import numpy as np
from numba import njit

from foredraft.graph.search import above_bar, bar_height, new_bar, pop, raise_bar, sift_up
from foredraft.graph.tree import FloatArray, IntArray
from foredraft.index.learned import LearnedArrays
from foredraft.index.successors import MOST_SUCCESSORS, Trust, successors
from foredraft.index.trigram import TableArrays


@njit(cache=True)
def best_first(
    table: TableArrays, learned: LearnedArrays, trust: Trust, a: int, b: int, nodes: int, depth: int, vocabulary: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the `nodes` most probable paths after (a, b), as tokens int32[N], parents int32[N], scores float32[N].

    A path's score is the product of its successors' scores, each taken as at most 1, so a child never outranks its
    parent and the result is prefix-closed. Tokens at or beyond `vocabulary` are left out. Once `nodes` better
    candidates are known, a candidate is dropped at sight, and a node whose children must all be dropped is not
    expanded.

    Contributions of a source below a quarter of that bar are left out of a candidate's score (see `successors`). So
    where several sources are blended, a score can fall short of the exact one by at most three quarters of the bar at
    the time, and of two candidates close to the bar the wrong one may be taken.
    """
    room = nodes * MOST_SUCCESSORS + MOST_SUCCESSORS
    candidate_token, candidate_parent = np.empty(room, np.int32), np.empty(room, np.int32)
    heap = np.empty(room, np.int32)
    candidate_score = np.empty(room, np.float32)
    size, made = 0, 0
    bar = new_bar(nodes)
    tokens, parents, level = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    scores = np.empty(nodes, np.float32)
    found_tokens = np.empty(MOST_SUCCESSORS, np.int32)
    found_scores = np.empty(MOST_SUCCESSORS, np.float32)
    count, node, node_score, node_level = 0, -1, np.float32(1.0), 0
    while count < nodes:
        if node_level < depth and above_bar(bar, node_score):
            before = a if node < 0 else (b if parents[node] < 0 else tokens[parents[node]])
            last = b if node < 0 else tokens[node]
            least = 0.25 * bar_height(bar) / float(node_score)
            found = successors(table, learned, trust, before, last, least, found_tokens, found_scores)
            for i in range(found):
                score = node_score * min(found_scores[i], np.float32(1.0))
                if not above_bar(bar, score) or not 0 <= found_tokens[i] < vocabulary:
                    continue
                candidate_token[made] = found_tokens[i]
                candidate_parent[made] = node
                candidate_score[made] = score
                heap[size] = made
                made += 1
                size += 1
                sift_up(heap, size, candidate_score)
                raise_bar(bar, score)
        if size == 0:
            break
        best = pop(heap, size, candidate_score)
        size -= 1
        node, node_score = count, candidate_score[best]
        tokens[node] = candidate_token[best]
        parents[node] = candidate_parent[best]
        scores[node] = node_score
        node_level = 1 if parents[node] < 0 else level[parents[node]] + 1
        level[node] = node_level
        count += 1
    return tokens[:count].copy(), parents[:count].copy(), scores[:count].copy()
