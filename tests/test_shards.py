"""Token shards: the ids of whole documents, the same at every run, and reused after a kill."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from typer.testing import CliRunner

from foredraft.cli import stores
from foredraft.corpus import documents as documents_module
from foredraft.corpus import shards as shards_module
from foredraft.corpus.documents import ReadReport, find_inputs, read_documents
from foredraft.corpus.shards import (
    KIND,
    finish_shard,
    has_shards,
    plan_shards,
    remove_shards,
    shard_symbols,
    tokenize_shards,
)
from foredraft.corpus.trigrams import count_trigrams
from foredraft.corpus.words import Words
from foredraft.errors import StoreError, UsageError
from foredraft.index.storage import open_store
from support.tokenizers import save_as_a_models
from support.toys import build_trigram_table

VOCABULARY = 12
END = VOCABULARY


def words(vocabulary=VOCABULARY, **options):
    """Return a tokenizer whose token `i` is `w<i>`; it drops the letter x, so that a text of x only has no ids."""
    known = {f"w{i}": i for i in [*range(VOCABULARY), vocabulary - 1]}
    tokenizer = Tokenizer(models.WordLevel(known))
    tokenizer.normalizer = normalizers.Replace("x", "")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Words(tokenizer.to_str(), **options)


def text_of(ids):
    return " ".join(f"w{i}" for i in ids)


def json_lines(path, documents):
    path.write_text("".join(json.dumps({"text": text_of(ids)}) + "\n" for ids in documents))
    return path


def random_documents(seed=0, count=200):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, generator.integers(1, 30)).tolist() for _ in range(count)]


def symbols_of(path):
    return np.concatenate([np.empty(0, np.uint16), *shard_symbols([path])])


def documents_of(paths):
    """Return the documents in shards, each as a list of ids."""
    found = []
    for path in paths:
        symbols = symbols_of(path)
        ends = np.flatnonzero(symbols == open_store(path, KIND).vocabulary)
        assert len(symbols) == (ends[-1] + 1 if len(ends) else 0), "every document is followed by the separator"
        found += [part[:-1].tolist() for part in np.split(symbols, ends + 1)[:-1]]
    return found


def made(path, shards, **options):
    finished = list(tokenize_shards(shards, options.pop("words", words()), path, **options))
    return [shard.path for shard in finished], sum((shard.report for shard in finished), ReadReport())


@pytest.fixture
def corpus(tmp_path):
    return json_lines(tmp_path / "a.jsonl", random_documents())


# --- what is in a shard


@pytest.mark.parametrize("shard_bytes", [100, 1000, 1 << 20])
def test_documents_come_back_in_order_each_with_a_separator(tmp_path, corpus, shard_bytes):
    paths, report = made(tmp_path / "shards", plan_shards([corpus], shard_bytes))
    expected = random_documents()
    assert documents_of(paths) == expected
    assert report == ReadReport(kept=200, tokens=sum(map(len, expected)))


def test_the_end_of_text_is_appended_where_it_is_missing(tmp_path):
    corpus = json_lines(tmp_path / "a.jsonl", [[1, 2], [3, 5], [5], [6]])
    paths, report = made(tmp_path / "shards", plan_shards([corpus]), words=words(eos_token_id=5))
    assert documents_of(paths) == [[1, 2, 5], [3, 5], [5], [6, 5]]
    assert report.tokens == 8


def test_empty_documents_and_documents_without_ids_are_not_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n{"text": " "}\n{"text": "x xx"}\n{"text": "w2"}\n{\n{}\n')
    (tmp_path / "b.txt").write_text("")
    paths, report = made(tmp_path / "shards", plan_shards(find_inputs([tmp_path])), words=words(eos_token_id=0))
    assert documents_of(paths) == [[1, 0], [2, 0]]
    counted = ReadReport(broken_lines=1, unusable_rows=1, empty_documents=2, kept=2, tokens=4)
    assert report == counted


def test_an_empty_corpus_makes_an_empty_shard(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    paths, report = made(tmp_path / "shards", plan_shards([tmp_path / "a.jsonl"]))
    assert documents_of(paths) == []
    assert (report.kept, report.tokens, len(paths)) == (0, 0, 1)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_the_separator_always_fits(tmp_path, vocabulary, dtype):
    corpus = json_lines(tmp_path / "a.jsonl", [[1, vocabulary - 1], [2]])
    paths, _ = made(tmp_path / "shards", plan_shards([corpus]), words=words(vocabulary))
    assert open_store(paths[0]).arrays["tokens"].dtype == dtype
    assert documents_of(paths) == [[1, vocabulary - 1], [2]]


def test_a_document_longer_than_memory_allows_for_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(shards_module, "_BLOCK_SYMBOLS", 64)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 1000).tolist()
    (tmp_path / "a.txt").write_text(text_of(ids))
    paths, report = made(tmp_path / "shards", plan_shards([tmp_path / "a.txt"]))
    assert documents_of(paths) == [ids]
    assert report.kept == 1
    sizes = [len(block) for block in shard_symbols(paths)]
    assert (max(sizes), sum(sizes)) == (64, 1001)


def test_strict_stops_at_the_first_broken_line(tmp_path, corpus):
    with corpus.open("a") as file:
        file.write("{\n")
    with pytest.raises(UsageError, match="is not JSON"):
        made(tmp_path / "shards", plan_shards([corpus], 1000, strict=True))
    assert made(tmp_path / "shards", plan_shards([corpus], 1000))[1].broken_lines == 1


# --- again


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.tokens")}


def test_a_shard_is_made_the_same_every_time(tmp_path, corpus):
    shards = plan_shards([corpus], 1000)
    for name in ("a", "b"):
        made(tmp_path / name, shards)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == len(shards) > 3


def test_finished_shards_are_used_again_and_report_the_same(tmp_path, corpus):
    with corpus.open("a") as file:
        file.write("{\n")
    shards = plan_shards([corpus], 1000)
    first = list(tokenize_shards(shards, words(), tmp_path / "shards"))
    told = []
    again = list(tokenize_shards(shards, words(), tmp_path / "shards", progress=lambda *at: told.append(at)))
    assert not any(shard.resumed for shard in first)
    assert all(shard.resumed for shard in again)
    assert [shard[:2] for shard in first] == [shard[:2] for shard in again]
    assert told[-1] == ("tokenising", corpus.stat().st_size, corpus.stat().st_size)


def test_what_is_damaged_or_of_other_inputs_is_made_again(tmp_path, corpus):
    folder = tmp_path / "shards"
    shards = plan_shards([corpus], 1000)
    paths, _ = made(folder, shards)
    before = contents(folder)
    data = bytearray(before[paths[0].name])
    data[-1] ^= 1
    paths[0].write_bytes(data)
    paths[1].write_bytes(before[paths[1].name][:-9])
    paths[2].write_bytes(before[paths[3].name])
    again = list(tokenize_shards(shards, words(), folder))
    assert [shard.resumed for shard in again] == [False] * 3 + [True] * (len(shards) - 3)
    assert contents(folder) == before
    other = list(tokenize_shards(shards, words(eos_token_id=3), folder))
    assert not any(shard.resumed for shard in other)


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from foredraft.corpus.shards import tokenize_shards

shards, words, folder = pickle.loads(Path(sys.argv[1]).read_bytes())

def progress(phase, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

list(tokenize_shards(shards, words, folder, progress=progress))
"""


def test_a_killed_process_loses_one_shard_at_most(tmp_path, corpus):
    shards, folder = plan_shards([corpus], 1000), tmp_path / "shards"
    (tmp_path / "job").write_bytes(pickle.dumps((shards, words(), folder)))
    environment = {**os.environ, "PYTHONPATH": str(Path(shards_module.__file__).parents[2])}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "job")], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    finished = len(contents(folder))
    assert len(list(folder.glob("*.building"))) == 1, "it died while it wrote"
    assert len(shards) // 2 - 1 <= finished < len(shards)
    again = list(tokenize_shards(shards, words(), folder))
    assert [shard.resumed for shard in again] == [True] * finished + [False] * (len(shards) - finished)
    made(tmp_path / "in one go", shards)
    assert contents(folder) == contents(tmp_path / "in one go")


def test_two_processes_do_not_write_the_same_shard(tmp_path, corpus):
    shards = plan_shards([corpus], 1000)

    def progress(*_):
        list(tokenize_shards(shards, words(), tmp_path / "shards"))

    with pytest.raises(StoreError, match="being written by another process"):
        list(tokenize_shards(shards, words(), tmp_path / "shards", progress=progress))


# --- the folder


def test_only_what_tokenising_made_is_removed(tmp_path, corpus):
    folder = tmp_path / "shards"
    paths, _ = made(folder, plan_shards([corpus], 1000))
    Path(f"{paths[0]}.building").mkdir()
    (folder / "notes.txt").write_text("mine")
    assert has_shards(folder)
    remove_shards(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    remove_shards(folder)
    remove_shards(folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, corpus):
    with pytest.raises(StoreError, match="cannot be written"):
        list(tokenize_shards(plan_shards([corpus]), words(), tmp_path / "missing" / "shards"))
    with pytest.raises(StoreError, match="does not exist"):
        finish_shard(plan_shards([corpus])[0], words(), tmp_path / "missing")


# --- tables


@pytest.mark.parametrize("eos", [None, 4])
def test_a_table_from_shards_is_the_table_from_documents(tmp_path, eos):
    inputs = json_lines(tmp_path / "a.jsonl", [*random_documents(), [1], []])
    (tmp_path / "b.txt").write_text(f"{text_of(range(VOCABULARY))}\n" * 9)
    files, used = find_inputs([inputs, tmp_path / "b.txt"]), words(eos_token_id=eos)
    documents = read_documents(files, report=ReadReport())
    build_trigram_table(documents, used.tokenizer(), VOCABULARY, tmp_path / "streamed", eos_token_id=eos)
    paths, _ = made(tmp_path / "shards", plan_shards(files, 700), words=used)
    for at_once in (50, 1 << 20):
        count_trigrams(
            shard_symbols(paths), used.tokenizer_hash, VOCABULARY, tmp_path / "counted",
            eos_token_id=eos, at_once=at_once, overwrite=True,
        )  # fmt: skip
        assert (tmp_path / "counted").read_bytes() == (tmp_path / "streamed").read_bytes()


def build_table(tmp_path, *arguments):
    save_as_a_models(words().tokenizer(), tmp_path / "model")
    inputs = (tmp_path / "a.jsonl", "--out", tmp_path / "t", "--model", tmp_path / "model", *arguments)
    return CliRunner().invoke(stores.table, ["build", *map(str, inputs)])


def test_a_stopped_table_build_goes_on_where_it_stopped(tmp_path, corpus, monkeypatch):
    folder = tmp_path / "t.shards"
    counted = shards_module.shard_symbols

    def interrupted(paths):
        yield from counted(paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(shards_module, "shard_symbols", interrupted)
    stopped = build_table(tmp_path)
    assert stopped.exit_code != 0
    assert f"is kept in {folder}; the same command goes on from there" in stopped.stderr
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    assert kept
    whole, when = corpus.read_bytes(), corpus.stat()
    with corpus.open("a") as file:
        file.write("{\n")
    assert isinstance(build_table(tmp_path, "--strict").exception, UsageError)
    assert kept.keys() <= {path.name for path in folder.glob("*.tokens")}, "a refused build removes no other's"
    corpus.write_bytes(whole)
    os.utime(corpus, ns=(when.st_atime_ns, when.st_mtime_ns))
    times = []
    monkeypatch.setattr(
        shards_module, "shard_symbols",
        lambda paths: counted(times.append((path.name, path.stat().st_mtime_ns)) or path for path in paths),
    )  # fmt: skip
    assert build_table(tmp_path).exit_code == 0
    assert dict(times) == kept, "nothing was tokenised again"
    assert not folder.exists()
    documents = read_documents([corpus], report=ReadReport())
    build_trigram_table(documents, words().tokenizer(), VOCABULARY, tmp_path / "u", metadata={"inputs": ["a.jsonl"]})
    assert (tmp_path / "t").read_bytes() == (tmp_path / "u").read_bytes()


def test_a_refused_table_build_keeps_nothing(tmp_path, corpus, monkeypatch):
    with corpus.open("a") as file:
        file.write("{\n")
    monkeypatch.setattr(shards_module, "plan_shards", lambda files, **options: plan_shards(files, 1000, **options))
    refused = build_table(tmp_path, "--strict")
    assert isinstance(refused.exception, UsageError)
    assert not (tmp_path / "t.shards").exists()
    (tmp_path / "t").write_text("there already")
    there = build_table(tmp_path)
    assert isinstance(there.exception, StoreError)
    assert not (tmp_path / "t.shards").exists()
    assert build_table(tmp_path, "--overwrite").exit_code == 0
