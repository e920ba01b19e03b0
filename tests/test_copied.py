"""Quick drafts: what followed the last two tokens when they last occurred."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from foredraft.contracts import EMPTY_DRAFT
from foredraft.index.copied import copied, latest_continuation


def own(nodes):
    return np.full(nodes, 1, np.uint8)


@pytest.mark.kernels
@settings(deadline=None)  # the first call compiles
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=90), count=st.integers(1, 9))
def test_the_kernel_does_what_its_twin_does(ids, count):
    tokens, score = latest_continuation(np.array(ids, np.int64), count)
    expected = naive.latest_continuation(ids, count)
    assert tokens.tolist() == expected[0]
    np.testing.assert_allclose(score, expected[1], rtol=1e-6)


def test_the_latest_occurrence_is_copied_as_a_chain_of_the_given_source():
    draft = copied(np.array([1, 2, 3, 1, 2, 4, 5, 1, 2]), own(3))
    draft.check()
    assert draft.tokens.tolist() == [4, 5, 1]
    assert draft.parents.tolist() == [-1, 0, 1]
    assert draft.source.tolist() == [1, 1, 1]
    assert (np.diff(draft.score) < 0).all()


def test_more_in_common_promises_more():
    long, short = (copied(np.array(ids), own(1)).score[0] for ids in ([1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 5, 2, 3]))
    assert 0 < short < long < 1


def test_a_loop_goes_round():
    assert copied(np.array([9, 7, 8, 7, 8]), own(5)).tokens.tolist() == [7, 8, 7, 8, 7]


@pytest.mark.parametrize("ids", [[1], [1, 1], [1, 2], [1, 2, 3, 2], [5, 1, 2, 3]])
def test_what_never_occurred_is_not_copied(ids):
    assert copied(np.array(ids), own(4)) is EMPTY_DRAFT


def test_only_the_end_of_a_long_text_is_searched():
    ids = np.arange(20_000)
    for place, found in ((10, False), (19_000, True)):
        assert bool(len(copied(np.append(ids, [place, place + 1]), own(2)))) == found
