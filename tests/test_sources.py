"""Training texts: each prompt occurs once, whole texts are held out, and other rows are counted."""

import gzip
import json

import pytest

from foredraft.corpus.documents import ReadReport
from foredraft.training.sources import is_held_out, read_sources
from support.tokenizers import pretrained_words


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write four answers to each of 60 prompts, a chat with a narrator, and Python files, one below `tests`."""
    folder = tmp_path_factory.mktemp("corpus")
    with gzip.open(folder / "chat.jsonl.gz", "wt") as file:
        for number in range(240):
            prompt = f"Say something about number {number % 60}."
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"Answer {number}."}]
            file.write(json.dumps({"messages": messages}) + "\n")
        file.write(json.dumps({"messages": [{"role": "narrator", "content": "Nobody speaks."}]}) + "\n")
    code = folder / "code"
    (code / "tests").mkdir(parents=True)
    for number in range(40):
        (code / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n")
    (code / "tests" / "test_m.py").write_text("UNWANTED = 1\n")
    return folder


def test_a_prompt_comes_once_whatever_was_answered(corpus):
    keys = [source.key for source in read_sources(corpus / "chat.jsonl.gz", pretrained_words(), ReadReport())]
    assert keys == [f"Say something about number {number}." for number in range(60)]


def test_hold_out_takes_its_share_and_ignores_white_space_and_case():
    assert is_held_out("Who  are you?\n", 7) == is_held_out("who are YOU?", 7)
    assert 150 < sum(is_held_out(f"key {number}", 50) for number in range(10_000)) < 250


def test_what_is_not_text_is_left_out_and_counted(corpus):
    report = ReadReport()
    assert len(list(read_sources(corpus / "chat.jsonl.gz", pretrained_words(), report))) == 60
    assert sum(report.left_out.values()) == 1
    found = [source.key for source in read_sources(corpus / "code", pretrained_words(), ReadReport())]
    assert len(found) == 40
    assert not any("UNWANTED" in key for key in found)


@pytest.mark.slow
def test_a_long_text_is_one_source(tmp_path):
    """The reader yields it in pieces of a few MiB."""
    path = tmp_path / "long.txt"
    path.write_text("w5 w6 w7 w8\n" * 1_000_000)
    found = list(read_sources(path, pretrained_words(), ReadReport()))
    assert [(len(each.prompt), len(each.text)) for each in found] == [(48, 1025)]


def test_a_text_that_begins_like_a_chat_is_a_text(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "\0messages\0w5 w6"}) + "\n")
    assert [each.key for each in read_sources(path, pretrained_words(), ReadReport())] == ["\0messages\0w5 w6"]
