"""Documents of ids, their suffix arrays, and texts that grew by them."""

import numpy as np

import naive.index_text
from foredraft.index.recent_text import append, empty_text, with_room
from foredraft.index.suffix_array import (
    SuffixArrays,
    follow,
    sorted_suffixes,
    symbol_dtype,
)


def some_tokens(vocabulary):
    """A few ids whose order goes wrong when bytes are mixed up or cut off."""
    return sorted({0, 1, 2, 127, 255, 256, 511, 65_279, 65_535, vocabulary - 1} & set(range(vocabulary)))


def random_documents(seed, vocabulary=3, count=12, longest=14):
    """Short documents of few ids; some of one token, some repeated, some of one id only."""
    rng = np.random.default_rng(seed)
    alphabet = np.array(some_tokens(vocabulary))[: int(rng.integers(1, 6))] if seed % 2 else some_tokens(vocabulary)
    documents = [rng.choice(alphabet, rng.integers(1, longest)).tolist() for _ in range(count)]
    repeated = rng.choice(alphabet, 9).tolist()
    return [repeated, *documents, [int(alphabet[0])], repeated, repeated, [int(alphabet[-1])] * 9]


def text_of(documents, vocabulary):
    return np.array(naive.index_text.joined(documents, vocabulary), symbol_dtype(vocabulary))


def sort(documents, vocabulary, pieces=1):
    text = text_of(documents, vocabulary)
    return SuffixArrays(text, *sorted_suffixes(np.array_split(text, pieces), vocabulary))


def ranges_after(text, tokens, longest):
    ranges = np.zeros((longest + 1, 2), np.int64)
    follow(text, ranges, np.array(tokens, np.int64), len(tokens))
    return ranges


def replaced(array, at, value):
    result = array.copy()
    result[at] = value
    return result


def swapped(array, i, j):
    result = array.copy()
    result[[i, j]] = result[[j, i]]
    return result


def grown(pieces, room=1):
    text = empty_text(room)
    for piece in pieces:
        text = with_room(text, len(piece))
        append(text, np.array(piece, np.int64))
    return text
