"""Own words: the newest distribution of every context; limits, saving, and conversion of a table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive.index_blend
from foredraft.contracts import TOP
from foredraft.errors import StoreError
from foredraft.index import storage
from foredraft.index.own_words import (
    context_key,
    empty_words,
    enlarged,
    find,
    learn_rows,
    load_words,
    save_words,
    words_of_table,
)
from support.own_words import learn
from support.tables import static_table

pytestmark = pytest.mark.kernels


def known(words, *context):
    """{token: probability * 255} after a context of one to three tokens; None if it is not stored."""
    slot = find(words.keys, context_key(*[-1] * (3 - len(context)), *context))
    if slot < 0:
        return None
    kept = words.chances[slot] > 0
    return dict(zip(words.tokens[slot][kept].tolist(), words.chances[slot][kept].tolist(), strict=True))


def test_every_row_is_learned_under_its_last_three_two_and_one_tokens():
    words = empty_words(64)
    learn(words, [5, 6, 7], [8, 9], [-1, 0], [{1: 0.6, 2: 0.29}, {4: 1.0}, {3: 1.0}])
    assert known(words, 7) == known(words, 6, 7) == known(words, 5, 6, 7) == {1: 153, 2: 74}
    assert known(words, 9) == known(words, 8, 9) == known(words, 7, 8, 9) == {3: 255}
    assert known(words, 8) == known(words, 7, 8) == known(words, 6, 7, 8) == {4: 255}


def test_a_text_shorter_than_a_context_teaches_the_shorter_ones():
    words = empty_words(64)
    learn(words, [5], [], [], [{1: 1.0}])
    assert known(words, 5) == {1: 255}
    learn(words, [5, 6], [], [], [{2: 1.0}])
    assert known(words, 5, 6) == {2: 255}
    assert words.clock[0] == 3


def test_unusable_probabilities_and_all_beyond_the_first_eight_are_not_kept():
    words = empty_words(64)
    learn(words, [5], [], [], [dict.fromkeys(range(12), 0.05)])
    assert list(known(words, 5)) == list(range(TOP))
    learn(words, [6], [], [], [{1: 0.5, 2: float("nan"), 3: 0.0, 4: 1e-9}])
    assert known(words, 6) == {1: 128, 4: 1}


def test_words_get_more_room_once_half_of_it_is_in_use_and_lose_nothing():
    words = empty_words(64)
    contexts = np.random.default_rng(0).permutation(40).tolist()
    for i in contexts:
        assert enlarged(words) is words or np.count_nonzero(words.keys) > 32
        learn(words, [i], [], [], [{i + 1: 0.6, i + 2: 0.2}])
    more = enlarged(words)
    assert len(more.keys) == 128
    assert more.clock[0] == words.clock[0] == 40
    kept = [i for i in contexts if known(words, i) is not None]
    assert len(kept) > 32
    assert all(known(more, i) == known(words, i) for i in contexts)
    assert all(
        more.learned[find(more.keys, key)] == words.learned[find(words.keys, key)]
        for key in (context_key(-1, -1, i) for i in kept)
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(1, 255)), max_size=60))
def test_the_newest_distribution_counts(rows):
    words, expected = empty_words(1 << 12), {}
    for a, b, c, parts in rows:
        learn(words, [a, b, c], [], [], [{parts % 7: parts / 255}])
        for context in ((a, b, c), (b, c), (c,)):
            expected[context] = {parts % 7: parts}
    assert {context: known(words, *context) for context in expected} == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_what_is_learned_of_a_draft_is_what_the_slow_twin_learns(seed):
    rng, words, expected = np.random.default_rng(seed), empty_words(1 << 12), {}
    for _ in range(3):
        count = int(rng.integers(0, 9))
        tokens = rng.integers(0, 6, count).astype(np.int32)
        parents = np.array([rng.integers(-1, node) for node in range(count)], np.int32)
        top = rng.permuted(np.tile(np.arange(12), (count + 1, 1)), axis=1)[:, :4].astype(np.int32)
        chances = -np.sort(-(rng.random((count + 1, 4)).astype(np.float32) ** 4))
        told = (tokens, parents, rng.integers(0, 6, int(rng.integers(1, 5))), top, chances)
        learn_rows(words, *told)
        naive.index_blend.learn_rows(expected, *told)
    for context in expected:
        padded = (*[-1] * (3 - len(context)), *context)
        slow = naive.index_blend.find(expected, naive.index_blend.context_key(*padded))
        slot = find(words.keys, context_key(*padded))
        assert words.tokens[slot][: len(slow)].tolist() == [token for token, _ in slow]
        assert words.chances[slot].tolist() == [parts for _, parts in slow] + [0] * (TOP - len(slow))


def test_the_contexts_learned_longest_ago_make_room():
    words = empty_words(64)
    for token in range(1000):
        learn(words, [token], [], [], [{1: 1.0}])
        assert known(words, token) is not None
    kept = [token for token in range(1000) if known(words, token) is not None]
    assert 32 < len(kept) <= 64
    assert np.mean(kept) > 900


def test_what_was_learned_is_saved_and_loaded(tmp_path):
    words = empty_words(256)
    for token in range(20):
        learn(words, [token, token + 1], [], [], [{token: 0.5, 3 + token: 0.25}])
    save_words(tmp_path / "w", words, "hash", 300)
    loaded = load_words(tmp_path / "w", "hash")
    assert all(known(loaded, token) == known(words, token) is not None for token in range(1, 21))
    assert known(loaded, 3, 4) == known(words, 3, 4)
    learn(loaded, [77], [], [], [{1: 1.0}])
    assert known(loaded, 77) == {1: 255}
    save_words(tmp_path / "w", loaded, "hash", 300)
    assert known(load_words(tmp_path / "w", "hash"), 77) == {1: 255}


def test_words_of_another_tokenizer_and_damaged_ones_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "EAGER_CHECK_BYTES", 0)  # a larger file is verified too
    words = empty_words(64)
    learn(words, [1], [], [], [{2: 1.0}])
    save_words(tmp_path / "w", words, "hash", 300)
    with pytest.raises(StoreError, match="another tokenizer"):
        load_words(tmp_path / "w", "other")
    data = (tmp_path / "w").read_bytes()
    for changed in (data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1])):
        (tmp_path / "w").write_bytes(changed)
        with pytest.raises(StoreError, match="is damaged"):
            load_words(tmp_path / "w", "hash")


def test_a_table_says_the_same_in_this_form():
    words = words_of_table(static_table([[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 2, 6]]))
    assert known(words, 1, 2) == {3: 170, 4: 85}
    assert known(words, 5, 2) == {6: 255}
    assert known(words, 2) == {3: 128, 4: 64, 6: 64}
    assert known(words, 4) is None
