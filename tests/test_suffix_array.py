"""Suffix arrays: sorted like a slow sort, searched like a scan, and verified so that every fault is found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive.index_text
from foredraft.errors import UsageError
from foredraft.index import suffix_array
from foredraft.index.suffix_array import (
    SuffixArrays,
    first_matches,
    follow,
    is_sorted,
    sorted_suffixes,
    symbol_dtype,
)
from support.documents import random_documents, ranges_after, replaced, sort, swapped

pytestmark = pytest.mark.kernels

VOCABULARIES = [3, 255, 256, 65_535, 65_536, 70_000]


# --- sorting


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("seed", range(4))
def test_suffixes_stand_in_the_order_of_the_slow_sort(vocabulary, seed):
    documents = random_documents(seed, vocabulary)
    text = sort(documents, vocabulary)
    symbols = text.symbols.tolist()
    found = [naive.index_text.suffix(symbols, vocabulary, place) for place in text.suffixes.tolist()]
    expected = naive.index_text.sorted_places(symbols, vocabulary)
    assert found == [naive.index_text.suffix(symbols, vocabulary, place) for place in expected]
    assert sorted(text.suffixes.tolist()) == sorted(expected), "every token's place, once; no separator's"
    assert is_sorted(text)
    assert first_matches(text)


@given(documents=st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=8).filter(any))
@settings(max_examples=80, deadline=None)
def test_small_corpora_of_every_shape_are_sorted(documents):
    """Empty documents too: consecutive separators."""
    text = sort(documents, 3)
    symbols = text.symbols.tolist()
    assert naive.index_text.is_sorted(symbols, 3, text.suffixes.tolist())
    assert is_sorted(text)
    assert first_matches(text)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_first_says_where_each_token_begins(vocabulary):
    documents = random_documents(1, vocabulary)
    text = sort(documents, vocabulary)
    assert text.first.dtype == np.int64
    assert len(text.first) == vocabulary + 1
    tokens = sorted(token for ids in documents for token in ids)
    asked = {*tokens, 0, vocabulary - 1, vocabulary}
    assert {t: int(text.first[t]) for t in asked} == {t: sum(token < t for token in tokens) for t in asked}


def test_symbols_are_as_wide_as_the_separator_needs():
    wide = {v: symbol_dtype(v) == np.uint32 for v in VOCABULARIES}
    assert wide == {v: v > 65_535 for v in VOCABULARIES}


@pytest.mark.parametrize("vocabulary", [3, 256, 70_000])
def test_a_text_sorts_the_same_however_it_is_handed_in(vocabulary, monkeypatch):
    documents = random_documents(2, vocabulary)
    whole = sort(documents, vocabulary)
    monkeypatch.setattr(suffix_array, "_CHUNK", 7)
    pieces = sort(documents, vocabulary, pieces=5)
    assert whole.suffixes.tolist() == pieces.suffixes.tolist()
    assert whole.first.tolist() == pieces.first.tolist()


@pytest.mark.parametrize("vocabulary", [3, 255, 65_534])
def test_a_symbol_above_the_separator_is_refused(vocabulary):
    with pytest.raises(UsageError, match=f"token {vocabulary + 1}, which is not below the vocabulary of {vocabulary}"):
        sorted_suffixes([np.array([0, vocabulary + 1, vocabulary], np.uint16)], vocabulary)


# --- looking up


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_counts_after_every_token_are_those_of_a_scan(vocabulary):
    documents, longest = random_documents(3, vocabulary), 5
    text = sort(documents, vocabulary)
    rng = np.random.default_rng(vocabulary)
    strange = [-1, -(1 << 40), vocabulary, vocabulary + 1, 1 << 40]
    unseen = [token for token in range(min(vocabulary, 300)) if not naive.index_text.ends(documents, [token])][:2]
    context = [*documents[0], *documents[1], *rng.choice(documents[2], 12).tolist(), *documents[0]]
    for token in (*strange, *unseen):
        context += [token, *documents[int(rng.integers(len(documents)))]]
    ranges = np.zeros((longest + 1, 2), np.int64)
    most = 0
    for end in range(1, len(context) + 1):
        follow(text, ranges, np.array(context[max(0, end - longest) : end], np.int64), 1)
        for length in range(1, longest + 1):
            last = context[end - length : end]
            expected = len(naive.index_text.ends(documents, last)) if length <= end else 0
            low, high = ranges[length]
            assert high - low == expected, (last, length)
            begun = [text.symbols[place : place + length].tolist() for place in text.suffixes[low:high]]
            assert begun == [last] * expected
            most = max(most, length if expected > 1 else 0)
    assert most == longest, "no long context occurs: the test shows nothing"


@given(
    documents=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6),
    context=st.lists(st.integers(-1, 4), max_size=9),
    longest=st.integers(1, 6),
    cut=st.integers(0, 9),
)
@settings(max_examples=120, deadline=None)
def test_ranges_are_the_same_however_the_context_arrives(documents, context, longest, cut):
    text = sort(documents, 3)
    at_once = ranges_after(text, context, longest)
    in_two = ranges_after(text, context[:cut], longest)
    follow(text, in_two, np.array(context, np.int64), len(context[cut:]))
    counts = (at_once[:, 1] - at_once[:, 0]).tolist()
    assert counts[1:] == naive.index_text.follow(documents, context, longest)
    assert (in_two[:, 1] - in_two[:, 0]).tolist() == counts
    assert all(in_two[n].tolist() == at_once[n].tolist() for n in range(1, longest + 1) if counts[n])


def test_a_context_does_not_cross_a_documents_end():
    text = sort([[0, 1], [2, 0], [1]], 3)
    assert [len(naive.index_text.ends([[0, 1], [2, 0], [1]], context)) for context in ([0, 1], [1, 2], [0, 1, 2])] == [
        1,
        0,
        0,
    ]
    for context, expected in (([0, 1], 1), ([1, 2], 0), ([0, 1, 2], 0), ([0, 3], 0), ([3], 0)):
        low, high = ranges_after(text, context, 4)[len(context)]
        assert high - low == expected, context


@pytest.mark.slow
@given(
    symbols=st.lists(st.integers(0, 65_535), min_size=1, max_size=10),
    suffixes=st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 12), min_size=1, max_size=10),
    first=st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 12), min_size=4, max_size=4),
    context=st.lists(st.integers(-1, 4), max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_looking_up_in_damaged_arrays_stays_inside_them(symbols, suffixes, first, context):
    text = SuffixArrays(np.array(symbols, np.uint16), np.array(suffixes, np.int32), np.array(first, np.int64))
    ranges = ranges_after(text, context, 4)
    for low, high in ranges.tolist():
        assert low == high or 0 <= low < high <= len(suffixes)


# --- checking


def test_the_check_agrees_with_the_slow_one_on_every_swap():
    documents = random_documents(5, count=4, longest=6)
    text = sort(documents, 3)
    symbols, count = text.symbols.tolist(), len(text.suffixes)
    for i in range(count):
        for j in range(i + 1, count):
            suffixes = swapped(text.suffixes, i, j)
            same = naive.index_text.suffix(symbols, 3, suffixes[i]) == naive.index_text.suffix(symbols, 3, suffixes[j])
            if not same:
                assert not naive.index_text.is_sorted(symbols, 3, suffixes.tolist())
                assert not is_sorted(text._replace(suffixes=suffixes)), (i, j)


def test_the_check_finds_places_that_are_wrong():
    text = sort(random_documents(4), 3)
    separator = int(np.flatnonzero(text.symbols == 3)[0])
    for value in (int(text.suffixes[0]), separator, -1, len(text.symbols), 1 << 30):
        at = 5
        assert not is_sorted(text._replace(suffixes=replaced(text.suffixes, at, value))), value
    assert not is_sorted(text._replace(suffixes=text.suffixes[:-1])), "a place too few"
    assert not is_sorted(text._replace(suffixes=np.append(text.suffixes, text.suffixes[-1]))), "a place twice"
    assert is_sorted(text)


def test_the_check_finds_a_changed_symbol():
    text = sort(random_documents(6), 3)
    order = text.suffixes.tolist()
    found = 0
    for at in range(len(text.symbols) - 1):
        changed = replaced(text.symbols, at, (int(text.symbols[at]) + 1) % 4)
        if not naive.index_text.is_sorted(changed.tolist(), 3, order):
            assert not is_sorted(text._replace(symbols=changed)), at
            found += 1
    assert found > len(text.symbols) // 2


def test_symbols_are_compared_behind_the_narrow_symbols_border():
    """256 and 511 differ from 0 and 255 in the upper byte only."""
    text = sort([[256, 1], [0, 2], [511, 0], [255, 3]], 600)
    assert [int(text.symbols[place]) for place in text.suffixes] == [0, 0, 1, 2, 3, 255, 256, 511]
    assert is_sorted(text)
    assert not is_sorted(text._replace(suffixes=text.suffixes[::-1].copy()))


def test_a_text_without_tokens_has_no_suffixes():
    for texts in ([], [np.empty(0, np.uint16)], [np.array([3, 3], np.uint16)]):
        suffixes, first = sorted_suffixes(texts, 3)
        assert (len(suffixes), first.tolist()) == (0, [0, 0, 0, 0])


def test_a_wrong_first_is_found_wherever_it_is():
    documents = [[0, 1, 4, 4, 2], [1, 1, 0]]
    text = sort(documents, 5)  # 3 occurs nowhere
    assert first_matches(text)
    for token in range(6):
        for value in (-1, 99, *range(len(text.suffixes) + 1)):
            first = replaced(text.first, token, value)
            expected = naive.index_text.first_matches(text.symbols.tolist(), text.suffixes.tolist(), first.tolist())
            assert expected == (value == text.first[token])
            assert first_matches(text._replace(first=first)) == expected, (token, value)
