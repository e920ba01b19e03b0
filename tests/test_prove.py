"""`foredraft prove` holds for what is sound, and fails where a mistake is planted."""

import dataclasses
import json
import re
from importlib.metadata import EntryPoint
from typing import ClassVar

import numpy as np
import pytest
import torch

import foredraft.engine.step as step_module
from foredraft import drafters
from foredraft.api import load
from foredraft.bench.method import parse_method
from foredraft.bench.prove import Difference, Proof, difference_between, is_exact, prove
from foredraft.bench.tasks import TaskPrompt
from foredraft.cli import main
from foredraft.cli.prove import show
from foredraft.contracts import Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.drafters.none import NoDrafter
from foredraft.graph.tree import chain_parents
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from foredraft.verify import verify
from support.toys import TOY, TOY_DRAFT, TOY_HEADS

OPTIONS = ["--prompts", "2", "--max-new-tokens", "24"]
SAMPLED = SamplingOptions(do_sample=True, temperature=0.8)


def proved(capsys, *options):
    status = main(["prove", *OPTIONS, "--json", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_sound_methods_are_proved(capsys):
    drafting = f'draft_model:{{"model":"{TOY_DRAFT}","num_speculative_tokens":3}}'
    status, found = proved(capsys, "--model", TOY, "--method", "prompt_lookup", "--method", drafting)
    assert status == 0
    assert [(row["setting"], row["method"], row["identical"]) for row in found["texts"]] == [
        ("greedy", "prompt_lookup", 2), ("greedy", drafting, 2),
        ("T=0.7", "prompt_lookup", 2), ("T=0.7", drafting, 2),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_verdict_is_a_sentence_and_a_piped_table_is_whole(capsys):
    assert main(["prove", *OPTIONS, "--method", "prompt_lookup", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert "beyond rounding" in shown.out
    assert re.search(r"Proved: all 2 texts \([\d,]+ tokens\) equal plain decoding's\.", shown.err)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_p": 0.3}])
def test_a_wrong_token_is_no_near_tie_though_the_best_two_are(how):
    generator = load(TOY_DRAFT, method="none", dtype="bfloat16", device="cpu", compile=False)
    expected = generator.generate("Once upon a time", max_new_tokens=12, seed=1, **how).token_ids
    wrong = list(expected)
    wrong[6] = (wrong[6] + 1000) % generator.target.vocabulary
    found = difference_between(generator, "Once upon a time", {**how, "seed": 1}, wrong, expected)
    assert (found.position, found.near_tie) == (6, False)
    ended = difference_between(generator, "Once upon a time", {**how, "seed": 1}, expected[:6], expected)
    assert (ended.position, ended.near_tie) == (6, False)


def test_a_model_without_a_chat_template_continues_the_questions():
    generator = load(TOY_DRAFT, method="none", dtype="float32", device="cpu", compile=False)
    generator.tokenizer.chat_template = None
    prompts = [TaskPrompt("task", 0, ("Once upon a time",))]
    (proof,) = prove(generator, [parse_method("prompt_lookup")], prompts, {"max_new_tokens": 8})
    assert (proof.texts, proof.holds) == (1, True)


def test_the_gap_is_between_the_best_score_and_the_other_tokens():
    generator = load(TOY_DRAFT, method="none", dtype="float32")
    written = generator.generate("Tell me about the sea.", max_new_tokens=4)
    prefix = [*generator.encode("Tell me about the sea.").tolist(), *written.token_ids[:2]]
    with torch.inference_mode():
        (best, least), (_, token) = generator.target.model(torch.tensor([prefix])).logits[0, -1].topk(2)
    other = (*written.token_ids[:2], int(token))
    found = difference_between(generator, "Tell me about the sea.", {}, other, written.token_ids)
    assert found.position == 2
    assert found.gap == pytest.approx(float(best - least), abs=1e-4)
    sampled = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
    assert difference_between(generator, "Tell me about the sea.", sampled, other, written.token_ids).gap >= 0


class CompiledTo:
    """Compiled passes of up to so many rows that round alike."""

    def __init__(self, rows):
        self.rows = rows

    def rounds_alike(self, rows):
        return rows <= self.rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "compiled", "method", "nodes", "exact"),
    [
        ("float32", None, "adaptix", 16, True),
        ("bfloat16", None, "adaptix", 16, False),
        ("bfloat16", CompiledTo(17), "adaptix", 16, True),
        ("bfloat16", CompiledTo(17), "adaptix", 17, False),
        ("bfloat16", CompiledTo(65), "auto", None, True),
        ("bfloat16", CompiledTo(65), "medusa", 16, True),
        ("bfloat16", CompiledTo(65), "eesd", 8, True),
    ],
)
def test_rounding_excuses_nothing_where_all_verifying_passes_round_alike(dtype, compiled, method, nodes, exact):
    config = {"method": method} | ({} if nodes is None else {"num_speculative_tokens": nodes})
    config |= {"head": TOY_HEADS[method]} if method in TOY_HEADS else {}
    generator = load(TOY, speculative_config=config, dtype=dtype, compile=False)
    generator.target.compiled = compiled
    assert is_exact(generator) is exact


def test_a_near_tie_is_excused_unless_the_comparison_is_exact():
    tie, more = (Difference("task[0]", 3, gap, 0.1) for gap in (0.05, 0.5))
    for differences, exact, holds in (
        ((), True, True), ((), False, True), ((tie,), False, True), ((tie,), True, False), ((tie, more), False, False),
    ):  # fmt: skip
        assert Proof("method", 9, 99, differences, exact).holds is holds


def test_the_table_counts_a_near_tie_as_a_difference_where_the_comparison_is_exact(capsys):
    tie = Difference("task[0]", 3, 0.05, 0.1)
    show(
        [("greedy", Proof("first", 9, 99, (tie,), False)), ("greedy", Proof("second", 9, 99, (tie,), True))], "float32"
    )
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = {line[1]: line[-2:] for line in shown if line[:1] == ["greedy"]}
    assert counts == {"first": ["1", "0"], "second": ["0", "1"]}  # near-ties, and beyond rounding
    assert [line[0] for line in shown[-2:]] == ["near-tie:", "DIFFERENCE:"]


def redraws_after_a_mismatch(draft, choose, ends, at):
    """The draw that did not match is thrown away, and another token is emitted in its place."""
    verdict = verify(draft, choose, ends, at)
    if len(draft) and len(verdict.path) < len(verdict.tokens):
        return dataclasses.replace(verdict, tokens=(*verdict.tokens[:-1], verdict.tokens[-1] // 2))
    return verdict


@pytest.mark.slow
def test_a_verifier_that_draws_again_is_found(capsys, monkeypatch):
    monkeypatch.setattr(step_module, "verify", redraws_after_a_mismatch)
    status, found = proved(capsys, "--method", "prompt_lookup")
    assert status == 1
    assert any(row["identical"] < row["texts"] for row in found["texts"])


class Meddling:
    """Drafts nothing of worth, and blurs what the target remembers."""

    name: ClassVar[str] = "meddling"
    summary: ClassVar[str] = "changes the cache"
    Options = NoDrafter.Options
    source_names = ("meddling",)
    needs = Needs()
    caches: ClassVar[list] = []

    @classmethod
    def create(cls, options, resources):
        return cls()

    def open(self, context: DraftContext):
        return self

    def propose(self, view: SequenceView, budget: Budget):
        with torch.inference_mode():
            for layer in self.caches[-1].layers:
                layer.values[:, :, : len(view.ids) - 1] *= 0.5
        tokens = view.ids[:1].astype(np.int32)
        return Draft(tokens, chain_parents(1)) if budget.nodes and budget.depth else Draft(tokens[:0], chain_parents(0))

    def observe(self, verdict: Verdict):
        pass

    def close(self):
        pass


@pytest.mark.slow
def test_a_drafter_that_changes_the_cache_is_found(capsys, monkeypatch):
    new_cache = TorchTarget.new_cache

    def kept(target, tokens=0):
        Meddling.caches.append(new_cache(target, tokens))
        return Meddling.caches[-1]

    monkeypatch.setattr(TorchTarget, "new_cache", kept)
    meddling = EntryPoint("meddling", f"{__name__}:Meddling", drafters.ENTRY_POINT_GROUP)
    monkeypatch.setattr(drafters, "entry_points", lambda **_: [meddling])
    status, found = proved(capsys, "--method", 'meddling:{"num_speculative_tokens":1}')
    assert status == 1
    assert any(
        not difference["gap"] <= difference["tolerance"] for row in found["texts"] for difference in row["differences"]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "transformers"], "transformers cannot be proved"),
        (["--task", "gsm9k"], "There is no task 'gsm9k'. Did you mean 'gsm8k'?"),
        (["--method", "adaptics"], "Did you mean 'adaptix'?"),
        (["--model", "./nowhere", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--model", "./nowhere", "--seed", "-1"], "seed is -1"),
    ],
)
def test_what_cannot_be_proved_is_refused_in_a_sentence(arguments, says, capsys):
    assert main(["prove", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
