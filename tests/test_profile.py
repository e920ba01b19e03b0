"""What the scripts say of a method's drafts adds up."""

import json

import numpy as np
import pytest

import draft_counts
import draft_graph_loans
from foredraft.contracts import Draft, Verdict
from support.toys import TOY, TOY_DRAFT


@pytest.fixture
def prompts(tmp_path):
    rows = [{"question": f"Tom has {n} apples and buys {n + 2} more. How many has he?"} for n in (3, 5)]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def draft(parents, score, source=None):
    parents = np.array(parents, np.int32)
    tokens = np.arange(len(parents), dtype=np.int32)
    return Draft(tokens, parents, np.array(score, np.float32), source=source)


def test_the_counts_of_drafts_add_up_by_hand():
    chain = draft([-1, 0, 1], [0.9, 0.5, 0.03], np.array([0, 1, 1], np.uint8))
    verdicts = [
        Verdict((0, 1, 7), (0, 1), chain, 0),
        Verdict((7,), (), draft([-1, -1], [0.3, 0.1]), 3),
        Verdict((8,), (), draft([], []), 4),
    ]
    counts = draft_counts.count_drafts(verdicts, ("one", "other"))
    assert (counts.drafted_by_depth, counts.accepted_by_depth) == ([3, 1, 1], [1, 1, 0])
    assert (counts.drafted_by_source, counts.accepted_by_source) == ({"one": 3, "other": 2}, {"one": 1, "other": 1})
    found = {each["low"]: (each["nodes"], each["estimate"], each["accepted"]) for each in counts.reliability}
    assert found == {
        0.0: (1, pytest.approx(0.03), 0.0),
        0.1: (1, pytest.approx(0.1), 0.0),
        0.2: (1, pytest.approx(0.3), 0.0),
        0.4: (1, pytest.approx(0.5), 1.0),
        0.8: (1, pytest.approx(0.9), 1.0),
    }


@pytest.mark.slow
def test_every_draft_is_counted_by_depth_source_and_estimate(prompts, capsys):
    graph = f'draft_graph:{{"model": "{TOY_DRAFT}", "num_speculative_tokens": 16, "tau": 1, "least_probability": 0.05}}'
    options = {"data": prompts, "model": TOY, "task": ["gsm8k"], "max_new_tokens": 40, "dtype": "float32"}
    draft_counts.main(**options, method=[graph], as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    drafted, accepted = (sum(row[f"{what}_by_depth"]) for what in ("drafted", "accepted"))
    assert row["steps"] <= row["emitted"] <= row["steps"] + accepted
    assert (sum(row["drafted_by_source"].values()), sum(row["accepted_by_source"].values())) == (drafted, accepted)
    assert sum(each["nodes"] for each in row["reliability"]) == drafted <= 16 * row["steps"]
    draft_counts.main(**options, method=["prompt_lookup"])
    shown = capsys.readouterr().out
    assert all(heading in shown for heading in ("depth", "source", "ms / token"))


@pytest.mark.slow
def test_loans_are_counted_by_shape_and_compared_with_the_truth(prompts, capsys, monkeypatch):
    options = ["--data", str(prompts), "--task", "gsm8k", "--prompts", "2", "--max-new-tokens", "64", "--json"]
    command = ["draft_graph_loans.py", TOY_DRAFT, *options, "--model", TOY, "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", command)
    draft_graph_loans.main()
    chain, tree, *graphs = json.loads(capsys.readouterr().out)
    assert [each["shape"] for each in (chain, tree, *graphs)] == [
        "chain", "tree", *(f"graph, tau {tau}" for tau in (1, 2, 3, 4))
    ]  # fmt: skip
    assert chain["nodes"] == pytest.approx(chain["depth"]), "a chain has a node a level"
    assert chain["recomputed"] == tree["recomputed"] == 0
    for each in (tree, *graphs):
        assert each["drafts"] == chain["drafts"]
        assert each["nodes"] <= tree["nodes"]
        assert each["passes"] <= each["nodes"] + 1
        assert each["divergence"] >= 0
        assert 0 <= each["agreement"] <= 1
    for wider, narrower in zip(graphs[1:], graphs, strict=False):
        assert narrower["nodes"] <= wider["nodes"], "the shorter the phrase, the more is merged"
    assert graphs[0]["recomputed"] > 0
