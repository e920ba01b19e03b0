"""The benchmark: what it measures is paired, and is refused where it would mislead."""

import asyncio
import dataclasses
import json
import random
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from foredraft.api import load
from foredraft.bench.cell import settings_name
from foredraft.bench.method import parse_method
from foredraft.bench.recommendation import advise
from foredraft.bench.runner import MethodWriter, PeerWriter, Run, stalled_seconds, write_interleaved
from foredraft.bench.summary import ALL, Ratio, mean_speed_up, speed_up, summarize_cells
from foredraft.bench.tasks import TaskPrompt, interleaved, load_task, load_tasks
from foredraft.cli import main
from foredraft.contracts import CostCurve, StepRecord
from foredraft.drafters.prompt_lookup import PromptLookupDrafter
from foredraft.errors import ForedraftError, ForedraftWarning, UsageError
from server_load import PLAIN, loads, shared_out
from support.toys import TOY, TOY_DRAFT

FIXED = 4
"""Drafted nodes a step: what follows measured times instead would follow the load of the machine that tests."""
METHODS = [
    dataclasses.replace(parse_method(text), amount={"nodes": FIXED})
    for text in ("prompt_lookup", 'adaptix:{"table":"none"}', "none")
]
SETTINGS = ({"max_new_tokens": 12, "seed": 0}, {"max_new_tokens": 12, "seed": 0, "temperature": 0.7})
PROMPTS = (
    TaskPrompt("sums", 0, ("Compute 2 + 2.",)),
    TaskPrompt("sums", 3, ("Compute 3 * 4. Compute 3 * 4.",)),
    TaskPrompt("talk", 0, ("What is a prime number?", "And what is an even number?")),
)
CELLS = len(SETTINGS) * 4 * len(METHODS)


@pytest.fixture(scope="module")
def generator():
    return load(TOY_DRAFT, method="none", dtype="float32")


def run(generator, *, methods=METHODS, prompts=PROMPTS, settings=SETTINGS):
    """Run the methods on the prompts, by default all of them, and return the run."""
    result = Run(generator, methods, prompts, settings)
    result.measure()
    return result


@pytest.fixture(scope="module")
def cells(generator):
    """Every cell of the plan."""
    return run(generator).cells


# --- tasks


def test_the_embedded_set_has_ten_different_prompts_of_each_of_six_kinds():
    prompts = load_task("embedded", None, 1000)
    kinds = [prompt.task for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        f"embedded/{kind}": 10 for kind in ("code", "arithmetic", "chat", "summary", "question", "rewriting")
    }
    assert len({prompt.turns for prompt in prompts}) == 60


def test_a_category_is_a_task_of_its_own_and_limits_count_in_each():
    assert [prompt.number for prompt in load_task("embedded/chat", None, 2)] == [20, 25]
    assert len(load_task("embedded", None, 2)) == 12
    with pytest.raises(UsageError, match=r"no category 'chats'. Did you mean 'chat'\?"):
        load_task("embedded/chats", None, 2)


def test_spec_bench_has_its_six_categories_and_mt_bench_both_turns(tmp_path):
    rows = [{"category": name, "turns": ["a", "b"]} for name in ("writing", "coding")]
    rows += [{"category": name, "turns": ["c"]} for name in ("translation", "qa")]
    for name in ("spec_bench", "mt_bench"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_task("spec_bench", tmp_path, 5)
    assert [(prompt.task, prompt.number) for prompt in found] == [
        ("spec_bench/mt_bench", 0), ("spec_bench/mt_bench", 1), ("spec_bench/translation", 2), ("spec_bench/qa", 3),
    ]  # fmt: skip
    assert load_task("mt_bench", tmp_path, 1)[0].turns == ("a", "b")


def test_any_file_is_a_task_by_its_field(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"ask": "one", "other": 1}\n\n{"ask": " "}\n{"ask": "two"}\n')
    with pytest.warns(ForedraftWarning, match="1 of the 3 rows of .* have no text in the field 'ask'"):
        found = load_task(f"{path}:ask", None, 9)
    assert [(each.turns, each.number) for each in found] == [(("one",), 0), (("two",), 2)]
    with pytest.raises(UsageError, match=r"field 'asks'. Did you mean 'ask'\? Its fields are: ask, other"):
        load_task(f"{path}:asks", None, 9)


def test_the_second_turn_is_asked_after_the_models_answer():
    prompt = PROMPTS[2]
    assert [message["role"] for message in prompt.prompt(("A number.",))] == ["user", "assistant", "user"]
    assert prompt.prompt(("A number.",))[1:] == (
        {"role": "assistant", "content": "A number."}, {"role": "user", "content": prompt.turns[1]},
    )  # fmt: skip


# --- cells and runs


@pytest.mark.slow
def test_every_cell_pairs_the_method_with_plain_decoding_of_the_same_prompt(cells):
    assert len(cells) == CELLS
    for cell in cells:
        base, own = cell.base, cell.own
        counts = own.statistics
        assert own.token_ids == base.token_ids
        assert own.prompt_tokens == base.prompt_tokens
        assert base.statistics.steps == base.statistics.emitted == len(base.token_ids)
        assert counts.steps + counts.accepted >= counts.emitted == len(own.token_ids)
    assert sum(cell.own.statistics.accepted for cell in cells) > 0


@pytest.mark.slow
def test_the_second_turn_follows_the_plain_answer(cells, generator):
    first, second = (next(cell for cell in cells if (cell.task, cell.turn) == ("talk", turn)) for turn in (1, 2))
    answer = generator.tokenizer.decode(first.base.token_ids, skip_special_tokens=True)
    assert second.base.prompt_tokens == len(generator.encode(PROMPTS[2].prompt((answer,))))


@pytest.mark.slow
def test_a_method_that_raises_on_one_prompt_fails_there_and_only_there(generator, monkeypatch):
    propose = PromptLookupDrafter.propose

    def raises_on_sums(drafting, view, budget):
        if "3 * 4" in generator.tokenizer.decode(view.ids):
            raise RuntimeError("no such sum")
        return propose(drafting, view, budget)

    monkeypatch.setattr(PromptLookupDrafter, "propose", raises_on_sums)
    result = run(generator)
    assert len(result.cells) == CELLS
    assert [(cell.method, cell.number) for cell in result.failures] == [("prompt_lookup", 3)] * 2
    assert "no such sum" in result.failures[0].failure
    failed = [each for each in summarize_cells(result.cells) if each.failed]
    assert {(each.method, each.task, each.failed) for each in failed} == {
        ("prompt_lookup", "sums", 1), ("prompt_lookup", ALL, 1),
    }  # fmt: skip


def test_methods_write_a_text_by_turns_a_slice_at_a_time(generator):
    turns = []

    def aloud(name):
        text = MethodWriter(generator, parse_method(name)).write("Once upon a", {"max_new_tokens": 64, "seed": 0})
        while True:
            turns.append(name)
            try:
                next(text)
            except StopIteration as ended:
                return ended.value
            yield

    written = write_interleaved({name: aloud(name) for name in ("none", "prompt_lookup")}, random.Random(0))
    assert written["none"][0].token_ids == written["prompt_lookup"][0].token_ids
    for one, other in (("none", "prompt_lookup"), ("prompt_lookup", "none")):
        assert turns.index(one) < len(turns) - 1 - turns[::-1].index(other), "by turns"


@pytest.mark.slow
def test_a_text_is_not_drafted_by_what_was_learned_of_it_in_another_setting(generator):
    method = parse_method('auto:{"table": "none", "num_speculative_tokens": 8}')
    once, twice = (
        run(generator, methods=[method], prompts=PROMPTS[:1], settings=settings)
        for settings in ([{"max_new_tokens": 32, "seed": 0}], [{"max_new_tokens": 32, "seed": seed} for seed in (1, 0)])
    )
    assert once.cells[0].own.statistics.accepted == twice.cells[-1].own.statistics.accepted
    assert once.cells[0].own.token_ids == twice.cells[-1].own.token_ids


def test_what_holds_passes_up_is_left_out_and_told():
    def step(rows, milliseconds):
        times = dict.fromkeys(("draft", "layout", "verify", "commit", "observe"), 100_000)
        return StepRecord((1,), 0, rows - 1, (None,), {**times, "forward": int(1e6 * milliseconds)})

    curve = CostCurve((1, 9), (0.001, 0.002))
    usual = [step(1, 1.0), step(9, 2.0), step(1, 1.1), step(9, 2.2), step(1, 4.9)]
    assert stalled_seconds(usual, curve) == 0
    assert stalled_seconds([*usual, step(1, 50.0)], curve) == pytest.approx(0.050 - 0.00105, rel=0.01)
    slow = [step(1, 10.0) for _ in range(8)]
    assert stalled_seconds(slow, curve) == 0, "a machine that is slow throughout holds nothing up"
    assert stalled_seconds([*slow, step(9, 120.0)], curve) == pytest.approx(0.100)
    assert stalled_seconds([step(1, 1.0), step(1, 50.0)], curve) == 0, "too few to tell"


def test_stalls_are_in_no_figure_but_their_own(cells):
    before = {(each.settings, each.task, each.method): each for each in summarize_cells(cells)}
    held_up = [
        dataclasses.replace(cell, own=dataclasses.replace(cell.own, stalled_seconds=cell.own.statistics.decode_seconds))
        for cell in cells
    ]
    for each in summarize_cells(held_up):
        assert each.stalled == pytest.approx(0.5)
        assert str(each.speed_up) == str(before[each.settings, each.task, each.method].speed_up)
    greedy = [each for each in summarize_cells(held_up) if each.settings.startswith("greedy")]
    assert any("for up to 50.0% of the time" in sentence for sentence in advise(greedy, TOY_DRAFT, "float32"))


@pytest.mark.slow
def test_the_peer_writes_the_same_greedy_text_plainly_and_assisted(generator):
    peers = (
        "transformers",
        'transformers:{"prompt_lookup_num_tokens":4}',
        f'transformers:{{"assistant_model":"{TOY_DRAFT}"}}',
    )
    only = {"prompts": PROMPTS[1:2], "settings": SETTINGS[:1]}
    result = run(generator, methods=[parse_method(text) for text in peers], **only)
    assert [cell.failure for cell in result.cells] == [""] * 3
    plain, lookup, assisted = ((cell.base, cell.own) for cell in result.cells)
    assert {own.token_ids for _, own in (plain, lookup, assisted)} == {plain[0].token_ids}
    assert plain[1].statistics.steps == plain[1].statistics.emitted
    assert lookup[1].statistics.steps <= plain[1].statistics.steps
    with pytest.raises(UsageError, match=r"no option 'prompt_lookup'. Did you mean"):
        run(generator, methods=[parse_method('transformers:{"prompt_lookup":4}')], **only)


# --- figures


def test_two_files_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.jsonl").write_text('{"prompt": "one"}\n')
    tasks = [str(tmp_path / folder / "mine.jsonl") for folder in ("a", "b")]
    with pytest.raises(UsageError, match=r"both called mine\.jsonl"):
        load_tasks(tasks, None, 9)
    assert len(load_tasks([tasks[0], tasks[0]], None, 9)) == 1
    assert len(load_tasks(["embedded", "embedded/code"], None, 1)) == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"ask": "one"}\n\n{"ask"\n', "Line 3 of .* is not JSON"), (b'{"ask": "\xff"}\n', "not text in UTF-8")],
)
def test_a_broken_file_of_prompts_is_refused_by_its_line(tmp_path, content, words):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load_task(f"{path}:ask", None, 9)


def test_a_file_of_prompts_may_begin_with_a_mark_of_byte_order(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n')
    assert load_task(str(path), None, 9)[0].turns == ("one",)


@pytest.mark.parametrize("field", ["", ":prompt"])
def test_a_text_that_is_too_long_to_name_a_file_is_refused(field):
    with pytest.raises(UsageError, match="There is no folder or file aaa"):
        load_task(300 * "a" + field, None, 9)


def test_equal_times_give_a_speed_up_of_one_and_twice_the_speed_two():
    rng = np.random.default_rng(0)
    seconds, tokens = rng.uniform(1, 2, 40), rng.integers(50, 128, 40).astype(np.float64)
    assert speed_up(seconds, tokens, seconds, tokens) == Ratio(1, 1, 1)
    tokens = np.full(40, 100.0)
    twice = speed_up(np.full(40, 2.0), tokens, np.tile([0.9, 1.1], 20), tokens)
    assert twice.low < 2 < twice.high
    assert mean_speed_up(np.full(9, 2.0)).value == pytest.approx(2)


def test_an_interval_covers_what_it_says_also_with_few_prompts():
    rng, covered = np.random.default_rng(1), dict.fromkeys((4, 8, 40), 0)
    for count in covered:
        for _ in range(400):
            ones = np.ones(count)
            found = speed_up(np.exp(rng.normal(0, 0.2, count)), ones, ones, ones)
            covered[count] += found.low <= np.exp(0.02) <= found.high
    assert all(0.92 <= each / 400 <= 0.98 for each in covered.values()), covered


def test_the_turns_of_a_conversation_count_as_one_prompt():
    rng = np.random.default_rng(2)
    seconds, ones = np.repeat(rng.uniform(1, 2, 20), 2), np.ones(40)
    apart = speed_up(seconds, ones, ones, ones)
    together = speed_up(seconds, ones, ones, ones, prompts=np.repeat(np.arange(20), 2))
    alone = speed_up(seconds[::2], ones[::2], ones[::2], ones[::2])
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high))
    assert apart.high - apart.low < 0.8 * (together.high - together.low)


def test_too_few_pairs_have_no_interval():
    one = np.ones(1)
    assert (speed_up(2 * one, one, one, one).low, speed_up(2 * one, one, one, one).high) == (0, float("inf"))


def test_micro_and_macro_averages_weigh_tokens_and_texts(cells):
    whole = [each for each in summarize_cells(cells) if each.task == ALL and each.method == "prompt_lookup"]
    assert len(whole) == len(SETTINGS)
    mine = [c.own for c in cells if c.settings == whole[0].settings and c.method == "prompt_lookup"]
    tokens, steps = (sum(getattr(each.statistics, name) for each in mine) for name in ("emitted", "steps"))
    assert whole[0].statistics.tokens_per_target_step == pytest.approx(tokens / steps)
    assert whole[0].tokens_per_target_step_macro == pytest.approx(
        np.mean([len(each.token_ids) / each.statistics.steps for each in mine])
    )


def advised(cells, **speeds):
    """What is advised where the methods have the speed-ups given, over all tasks."""
    rows = [each for each in summarize_cells(cells) if each.settings == "greedy-12-seed0" and each.task == ALL]
    changed = [
        dataclasses.replace(each, speed_up=speed, texts_without_loops=0)
        for each in rows
        if (speed := speeds.get(each.method.partition(":")[0])) is not None
    ]
    return advise(changed, TOY_DRAFT, "float32")


def test_the_fastest_method_is_advised_and_those_beside_it_are_named(cells):
    clear = advised(cells, prompt_lookup=Ratio(1.2, 1.1, 1.3), adaptix=Ratio(1.8, 1.7, 1.9))
    assert 'use adaptix:{"table":"none"}' in clear[0]
    assert "prompt_lookup" not in clear[0]
    close = advised(cells, prompt_lookup=Ratio(1.2, 1.1, 1.3), adaptix=Ratio(1.25, 1.15, 1.4))
    assert "interval overlaps that of prompt_lookup" in close[0]
    noisy = advised(cells, prompt_lookup=Ratio(1.3, 0.8, 1.9), adaptix=Ratio(1.2, 1.1, 1.3))
    assert 'use adaptix:{"table":"none"}' in noisy[0]
    slow = advised(cells, prompt_lookup=Ratio(1.05, 0.95, 1.2), adaptix=Ratio(0.8, 0.7, 0.9))
    assert "no method is significantly faster than plain decoding" in slow[0]


# --- the command line


@pytest.mark.slow
def test_the_command_measures_and_keeps(tmp_path, capsys):
    out = tmp_path / "cells.jsonl"
    options = ["--task", "embedded/chat", "--prompts", "1", "--max-new-tokens", "8", "--dtype", "float32"]
    command = ["bench", "run", *options, "--method", "prompt_lookup", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["speed_up"]["high"] is row["speed_up_macro"]["high"] is None
    assert (row["task"], row["texts"], row["identical"], row["statistics"]["emitted"]) == ("embedded/chat", 1, 1, 8)
    (cell,) = map(json.loads, out.read_text().splitlines())
    assert (cell["task"], cell["method"], len(cell["own"]["token_ids"])) == ("embedded/chat", "prompt_lookup", 8)
    assert cell["dtype"] == "float32"
    assert cell["machine"]["torch"] == torch.__version__
    assert cell["machine"]["processor"]
    assert main(command) == 0
    assert "prompt_lookup" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--task", "embeded"], "There is no task 'embeded'. Did you mean 'embedded'?"),
        (["run", "--method", "adaptics"], "There is no method 'adaptics'. Did you mean 'adaptix'?"),
        (["run", "--method", "none", "--method", "none"], "none is given twice"),
        (["run", "--task", "gsm8k"], "needs the file gsm8k_test.jsonl; give its folder with --data"),
        (["run", "--prompts", "0"], "it must be at least 1"),
        (["run", "--temperature", "-1"], "temperature is -1"),
        (["run", "--task", "/nowhere/file.jsonl:field"], "There is no file /nowhere/file.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments, says, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_prompts_are_not_replaced_by_their_measurements(tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "Hello"}\n')
    for task in (str(file), f"{file}:text"):
        assert main(["bench", "run", "--task", task, "--out", str(file)]) == 2
        assert "mine.jsonl is an input of this command and would be replaced" in capsys.readouterr().err
    assert file.read_text() == '{"text": "Hello"}\n'


def test_temperatures_that_differ_a_little_are_settings_of_their_own():
    given = [{"temperature": each, "max_new_tokens": 8, "seed": 0} for each in (0.7, 0.70000001, 1.0)]
    names = ["temperature0.7-8-seed0", "temperature0.70000001-8-seed0", "temperature1-8-seed0"]
    assert [settings_name(each) for each in given] == names


def test_every_stream_of_every_load_has_as_many_prompts_and_none_is_asked_twice():
    shares = list(shared_out(range(50), (1, 4, 8), rounds=2))
    assert [len(share) for share in shares] == [1, 4, 8, 1, 4, 8]
    asked = [each for share in shares for each in share]
    assert len(set(asked)) == len(asked)
    with pytest.raises(UsageError, match=r"2 rounds of 1 \+ 16 streams need 34 prompts, and there are 33"):
        shared_out(range(33), (1, 16), rounds=2)


def test_a_server_that_does_not_answer_is_told_in_a_sentence():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ForedraftError, match=f"There is no server at {address} "):
            asyncio.run(loads(address, [{}] * 4, [1], 1, [PLAIN]))
    for wrong in ("localhost", "http://127.0.0.1:9x"):
        with pytest.raises(ForedraftError, match=f"There is no server at {wrong}"):
            asyncio.run(loads(wrong, [{}] * 4, [1], 1, [PLAIN]))


@pytest.mark.parametrize("pieces", [("one", " two"), ()])
def test_tokens_are_counted_for_a_server_that_does_not(pieces):
    """It sends two pieces of each text or none, counts nothing, and closes every connection."""

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for piece in pieces:
                chunk = json.dumps({"choices": [{"delta": {"content": piece}}]})
                self.wfile.write(f"data: {chunk}\n\n".encode())

        def log_message(self, *_arguments):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = asyncio.run(loads(f"http://127.0.0.1:{server.server_port}", [{}] * 6, [2], 1, [PLAIN]))
        server.shutdown()
    assert found[0].texts == ("".join(pieces),) * 6
    assert (found[0].tokens_per_second > 0) == bool(pieces)
    assert found[0].first > 0


def test_prompts_of_all_kinds_are_in_every_load():
    prompts = interleaved(load_tasks(["embedded"], None, 10))
    assert {prompt.task for prompt in prompts[:6]} == {prompt.task for prompt in prompts}
    assert len(prompts) == 60


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 1.5), ("num_beams", 3), ("min_new_tokens", 30)])
def test_the_peer_does_not_follow_the_checkpoints_defaults(generator, name, value, monkeypatch):
    monkeypatch.setattr(generator.target.model.generation_config, name, value)
    result = run(generator, methods=[parse_method("transformers")], prompts=PROMPTS[1:2], settings=SETTINGS[:1])
    assert [(cell.own.token_ids == cell.base.token_ids, cell.failure) for cell in result.cells] == [(True, "")]


@pytest.mark.slow
def test_the_peer_drafts_as_many_tokens_as_it_is_told():
    generator, steps = load(TOY, method="none", dtype="float32"), []
    for count in (1, 12):
        peer = PeerWriter(generator, {"assistant_model": TOY_DRAFT, "num_assistant_tokens": count})
        text = peer.written("Once upon a time there was a little", {"max_new_tokens": 40, "seed": 0})
        steps.append(text.statistics.steps)
    assert steps[0] > steps[1]
