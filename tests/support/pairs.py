"""Combinations of values for parametrised tests."""

import itertools


def pairs(*dimensions):
    """Return rows of one value of each dimension, in which any two values of two dimensions are together at least once.

    They are far fewer than the product, and find what depends on one value or on two, as most mistakes do.
    """
    rows = {
        places: set(itertools.combinations(enumerate(places), 2))
        for places in itertools.product(*map(range, map(len, dimensions)))
    }
    missing, chosen = set().union(*rows.values()), []
    while missing:
        best = max(rows, key=lambda places: len(rows[places] & missing))
        missing -= rows[best]
        chosen.append(best)
    return [tuple(values[place] for values, place in zip(dimensions, places, strict=True)) for places in sorted(chosen)]
