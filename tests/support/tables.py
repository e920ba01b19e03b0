"""Tri-gram tables in memory, and paths found in them."""

import pytest

import naive.index_tables
from foredraft.index.trigram import TableArrays

VOCABULARY = 11


def frozen(arrays):
    """Read-only, as mapped files are, so that the kernels are compiled once for both."""
    for array in arrays.values():
        array.flags.writeable = False
    return TableArrays(**arrays)


def static_table(texts):
    return frozen(naive.index_tables.static_arrays(texts, VOCABULARY, 8))


def assert_same_paths(found, expected):
    """Equal scores, and equal paths but for those that tie with the last one taken."""
    assert sorted(found.values()) == pytest.approx(sorted(expected.values()), rel=1e-5)
    for path in found.keys() & expected.keys():
        assert found[path] == pytest.approx(expected[path], rel=1e-5)
    for path in found.keys() ^ expected.keys():
        score = found.get(path, expected.get(path))
        assert score == pytest.approx(min(expected.values()), rel=1e-5), path
