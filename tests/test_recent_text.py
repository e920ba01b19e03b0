"""A text that grows while it is searched: occurrences equal those of a scan, newest first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive.index_text
from foredraft.index.recent_text import END, append, occurrences, with_room
from support.documents import grown

pytestmark = pytest.mark.kernels


def found_in(text, context, longest=16, most=256):
    places, lengths = occurrences(text, np.array(context, np.int64), longest, most)
    assert places.dtype == lengths.dtype == np.int32
    return list(zip(places.tolist(), lengths.tolist(), strict=True))


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6),
    context=st.lists(st.integers(0, 3), max_size=8),
    longest=st.integers(2, 6),
    most=st.integers(1, 6),
    own=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_occurrences_are_those_of_a_scan(sequences, context, longest, most, own):
    pieces = [[*ids, END] for ids in sequences] + [context] * own
    text = grown(pieces)
    symbols = [symbol for piece in pieces for symbol in piece]
    assert text.symbols[: len(symbols)].tolist() == symbols
    assert text.previous[: len(symbols)].tolist() == naive.index_text.append(symbols)
    assert found_in(text, context, longest, most) == naive.index_text.occurrences(symbols, context, longest, most)


@pytest.mark.parametrize("top", [5, 70_000, (1 << 31) - 1])
def test_long_texts_are_searched_as_a_scan_searches(top):
    """Many pairs, so that the hash table has collisions, and the largest ids."""
    rng = np.random.default_rng(top)
    alphabet = np.unique(np.concatenate([rng.integers(0, top, 14), [top - 1, top]]))
    ids = rng.choice(alphabet, 700)
    ids[rng.integers(0, 700, 20)] = END
    text = grown(np.array_split(ids, 9))
    symbols = ids.tolist()
    met = 0
    for end in rng.integers(2, 700, 60).tolist():
        context = symbols[max(end - 8, 0) : end]
        expected = naive.index_text.occurrences(symbols, context, 5, 16) if END not in context[-2:] else []
        assert found_in(text, context, 5, 16) == expected
        met += len(expected)
    assert met > 100


def test_a_text_is_the_same_however_it_grew():
    ids = np.random.default_rng(1).integers(0, 4, 300)
    whole, pieces, one_by_one = grown([ids], 300), grown(np.array_split(ids, 7)), grown(ids.reshape(-1, 1))
    for text in (pieces, one_by_one):
        assert text.previous[:300].tolist() == whole.previous[:300].tolist()
        assert text.length[0] == 300
    for end in range(2, 300, 7):
        assert found_in(pieces, ids[:end]) == found_in(whole, ids[:end]) == found_in(one_by_one, ids[:end])


def test_room_is_kept_where_there_is_enough_and_doubled_where_not():
    text = grown([[1, 2, 3]], 4)
    assert with_room(text, 1) is text
    larger = with_room(text, 2)
    assert len(larger.symbols) == 8
    assert len(with_room(text, 50).symbols) == 53
    assert len(larger.keys) >= 2 * len(larger.symbols)
    append(larger, np.array([1, 2], np.int64))
    assert text.length[0] == 3, "the old text is left as it was"
    assert found_in(larger, [1, 2]) == [(2, 2)]


def test_nothing_is_found_across_the_end_of_a_sequence():
    text = grown([[1, 2, END, 3, 1, 2, END, 2, 3]])
    assert found_in(text, [1, 2]) == [], "both stand last in their sequences: nothing went on"
    assert found_in(text, [2, 3]) == [], "3 stands behind 2 only across an end, and at the text's own"
    assert found_in(text, [3, 1]) == [(5, 2)]


def test_contexts_of_less_than_two_tokens_are_found_nowhere():
    text = grown([[1, 1, 1, 1]])
    assert found_in(text, []) == found_in(text, [1]) == []
    assert found_in(text, [1, END]) == found_in(text, [END, 1]) == []
    assert found_in(text, [1, 1]) == [(3, 2), (2, 2)]


def test_no_match_is_measured_longer_than_asked_for():
    text = grown([[1, 2, 1, 2, 1, 2]])
    context = [1, 2, 1, 2, 1, 2]
    assert [length for _, length in found_in(text, context, 16)] == [4, 2]
    assert [length for _, length in found_in(text, context, 3)] == [3, 2]
    assert [length for _, length in found_in(text, context, 2)] == [2, 2]


def test_the_search_gives_up_after_eight_places_for_each_one_wanted():
    blocked = [1, 2, END]
    assert found_in(grown([[1, 2, 5, END], blocked * 7]), [1, 2], most=1) == [(2, 2)]
    assert found_in(grown([[1, 2, 5, END], blocked * 8]), [1, 2], most=1) == []
    assert found_in(grown([[1, 2, 5, END], blocked * 8]), [1, 2], most=2) == [(2, 2)]
