"""The command line, run in this process on the embedded model; a few times as a process of its own."""

import dataclasses
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer

from foredraft import __version__
from foredraft.cli import VERBS, app, chat, flags, main, screen
from foredraft.cli.job import prompt_text
from foredraft.cli.screen import Ink
from foredraft.cli.serve import example_request, name_of
from foredraft.drafters import drafter_class, method_names
from foredraft.errors import UsageError
from foredraft.generation import Piece
from foredraft.index.datastore import read_manifest
from foredraft.request import GenerationArguments, GenerationOptions
from support.toys import TOY

SOURCE = Path(__file__).resolve().parent.parent / "src"
EMPTY_TABLE = ("--speculative-config", '{"table": "none"}', "--num-speculative-tokens", "6")
QUICK = ("--dtype", "float32", "--max-new-tokens", "12", *EMPTY_TABLE)
PROMPT = "Tell me about the sea."
LOOPING = (
    "one two one two one two one two", "--raw", "--dtype", "float32", "--max-new-tokens", "40", "--method",
    "prompt_lookup", "--num-speculative-tokens", "6", "--eos-token-id", "8191",
)  # fmt: skip
ESCAPE = "\x1b["


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "FOREDRAFT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command with `arguments`, and `stdin` piped into it; return status, output and errors."""

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = main(list(arguments))
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run


def refused(result, status, words):
    """One sentence on standard error, nothing on standard output."""
    assert result.status == status
    assert result.out == ""
    assert result.err.endswith("\n")
    assert len(result.err.splitlines()) == 1, result.err
    assert "Traceback" not in result.err
    assert words in result.err
    return True


def commands(command, path=()):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


# --- the command as a whole


@pytest.mark.parametrize("path", list(commands(typer.main.get_command(app))), ids="-".join)
def test_every_command_has_help(run, path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # a terminal's usual width
    result = run(*path, "--help")
    assert "…" not in result.out  # nothing is cut
    assert result.status == 0
    assert "Usage: foredraft" in result.out
    assert result.err == ""


def test_help_is_short_to_ask_for_at_every_level(run):
    for path in ((), ("generate",), ("bench", "run")):
        assert run(*path, "-h").out == run(*path, "--help").out


def test_a_narrow_terminal_shows_the_names_of_options_in_full(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "--num-speculative-tokens <int>" in run("generate", "--help").out


def test_a_flag_shows_no_type(run):
    for path in ((), ("generate",), ("index", "build")):
        assert "<bool>" not in run(*path, "--help").out


def test_a_hub_that_cannot_be_reached_is_said_at_once(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://127.0.0.1:1")
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    result = run("generate", "a", "--model", "nobody/no-such-model")
    assert refused(result, 2, "the hub https://127.0.0.1:1 cannot be reached")


def test_the_arguments_that_editors_complete_are_those_that_are_taken():
    assert list(GenerationArguments.__annotations__) == [field.name for field in dataclasses.fields(GenerationOptions)]


def test_a_busy_port_is_told_before_the_model_is_loaded(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert refused(run("serve", str(tmp_path / "no.gguf"), "--port", str(port)), 2, f"port {port}")


def test_keys_of_the_environment_are_read_without_the_spaces_around_them(run, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_API_KEY", f"{'k' * 16}, {'k' * 15}")
    assert refused(run("serve"), 2, "has only 15 characters")


def test_tables_are_as_wide_as_the_columns_that_are_asked_for(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(len(line) for line in run("methods", "rest").out.splitlines() if "│" in line or "─" in line) <= 60


@pytest.mark.parametrize(
    ("model", "name"), [("smollm2", "smollm2"), ("an/hub-id-1.5", "an/hub-id-1.5"), ("a/file.gguf", "file")]
)
def test_a_served_model_has_the_name_of_its_file_folder_or_hub_id(model, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file.gguf").touch()
    (tmp_path / "dotted-1.5").mkdir()
    assert name_of(model) == name
    assert name_of("./dotted-1.5") == name_of(str(tmp_path / "dotted-1.5")) == "dotted-1.5"


def test_the_example_of_a_request_can_be_pasted_into_a_shell_whatever_the_model_is_called():
    name = 'it\'s "q4" [é]'
    *_, body = shlex.split(example_request("http://127.0.0.1:8000", name, keyed=True))
    assert json.loads(body)["model"] == name


def test_a_prompt_file_may_begin_with_a_mark_of_its_encoding(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffHello".encode())
    assert prompt_text(None, file) == "Hello"


def test_a_prompt_from_a_closed_input_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--model", "./nowhere"]) == 2
    assert "Standard input is closed" in capsys.readouterr().err
    with pytest.raises(UsageError, match="Standard input is closed"):
        prompt_text("-", None)


def test_a_shell_can_complete_verbs():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "_FOREDRAFT_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": "foredraft gen", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "foredraft"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["generate"]
    assert result.returncode == 0


@pytest.mark.parametrize(("typed", "status"), [("foredraft gen", 0), ("foredraft nothing-like-it", 1)])
def test_fish_is_told_by_the_status_whether_there_are_completions(typed, status):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "_FOREDRAFT_COMPLETE": "complete_fish"}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "is-args", "_TYPER_COMPLETE_ARGS": typed}
    assert subprocess.run([sys.executable, "-m", "foredraft"], env=environment, check=False).returncode == status


def test_help_names_every_verb_and_the_library_s_defaults(run):
    listing = run("--help").out
    assert all(re.search(rf"^\W*{verb}\b", listing, re.MULTILINE) for verb in VERBS)
    assert "256" in run("generate", "--help").out


def test_importing_the_command_line_imports_nothing_slow():
    code = "import sys, foredraft.cli; print(sorted({'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]", "Import it inside the function that needs it, so that help stays quick."


def test_it_runs_as_a_module():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "foredraft", "--version"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"foredraft {__version__}\n", "")
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    result = subprocess.run(closed, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_an_output_without_room_is_told_in_a_sentence(monkeypatch, capsys):
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)  # nothing is left to fail later
    monkeypatch.setattr("sys.stdout", full)
    assert main(["--version"]) == 1
    assert "The output cannot be written (No space left on device)" in capsys.readouterr().err


def test_an_interrupt_in_a_callback_of_a_library_is_told_as_one():
    code = """
import ctypes, signal, foredraft.cli
from foredraft.__main__ import main

@ctypes.CFUNCTYPE(None)
def called():
    signal.raise_signal(signal.SIGINT)

def run():
    called()
    raise RuntimeError("The library fails, as its callback did.")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
foredraft.cli.main = run
main()
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_without_a_verb_it_shows_help(run):
    result = run()
    assert result.status == 2
    assert "generate" in result.out + result.err


def test_an_unexpected_error_is_one_sentence_with_a_hint(run, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("something odd\nand more")

    monkeypatch.setattr("foredraft.cli.generate.prompt_text", fail)
    assert refused(run("generate", "a"), 1, "Unexpected RuntimeError: something odd. Set FOREDRAFT_TRACEBACK=1")
    monkeypatch.setenv("FOREDRAFT_TRACEBACK", "1")
    assert "Traceback" in run("generate", "a").err


def test_a_name_that_is_too_long_for_a_file_is_a_sentence(run, tmp_path):
    name = "a" * 300
    for command in (["bench", "run", "--data", name], ["table", "build", "--out", str(tmp_path / "t"), name]):
        assert refused(run(*command), 1, "cannot be used (File name too long). Give another file or folder")


@pytest.mark.slow
def test_a_reader_that_went_away_is_no_news(run, monkeypatch):
    def fail(*_):
        raise BrokenPipeError

    monkeypatch.setattr(Ink, "write", fail)
    result = run("generate", PROMPT, *QUICK)
    assert (result.status, result.err) == (1, "")


# --- generate


@pytest.mark.slow
def test_generate_writes_the_same_text_from_every_source_and_method(run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    result = run("generate", PROMPT, *QUICK)
    assert result.status == 0
    assert len(result.out) > 10
    assert result.out.endswith("\n")
    assert ESCAPE not in result.out + result.err
    assert "tokens per target step" in result.err
    assert len(result.err.splitlines()) == 1
    others = [
        run("generate", "-", *QUICK, stdin=PROMPT),
        run("generate", "--file", str(file), *QUICK),
        run("generate", PROMPT, "--dtype", "float32", "--max-new-tokens", "12", "--method", "none"),
    ]
    assert [other.out for other in others] == [result.out] * 3


@pytest.mark.slow
def test_json_is_one_object_and_adds_up(run):
    result = run("generate", PROMPT, *QUICK, "--temperature", "0.8", "--seed", "7", "--json")
    assert (result.status, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["seed"] == 7
    assert found["finish_reason"] in ("length", "eos")
    assert [token for step in found["steps"] for token in step["emitted"]] == found["token_ids"]
    assert sum(step["drafted"] for step in found["steps"]) == found["statistics"]["drafted"]
    assert all(len(step["sources"]) == len(step["emitted"]) for step in found["steps"])
    assert set(found["steps"][0]["microseconds"]) == {"draft", "layout", "forward", "verify", "commit", "observe"}


@pytest.mark.slow
def test_sampling_reports_its_seed_which_repeats_the_text(run):
    first = run("generate", PROMPT, *QUICK, "--temperature", "0.9")
    seed = re.search(r"seed (\d+)", first.err)[1]
    assert run("generate", PROMPT, *QUICK, "--temperature", "0.9", "--seed", seed).out == first.out


@pytest.mark.slow
def test_options_reach_the_library(run):
    plain = json.loads(run("generate", PROMPT, *QUICK, "--json").out)
    second = plain["token_ids"][1]
    ended = json.loads(run("generate", PROMPT, *QUICK, "--json", "--eos-token-id", str(second)).out)
    assert ended["token_ids"] == plain["token_ids"][:2]
    letter = next(letter for letter in plain["text"] if letter.isalpha())
    stopped = json.loads(run("generate", PROMPT, *QUICK, "--json", "--stop-strings", letter, "--stop-strings", "q").out)
    assert stopped["finish_reason"] == "stop"
    raw = json.loads(run("generate", PROMPT, *QUICK, "--json", "--raw").out)
    system = json.loads(run("generate", PROMPT, *QUICK, "--json", "--system", "Be brief.").out)
    assert raw["prompt_length"] < plain["prompt_length"] < system["prompt_length"]


@pytest.mark.slow
def test_colour_marks_drafted_tokens_and_has_a_legend(run):
    arguments = ("generate", *LOOPING)
    coloured = run(*arguments, "--color")
    assert ESCAPE in coloured.out
    assert "Drafted by" in coloured.err
    plain = run(*arguments)
    assert re.sub(r"\x1b\[\d*m", "", coloured.out) == plain.out
    assert "Drafted by" not in plain.err


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_written(run, monkeypatch):
    written = []
    write = Ink.write

    def interrupted(ink, piece):
        write(ink, piece)
        written.append(piece.text)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Ink, "write", interrupted)
    result = run("generate", PROMPT, *QUICK)
    assert result.status == 130
    assert result.out.rstrip("\n") == "".join(written)
    assert "finish: interrupted" in result.err
    assert result.err.splitlines()[-1] == "Interrupted."


@pytest.mark.slow
def test_a_chat_goes_on_after_an_interrupted_answer(run, monkeypatch):
    write, written = Ink.write, []

    def interrupted(ink, piece):
        write(ink, piece)
        written.append(piece)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Ink, "write", interrupted)
    result = run("chat", *QUICK, stdin="hello\nand now?\n")
    assert result.status == 0
    assert [line.rpartition("finish: ")[2] for line in result.err.splitlines()] == ["interrupted", "length"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generat",), "Did you mean 'generate'?"),
        (("generate", "a", "--temperatur", "1"), "There is no option --temperatur. Did you mean '--temperature'?"),
        (("generate", "a", "--top-k", "many"), "--top-k"),
        (("generate",), "Give one prompt"),
        (("generate", ""), "The prompt is empty"),
        (("generate", "-"), "The prompt is empty"),
        (("generate", "a", "--file", "b"), "Give one prompt"),
        (("generate", "--file", "top_k.txt"), "The file top_k.txt cannot be read (No such file or directory)"),
        (("generate", "\udcff"), "not text in UTF-8"),
        (("chat", "-"), "chat reads the conversation from standard input"),
        (("generate", "a", "--raw", "--system", "b"), "--raw and --system exclude each other"),
        (("generate", "a", "--speculative-config", "{x"), "--speculative-config is not JSON"),
        (("generate", "a", "--speculative-config", 100_000 * "["), "--speculative-config is not JSON"),
        (("serve", TOY, "--kv-cache-gib", "inf"), "Invalid value for '--kv-cache-gib': Input should be less than"),
        (("generate", "a", "--speculative-config", "[1]"), "give a JSON object"),
        (("generate", "a", "--speculative-config", '{"tabel": "none"}'), "Did you mean 'table'?"),
        (("generate", "a", "--speculative-config", '{"num_speculative_tokens": 3}', *EMPTY_TABLE[2:]), "give one of"),
        (("generate", "a", "--num-speculative-tokens", "-1"), "num_speculative_tokens is -1"),
        (("generate", "a", "--method", ""), "There is no method ''"),
        (("generate", "a", "--method", "adaptx"), "Did you mean 'adaptix'?"),
        (("generate", "a", "--method", "none", "--speculative-config", '{"method": "adaptix"}'), "give one of them"),
        (("generate", "a", "--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("generate", "a", "--model", "./nowhere", "--min-p", "2"), "min_p is 2"),
        (("generate", "a", "--model", "./nowhere", "--top-k", "40"), "nowhere"),
        (("generate", "a", "--no-do-sample", "--temperature", "1"), "would be ignored with do_sample=False; leave"),
        (("generate", "a", "--do-sample", "--temperature", "0"), "use do_sample=False for greedy"),
        (("generate", "a", "--stop", "b"), "There is no option --stop. Did you mean '--stop-strings'? See foredraft"),
        (("generate", "a", "--max-new-tokens", "b"), "valid integer, unable to parse string as an integer. See"),
        (("index", "build", "a", "--overwrit"), "Did you mean '--overwrite'? See foredraft index build --help"),
        (("serve", "--model", "a.gguf"), "no option --model; give it without a name: foredraft serve MODEL. See"),
        (("generate", "a", "--top-p", "2"), "top_p is 2.0"),
        (("generate", "a", "--dtype", "int4"), "dtype is 'int4'"),
        (("generate", "a", "--dtype", "int8"), "choose auto, float32, float64, bfloat16, float16, q8_0, q4_0"),
        (("generate", "a", "--device", "nowhere"), "device is 'nowhere'"),
        (("generate", "a", "--model", "./nowhere"), "There is no folder ./nowhere"),
        (("info", "./nowhere"), "There is no folder ./nowhere"),
        (("info", ""), "The name of a folder or file is empty"),
        (("compile", "of-no-one"), "No model could be loaded from 'of-no-one'"),
        (("serve", "./nowhere", "--host", ""), "The address to listen on is empty"),
        (("serve", "./nowhere", "--api-key", 16 * "k", "--speculative-config", '{"memory": "m"}'), "share nothing"),
        (("train", "traces", "--model", "a", "--data", "b", "--out", "c", "--set", "x=1"), "--set has no option 'x'"),
    ],
)
def test_what_was_asked_wrongly_is_refused_in_a_sentence(run, arguments, words):
    assert refused(run(*arguments), 2, words)


# --- chat


@pytest.mark.slow
def test_chat_answers_piped_lines_until_an_empty_one(run):
    lines = "Hello!\nWho are you?\n/reset\nHello!\n\nnot read\n"
    result = run("chat", *QUICK, stdin=lines)
    assert result.status == 0
    assert result.err.count("finish: ") == 3
    assert "starts over" in result.err
    answers = result.out.strip().splitlines()
    assert answers[0] == answers[-1]  # the same first turn
    assert result.out.startswith(run("generate", "Hello!", *QUICK).out)


@pytest.mark.slow
def test_chat_keeps_what_it_learned_where_it_is_told_to(run, tmp_path, monkeypatch):
    monkeypatch.setattr(screen, "_PATIENCE", 0.0)
    folder = tmp_path / "memory"
    result = run("chat", *QUICK, "--memory", str(folder), stdin="Hello!\n")
    assert result.status == 0
    assert "warming up" in result.err
    assert sum(entry.documents for entry in read_manifest(folder).segments) == 1  # nothing of the warm-up


@pytest.mark.slow
def test_chat_without_a_line_is_refused(run):
    assert refused(run("chat", *QUICK), 2, "pipe one message per line")


def test_chat_forgets_the_oldest_turns_when_the_window_is_full(capsys):
    generator = SimpleNamespace(
        target=SimpleNamespace(window=40),
        arguments=lambda _options: {"max_new_tokens": 256},
        encode=lambda messages: np.arange(sum(len(message["content"]) for message in messages)),
    )
    turns = [
        {"role": role, "content": 10 * letter} for role, letter in zip(3 * ["user", "assistant"], "abcdef", strict=True)
    ]
    system = {"role": "system", "content": "s"}
    messages = [system, *turns[:5]]
    kept = chat._fitting(generator, {}, messages)
    assert kept == [system, turns[4]]
    error = capsys.readouterr().err
    assert "window of 40 tokens" in error
    assert "oldest 2 turns were dropped" in error
    with pytest.raises(UsageError, match="send a shorter one"):
        chat._fitting(generator, {}, [{"role": "user", "content": 50 * "a"}])


# --- methods and info


def test_methods_lists_every_method_with_its_options(run):
    text = run("methods").out
    found = {entry["name"]: entry for entry in json.loads(run("methods", "--json").out)}
    assert {"none", "prompt_lookup", "adaptix"} <= set(found)
    assert all(name in text and entry["summary"] for name, entry in found.items())
    assert [name for name, entry in found.items() if entry["default"]] == ["auto"]
    options = {option["name"]: option for option in found["adaptix"]["options"]}
    assert options["search"]["default"] == "best_first"
    assert options["search"]["type"] == "'best_first' | 'mcts'"
    undescribed = [
        f"{name}.{option['name']}"
        for name, entry in found.items()
        for option in entry["options"]
        if not option["description"]
    ]
    assert not undescribed, f"Describe these in a comment behind or above the field: {undescribed}"


def test_methods_shows_one_by_name(run):
    assert [entry["name"] for entry in json.loads(run("methods", "rest", "--json").out)] == ["rest"]
    assert [entry["name"] for entry in json.loads(run("methods", "fixed", "--controls", "--json").out)] == ["fixed"]
    assert refused(run("methods", "rst"), 2, "Did you mean 'rest'?")
    text = " ".join(run("methods", "eesd").out.split())
    assert "Thompson Sampling" in text  # its paper's title
    assert "Needs a head trained for the model (`foredraft train eesd`)" in text


def test_methods_shows_what_the_classes_declare_without_importing_torch(run):
    code = "import sys; from foredraft.cli import main; main(['methods', '--json']); assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    listed = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert list(listed) == method_names()
    for name, entry in listed.items():
        kind = drafter_class(name)
        assert entry["summary"] == kind.summary
        assert [each["name"] for each in entry["options"]] == [each.name for each in dataclasses.fields(kind.Options)]
        kind.Options(**{each["name"]: each["default"] for each in entry["options"]})  # takes them all
        assert entry["about"] or name == "none"


def test_methods_lists_the_controls_with_their_options(run):
    text = run("methods", "--controls").out
    found = {entry["name"]: entry for entry in json.loads(run("methods", "--controls", "--json").out)}
    known = {"measured", "fixed", "beta_ts", "cali_ts", "exit_threshold", "whole"}
    assert set(found) == known
    assert all(name in text and entry["summary"] for name, entry in found.items())
    assert [name for name, entry in found.items() if entry["default"]] == ["measured"]
    assert {option["name"]: option["default"] for option in found["beta_ts"]["options"]} == {
        "alpha0": 1.0, "beta0": 1.0,
    }  # fmt: skip
    assert all(option["description"] for entry in found.values() for option in entry["options"])


@pytest.mark.parametrize("place", ["no.such.module:Drafter", "json:NoDrafter"])
def test_a_broken_third_party_method_does_not_hide_the_others(run, monkeypatch, place):
    broken = EntryPoint("broken", place, "foredraft.drafters")
    monkeypatch.setattr("foredraft.drafters.entry_points", lambda **_: [broken])
    found = {entry["name"]: entry for entry in json.loads(run("methods", "--json").out)}
    assert "cannot be imported" in found["broken"]["summary"]
    assert "adaptix" in found


@pytest.mark.slow
def test_info_reads_and_measures(run):
    found = json.loads(run("info", TOY, "--json", "--dtype", "float32").out)
    assert (found["family"], found["tested"], found["vocabulary"], found["window"]) == ("llama", True, 8192, 2048)
    assert found["attention"] == {"full_attention": 8}
    assert found["dtype"] == "float32"
    assert found["cost"][0]["rows"] == 1
    assert found["cost"][0]["relative"] == 1.0
    text = run("info", TOY, "--no-measure")
    assert text.status == 0
    assert f"{found['parameters']:,}" in text.out
    assert "relative" not in text.out


def folder_of(path, config):
    path.joinpath("config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_info_works_from_a_configuration_alone(run, tmp_path):
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 50,
    }
    folder = folder_of(tmp_path, {"model_type": "llama", **small})
    result = run("info", folder)
    assert result.status == 0
    assert "3 full attention" in result.out
    assert "Not measured" in result.out
    # a model without a dtype in its configuration is loaded in that of its weights
    assert json.loads(run("info", folder, "--no-measure", "--json").out)["dtype"] is None
    assert "as stored" in run("info", folder, "--no-measure").out


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "rwkv", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 50}, "cannot step back"),
        ({"model_type": "t5"}, "supports decoder-only"),
    ],
)
def test_an_unsupported_model_is_refused_in_a_sentence(run, tmp_path, config, words):
    assert refused(run("info", folder_of(tmp_path, config)), 1, words)


# --- what help is made of


def test_options_read_from_source_are_those_of_the_class():
    read = flags.options_in_source("foredraft.request", "GenerationOptions")
    for option in dataclasses.fields(GenerationOptions):
        assert read[option.name]["default"] == option.default
        assert read[option.name]["description"] != ""


def test_an_option_is_described_by_the_comments_above_and_behind_it(tmp_path, monkeypatch):
    text = (
        "class Chosen:\n    # not an option\n\n    # first,\n    # continued\n    one: int = 1\n"
        "    two: str  # second\n    three: bool = True\n"
    )
    tmp_path.joinpath("chosen_options.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = flags.options_in_source("chosen_options", "Chosen")
    assert [each["description"] for each in found.values()] == ["first, continued", "second", ""]
    assert [each.get("default") for each in found.values()] == [1, None, True]


@pytest.mark.slow
def test_long_work_is_told_on_a_pipe_and_short_work_is_not(capsys, monkeypatch):
    monkeypatch.setattr(screen, "_PATIENCE", 0.05)
    with screen.working("loading a model") as tell:
        time.sleep(0.5)
        tell(0.5, "compiling")
        tell(0.6, "compiling")
        time.sleep(0.5)
        tell(0.9, "quick work")
    assert capsys.readouterr().err.splitlines() == ["loading a model ...", "compiling ..."]


def test_a_table_cuts_nothing_off(capsys):
    labels = ['transformers:{"prompt_lookup_num_tokens": 10}', 'transformers:{"assistant_model": "SMALL"}']
    screen.show_table(("method", *("a heading of some width",) * 6), [(label, *"123456") for label in labels])
    _, rows = capsys.readouterr().out.rsplit("─", 1)
    assert re.sub(r"[\s\d]", "", rows) == re.sub(r"[\s\d]", "", "".join(labels))


def test_a_path_with_brackets_is_shown_as_it_is(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with screen.working("loading models[/v2]") as tell:
        tell(0.5, "loading models[/v2]")
    assert "models[/v2]" in capsys.readouterr().err


@pytest.mark.parametrize("control", ["\x1b[2J", "\x9b2J"])
def test_a_text_sends_no_control_sequence_to_a_terminal(capsys, control):
    Ink(True, []).print([Piece(f"a{control}b", 5, None)])
    assert control not in capsys.readouterr().out


def test_a_phase_without_work_is_told_as_none_done(monkeypatch):
    told = []
    monkeypatch.setattr(screen, "working", lambda _subject: nullcontext(lambda *what: told.append(what)))
    with screen.working_in_phases("reading") as tell:
        tell("sorting", 0, 0)
        tell("sorting", 3, 4)
    assert told == [(0.0, "sorting"), (0.75, "sorting")]
