"""`foredraft recommend`: what it says follows from its figures, within its time."""

import dataclasses
import json

import pytest

import foredraft
from foredraft.api import load
from foredraft.bench import recommendation
from foredraft.bench.recommendation import recommend
from foredraft.bench.summary import Ratio
from foredraft.bench.tasks import TaskPrompt, interleaved, load_task
from foredraft.cli import main
from foredraft.errors import ForedraftWarning, UsageError
from support.toys import TOY_DRAFT

PROMPTS = [
    TaskPrompt(task, number, (f"Repeat: {number} apples and {number} pears, {number} apples and {number} pears.",))
    for task in ("one", "other")
    for number in range(2)
]


@pytest.fixture(scope="module")
def generator():
    return load(TOY_DRAFT, method="none", dtype="float32")


def with_speeds(monkeypatch, low):
    """Let every method but prompt_lookup be half as fast as plain decoding, and that one's interval begin at `low`.

    Texts are short, so that a busy machine has time for all of them.
    """
    summarize = recommendation.summarize_cells

    def changed(cells):
        for each in summarize(cells):
            ratio = Ratio(low + 0.2, low, low + 0.4) if each.method == "prompt_lookup" else Ratio(0.5, 0.4, 0.6)
            yield dataclasses.replace(each, speed_up=ratio, texts_without_loops=0)

    monkeypatch.setattr(recommendation, "summarize_cells", lambda cells: list(changed(cells)))
    monkeypatch.setattr(recommendation, "_MOST_TOKENS", 32)


@pytest.mark.slow
def test_what_is_fastest_beyond_doubt_is_recommended(generator, monkeypatch):
    with_speeds(monkeypatch, 1.1)
    shares = []
    found = recommend(generator, TOY_DRAFT, PROMPTS, {}, 600.0, shares.append)
    assert found.method == found.ranked[0].method == "prompt_lookup"
    assert {each.method for each in found.ranked} == set(recommendation.CANDIDATES)
    assert found.prompts == len(PROMPTS)
    assert all(each.identical == each.texts for each in found.ranked)
    assert shares == sorted(shares)
    said = " ".join(found.sentences)
    for words in ("use prompt_lookup", "1.30 [1.10, 1.50] times"):
        assert words in said


@pytest.mark.slow
def test_where_nothing_helps_it_says_so(generator, monkeypatch):
    with_speeds(monkeypatch, 0.9)
    found = recommend(generator, TOY_DRAFT, PROMPTS, {"temperature": 0.7}, 600.0)
    assert found.method == "none"
    said = " ".join(found.sentences)
    assert "no method is significantly faster than plain decoding" in said
    assert "Leave drafting off" in said


@pytest.mark.slow
def test_no_prompt_is_begun_after_the_time_and_too_few_are_called_so(generator):
    found = recommend(generator, TOY_DRAFT, PROMPTS, {}, 1e-3)
    assert (found.prompts, found.method, found.tokens) == (1, "none", 16)
    assert "too few for an interval" in found.sentences[0]
    assert "inf" not in f"{found.sentences} {found.ranked[0].speed_up}"


def test_tasks_take_turns_so_that_any_cut_holds_all_of_them():
    ordered = interleaved(PROMPTS)
    assert [each.task for each in ordered] == ["one", "other"] * 2
    assert sorted(ordered, key=PROMPTS.index) == PROMPTS


def test_a_file_is_read_by_its_usual_field_or_the_one_named(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": 1}\n{"text": "x", "question": "one"}\n')
    with pytest.warns(ForedraftWarning, match="1 of the 2 rows of .* have no text in the field 'question'"):
        assert load_task(str(path), None, 9)[0].turns == ("one",)
    with pytest.warns(ForedraftWarning, match="in the field 'text'"):
        assert load_task(f"{path}:text", None, 9)[0].turns == ("x",)
    with pytest.raises(UsageError, match=r"There is no task 'nowhere.jsonl'"):
        load_task("nowhere.jsonl", None, 9)


@pytest.mark.slow
def test_the_command_ends_with_lines_that_work(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": each.turns[0]}) + "\n" for each in PROMPTS[:2]))
    options = ["--data", str(path), "--temperature", "0.7", "--minutes", "0.001", "--dtype", "float32"]
    assert main(["recommend", TOY_DRAFT, *options]) == 0
    shown = capsys.readouterr().out
    assert "Cost of verification" in shown
    *_, command, python = shown.splitlines()
    assert command == f'foredraft generate --model {TOY_DRAFT} --method none --dtype float32 --temperature 0.7 "..."'
    written = eval(python.replace('"..."', '"One two", max_new_tokens=4'), {"foredraft": foredraft})  # noqa: S307  # our own line
    assert len(written.token_ids) == 4
    assert main(["recommend", TOY_DRAFT, *options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["method"], figures["python"]) == ("none", python)
    assert figures["cost"][0]["relative"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--minutes", "0"], "Invalid value for '--minutes'"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--data", "/nowhere.jsonl"], "There is no task '/nowhere.jsonl'"),
        (["--data", ""], "The name of a folder or file is empty"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_model_is_loaded(arguments, says, capsys):
    assert main(["recommend", TOY_DRAFT, *arguments]) == 2
    assert says in capsys.readouterr().err
