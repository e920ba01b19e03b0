"""The demo: three ways to write a text, what it says of them, and a model that can only run as it is."""

import re
from dataclasses import replace

import pytest

import foredraft
from foredraft.bench import demonstration
from foredraft.bench.demonstration import SCENES, Outcome, perform
from foredraft.cli import main
from foredraft.errors import UsageError
from support.toys import TOY_DRAFT

SHORT = tuple(replace(scene, options={**scene.options, "max_new_tokens": 24}) for scene in SCENES)


def outcome(milliseconds, **changes):
    generator = foredraft.load(TOY_DRAFT, method="prompt_lookup", dtype="float32", device="cpu", compile=False)
    drafted = generator.generate([5, 6, 7, 5, 6, 7, 5, 6], max_new_tokens=12, eos_token_id=())
    given = {"scene": SCENES[-1], "method": "auto", "drafted": drafted, "same": True}
    return Outcome(
        milliseconds=dict(zip(("transformers", "none", "auto"), milliseconds, strict=True)), **given | changes
    )


@pytest.mark.slow
def test_the_sentence_says_what_was_measured_and_why_there_is_little_to_gain():
    said = outcome((30.0, 10.0, 10.0)).sentence()
    assert said.startswith("1.0 times our own plain decoding, 3.0 times as fast as transformers' generate, ")
    assert "the same text: new prose is hard to predict" in said
    assert (
        outcome((30.0, 10.0, 5.0), scene=SCENES[0]).sentence().startswith("2.0 times our own plain decoding, 6.0 times")
    )
    assert "please report it" in outcome((30.0, 10.0, 5.0), same=False).sentence()


@pytest.mark.slow
def test_a_greedy_text_is_compared_with_transformers_own():
    generator = foredraft.load(TOY_DRAFT, method="prompt_lookup", dtype="float32", device="cpu", compile=False)
    shown = []
    found = perform(generator, SHORT[0], lambda stream: shown.extend(piece.text for piece in stream))
    assert found.same
    assert "".join(shown) == found.drafted.text
    assert min(found.milliseconds.values()) > 0


@pytest.mark.slow
def test_the_command_runs_what_cannot_be_compiled_as_it_is(monkeypatch, capsys):
    def refuse(*_args, **_options):
        raise UsageError("This model cannot be compiled.")

    monkeypatch.setattr("foredraft.model.compiled.build.compile_forward", refuse)
    monkeypatch.setattr(demonstration, "SCENES", SHORT)
    options = ["--method", "prompt_lookup", "--no-color"]
    assert main(["demo", "--model", TOY_DRAFT, *options]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines().count("This model cannot be compiled.") == 1
    assert len(re.findall(r"times as fast as transformers' generate", printed.out)) == len(SCENES)
