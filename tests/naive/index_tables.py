"""Tri-gram tables, learned counts in the same form, and the searches in both.

A learned table is {(a, b): {"weights": {token: weight}, "total": float}}; a static one is made by `static_tables`.
"""

import math

import numpy as np

FLOOR = 1e-4
ROW_WIDTH = 12


def bigram_row(first, second, a, b):
    """Searches all rows of `a`, as far as there are rows."""
    if not 0 <= a < len(first) - 1:
        return -1
    for row in range(min(int(first[a]), len(second)), min(int(first[a + 1]), len(second))):
        if second[row] == b:
            return row
    return -1


def successor_counts(documents, width):
    """How often each token followed each `width` tokens, in lists of ids: {context: {token: count}}."""
    counts = {}
    for ids in documents:
        for at in range(width, len(ids)):
            row = counts.setdefault(tuple(ids[at - width : at]), {})
            row[ids[at]] = row.get(ids[at], 0) + 1
    return counts


def stored_row(row, keep):
    """A row of counts as a table stores it: [(token, probability as uint16)], and the row's total."""
    total = sum(row.values())
    best = sorted(row.items(), key=lambda item: (-item[1], item[0]))[:keep]
    return [(token, max(1, round(count * 65535 / total))) for token, count in best], total


def learned_row(arrays, a, b):
    """Searches all slots; -1 if absent."""
    key = (int(a) + 1) * 2**21 + int(b) + 1
    return next((slot for slot in range(len(arrays.keys)) if arrays.keys[slot] == key), -1)


def learn(memory, a, b, token, weight, cap):
    row = memory.setdefault((a, b), {"weights": {}, "total": 0.0})
    weights = row["weights"]
    if token not in weights and len(weights) == ROW_WIDTH:
        del weights[min(weights, key=weights.get)]
    weights[token] = min(weights.get(token, 0.0) + weight, cap)
    row["total"] += weight


def learn_text(memory, ids, start):
    for i, token in enumerate(ids):
        if i >= max(start, 1):
            learn(memory, -1, ids[i - 1], token, 1.0, float("inf"))
        if i >= max(start, 2):
            learn(memory, ids[i - 2], ids[i - 1], token, 1.0, float("inf"))


def learn_distributions(memory, tokens, parents, ids, top, shares, weight):
    for row, (top_tokens, probabilities) in enumerate(zip(top, shares, strict=True)):
        path, node = [], row - 1
        while node != -1:
            path, node = [tokens[node], *path], parents[node]
        a, b = [-1, *ids, *path][-2:]
        for token, share in zip(top_tokens, probabilities, strict=True):
            learn(memory, a, b, token, weight * share, float("inf"))


def learned_memory(arrays):
    """A compiled table's content as a dictionary."""
    memory = {}
    for slot in range(len(arrays.keys)):
        if arrays.keys[slot] != 0:
            a, b = divmod(int(arrays.keys[slot]), 2**21)
            pairs = zip(arrays.tokens[slot].tolist(), arrays.weights[slot].tolist(), strict=True)
            memory[a - 1, b - 1] = {
                "weights": {token: weight for token, weight in pairs if weight > 0},
                "total": float(arrays.totals[slot]),
            }
    return memory


def static_tables(arrays):
    """The static table as dictionaries: {(a, b): (total, [(token, probability)])}, and the same by single token."""
    pairs, singles = {}, {}
    for a in range(len(arrays.first) - 1):
        for row in range(int(arrays.first[a]), int(arrays.first[a + 1])):
            entries = range(int(arrays.offsets[row]), int(arrays.offsets[row + 1]))
            found = [(int(arrays.tokens[entry]), int(arrays.probabilities[entry]) / 65535) for entry in entries]
            pairs[a, int(arrays.second[row])] = (int(arrays.totals[row]), found)
    for b in range(len(arrays.first) - 1):
        entries = range(int(arrays.unigram_offsets[b]), int(arrays.unigram_offsets[b + 1]))
        found = [(int(arrays.unigram_tokens[e]), int(arrays.unigram_probabilities[e]) / 65535) for e in entries]
        singles[b] = (int(arrays.unigram_totals[b]), found)
    return pairs, singles


def static_arrays(documents, vocabulary, keep):
    """The static table's arrays, by name, from documents of ids."""
    pairs = {context: stored_row(row, keep) for context, row in sorted(successor_counts(documents, 2).items())}
    singles = [stored_row(successor_counts(documents, 1).get((b,), {}), 32) for b in range(vocabulary)]
    firsts = [sum(context[0] < a for context in pairs) for a in range(vocabulary + 1)]
    return {
        "first": np.array(firsts, np.uint32),
        "second": np.array([b for _, b in pairs], np.uint16),
        "offsets": np.cumsum([0, *(len(row) for row, _ in pairs.values())]).astype(np.uint32),
        "totals": np.array([total for _, total in pairs.values()], np.uint32),
        "tokens": np.array([token for row, _ in pairs.values() for token, _ in row], np.uint16),
        "probabilities": np.array([share for row, _ in pairs.values() for _, share in row], np.uint16),
        "unigram_offsets": np.cumsum([0, *(len(row) for row, _ in singles)]).astype(np.uint32),
        "unigram_totals": np.array([total for _, total in singles], np.uint32),
        "unigram_tokens": np.array([token for row, _ in singles for token, _ in row], np.uint16),
        "unigram_probabilities": np.array([share for row, _ in singles for _, share in row], np.uint16),
    }


def successors(table, memory, trust, a, b):
    """[(token, score)] in order of discovery; `table` from `static_tables`, `memory` as `learn` fills it."""
    pairs, singles = table
    static = pairs.get((a, b), (0, []))
    learned = memory.get((a, b), {"weights": {}, "total": 0.0})
    scores = {}
    if trust.paper:
        for token, probability in [*static[1], *learned["weights"].items()]:
            scores[token] = np.float32(float(scores.get(token, 0.0)) + probability)
        return [(token, min(score, np.float32(trust.cap))) for token, score in scores.items()]
    single = memory.get((-1, b), {"weights": {}, "total": 0.0})
    sources = [  # observations, trust, what followed with which share
        (learned["total"], trust.learned_pair, shares_of(learned)),
        (static[0], trust.table_pair, static[1]),
        (single["total"], trust.learned_single, shares_of(single)),
        (singles.get(b, (0, []))[0], trust.table_single, singles.get(b, (0, []))[1][:12]),
    ]
    left = 1.0
    for observations, needed, followers in sources:
        share = observations / (observations + needed)
        for token, probability in followers:
            scores[token] = np.float32(float(scores.get(token, 0.0)) + left * share * probability)
        left *= 1 - share
    return list(scores.items())


def shares_of(row):
    return [(token, weight / row["total"]) for token, weight in row["weights"].items()] if row["total"] > 0 else []


def best_first(table, memory, trust, a, b, nodes, depth, vocabulary):
    """{path: score}. All candidates stay in one list, which is searched for the best every time."""
    known, taken = {}, {}
    path, score = (), np.float32(1.0)
    while len(taken) < nodes:
        lowest = sorted([FLOOR] * nodes + list(known.values()))[-nodes]
        if len(path) < depth and score > lowest:
            before, last = (a, b, *path)[-2:]
            for token, share in successors(table, memory, trust, before, last):
                if 0 <= token < vocabulary and score * min(share, np.float32(1.0)) > FLOOR:
                    known[(*path, token)] = score * min(share, np.float32(1.0))
        free = [candidate for candidate in known if candidate not in taken]
        if not free:
            break
        path = max(free, key=known.get)
        score = taken[path] = known[path]
    return taken


def best_paths(table, memory, trust, a, b, nodes, depth, vocabulary):
    """{path: score} of the exact most probable paths: all are made, none is dropped. Only for small tables."""
    found, fresh = {}, {(): 1.0}
    for _ in range(depth):
        longer = {}
        for path, score in fresh.items():
            before, last = (a, b, *path)[-2:]
            for token, share in successors(table, memory, trust, before, last):
                if 0 <= token < vocabulary and score * min(share, 1.0) >= FLOOR:
                    longer[(*path, token)] = score * min(share, 1.0)
        found.update(longer)
        fresh = longer
    return dict(sorted(found.items(), key=lambda item: -item[1])[:nodes])


def mcts(table, memory, trust, a, b, settings, vocabulary, draws):
    """{path: score} of the kept tree, and {path: visits} of the whole one; a node is its path, the root ()."""
    deepest = settings.length - 1
    visits, value, prior, children = {(): 0}, {(): np.float32(0.0)}, {(): 1.0}, {}

    def ranked(path):
        before, last = (a, b, *path)[-2:]
        return sorted(successors(table, memory, trust, before, last), key=lambda item: -item[1])

    def puct(path, child):
        if visits[child] == 0:
            return float("inf")
        total = sum(visits[other] for other in children[path])
        exploration = settings.c1 + math.log((total + settings.c2 + 1) / settings.c2)
        return float(value[child]) / visits[child] + prior[child] * math.sqrt(total) / (1 + visits[child]) * exploration

    for iteration in range(settings.iterations):
        path, reward = (), 1.0
        while len(path) < deepest and children.get(path):
            path = max(children[path], key=lambda child, above=path: puct(above, child))
            reward += prior[path]
        if len(path) < deepest and path not in children:
            above = path
            children[above] = [(*above, token) for token, _ in ranked(above) if 0 <= token < vocabulary]
            for child, score in ((child, dict(ranked(above))[child[-1]]) for child in children[above]):
                visits[child], value[child], prior[child] = 0, np.float32(0.0), float(score)
            if children[above]:
                path = children[above][0]
                reward += prior[path]
        reward += rollout(table, memory, trust, (a, b, *path), draws[iteration][: deepest - len(path)])
        for end in range(len(path) + 1):
            visits[path[:end]] += 1
            value[path[:end]] += np.float32(reward)
    kept = kept_paths(visits, prior, settings.candidates)
    for path in [path for path in kept if path]:
        best = ranked(path)[:1]
        if best and 0 <= best[0][0] < vocabulary and (*path, best[0][0]) not in kept:
            kept[*path, best[0][0]] = kept[path] * min(best[0][1], 1.0)
    return {path: score for path, score in kept.items() if path}, visits


def rollout(table, memory, trust, ids, draws):
    reward = 0.0
    for draw in draws:
        found = successors(table, memory, trust, ids[-2], ids[-1])
        if not found:
            break
        left = draw * sum(float(score) for _, score in found)
        drawn = found[-1]
        for choice in found:
            left -= float(choice[1])
            if left < 0:
                drawn = choice
                break
        reward += float(drawn[1])
        ids = (*ids, drawn[0])
    return reward


def kept_paths(visits, prior, candidates):
    """The most visited nodes, earlier ones first on ties, and their ancestors: {path: score}."""
    kept = {(): 1.0}
    for path in sorted(visits, key=lambda path: -visits[path])[:candidates]:
        for end in range(1, len(path) + 1):
            if visits[path] > 0:
                kept[path[:end]] = kept[path[: end - 1]] * min(prior[path[:end]], 1.0)
    return kept
