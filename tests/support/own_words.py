"""Own words, taught row by row."""

import numpy as np

from foredraft.index.own_words import learn_rows


def learn(words, ids, tokens, parents, tops):
    """Learn that {token: chance} `tops[row]` follow each row."""
    width = max(len(top) for top in tops)
    top = np.array([list(each) + [0] * (width - len(each)) for each in tops], np.int32)
    chances = np.array([list(each.values()) + [0.0] * (width - len(each)) for each in tops], np.float32)
    arrays = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(ids, np.int64)
    learn_rows(words, *arrays, top, chances)
