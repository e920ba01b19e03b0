"""Cutting a corpus into shards: every line, row and file is in exactly one shard, whatever its size."""

import gzip
import itertools
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from foredraft.corpus.documents import ReadReport, find_inputs, read_documents
from foredraft.corpus.shards import Shard, plan_shards
from foredraft.corpus.words import Words
from foredraft.errors import UsageError

UNKNOWN = "a"
WORDS = Words(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token=UNKNOWN)).to_str())
ROWS_TO_SKIP = ["{", '{"text": ""}', "", '"no text"']


def read(shards, **options):
    """Return the texts of each shard, and the reading report of all."""
    report = ReadReport()
    return [[d.text for d in read_documents(shard.parts, report=report, **options)] for shard in shards], report


def read_whole(files):
    report = ReadReport()
    return [document.text for document in read_documents(files, report=report)], report


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def assert_same(files, shard_bytes):
    """Compare reading in shards with reading whole files."""
    shards = plan_shards(files, shard_bytes)
    texts, report = read(shards)
    assert (flat(texts), report) == read_whole(files)
    assert sum(shard.bytes for shard in shards) == sum(path.stat().st_size for path in files)
    return shards


@given(
    lines=st.lists(
        st.one_of(st.sampled_from(ROWS_TO_SKIP), st.text(max_size=40).map(lambda t: json.dumps({"text": t})))
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    last=st.booleans(),
    shard_bytes=st.integers(1, 120),
)
@settings(max_examples=150, deadline=None)
def test_every_line_is_in_one_shard(tmp_path_factory, lines, end, mark, last, shard_bytes):
    path = tmp_path_factory.mktemp("plan") / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + (end.join(lines) + end * last).encode())
    shards = assert_same([path], shard_bytes)
    assert all(shard.bytes <= shard_bytes for shard in shards)


def test_a_line_longer_than_a_shard_is_read_once(tmp_path):
    rows = [{"text": "short"}, {"text": "long " * 2000}, {"text": "end"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shards = assert_same([tmp_path / "a.jsonl"], 100)
    assert len(shards) > 50
    texts, _ = read(shards)
    assert [text for text in texts if text] == [["short", rows[1]["text"]], ["end"]]


@pytest.mark.parametrize("shard_bytes", [2, 10, 1000])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, shard_bytes):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "one"}\n{"text": "two"}')
    texts, _ = read(plan_shards([tmp_path / "a.jsonl"], shard_bytes), strict=True)
    assert flat(texts) == ["one", "two"]


def test_row_groups_are_shared_out(tmp_path):
    rows = [f"row {i} " + "x" * 500 for i in range(40)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": rows}), path, row_group_size=3, compression="none", use_dictionary=False)
    texts, _ = read(assert_same([path], 6000))
    assert flat(texts) == rows
    assert {len(text) for text in texts} == {6, 4}
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert_same([path], 5000)


def test_small_files_share_a_shard_and_large_ones_stay_whole(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"text {number}" * 10)
    (tmp_path / "x.md").write_text("large " * 1000)
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n' * 5))
    (tmp_path / "z.py").write_text("")
    files = find_inputs([tmp_path])
    shards = assert_same(files, 300)
    assert [len(shard.parts) for shard in shards] == [5, 5, 1, 2]
    assert len(assert_same(files, 1 << 30)) == 1


def test_places_in_files_are_named_whichever_shard_they_are_in(tmp_path):
    rows = [{"text": "x" * 50}] * 9
    (tmp_path / "a.jsonl").write_text("\n".join([*map(json.dumps, rows), "{"]))
    pq.write_table(pa.table({"text": ["x" * 90] * 9 + [""]}), tmp_path / "b.parquet", row_group_size=1)
    for name, says in (("a.jsonl", rf"the line at byte {9 * 64 - 9} is not JSON"), ("b.parquet", "row 10 has no text")):
        with pytest.raises(UsageError, match=says):
            read(plan_shards([tmp_path / name], 100), strict=True)


def test_consumed_bytes_run_to_the_end_of_a_shard(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 100)
    (tmp_path / "b.txt").write_text("some text")
    for shard in plan_shards(find_inputs([tmp_path]), 500):
        consumed = [document.consumed for document in read_documents(shard.parts, report=ReadReport())]
        assert consumed == sorted(consumed)
        assert consumed[-1] == shard.bytes


# --- names


def identities(files, words=WORDS, shard_bytes=50, **options):
    return [shard.identity(words) for shard in plan_shards(files, shard_bytes, **options)]


def test_the_same_files_give_the_same_shards(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 9)
    first = plan_shards([tmp_path / "a.jsonl"], 50)
    monkeypatch.chdir(tmp_path)
    assert plan_shards(find_inputs(["a.jsonl"]), 50) == first
    names = identities([tmp_path / "a.jsonl"])
    assert names == identities([tmp_path / "a.jsonl"])
    assert len(set(names)) == len(first) == 4


def test_a_name_changes_with_whatever_changes_the_ids(tmp_path):
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for each in (path, other):
        each.write_text('{"text": "some text"}\n' * 9)
        os.utime(each, ns=(1, 1))
    names = [
        identities([path]), identities([other]), identities([path], shard_bytes=70),
        identities([path], words=Words(WORDS.tokenizer_json, eos_token_id=1)),
        identities([path], strict=True),
    ]  # fmt: skip
    os.utime(path, ns=(2, 2))
    names.append(identities([path]))
    path.write_text('{"text": "some text"}\n' * 10)
    os.utime(path, ns=(2, 2))
    names.append(identities([path]))
    assert len(set(flat(names))) == sum(map(len, names))


# --- refusals


def test_what_cannot_be_planned_or_is_no_longer_as_planned_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some text"}\n')
    with pytest.raises(UsageError, match=r"gone\.txt cannot be read"):
        plan_shards([tmp_path / "gone.txt"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"b\.parquet is damaged"):
        plan_shards([tmp_path / "b.parquet"])
    planned = plan_shards([path])
    path.write_text("")
    with pytest.raises(UsageError, match=r"a\.jsonl has changed"):
        read(planned)
    assert plan_shards([]) == []
    assert Shard(()).bytes == 0
