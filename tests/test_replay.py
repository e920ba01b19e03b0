"""Replay: recorded answers drive drafters, greedy ones only count as greedy, and processes change nothing."""

import json

import numpy as np
import pytest

from foredraft.bench.replay import replay
from foredraft.cli import main
from foredraft.testing import OracleDrafter, continuation_in


@pytest.fixture
def records(tmp_path):
    rows = [
        {"prompt": "Count.", "output": "one two three one two three one two three", "sampling": "greedy"},
        {"prompt": "Say it twice.", "output": "the sea is wide and the sea is deep", "sampling": "greedy"},
        {"prompt": "Count.", "output": "nine nine nine nine nine nine", "sampling": "nucleus9"},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def replayed(capsys, *arguments):
    assert main(["replay", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    return [{name: value for name, value in row.items() if not name.endswith(("_us", "_mib"))} for row in rows]


def test_many_settings_in_one_pass_are_the_same_in_one_process_and_in_two(records, capsys):
    settings = ["--method", "prompt_lookup", "--method", 'adaptix:{"learn":"paper"}', "--nodes", "2", "--nodes", "8"]
    rows = replayed(capsys, records, *settings)
    assert [(row["method"], row["nodes"]) for row in rows] == [
        ("prompt_lookup", 2), ("prompt_lookup", 8), ('adaptix:{"learn":"paper"}', 2), ('adaptix:{"learn":"paper"}', 8),
    ]  # fmt: skip
    assert all(
        row["tokens"] == row["steps"] + row["accepted"] or row["tokens"] < row["steps"] + row["accepted"]
        for row in rows
    )
    assert replayed(capsys, records, *settings, "--processes", "2") == rows


def test_only_greedy_records_count_unless_others_are_asked_for(records, capsys):
    counts = {
        sampling: replayed(capsys, records, "--method", "prompt_lookup", "--nodes", "4", "--sampling", sampling)[0][
            "records"
        ]
        for sampling in ("greedy", "nucleus9", "")
    }
    assert counts == {"greedy": 2, "nucleus9": 1, "": 3}
    assert main(["replay", records, "--sampling", "beam"]) == 2
    assert "holds no record sampled 'beam'" in capsys.readouterr().err


def test_a_drafter_that_knows_the_record_needs_one_step_for_each_budget():
    text = np.arange(40, dtype=np.int64) % 7
    result = replay(OracleDrafter(continuation_in(text)), [(text[:4], text[4:])], 3, 7)
    assert (result.tokens, result.steps) == (36, 9)
    assert result.tokens_per_target_step == result.macro == 4
