"""What `foredraft bench profile` says of a method adds up."""

import json

import pytest

from foredraft.cli import main


@pytest.fixture
def prompts(tmp_path):
    rows = [{"question": f"Tom has {n} apples and buys {n + 2} more. How many has he?"} for n in (3, 5)]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_profile_counts_what_was_emitted_and_where_it_came_from(prompts, capsys):
    graph = 'draft_graph:{"num_speculative_tokens": 16, "tau": 1, "least_probability": 0.05}'
    options = [
        "--data",
        str(prompts),
        "--task",
        "gsm8k",
        "--prompts",
        "2",
        "--max-new-tokens",
        "40",
        "--dtype",
        "float32",
        "--json",
    ]
    assert main(["bench", "profile", *options, "--method", graph, "--method", "prompt_lookup"]) == 0
    plain, drafted, lookup = json.loads(capsys.readouterr().out)
    assert (plain["method"], drafted["method"], lookup["method"]) == ("none", graph, "prompt_lookup")
    assert plain["tokens"] == plain["steps"]
    assert plain["accepted"] == plain["drafted"] == 0
    for each in (drafted, lookup):
        assert each["tokens"] == plain["tokens"]
        assert each["steps"] <= each["tokens"] <= each["steps"] + each["accepted"]
        assert each["reached"] == sorted(each["reached"], reverse=True)
        assert sum(each["reached"]) * each["steps"] <= each["accepted"] + 1e-6
    assert 0 <= drafted["merged"] <= drafted["accepted"]
    assert lookup["merged"] == 0
    assert drafted["drafted"] <= 16 * drafted["steps"]
