"""Own words, and the blend of all sources by their acceptance rates.

Own words are {context: [(token, parts of 255), ...]}, a context a tuple of one to three tokens; rates are
{(source, cell): [hits, seen]} and the weights' array.
"""

import itertools
import math

# --- own_words, rates, sources, blend


def context_key(a, b, c):
    return tuple(int(token) for token in (a, b, c) if token >= 0)


def find(words, key):
    return words.get(key)


def fill_context(size, tokens, parents, node, ids):
    """The last `size` tokens down to the node, or fewer."""
    path = []
    while node >= 0:
        path.insert(0, int(tokens[node]))
        node = parents[node]
    return [*(int(token) for token in ids), *path][-size:]


def learn_rows(words, tokens, parents, ids, top, chances):
    for row, (likely, shares) in enumerate(zip(top, chances, strict=True)):
        text = fill_context(3, tokens, parents, row - 1, ids)
        for length in range(1, len(text) + 1):
            kept = itertools.takewhile(lambda each: each[1] > 0, zip(likely.tolist(), shares.tolist(), strict=True))
            words[tuple(text[-length:])] = [(token, max(round(255 * share), 1)) for token, share in kept][:8]


def chance(rates, cells, known):
    counted, weights = rates
    total = weights[known][7]
    for source, cell in enumerate(cells):
        if cell != 255:
            hits, seen = counted[source, cell]
            total += weights[known][source] * math.log(hits / (seen - hits))
    return 1 / (1 + math.exp(-total))


def newest_place(text, first, second):
    return max((place for place in range(1, len(text)) if text[place - 1 : place + 1] == [first, second]), default=-1)


def bin_of(value, bounds):
    return sum(value >= bound for bound in bounds)


def share_bin(share):
    return bin_of(share, (0.01, 0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9))


def length_bin(length):
    return bin_of(length, (3, 4, 6, 9, 16))


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
    """{token: cell} of the next tokens of rows that begin with `path`."""
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
