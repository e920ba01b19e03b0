"""Replay: recorded answers drive drafters, and only those sampled as asked count."""

import json

import numpy as np
import pytest

from foredraft.contracts import Draft, Needs
from replay_records import main, replay
from support.scripted import OracleDrafter, continuation_in


@pytest.fixture
def records(tmp_path):
    rows = [
        {"prompt": "Count.", "output": "one two three one two three one two three"},
        {"prompt": "Say it twice.", "output": "the sea is wide and the sea is deep"},
        {"prompt": "Count.", "output": "nine nine nine nine nine nine"},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_every_method_is_replayed_at_every_budget(records, capsys):
    main(records, ["prompt_lookup", 'adaptix:{"learn":"paper"}'], [2, 8], as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["nodes"]) for row in rows] == [
        ("prompt_lookup", 2), ("prompt_lookup", 8), ('adaptix:{"learn":"paper"}', 2), ('adaptix:{"learn":"paper"}', 8),
    ]  # fmt: skip
    assert all(row["steps"] < row["tokens"] <= row["steps"] + row["accepted"] for row in rows)


def test_a_drafter_that_knows_the_record_needs_one_step_for_each_budget():
    text = np.arange(40, dtype=np.int64) % 7
    figures = replay(OracleDrafter(continuation_in(text)), [(text[:4], text[4:])], 3, 7)
    assert (figures["tokens"], figures["steps"]) == (36, 9)
    assert figures["tokens_per_target_step"] == figures["tokens_per_target_step_macro"] == 4


class HalfRightDrafter:
    """Two guesses at every token, each believed in by a half: the record's next token and one that it does not hold."""

    name, needs, source_names = "half right", Needs(), ("half right",)

    def __init__(self, texts):
        self._texts = [np.concatenate(text) for text in texts]

    def open(self, context):
        return self

    def propose(self, view, budget):
        whole = next(text for text in self._texts if text[: len(view.ids)].tolist() == view.ids.tolist())
        tokens = np.array([whole[len(view.ids)], 5], np.int32)[: budget.nodes if budget.depth else 0]
        return Draft(tokens, np.full(len(tokens), -1, np.int32), np.full(len(tokens), 0.5, np.float32))

    def observe(self, verdict):
        pass

    def close(self):
        pass


def test_estimates_are_counted_by_hand():
    texts = [(np.array([number]), np.arange(10, 10 + length)) for number, length in enumerate((4, 2, 1, 6, 3))]
    figures = replay(HalfRightDrafter(texts), texts, 2, 99)
    steps = [2, 1, 1, 3, 2]  # two tokens a step while two are left
    assert (figures["tokens"], figures["steps"]) == (4 + 2 + 1 + 6 + 3, sum(steps))
    assert figures["tokens_per_target_step_macro"] == pytest.approx((4 / 2 + 2 / 1 + 1 / 1 + 6 / 3 + 3 / 2) / 5)
    (curve,) = figures["reliability"]
    assert (curve["low"], curve["high"], curve["estimate"]) == (0.4, 0.6, 0.5)
    assert curve["nodes"] == 2 * (2 + 1 + 3 + 1)
    assert curve["accepted"] == 0.5
