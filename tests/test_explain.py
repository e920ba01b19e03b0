"""`foredraft explain`: the account of a text adds up, and listening changes nothing."""

import json

import numpy as np
import pytest

from foredraft.bench.summary import account_of
from foredraft.cli import main
from foredraft.contracts import CostCurve, Draft, StepRecord, Verdict
from foredraft.engine.statistics import summarize
from foredraft.generation import Generation

PROMPT = "Tom has three apples and buys three more apples. How many apples has Tom?"


def step(emitted, accepted, drafted, forward):
    parts = {"draft": 1_000_000, "layout": 0, "forward": forward * 1_000_000, "verify": 0, "commit": 0, "observe": 0}
    return StepRecord(emitted, accepted, drafted, (None,) * len(emitted), parts)


def draft(parents, score, source=None):
    parents = np.array(parents, np.int32)
    tokens = np.arange(len(parents), dtype=np.int32)
    return Draft(tokens, parents, np.array(score, np.float32), source=source)


def test_an_account_adds_up_by_hand():
    chain = draft([-1, 0, 1], [0.9, 0.5, 0.03], np.array([0, 1, 1], np.uint8))
    star = draft([-1, -1], [0.3, 0.1])
    verdicts = [
        Verdict((0, 1, 7), (0, 1), chain, 0),
        Verdict((7,), (), star, 3),
        Verdict((8,), (), draft([], []), 4),
    ]
    steps = (step((0, 1, 7), 2, 3, 4), step((7,), 0, 2, 3), step((8,), 0, 0, 2))
    generation = Generation("text", (0, 1, 7, 7, 8), "length", 1, 0, steps, summarize(steps, 0.0))
    account = account_of(generation, verdicts, ("one", "other"), CostCurve((1, 4), (0.002, 0.005)))
    assert [tuple(each.values()) for each in account["sources"]] == [
        ("one", 3, 1, 2), ("other", 2, 1, 1)
    ]  # fmt: skip
    found = {each["low"]: (each["nodes"], each["estimate"], each["accepted"]) for each in account["reliability"]}
    assert found == {
        0.0: (1, pytest.approx(0.03), 0.0),
        0.1: (1, pytest.approx(0.1), 0.0),
        0.2: (1, pytest.approx(0.3), 0.0),
        0.4: (1, pytest.approx(0.5), 1.0),
        0.8: (1, pytest.approx(0.9), 1.0),
    }
    assert account["plain_steps"] == 1
    assert account["expected"] == {
        "tokens": pytest.approx((1 + 1.43 + 1 + 0.4) / 2),
        "plain_milliseconds": 2,
        "drafted_milliseconds": pytest.approx((5 + 4) / 2),
    }
    assert account["measured"] == {
        "tokens": 2, "plain_milliseconds": 2, "drafted_milliseconds": 3.5, "overhead_milliseconds": 1,
    }  # fmt: skip


@pytest.mark.slow
def test_an_explained_text_is_the_text(capsys):
    options = ["--dtype", "float32", "--max-new-tokens", "24", "--temperature", "0.7", "--seed", "3", "--json"]
    assert main(["explain", PROMPT, "--num-speculative-tokens", "8", *options]) == 0
    account = json.loads(capsys.readouterr().out)
    assert main(["generate", PROMPT, "--method", "none", *options]) == 0
    assert account["text"] == json.loads(capsys.readouterr().out)["text"]
    counts = account["statistics"]
    assert sum(source["drafted"] for source in account["sources"]) == counts["drafted"] > 0
    assert sum(source["accepted"] for source in account["sources"]) == counts["accepted"]
    assert sum(each["nodes"] for each in account["reliability"]) == counts["drafted"]
    assert [source["name"] for source in account["sources"]] == [
        "auto, three tokens", "auto, two tokens", "auto, one token", "auto, own text", "auto, shared text",
        "auto, datastore", "auto, draft model",
    ]  # fmt: skip


@pytest.mark.slow
def test_an_account_is_shown_in_words(capsys):
    assert main(["explain", PROMPT, "--max-new-tokens", "16", "--method", "prompt_lookup", "--no-color"]) == 0
    shown = capsys.readouterr().out
    for words in ("tokens per step", "draft sources", "prompt_lookup", "ms per pass without a draft"):
        assert words in shown


@pytest.mark.slow
def test_plain_decoding_has_an_account_too(capsys):
    assert main(["explain", PROMPT, "--max-new-tokens", "8", "--method", "none", "--json"]) == 0
    account = json.loads(capsys.readouterr().out)
    assert account["plain_steps"] == account["statistics"]["steps"] == 8
    assert account["measured"]["tokens"] is None


def test_an_empty_prompt_is_refused(capsys):
    assert main(["explain", " "]) == 2
    assert "The prompt is empty" in capsys.readouterr().err
