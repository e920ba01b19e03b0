"""The tri-gram table: right counts with any memory limit, lookups, and refusal of damaged or foreign tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive.index_tables
from foredraft.corpus import trigrams
from foredraft.corpus.documents import Document
from foredraft.corpus.words import tokenizer_hash
from foredraft.errors import StoreError, UsageError
from foredraft.index.storage import open_store, write_store
from foredraft.index.trigram import (
    KIND,
    bigram_row,
    empty_table,
    open_table,
    table_info,
)
from support.tokenizers import VOCABULARY, split_at_spaces, word_tokenizer, words
from support.toys import build_trigram_table, text_documents

pytestmark = pytest.mark.kernels


def successors(table, a, b):
    """Return the stored tokens that followed `a, b`, the most probable first."""
    row = bigram_row(table.first, table.second, a, b)
    return table.tokens[table.offsets[row] : table.offsets[row + 1]].tolist() if row >= 0 else []


def build(path, documents, vocabulary=VOCABULARY, **options):
    texts = text_documents([words(ids) for ids in documents])
    at_once = options.setdefault("at_once", 1 << 22)
    build_trigram_table(texts, word_tokenizer(vocabulary), vocabulary, path, batch_characters=at_once, **options)


def random_documents(seed=0, count=30, longest=60, vocabulary=VOCABULARY):
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocabulary + 1)
    lengths = generator.integers(1, longest, count)
    return [generator.choice(vocabulary, n, p=weights / weights.sum()).tolist() for n in lengths]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def assert_counted(path, documents, keep, vocabulary=VOCABULARY):
    """Compare a table with naive counts, entry by entry."""
    arrays = open_table(path, check=True)
    documents = [ids for ids in documents if ids]
    for width, rows, totals, offsets, tokens, probabilities, kept in (
        (2, lambda a, b: bigram_row(arrays.first, arrays.second, a, b), arrays.totals, arrays.offsets, arrays.tokens,
         arrays.probabilities, keep),
        (1, lambda b: b, arrays.unigram_totals, arrays.unigram_offsets, arrays.unigram_tokens,
         arrays.unigram_probabilities, 32),
    ):  # fmt: skip
        counts = naive.index_tables.successor_counts(documents, width)
        entries = 0
        for context, row_counts in counts.items():
            row = rows(*context)
            start, end = int(offsets[row]), int(offsets[row + 1])
            expected = naive.index_tables.stored_row(row_counts, kept)
            found = list(zip(tokens[start:end].tolist(), probabilities[start:end].tolist(), strict=True))
            assert (found, totals[row]) == expected, context
            entries += end - start
        assert entries == len(tokens)
        assert int(totals.sum()) == sum(sum(row.values()) for row in counts.values())
    assert len(arrays.second) == len(naive.index_tables.successor_counts(documents, 2))


@pytest.fixture
def table(tmp_path):
    build(tmp_path / "t.trigrams", random_documents())
    return tmp_path / "t.trigrams"


# --- counting


@pytest.mark.parametrize("keep", [1, 3, 12])
@pytest.mark.parametrize("at_once", [1 << 22, 50, 3])
def test_counts_are_the_slow_counts_with_any_number_of_runs_and_ranges(tmp_path, keep, at_once):
    documents = random_documents(keep)
    build(tmp_path / "t", documents, keep=keep, at_once=at_once)
    assert_counted(tmp_path / "t", documents, keep)
    noted = table_info(tmp_path / "t")["metadata"]
    assert (noted["documents"], noted["tokens"]) == (len(documents), sum(map(len, documents)))
    assert noted["distinct_trigrams"] == sum(map(len, naive.index_tables.successor_counts(documents, 2).values()))
    assert names_in(tmp_path) == ["t"]


@given(
    documents=st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=6).filter(any),
    at_once=st.integers(1, 40),
    eos=st.one_of(st.none(), st.integers(0, 4)),
)
@settings(max_examples=60, deadline=None)
def test_small_corpora_of_every_shape_are_counted(tmp_path_factory, documents, at_once, eos):
    path = tmp_path_factory.mktemp("t") / "t"
    build(path, documents, 5, at_once=at_once, eos_token_id=eos)
    ended = [ids if eos is None or not ids or ids[-1] == eos else [*ids, eos] for ids in documents]
    assert_counted(path, ended, 12, 5)


def test_the_file_does_not_depend_on_the_memory_given(tmp_path):
    documents = random_documents(7)
    for name, at_once in (("a", 1 << 22), ("b", 40), ("c", 1)):
        build(tmp_path / name, documents, at_once=at_once)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_merging_holds_little_even_when_the_text_changes_its_subject(tmp_path):
    """Ranges follow all runs, not only the first: here later tri-grams differ from those of the first run."""
    documents = [[i % 4] * 3 for i in range(9)] + random_documents(3, 40, vocabulary=300)
    merged = []
    build(tmp_path / "t", documents, 300, at_once=64, progress=lambda _phase, done, _total: merged.append(done))
    steps = np.diff([0, *merged])
    runs = -(-sum(map(len, documents)) // 64) + 1
    assert merged[-1] > 64 * 5
    assert steps.max() <= 64 + 4 * (runs + 1), "each range may overshoot by one sample of four records a run"


def test_progress_runs_to_the_end(tmp_path):
    told = []
    build(tmp_path / "t", random_documents(), progress=lambda *at: told.append(at), at_once=50)
    assert len(told) > 2
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][0] == "merging"
    assert told[-1][1] == told[-1][2]


def test_documents_in_pieces_count_as_one(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    build(whole, [[1, 2, 3, 4], [5]])
    pieces = [Document("w1 w2 ", 0, False), Document("w3", 0, False), Document(" w4", 0), Document("w5", 0)]
    build_trigram_table(pieces, word_tokenizer(), VOCABULARY, parts)
    assert whole.read_bytes() == parts.read_bytes()


def test_one_token_documents_make_no_bigram(tmp_path):
    build(tmp_path / "t", [[1], [2], [1]])
    arrays = open_table(tmp_path / "t", check=True)
    assert (len(arrays.second), len(arrays.tokens), len(arrays.unigram_tokens)) == (0, 0, 0)
    assert bigram_row(arrays.first, arrays.second, 1, 2) == -1


def test_large_vocabularies_take_wider_tokens(tmp_path):
    big = 70_000
    tokenizer = split_at_spaces({"w0": 0, "w1": 1, "top": big - 1})
    build_trigram_table(text_documents(["w1 top w1 top top"]), tokenizer, big, tmp_path / "t")
    opened = open_table(tmp_path / "t", check=True)
    assert opened.tokens.dtype == opened.second.dtype == np.uint32
    assert successors(opened, 1, big - 1) == [1, big - 1]


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 70_000])
def test_entries_are_as_small_as_promised(tmp_path, vocabulary):
    build_trigram_table(text_documents([words(range(9))]), word_tokenizer(), vocabulary, tmp_path / "t")
    arrays = open_table(tmp_path / "t")
    assert arrays.tokens.itemsize + arrays.probabilities.itemsize <= 8
    assert arrays.second.itemsize + arrays.offsets.itemsize + arrays.totals.itemsize <= 16
    info = table_info(tmp_path / "t")
    assert (info["bytes_per_trigram"], info["bytes_per_bigram"]) == ((4, 10) if vocabulary < 1 << 16 else (6, 12))


# --- refusing to build


@pytest.mark.parametrize("phase", ["reading", "merging"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_killed_build_leaves_the_old_file_and_nothing_else(table, phase, error):
    def stop(*_):
        assert (table.parent / "t.trigrams.building").is_dir()
        raise error

    def texts():
        yield from text_documents(map(words, random_documents(1)))
        if phase == "reading":
            stop()

    before = table.read_bytes()
    with pytest.raises(error):
        build_trigram_table(texts(), word_tokenizer(), VOCABULARY, table, overwrite=True, progress=stop, at_once=40)
    assert table.read_bytes() == before
    assert names_in(table.parent) == ["t.trigrams"]


def test_a_second_builder_is_refused(table):
    def build_again(*_):
        build(table, [[1, 2, 3]], overwrite=True)

    with pytest.raises(StoreError, match="being written by another process"):
        build(table, random_documents(1), overwrite=True, progress=build_again)


def test_bad_arguments_and_inputs_are_refused(table, tmp_path):
    with pytest.raises(StoreError, match="exists already"):
        build(table, [[1, 2, 3]])
    for options, says in (
        ({"keep": 0}, "keep is 0"),
        ({"keep": 256}, "keep is 256"),
    ):
        with pytest.raises(UsageError, match=says):
            build(tmp_path / "x", [[1, 2, 3]], **options)
    with pytest.raises(UsageError, match="vocabularies of 1 to"):
        build_trigram_table([], word_tokenizer(), 1 << 21, tmp_path / "x")
    for nothing in ([], [[]]):
        with pytest.raises(UsageError, match="nothing to count"):
            build(tmp_path / "x", nothing)
    assert names_in(tmp_path) == ["t.trigrams"]


def test_more_entries_than_offsets_can_count_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trigrams, "MAX_ENTRIES", 5)
    with pytest.raises(StoreError, match="more than 5 tri-grams"):
        build(tmp_path / "x", random_documents())
    assert names_in(tmp_path) == []


# --- opening and checking


def test_tables_of_another_tokenizer_or_a_larger_vocabulary_are_refused(table):
    own = tokenizer_hash(word_tokenizer())
    assert table_info(table)["tokenizer_hash"] == own
    for vocabulary in (VOCABULARY, VOCABULARY + 4):
        assert len(open_table(table, own, vocabulary).first) == VOCABULARY + 1
    with pytest.raises(StoreError, match=r"made with another tokenizer .* Build a table for this model"):
        open_table(table, tokenizer_hash(word_tokenizer(prefix="v")), VOCABULARY)
    with pytest.raises(StoreError, match="vocabulary of 12 tokens and this model scores 11"):
        open_table(table, own, VOCABULARY - 1)


def test_the_hash_covers_ids_tokens_and_added_tokens():
    hashes = {tokenizer_hash(word_tokenizer(*args)) for args in ((3, "w"), (4, "w"), (3, "v"))}
    added = word_tokenizer(3)
    assert tokenizer_hash(added) in hashes
    added.add_special_tokens(["<end>"])
    assert len(hashes | {tokenizer_hash(added)}) == 4


def test_info_says_what_was_counted(table):
    info = table_info(table)
    assert info["metadata"]["documents"] == 30
    assert info["bigrams"] == len(open_table(table).second)
    assert info["bytes"] == table.stat().st_size


def rewritten(table, path, **changed):
    """Rewrite a table with some arrays changed; it stays a sound store."""
    store = open_store(table)
    with write_store(
        path, KIND, tokenizer_hash=store.tokenizer_hash, vocabulary=store.vocabulary, metadata=store.metadata
    ) as writer:
        for name, array in {**store.arrays, **changed}.items():
            writer.append(name, array)
    return path


def swapped(array, i, j):
    result = array.copy()
    result[[i, j]] = result[[j, i]]
    return result


def replaced(array, at, value):
    result = array.copy()
    result[at] = value
    return result


def test_check_finds_every_broken_promise(table, tmp_path):
    arrays = open_table(table)
    row = int(np.argmax(np.diff(arrays.offsets)))  # the longest row
    at = int(arrays.offsets[row])
    start = int(arrays.first[1])
    breaks = {
        "first": replaced(arrays.first, 1, 1 << 31),
        "second": swapped(arrays.second, start, start + 1),
        "offsets": swapped(arrays.offsets, row, row + 1),
        "totals": replaced(arrays.totals, 0, 0),
        "tokens": replaced(arrays.tokens, at, arrays.tokens[at + 1]),
        "probabilities": replaced(arrays.probabilities, at, 0),
        "unigram_offsets": swapped(arrays.unigram_offsets, 3, 4),
        "unigram_tokens": replaced(arrays.unigram_tokens, 0, VOCABULARY),
        "unigram_probabilities": replaced(arrays.unigram_probabilities, 1, 65535),
    }
    older = {"common_tokens": np.zeros(2, np.uint16), "common_probabilities": np.zeros(2, np.uint16)}
    assert len(open_table(rewritten(table, tmp_path / "sound", **older), check=True).first) == VOCABULARY + 1
    for name, array in breaks.items():
        path = rewritten(table, tmp_path / name, **{name: array})
        with pytest.raises(StoreError, match="damaged"):
            open_table(path, check=True)


def test_arrays_of_the_wrong_size_or_kind_are_not_opened(table, tmp_path):
    arrays = open_table(table)
    for number, changed in enumerate((
        {"totals": arrays.totals[1:]},
        {"first": arrays.first[:-1]},
        {"probabilities": arrays.probabilities.astype(np.float32)},
        {"offsets": replaced(arrays.offsets, -1, 3)},
    )):  # fmt: skip
        path = rewritten(table, tmp_path / str(number), **changed)
        with pytest.raises(StoreError, match="damaged"):
            open_table(path)
    with write_store(tmp_path / "other", "datastore", tokenizer_hash="", vocabulary=3):
        pass
    with pytest.raises(StoreError, match="holds a 'datastore', not a 'trigram-table'"):
        open_table(tmp_path / "other")


# --- looking up


@given(
    first=st.lists(st.integers(0, (1 << 32) - 1), max_size=8),
    second=st.lists(st.integers(0, 9), max_size=12),
    a=st.integers(-(1 << 40), 1 << 40) | st.integers(-2, 9),
    b=st.integers(-(1 << 40), 1 << 40) | st.integers(-2, 9),
)
@settings(max_examples=200, deadline=None)
def test_looking_up_in_damaged_arrays_stays_inside_them(first, second, a, b):
    first, second = np.array(first, np.uint32), np.array(second, np.uint16)
    row = bigram_row(first, second, a, b)
    assert row == -1 or (0 <= row < len(second) and second[row] == b)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_every_pair_is_found_where_the_slow_search_finds_it(table, dtype):
    arrays = open_table(table)
    second = arrays.second.astype(dtype)
    pairs = [(a, b) for a in range(-2, VOCABULARY + 3) for b in range(-2, VOCABULARY + 3)]
    found = [bigram_row(arrays.first, second, a, b) for a, b in pairs]
    assert found == [naive.index_tables.bigram_row(arrays.first, second, a, b) for a, b in pairs]
    assert sum(row >= 0 for row in found) == len(second)


def test_an_empty_table_knows_nothing():
    table = empty_table(VOCABULARY)
    assert all(bigram_row(table.first, table.second, a, b) == -1 for a in range(-1, 13) for b in range(-1, 13))
    assert successors(table, 1, 2) == []
    assert [array.dtype for array in table[:5]] == [np.uint32, np.uint16, np.uint32, np.uint32, np.uint16]
