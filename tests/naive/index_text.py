"""Texts that are searched: suffix arrays, rows retrieved from them, and a text that grows.

Documents are lists of ids; rows are tuples of ids, as long as the document went on.
"""

import itertools


def joined(documents, separator):
    return [symbol for ids in documents for symbol in (*ids, separator)]


def suffix(symbols, separator, place):
    """The text from a place on, up to and including the separator."""
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
    """Occurrences of the last 1, 2, ... `longest` tokens of a context; 0 if longer than the context."""
    lengths = range(1, longest + 1)
    return [len(ends(documents, context[-n:])) if n <= len(context) else 0 for n in lengths]


def first_matches(symbols, places, first):
    begun = [symbols[place] for place in places]
    return first == [sum(token < t for token in begun) for t in range(len(first))]


def ends(documents, context):
    """(document, place) after every occurrence of a context; none crosses a document's end."""
    size = len(context)
    return [
        (number, end)
        for number, ids in enumerate(documents)
        for end in range(size, len(ids) + 1)
        if list(ids[end - size : end]) == list(context)
    ]


def followers(documents, context, depth, separator):
    """The continuation of each occurrence, as rows, in the order of a suffix array."""
    rows = sorted([*documents[number][end:], separator] for number, end in ends(documents, context))
    return [tuple(row[:-1][:depth]) for row in rows]


def spread(rows, count):
    """`count` of `rows`, from the middle of equal parts."""
    return [rows[int((part + 0.5) * len(rows) / count)] for part in range(count)]


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


def append(symbols):
    """For each place, the last one before it that ends in the same two tokens, or -1."""
    pairs = [(), *itertools.pairwise(symbols)][: len(symbols)]
    return [
        max((other for other in range(at) if pairs[other] == pair and pair and min(pair) >= 0), default=-1)
        for at, pair in enumerate(pairs)
    ]


def occurrences(symbols, context, longest, most):
    """[(place, length)], newest first; the search stops after eight places per requested one."""
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
