"""Arrays by their addresses are the arrays."""

import numpy as np
import pytest

from foredraft.addresses import array_at

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int32, np.int64, np.float32, np.float64])
def test_arrays_are_found_at_their_addresses(kind):
    rows = np.arange(12).reshape(4, 3).astype(kind)
    np.testing.assert_array_equal(array_at(rows.ctypes.data + rows.strides[0], 3, kind(0)), rows[1])
    assert len(array_at(rows.ctypes.data, 0, kind(0))) == 0


def test_what_is_written_there_is_written_into_the_array():
    held = np.zeros(3)
    array_at(held.ctypes.data, 3, np.float64(0))[1] = 7
    assert held.tolist() == [0, 7, 0]
