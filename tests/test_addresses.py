"""Arrays by their addresses are the arrays."""

import numpy as np
import pytest

from foredraft.addresses import Addresses, array_at, matrix, vector

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int32, np.int64, np.float32, np.float64])
def test_arrays_are_found_at_their_addresses(kind):
    flat, rows = np.arange(5).astype(kind), np.arange(12).reshape(4, 3).astype(kind)
    words = Addresses([flat, rows, flat[:0]]).words
    np.testing.assert_array_equal(vector(words, 0, kind(0)), flat)
    np.testing.assert_array_equal(matrix(words, 1, kind(0)), rows)
    assert len(vector(words, 2, kind(0))) == 0
    np.testing.assert_array_equal(array_at(rows.ctypes.data + rows.strides[0], 3, kind(0)), rows[1])


def test_what_is_written_there_is_written_into_the_array():
    held = np.zeros(3)
    vector(Addresses([held]).words, 0, np.float64(0))[1] = 7
    assert held.tolist() == [0, 7, 0]


def test_another_array_takes_a_place_and_both_are_kept_alive():
    addresses = Addresses([np.zeros(2), np.full(3, 5.0)])
    words = addresses.words
    addresses.put(0, [np.full(4, 9.0)])
    assert addresses.words is words
    assert vector(words, 0, np.float64(0)).tolist() == [9.0] * 4
    assert vector(words, 1, np.float64(0)).tolist() == [5.0] * 3


def test_only_contiguous_arrays_have_an_address():
    with pytest.raises(AssertionError, match="contiguous"):
        Addresses([np.zeros((4, 4))[:, 1]])
