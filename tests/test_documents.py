"""Documents to learn from: whole ones are held out, what is not text is counted, options come from strings."""

import gzip
import json
from dataclasses import dataclass

import pytest

from foredraft.corpus.documents import ReadReport
from foredraft.errors import UsageError
from foredraft.training.documents import chat_document, documents_in, is_held_out
from foredraft.training.settings import assigned, named


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Four answers to each of 60 prompts, a chat of a narrator, and a folder of Python files, one below `tests`."""
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


def test_all_answers_to_a_prompt_are_on_one_side(corpus):
    sides = {True: set(), False: set()}
    for document in documents_in(corpus / "chat.jsonl.gz", ReadReport()):
        sides[is_held_out(document.key, 5)].add(document.parts[0][1])
    assert sides[True]
    assert not sides[True] & sides[False]


def test_hold_out_takes_its_share_and_ignores_white_space_and_case():
    assert is_held_out("Who  are you?\n", 7) == is_held_out("who are YOU?", 7)
    assert 150 < sum(is_held_out(f"key {number}", 50) for number in range(10_000)) < 250


def test_what_is_not_text_is_left_out_and_counted(corpus):
    report = ReadReport()
    assert len(list(documents_in(corpus / "chat.jsonl.gz", report))) == 240
    assert report.skipped == 1
    found = [document.key for document in documents_in(corpus / "code", ReadReport())]
    assert len(found) == 40
    assert not any("UNWANTED" in key for key in found)


@pytest.mark.parametrize("role", ["system", "narrator", ""])
def test_unknown_roles_are_refused(role):
    with pytest.raises(UsageError, match=f"the role {role!r}"):
        chat_document([{"role": role, "content": "a"}])


@dataclass(frozen=True)
class Options:
    steps: int = 5
    decay: str = "linear"


def test_options_come_from_strings():
    assert assigned(Options, ["steps=7", "decay=cosine"], "the run") == Options(steps=7, decay="cosine")
    for wrong, told in (("step=7", "Did you mean 'steps'"), ("steps=x", "no int"), ("steps", "NAME=VALUE")):
        with pytest.raises(UsageError, match=told):
            assigned(Options, [wrong], "the run")
    with pytest.raises(UsageError, match="twice"):
        named(["a=1", "a=2"])
