"""`foredraft index` from end to end: what each verb does to a store, and what it says."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from foredraft.cli import main
from foredraft.cli.stores import words_of
from foredraft.index.datastore import WORDS_FILE, open_datastore, write_datastore
from foredraft.index.own_words import empty_words, save_words
from support.tokenizers import save_as_a_models
from support.toys import TOY

DEMO = ["--model", TOY]
STORIES = [f"Once upon a time, story {number} began by the sea and ended there." for number in range(40)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    return path


@pytest.fixture
def store(tmp_path, corpus):
    folder = tmp_path / "my.store"
    assert main(["index", "build", str(corpus), "--out", str(folder), *DEMO]) == 0
    return folder


def described(capsys, store):
    capsys.readouterr()
    assert main(["index", "info", str(store), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix != ".lock"}


def test_a_store_is_built_described_and_checked(store, capsys):
    fields = described(capsys, store)
    assert fields["segments"][0]["documents"] == len(STORIES)
    assert fields["tokens"] == open_datastore(store).manifest.tokens > 10 * len(STORIES)
    assert fields["leftovers"] == []
    assert not store.with_name("my.store.shards").exists()
    assert main(["index", "check", str(store)]) == 0
    assert "is sound: 1 segments" in capsys.readouterr().out


def test_own_words_beside_a_store_are_checked_with_it(store, capsys):
    words = store / WORDS_FILE
    save_words(words, empty_words(8), open_datastore(store).manifest.tokenizer_hash, 9)
    assert main(["index", "check", str(store)]) == 0
    assert "own-words is sound" in capsys.readouterr().out
    words.write_bytes(words.read_bytes()[:-1])
    assert main(["index", "check", str(store)]) == 1
    assert "own-words is damaged" in capsys.readouterr().err


def test_text_is_added_merged_and_removed(store, tmp_path, capsys):
    more = tmp_path / "answers.txt"
    more.write_text("What the assistant said yesterday.")
    assert main(["index", "add", str(store), str(more), *DEMO]) == 0
    first, second = described(capsys, store)["segments"]
    assert second["documents"] == 1
    assert main(["index", "merge", str(store)]) == 0
    merged = described(capsys, store)["segments"]
    assert [entry["documents"] for entry in merged] == [len(STORIES) + 1]
    assert {path.name for path in store.glob("*.segment")} == {merged[0]["name"] + ".segment"}
    assert first["name"] not in merged[0]["name"]
    assert main(["index", "remove", str(store), merged[0]["name"]]) == 0
    assert described(capsys, store)["segments"] == []
    assert main(["index", "remove", str(store), "0123456789abcdef"]) == 2
    assert "has no segment '0123456789abcdef'" in capsys.readouterr().err


def test_small_segments_bound_the_memory_and_hold_the_same_text(store, corpus, tmp_path, capsys):
    small = tmp_path / "small.store"
    assert main(["index", "build", str(corpus), "--out", str(small), "--segment-tokens", "100", *DEMO]) == 0
    whole, parts = described(capsys, store), described(capsys, small)
    assert len(parts["segments"]) > 5
    assert parts["tokens"] == whole["tokens"]
    assert all(entry["tokens"] + entry["documents"] <= 100 for entry in parts["segments"])
    assert main(["index", "merge", str(small)]) == 0
    assert described(capsys, small)["segments"] == whole["segments"]


def test_a_store_that_exists_is_not_touched_unless_asked(store, corpus, capsys):
    before = contents(store)
    assert main(["index", "build", str(corpus), "--out", str(store), *DEMO]) == 1
    assert "exists already" in capsys.readouterr().err
    assert contents(store) == before
    assert main(["index", "build", str(corpus), "--out", str(store), "--overwrite", *DEMO]) == 0
    assert contents(store) == before


def test_what_was_left_out_is_counted_and_strict_stops_there(tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b'{"text": "fine"}\nnot json\n{"text": ""}\n{"other": 1}\n{"text": "bytes \xff"}\n')
    out = tmp_path / "a.store"
    assert main(["index", "build", str(broken), "--out", str(out), *DEMO]) == 0
    said = capsys.readouterr().out
    assert "2 documents" in said
    assert "1 broken lines, 1 unusable rows, 1 empty documents" in said
    strict = tmp_path / "b.store"
    assert main(["index", "build", str(broken), "--out", str(strict), "--strict", *DEMO]) == 2
    assert "line 2 is not JSON" in capsys.readouterr().err
    assert main(["index", "info", str(strict)]) == 1
    assert "is not a datastore" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "skipped"), [("", "1 empty"), ("   \n", "1 empty"), ("\0a", "1 binary files")])
@pytest.mark.parametrize("kind", ["index", "table"])
def test_a_corpus_without_text_makes_nothing_and_is_told_why(kind, text, skipped, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text(text)
    assert main([kind, "build", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "a.store"), *DEMO]) == 2
    said = capsys.readouterr()
    assert "hold no text" in said.err
    assert f"Skipped: {skipped}" in said.out
    assert {path.name for path in tmp_path.iterdir()} - {"a.store.lock"} == {"empty.txt"}


def test_a_table_goes_where_a_file_can_be_made(corpus, capsys):
    assert main(["table", "build", str(corpus), "--out", "/proc/a.table", *DEMO]) == 1
    assert "/proc is not writable" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::foredraft.errors.ForedraftWarning")  # of the table, which is left out
def test_an_output_is_no_input(tmp_path, corpus, capsys):
    """Named itself, or in a folder; a folder of texts may hold another output."""
    before = corpus.read_bytes()
    for given in (corpus, tmp_path):
        assert main(["table", "build", str(given), "--out", str(corpus), "--overwrite", *DEMO]) == 2
        assert "is an input of this command and would be replaced" in capsys.readouterr().err
    assert main(["train", "traces", *DEMO, "--data", str(corpus), "--out", str(corpus)]) == 2
    assert corpus.read_bytes() == before
    for more in ([], ["--overwrite"]):
        assert main(["table", "build", str(tmp_path), "--out", str(tmp_path / "a.table"), *DEMO, *more]) == 0


def test_text_is_added_to_a_store_of_a_model_with_more_ids_than_its_tokenizer(tmp_path, corpus, capsys):
    """Such as a memory: a model's embeddings may be padded."""
    words = words_of(TOY)
    with write_datastore(
        tmp_path / "wide", tokenizer_hash=words.tokenizer_hash, vocabulary=words.vocabulary + 100, create=True
    ) as writer:
        writer.commit()
    assert main(["index", "add", str(tmp_path / "wide"), str(corpus), *DEMO]) == 0
    assert described(capsys, tmp_path / "wide")["segments"][0]["documents"] == len(STORIES)


def test_a_store_is_built_where_the_name_is_a_dot(tmp_path, corpus, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["index", "build", str(corpus), "--out", ".", *DEMO]) == 0
    assert open_datastore(tmp_path / "here").manifest.tokens


def test_a_name_with_a_tilde_is_of_the_home_folder_although_the_shell_left_it(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    for what, name in (("index", "~/store"), ("table", "~/table")):
        assert main([what, "build", str(corpus), f"--out={name}", *DEMO]) == 0
        assert main([what, "info", name]) == main([what, "check", name]) == 0
    assert {"store", "table"} <= {path.name for path in (tmp_path / "home").iterdir()}
    assert not (tmp_path / "~").exists()


def test_another_tokenizers_text_is_not_added(store, corpus, tmp_path, capsys):
    tokenizer = json.loads(Path(TOY, "tokenizer.json").read_text())
    a, b = list(tokenizer["model"]["vocab"])[300:302]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    save_as_a_models(Tokenizer.from_str(json.dumps(tokenizer)), tmp_path / "other")
    before = contents(store)
    assert main(["index", "add", str(store), str(corpus), "--model", str(tmp_path / "other")]) == 1
    assert "another tokenizer" in capsys.readouterr().err
    assert contents(store) == before


def test_equal_texts_in_segments_of_their_own_are_stored_once(tmp_path, capsys):
    path = tmp_path / "twice.jsonl"
    path.write_text((json.dumps({"text": STORIES[0]}) + "\n") * 2)
    folder = tmp_path / "twice.store"
    assert main(["index", "build", str(path), "--out", str(folder), "--segment-tokens", "5", *DEMO]) == 0
    assert len(described(capsys, folder)["segments"]) == 1
