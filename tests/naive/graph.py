"""Trees, and graphs that become trees."""

import numpy as np

# --- tree


def wrong_node(tokens, parents, vocabulary):
    edges = list(zip(parents.tolist(), tokens.tolist(), strict=True))
    for node, (parent, token) in enumerate(edges):
        if parent not in range(-1, node) or token not in range(vocabulary) or edges[node] in edges[:node]:
            return node
    return -1


def depths(parents):
    result = []
    for node in range(len(parents)):
        steps, above = 1, parents[node]
        while above != -1:
            steps, above = steps + 1, parents[above]
        result.append(steps)
    return np.array(result, np.int32)


def best_chain(parents, score, longest):
    best, most = [], 0.0
    for last in range(len(parents)):
        path = [last]
        while parents[path[0]] != -1:
            path.insert(0, int(parents[path[0]]))
        worth = sum(float(score[node]) for node in path)
        if len(path) <= longest and (not best or worth > most):
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
    """Every step searches all nodes and takes the best one whose parent is taken."""
    taken = {-1}
    depth = depths(parents)
    for _ in range(limit):
        free = [n for n in range(len(parents)) if n not in taken and parents[n] in taken and depth[n] <= max_depth]
        if free:
            taken.add(max(free, key=lambda node: (score[node], -node)))
    return np.array(sorted(taken - {-1}), np.int32)


# --- dag: a naive graph is a dictionary of lists, named as `DraftGraph`'s fields


def gram(tokens, parents, context, tau, parent, token):
    """The last `tau` tokens; fewer at the text's beginning."""
    path = [int(token)]
    while parent >= 0:
        path.insert(0, int(tokens[parent]))
        parent = parents[parent]
    before = len(context) + parent + 1  # -1 is the root, the last token of the context; -2 the one before it
    return tuple([*(int(token) for token in context[:before]), *path][-tau:])


def reachable(edges, source):
    """All nodes reachable from `source`, itself included; edges are pairs."""
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
    """Computes reachability by walks. `only_tree_ancestors` uses the released code's test instead."""
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


def unmerge(tokens, parents, conditional, lenders, limit, max_depth):
    """Makes all paths, then takes the best. Returns {path as tokens: (score, origin, merged)}."""
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
            lender = -1 if place == -1 else lenders[place]
            for node in family[lender] if lender >= 0 else []:
                if tokens[node] not in [tokens[other] for other in own]:
                    share = min(conditional[node], max(left, np.float32(0)))
                    new.append(((*path, int(tokens[node])), score * share, node, True))
        paths |= {path: (score, node, merged) for path, score, node, merged in new if score > 0}
    best = sorted(paths, key=lambda path: (-paths[path][0], path))[: max(limit, 0)]
    return {path: paths[path] for path in best}
