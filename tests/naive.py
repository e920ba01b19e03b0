"""Slow, obvious twins of the compiled kernels: same name, same answer, no cleverness. What a test compares with."""

import itertools
import math

import numpy as np

# --- graph/tree


def is_tree(tokens, parents, vocabulary):
    edges = list(zip(parents.tolist(), tokens.tolist(), strict=False))
    return (
        len(tokens) == len(parents)
        and all(parent in range(-1, node) for node, parent in enumerate(parents))
        and all(token in range(vocabulary) for token in tokens)
        and len(set(edges)) == len(edges)
    )


def depths(parents):
    result = []
    for node in range(len(parents)):
        steps, above = 1, parents[node]
        while above != -1:
            steps, above = steps + 1, parents[above]
        result.append(steps)
    return np.array(result, np.int32)


def best_chain(parents, score, longest, least):
    best, most = [], 0.0
    for last in range(len(parents)):
        path = [last]
        while parents[path[0]] != -1:
            path.insert(0, int(parents[path[0]]))
        worth = sum(float(score[node]) for node in path)
        if len(path) <= longest and score[last] >= least and (not best or worth > most):
            best, most = path, worth
    return np.array(best, np.int32)


def ancestor_mask(parents):
    mask = [[False] * (len(parents) + 1) for _ in range(len(parents) + 1)]
    for row in range(len(parents) + 1):
        seen = row
        while seen != 0:
            mask[row][seen] = True
            seen = parents[seen - 1] + 1
        mask[row][0] = True
    return np.array(mask)


def child_with(tokens, parents, node, token):
    found = [child for child in range(len(parents)) if (parents[child], tokens[child]) == (node, token)]
    return found[0] if found else -1


def top_nodes(parents, score, limit, max_depth):
    """Every step looks at every node again, and takes the best whose parent is taken."""
    taken = {-1}
    depth = depths(parents)
    for _ in range(limit):
        free = [n for n in range(len(parents)) if n not in taken and parents[n] in taken and depth[n] <= max_depth]
        if free:
            taken.add(max(free, key=lambda node: (score[node], -node)))
    return np.array(sorted(taken - {-1}), np.int32)


# --- index/trigram


def bigram_row(first, second, a, b):
    """Looks at every row of `a`, as far as there are rows."""
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


# --- index/learned, successors, best_first, mcts
# A learned table is {(a, b): {"weights": {token: weight}, "total": float}}; a static one is made by `static_tables`.

ROW_WIDTH = 12
FLOOR = 1e-4


def learned_row(keys, a, b):
    """Looks at every slot."""
    for slot in range(len(keys)):
        if keys[slot] == (int(a) + 1) * 2**32 + int(b):
            return slot
    return -1


def learn(memory, a, b, token, weight, keep, cap):
    row = memory.setdefault((a, b), {"weights": {}, "total": 0.0})
    weights = row["weights"]
    for known in weights:
        weights[known] *= keep
    if token not in weights and len(weights) == ROW_WIDTH:
        del weights[min(weights, key=weights.get)]
    weights[token] = min(weights.get(token, 0.0) + weight, cap)
    row["total"] = row["total"] * keep + weight


def learn_text(memory, ids, start, weight, keep, cap):
    for i, token in enumerate(ids):
        if i >= max(start, 1):
            learn(memory, -1, ids[i - 1], token, weight, keep, cap)
        if i >= max(start, 2):
            learn(memory, ids[i - 2], ids[i - 1], token, weight, keep, cap)


def learn_distributions(memory, tokens, parents, rows, before, root, top, shares, weight, keep):
    for row, top_tokens, probabilities in zip(rows, top, shares, strict=True):
        path, node = [], row - 1
        while node != -1:
            path, node = [tokens[node], *path], parents[node]
        a, b = [before, root, *path][-2:]
        for j, (token, share) in enumerate(zip(top_tokens, probabilities, strict=True)):
            learn(memory, a, b, token, weight * share, keep if j == 0 else 1.0, float("inf"))


def check_learned(arrays):
    """Assert what the compiled table of what was learned promises."""
    used = np.flatnonzero(arrays.keys != -1)
    assert 2 * len(used) <= len(arrays.keys)
    assert len(used) == arrays.clock[1]
    for slot in used.tolist():
        a, b = divmod(int(arrays.keys[slot]), 2**32)
        assert learned_row(arrays.keys, a - 1, b) == slot
        present = arrays.tokens[slot][arrays.weights[slot] > 0].tolist()
        assert min(present, default=0) >= 0
        assert len(set(present)) == len(present)
        assert np.isfinite(arrays.totals[slot])


def learned_memory(arrays):
    """A compiled table's content as a dictionary."""
    memory = {}
    for slot in range(len(arrays.keys)):
        if arrays.keys[slot] != -1:
            a, b = divmod(int(arrays.keys[slot]), 2**32)
            pairs = zip(arrays.tokens[slot].tolist(), arrays.weights[slot].tolist(), strict=True)
            memory[a - 1, b] = {
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
        "common_tokens": np.empty(0, np.uint16),
        "common_probabilities": np.empty(0, np.uint16),
    }


def successors(table, memory, trust, a, b, least):
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
    sources = [  # observations, trust, what followed with which share, may small contributions be left out
        (learned["total"], trust.learned_pair, shares_of(learned), False),
        (static[0], trust.table_pair, static[1], True),
        (single["total"], trust.learned_single, shares_of(single), False),
        (singles.get(b, (0, []))[0], trust.table_single, singles.get(b, (0, []))[1][:12], True),
    ]
    left = 1.0
    for number, (observations, needed, followers, droppable) in enumerate(sources):
        if number >= 2 and left < least:
            break
        share = observations / (observations + needed)
        for token, probability in followers:
            if not droppable or left * share * probability >= least:
                scores[token] = np.float32(float(scores.get(token, 0.0)) + left * share * probability)
        left *= 1 - share
    return list(scores.items())


def shares_of(row):
    return [(token, weight / row["total"]) for token, weight in row["weights"].items()] if row["total"] > 0 else []


def score_bin(score):
    """Eight bins for every power of two."""
    exponent, power = 0, 1.0
    while score < power:
        exponent, power = exponent - 1, power / 2
    return 8 * exponent + int(8 * (score / power - 1))


def bin_start(number):
    return 2.0 ** (number // 8) * (1 + number % 8 / 8)


def best_first(table, memory, trust, a, b, nodes, depth, vocabulary):
    """{path: score}. All candidates stay in one list, and the best is looked for from the start every time.

    As the kernel says: once `nodes` candidates lie in higher bins, a bin is too low to be of use, and contributions
    below a quarter of the bar are left out.
    """
    known, taken = {}, {}
    path, score = (), np.float32(1.0)
    while len(taken) < nodes:
        ranked = sorted(map(score_bin, known.values()), reverse=True)
        lowest = ranked[nodes - 1] if len(ranked) >= nodes else score_bin(FLOOR)
        if len(path) < depth and score_bin(score) >= lowest:
            before, last = (a, b, *path)[-2:]
            least = 0.25 * max(FLOOR, bin_start(lowest)) / score
            for token, share in successors(table, memory, trust, before, last, least):
                if 0 <= token < vocabulary and score * min(share, np.float32(1.0)) >= FLOOR:
                    known[(*path, token)] = score * min(share, np.float32(1.0))
        free = [candidate for candidate in known if candidate not in taken]
        if not free:
            break
        path = max(free, key=known.get)
        score = taken[path] = known[path]
    return taken


def best_paths(table, memory, trust, a, b, nodes, depth, vocabulary):
    """{path: score} of the truly most probable paths: all are made, nothing is left out. Only for small tables."""
    found, fresh = {}, {(): 1.0}
    for _ in range(depth):
        longer = {}
        for path, score in fresh.items():
            before, last = (a, b, *path)[-2:]
            for token, share in successors(table, memory, trust, before, last, 0.0):
                if 0 <= token < vocabulary and score * min(share, 1.0) >= FLOOR:
                    longer[(*path, token)] = score * min(share, 1.0)
        found.update(longer)
        fresh = longer
    return dict(sorted(found.items(), key=lambda item: -item[1])[:nodes])


def uniforms(seed):
    """xorshift64*, of whose values the upper half is used."""
    x = (2 * seed + 1) % 2**63
    while True:
        x ^= x >> 12
        x = (x ^ (x << 25)) % 2**64
        x ^= x >> 27
        yield (x * 0x2545F4914F6CDD1D % 2**64 >> 32) / 2**32


def mcts(table, memory, trust, a, b, settings, vocabulary, seed):
    """{path: score} of the kept tree, and {path: visits} of the whole one; a node is its path, the root ()."""
    random = uniforms(seed)
    deepest = settings.length - 1
    visits, value, prior, children = {(): 0}, {(): np.float32(0.0)}, {(): 1.0}, {}

    def ranked(path):
        before, last = (a, b, *path)[-2:]
        return sorted(successors(table, memory, trust, before, last, 0.0), key=lambda item: -item[1])

    def puct(path, child):
        if visits[child] == 0:
            return float("inf")
        total = sum(visits[other] for other in children[path])
        exploration = settings.c1 + math.log((total + settings.c2 + 1) / settings.c2)
        return float(value[child]) / visits[child] + prior[child] * math.sqrt(total) / (1 + visits[child]) * exploration

    for _ in range(settings.iterations):
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
        reward += rollout(table, memory, trust, (a, b, *path), deepest - len(path), random)
        for end in range(len(path) + 1):
            visits[path[:end]] += 1
            value[path[:end]] += np.float32(reward)
    kept = kept_paths(visits, prior, settings.candidates)
    for path in [path for path in kept if path]:
        best = ranked(path)[:1]
        if best and 0 <= best[0][0] < vocabulary and (*path, best[0][0]) not in kept:
            kept[*path, best[0][0]] = kept[path] * min(best[0][1], 1.0)
    return {path: score for path, score in kept.items() if path}, visits


def rollout(table, memory, trust, ids, steps, random):
    reward = 0.0
    for _ in range(steps):
        found = successors(table, memory, trust, ids[-2], ids[-1], 0.0)
        if not found:
            break
        left = next(random) * sum(float(score) for _, score in found)
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
    """The most visited nodes, the earlier made one first among equals, and what lies above them: {path: score}."""
    kept = {(): 1.0}
    for path in sorted(visits, key=lambda path: -visits[path])[:candidates]:
        for end in range(1, len(path) + 1):
            if visits[path] > 0:
                kept[path[:end]] = kept[path[: end - 1]] * min(prior[path[:end]], 1.0)
    return kept


# --- drafters/prompt_lookup


def earlier_match(ids, shortest, longest):
    """Every window of every length is compared; one that ends where the sequence ends has nothing to copy."""
    ids = list(ids)
    for size in range(longest, shortest - 1, -1):
        ends = [end for end in range(size, len(ids)) if ids[end - size : end] == ids[-size:]]
        if ends:
            return ends[0]
    return -1


# --- sampling


def philox(counter, key):
    """Philox-4x32-10 in Python's unbounded integers."""
    x, k = [int(value) for value in counter], [int(value) for value in key]
    for _ in range(10):
        p, q = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [q // 2**32 ^ x[1] ^ k[0], q % 2**32, p // 2**32 ^ x[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def uniform_noise(seed, position, tokens):
    key = divmod(int(seed), 2**32)[::-1]
    return [(philox((token // 4, position, 0, 0), key)[token % 4] + 0.5) / 2**32 for token in map(int, tokens)]


def filter_row(row, temperature, top_k, top_p, min_p):
    row = [float(value) for value in row]
    if any(math.isnan(value) for value in row) or not math.isfinite(max(row)):
        return []
    weights = [math.exp((value - max(row)) / temperature) for value in row]
    if 0 < top_k < len(row):
        last = sorted(row, reverse=True)[top_k - 1]
        weights = [weight if value >= last else 0.0 for value, weight in zip(row, weights, strict=True)]
    if top_p < 1:
        mass, last = 0.0, 1.0
        for weight in sorted(weights, reverse=True):
            if mass >= top_p * sum(weights):
                break
            mass, last = mass + weight, weight
        weights = [weight if weight >= last else 0.0 for weight in weights]
    return [weight if weight >= min_p else 0.0 for weight in weights]


def perturbed_argmax(weights, seed, position):
    alive = [token for token, weight in enumerate(weights) if weight > 0]
    noise = dict(zip(alive, uniform_noise(seed, position, alive), strict=True))
    return max(alive, key=lambda token: math.log(weights[token]) - math.log(-math.log(noise[token])), default=-1)


# --- index/suffix_array, retrieval, published, recent_text
# Documents are lists of ids; rows are tuples of ids, as long as the document went on.


def joined(documents, separator):
    return [symbol for ids in documents for symbol in (*ids, separator)]


def suffix(symbols, separator, place):
    """What stands from a place on, with the separator behind its document."""
    return symbols[place : symbols.index(separator, place) + 1]


def sorted_places(symbols, separator):
    """The places of all tokens, each suffix compared in full."""
    places = [place for place, symbol in enumerate(symbols) if symbol != separator]
    return sorted(places, key=lambda place: suffix(symbols, separator, place))


def is_sorted(symbols, separator, places):
    texts = [suffix(symbols, separator, place) for place in places]
    all_places = [place for place, symbol in enumerate(symbols) if symbol != separator]
    return sorted(places) == all_places and texts == sorted(texts)


def follow(documents, context, longest):
    """How often the last 1, 2, ... `longest` tokens of a context occur; what is longer than the context does not."""
    lengths = range(1, longest + 1)
    return [len(ends(documents, context[-n:])) if n <= len(context) else 0 for n in lengths]


def first_matches(symbols, places, first):
    begun = [symbols[place] for place in places]
    return first == [sum(token < t for token in begun) for t in range(len(first))]


def ends(documents, context):
    """(document, place) behind every occurrence of a context; none crosses a document's end."""
    size = len(context)
    return [
        (number, end)
        for number, ids in enumerate(documents)
        for end in range(size, len(ids) + 1)
        if list(ids[end - size : end]) == list(context)
    ]


def followers(documents, context, depth, separator):
    """What follows each occurrence, as rows, in the order of a suffix array."""
    rows = sorted([*documents[number][end:], separator] for number, end in ends(documents, context))
    return [tuple(row[:-1][:depth]) for row in rows]


def spread(rows, count):
    """`count` of `rows`, from the middle of equal parts."""
    return [rows[int((part + 0.5) * len(rows) / count)] for part in range(count)]


def best_nodes(rows, weights, limit, doubt):
    """{prefix: score} of the best `limit` prefixes; of equals the shorter."""
    scores = prefix_scores(rows, weights, doubt)
    return {prefix: scores[prefix] for prefix in sorted(scores, key=lambda p: (-scores[p], len(p)))[:limit]}


def prefix_scores(rows, weights, doubt):
    """{prefix: score} of every prefix of the rows."""
    having = {}
    for row, weight in zip(rows, weights, strict=True):
        for end in range(1, len(row) + 1):
            having.setdefault(row[:end], []).append(weight)
    scores = {}
    for prefix in sorted(having, key=len):
        if len(prefix) == 1:
            scores[prefix] = min(sum(having[prefix]), 1.0)
        else:
            above = having[prefix[:-1]]
            part = sum(having[prefix]) / sum(above) * len(above) / (len(above) + doubt)
            scores[prefix] = scores[prefix[:-1]] * part
    return scores


def published_paths(rows, nodes):
    """The paths of the released code's tree; None where equals make it a matter of chance."""
    counts = {}
    for row in rows:
        for end in range(1, len(row) + 1):
            counts[row[:end]] = counts.get(row[:end], 0) + 1
    ranked = sorted(counts, key=lambda prefix: -counts[prefix])
    chosen, left_out = ranked[:nodes], ranked[nodes:]
    if left_out and counts[left_out[0]] == counts[chosen[-1]]:
        return None
    chosen.sort(key=lambda prefix: (len(prefix), -counts[prefix]))
    while sum(len(set(prefix)) for prefix in chosen) > nodes:
        cut = chosen.pop()
    if chosen and len(chosen) < min(nodes, len(ranked)):
        last = chosen[-1]
        if (len(last), counts[last]) == (len(cut), counts[cut]):
            return None
    return {prefix[:end] for prefix in chosen for end in range(1, len(prefix) + 1)}


def append(symbols):
    """For each place, the last one before it that ends in the same two tokens, or -1."""
    pairs = [(), *itertools.pairwise(symbols)][: len(symbols)]
    return [
        max((other for other in range(at) if pairs[other] == pair and pair and min(pair) >= 0), default=-1)
        for at, pair in enumerate(pairs)
    ]


def occurrences(symbols, context, longest, most):
    """[(place, length)], newest first; the search gives up after eight places for each one wanted."""
    pair = list(context[-2:])
    ends_of_pair = [at for at in range(1, len(symbols)) if symbols[at - 1 : at + 1] == pair] if len(pair) == 2 else []
    found = []
    for at in ends_of_pair[::-1][: 8 * most]:
        if at + 1 < len(symbols) and symbols[at + 1] != -1 and len(found) < most:
            length = 0
            while length < min(longest, len(context), at + 1) and symbols[at - length] == context[-1 - length]:
                length += 1
            found.append((at + 1, length))
    return found


# --- graph/heap, reach, grams, dag, unmerge
# Reach is {node: set of nodes that reach it}. A naive graph is a dictionary of lists, named as `DraftGraph`'s fields.


def sift_up(waiting, score):
    """Any order will do: `pop` looks at everything."""


def pop(waiting, score):
    best = max(waiting, key=lambda item: score[item])
    waiting.remove(best)
    return best


def no_reach(nodes):
    return {node: set() for node in range(nodes)}


def reaches(above, source, node):
    return source in above[node]


def inherit(above, node, source):
    above[node] |= above.get(source, set())


def reach_itself(above, node):
    above[node].add(node)


def gram(tokens, parents, context, tau, parent, token):
    """The last `tau` tokens, written out; shorter where the text begins."""
    path = [int(token)]
    while parent >= 0:
        path.insert(0, int(tokens[parent]))
        parent = parents[parent]
    before = len(context) + parent + 1  # -1 is the root, the last token of the context; -2 the one before it
    return tuple([*(int(token) for token in context[:before]), *path][-tau:])


def remember(remembered, node):
    remembered.append(node)


def first_occurrence(remembered, tokens, parents, context, tau, parent, token):
    wanted = gram(tokens, parents, context, tau, parent, token)
    same = [node for node in remembered if gram(tokens, parents, context, tau, parents[node], tokens[node]) == wanted]
    return same[0] if same else -1


def reachable(edges, source):
    """Every node that a walk from `source` comes to, `source` included; edges are pairs."""
    after = {}
    for start, to in edges:
        after.setdefault(start, set()).add(to)
    found, new = {source}, [source]
    while new:
        beyond = after.get(new.pop(), set()) - found
        found |= beyond
        new += beyond
    return found


def edges_of(parents, lenders):
    """Tree edges and loans, as pairs."""
    return [
        *((int(parent), node) for node, parent in enumerate(parents) if parent >= 0),
        *((node, int(lender)) for node, lender in enumerate(lenders) if lender >= 0),
    ]


def empty_graph(context, tau):
    return {"context": context, "tau": tau, "tokens": [], "parents": [], "score": [], "lenders": [], "open": []}


def add_level(graph, parents, tokens, probabilities, leaf, most_open, only_tree_ancestors=False):
    """Every question about reach is answered by a walk. `only_tree_ancestors` asks the released code's question."""
    start, opened = len(graph["tokens"]), []
    for parent, token, probability in zip(parents, tokens, probabilities, strict=True):
        graph["tokens"].append(int(token))
        graph["parents"].append(int(parent))
        graph["score"].append(np.float32(probability) * (graph["score"][parent] if parent >= 0 else np.float32(1)))
        graph["lenders"].append(-1)
        graph["open"].append(0)
    for node in sorted(range(start, len(graph["tokens"])), key=lambda node: -graph["score"][node]):
        grams = [
            gram(graph["tokens"], graph["parents"], graph["context"], graph["tau"], parent, token)
            for parent, token in zip(graph["parents"], graph["tokens"], strict=True)
        ]
        edges = edges_of(graph["parents"], [] if only_tree_ancestors else graph["lenders"])
        same = [other for other in range(len(grams)) if graph["open"][other] and grams[other] == grams[node]]
        may_lend = [other for other in same if graph["tau"] and node not in reachable(edges, other)]
        if may_lend:  # `open` says when a node was opened
            graph["lenders"][node] = min(may_lend, key=lambda other: graph["open"][other])
        elif not leaf[node - start] and len(opened) < most_open:
            graph["open"][node] = max(graph["open"]) + 1
            opened.append(node)
    return sorted(opened)


def unroll(tokens, parents, conditional, lenders, root_lender, limit, max_depth):
    """Every path there is, and then the best. Returns {path as tokens: (score, origin, merged)}."""
    one = np.float32(1)

    family = {of: [] for of in range(-1, len(tokens))}
    for node in sorted(range(len(tokens)), key=lambda node: -conditional[node]):
        family[int(parents[node])].append(node)
    paths, new = {}, [((), one, -1, False)]
    for _ in range(max_depth):
        before, new = new, []
        for path, score, place, merged in before:
            own = family[place]
            left = one
            for node in own:
                left -= conditional[node]
                new.append(((*path, int(tokens[node])), score * conditional[node], node, merged))
            lender = root_lender if place == -1 else lenders[place]
            for node in family[lender] if lender >= 0 else []:
                if tokens[node] not in [tokens[other] for other in own]:
                    share = min(conditional[node], max(left, np.float32(0)))
                    new.append(((*path, int(tokens[node])), score * share, node, True))
        paths |= {path: (score, node, merged) for path, score, node, merged in new if score > 0}
    best = sorted(paths, key=lambda path: (-paths[path][0], path))[: max(limit, 0)]
    return {path: paths[path] for path in best}


# --- graph/bar: a bar is the number N and every score that was counted


def new_bar(most):
    return most, []


def lowest_bin(bar):
    most, scores = bar
    ranked = sorted(map(score_bin, scores), reverse=True)
    return ranked[most - 1] if len(ranked) >= most else score_bin(FLOOR)


def above_bar(bar, score):
    return score >= FLOOR and score_bin(score) >= lowest_bin(bar)


def raise_bar(bar, score):
    bar[1].append(score)


def bar_height(bar):
    return max(FLOOR, bin_start(lowest_bin(bar)))


def halvings(score):
    """As foredraft.control.evidence's: how often 1 halves until it is no more than the score, up to 11 times."""
    number = 0
    while number < 11 and score <= 0.5 ** (number + 1) * (1 - 1e-12):
        number += 1
    return number


def chances(evidence):
    """As foredraft.control.evidence's, bin by bin."""
    ratio = (evidence.accepted.sum() + 3.0 * 1.0) / (evidence.promised.sum() + 3.0)
    usual = [0.7 * 0.5**number for number in range(12)]
    scores = [p / s if s > 0 else u for p, s, u in zip(evidence.promised, evidence.seen, usual, strict=True)]
    return [
        (accepted + 24.0 * min(ratio * score, 1.0)) / (seen + 24.0)
        for accepted, seen, score in zip(evidence.accepted, evidence.seen, scores, strict=True)
    ]


def best_count(score, evidence, passes, seconds, depth, cheap):
    """As foredraft.control.evidence's: every count of nodes is tried."""
    chance, (plain, overhead), (least, margin) = chances(evidence), seconds, cheap
    each = [chance[halvings(one)] for one in sorted(score.tolist(), reverse=True)][: len(passes) - 2]
    rates = [(1 + min(sum(each[:n]), depth)) / (passes[n + 1] + overhead) for n in range(1, len(each) + 1)]
    few = min(least, len(rates))
    more = [n for n in range(few + 1, len(rates) + 1) if rates[n - 1] > margin * rates[few - 1]]
    best = max(more, key=lambda n: rates[n - 1], default=few)
    return best if best and rates[best - 1] > 1 / plain else 0


def credit(evidence, score, path):
    """As foredraft.control.evidence's: returns what was seen, accepted and promised afterwards."""
    seen, accepted, promised = (each.tolist() for each in evidence)
    for node, one in enumerate(score.tolist()):
        seen[halvings(one)] += 1
        promised[halvings(one)] += one
        accepted[halvings(one)] += node in path.tolist()
    for number in range(12):
        share = 0.5 if seen[number] > 400 else 1
        seen[number], accepted[number], promised[number] = (share * each[number] for each in (seen, accepted, promised))
    return seen, accepted, promised


# --- index/own_words: {context: [(token, parts of 255), ...]}; a context is a tuple of one to three tokens


def context_key(a, b, c):
    return tuple(int(token) for token in (a, b, c) if token >= 0)


def find(words, key):
    return words.get(key)


def learn_rows(words, tokens, parents, ids, rows, top, chances):
    for row, likely, shares in zip(rows, top, chances, strict=True):
        path, node = [], row - 1
        while node >= 0:
            path.insert(0, int(tokens[node]))
            node = parents[node]
        text = [*(int(token) for token in ids), *path]
        for length in range(1, min(3, len(text)) + 1):
            kept = itertools.takewhile(lambda each: each[1] > 0, zip(likely.tolist(), shares.tolist(), strict=True))
            words[tuple(text[-length:])] = [(token, max(round(255 * share), 1)) for token, share in kept][:8]


# --- index/rates: {(source, cell): [hits, seen]}, and the weights' array


def chance(rates, cells, known):
    counted, weights = rates
    total = weights[known][7]
    for source, cell in enumerate(cells):
        if cell != 255:
            hits, seen = counted[source, cell]
            total += weights[known][source] * math.log(hits / (seen - hits))
    return 1 / (1 + math.exp(-total))


# --- index/sources, blend


def newest_place(text, first, second):
    return max((place for place in range(1, len(text)) if text[place - 1 : place + 1] == [first, second]), default=-1)


def share_bin(share):
    return sum(share >= bound for bound in (0.01, 0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9))


def length_bin(length):
    return sum(length >= bound for bound in (3, 4, 6, 9, 16))


def listed_words(words, context):
    known, first = next(((each[context], 1 + 27 * i) for i, each in enumerate(words) if context in each), (None, 0))
    if known is None:
        return None
    return {token: first + min(i, 2) * 9 + share_bin(parts / 255) for i, (token, parts) in enumerate(known)}


def listed_places(text, context, visits, mark):
    """{token: cell} and {token: (place, length)} of what followed the last two tokens, at most `visits` newest."""
    if len(context) < 2 or not text:
        return None, {}
    ends = [place for place in range(1, len(text)) if text[place - 1 : place + 1] == context[-2:]][::-1][:visits]
    found = []
    for place in ends:
        length = 2
        while (
            length < 16 and length <= place and length < len(context) and text[place - length] == context[-1 - length]
        ):
            length += 1
        found.append((place, length))
    found += [mark] if mark is not None else []
    found = [(place, length) for place, length in found if place + 1 < len(text) and text[place + 1] >= 0]
    cells, marks = {}, {}
    for token in dict.fromkeys(text[place + 1] for place, _ in found):
        here = [(place, length) for place, length in found if text[place + 1] == token]
        place, length = max(here, key=lambda each: each[1])
        newest = found[0] == here[0] and found[0][0] in ends
        share = 0 if 3 * len(here) < len(found) else 1 if len(here) < len(found) else 2
        cells[token] = 1 + ((length_bin(length) * 3 + share) * 2 + min(len(here) - 1, 1)) * 2 + newest
        marks[token] = (place + 1, min(length + 1, 16))
    return (cells or None), marks


def listed_rows(rows, weights, lengths, path):
    """{token: cell} of what rows that begin with `path` go on with."""
    depth = len(path)
    mine = [i for i, row in enumerate(rows) if row[:depth] == path and depth < len(row) and row[depth] >= 0]
    total, cells = sum(weights[i] for i in mine), {}
    many = 0 if len(mine) == 1 else 1 if len(mine) < 5 else 2
    for token in dict.fromkeys(rows[i][depth] for i in mine):
        here = [i for i in mine if rows[i][depth] == token]
        share, longest = sum(weights[i] for i in here) / total, max(lengths[i] for i in here)
        cells[token] = 1 + (share_bin(share) * 4 + min(length_bin(longest + depth), 3)) * 3 + many
    return cells or None


def listed_foreseen(foreseen, path):
    """{token: cell} of the children of the node that `path` leads to in {path: score}."""
    children = {each[-1]: score for each, score in foreseen.items() if len(each) == len(path) + 1 and each[:-1] == path}
    return {token: 1 + share_bin(score / foreseen.get(path, 1.0)) for token, score in children.items()} or None


def blend(sources, rates, ids, size):
    """{path: score} of the best paths; see the test for the form of the sources."""
    words, own, shared, rows, foreseen = sources
    most, deepest, vocabulary = size
    taken, waiting = {}, [((), 1.0, {})]
    while waiting and len(taken) <= most:
        path, score, marks = waiting.pop(max(range(len(waiting)), key=lambda i: waiting[i][1]))
        taken[path] = score
        if len(path) == deepest:
            continue
        context = [*ids, *path][-16:]
        visits = 16 if path else 64
        mine, mine_marks = listed_places(own, context, visits, marks.get("own"))
        theirs, their_marks = listed_places(shared, context, visits, marks.get("shared"))
        listed = [
            listed_words(words, tuple(context[-3:])) if len(context) > 2 else None,
            listed_words(words, tuple(context[-2:])) if len(context) > 1 else None,
            listed_words(words, tuple(context[-1:])),
            mine,
            theirs,
            listed_rows(*rows, path),
            listed_foreseen(foreseen, path),
        ]
        known = sum(1 << source for source, cells in enumerate(listed) if cells is not None)
        for token in dict.fromkeys(token for cells in listed if cells for token in cells):
            if token < vocabulary:
                cells = [255 if cells is None else cells.get(token, 0) for cells in listed]
                places = {"own": mine_marks.get(token), "shared": their_marks.get(token)}
                waiting.append(((*path, token), score * chance(rates, cells, known), places))
    return {path: score for path, score in taken.items() if path}
