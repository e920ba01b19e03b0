"""`foredraft prove`: tests that methods are lossless for a model and settings.

Does not depend on how they are compared; that is in `foredraft.bench.prove`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.job import load_plain
from foredraft.cli.screen import counting, say, show_json, show_table, working
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:
    from foredraft.bench.prove import Proof, RuleProof
    from foredraft.bench.tasks import TaskPrompt

    Texts = list[tuple[str, Proof]]
    Rules = list[tuple[str, RuleProof]]


def prove(
    data: flags.DataOption = None,
    model: flags.ModelOption = SMOLLM2,
    task: flags.TaskOption = None,
    method: flags.MethodsOption = None,
    prompts: Annotated[int, flags.in_text(help="Prompts in all, spread over the tasks")] = 30,
    max_new_tokens: flags.TokensOption = 128,
    temperature: Annotated[float, flags.in_text(help="Temperature of the sampled half; 0 skips it")] = 0.7,
    top_p: Annotated[float, flags.in_text(help="top_p of the sampled half")] = 1.0,
    dtype: Annotated[str, flags.in_model(help="float32 allows no difference")] = "float32",
    eager: flags.EagerOption = False,
    seed: flags.SeedOption = 0,
    as_json: flags.JsonOption = False,
) -> None:
    """Compare methods with plain decoding token by token, and test their verification rules.

    Exit status 1 if a text differs beyond rounding, or a rule does not keep the target's distribution. Rounding
    explains near-ties in 16-bit arithmetic, unless every pass is compiled.
    """
    from foredraft.bench import prove as proving
    from foredraft.bench.method import chosen_methods
    from foredraft.request import GenerationOptions

    methods = chosen_methods(method or ["prompt_lookup", "adaptix"])
    chosen = _prompts(task, data, prompts)
    settings: list[tuple[str, dict[str, Any]]] = [("greedy", {})]
    if temperature:
        settings.append((f"T={temperature:g}", {"temperature": temperature, "top_p": top_p}))
    texts: Texts = []
    rules: Rules = []
    with working("comparing") as tell:
        generator = load_plain(model, dtype, eager, tell)
        done = counting(tell, len(settings) * (len(methods) + 1) * len(chosen), "comparing")
        vocabulary = generator.target.vocabulary
        for name, arguments in settings:
            given = {**arguments, "max_new_tokens": max_new_tokens}
            exact = [each for each in methods if proving.keeps_tokens(each, given, vocabulary)]
            texts += [(name, proof) for proof in proving.prove(generator, exact, chosen, given, seed=seed, done=done)]
            sampling = GenerationOptions.parse(given).sampling(vocabulary)
            for rule in sorted({each.verification for each in methods}):
                rules += [(name, proof) for proof in proving.prove_rule(rule, sampling)]
    if as_json:
        rows = [{"setting": name, **asdict(proof), "identical": proof.identical} for name, proof in texts]
        show_json({"texts": rows, "rules": [{"setting": name, **asdict(proof)} for name, proof in rules]})
    else:
        _show_texts(texts, dtype)
        _show_rules(rules)
    if not _print_verdict(texts, rules, dtype):
        raise typer.Exit(1)


def _prompts(task: list[str] | None, data: Path | None, prompts: int) -> "list[TaskPrompt]":
    """Return `prompts` prompts in total, spread over the tasks and their categories."""
    from foredraft.bench.tasks import default_tasks, load_task, spread

    tasks = task or default_tasks(data)
    counts = [prompts // len(tasks) + (number < prompts % len(tasks)) for number in range(len(tasks))]
    loaded = [load_task(name, data, max(count, 1)) for name, count in zip(tasks, counts, strict=True)]
    return [prompt for found, count in zip(loaded, counts, strict=True) for prompt in spread(found, count)]


def _show_texts(texts: "Texts", dtype: str) -> None:
    headings = ("setting", "method", "dtype", "texts", "identical", "tokens compared", "near-ties", "beyond rounding")
    rows = []
    for name, proof in texts:
        ties = sum(difference.near_tie for difference in proof.differences)
        counts = (proof.texts, proof.identical, proof.tokens, ties, len(proof.differences) - ties)
        rows.append((name, proof.method, dtype, *map(str, counts)))
    show_table(headings, rows)
    for name, proof in texts:
        for each in proof.differences:
            kind = "near-tie" if each.near_tie else "DIFFERENCE"
            typer.echo(
                f"{kind}: {name} {proof.method} {each.prompt} token {each.position}, top-2 gap {each.gap:.3g}, "
                f"rounding {each.tolerance:.3g}"
            )


def _show_rules(rules: "Rules") -> None:
    rows = []
    for name, proof in rules:
        limit = f"{'below' if proof.test == 'enumeration' else 'at least'} {proof.limit:g}"
        holds = "yes" if proof.holds else "NO"
        rows.append((name, proof.rule, proof.test, proof.of, f"{proof.figure:.2g}", limit, holds))
    show_table(("setting", "rule", "test", "of", "figure", "limit", "holds"), rows)


def _print_verdict(texts: "Texts", rules: "Rules", dtype: str) -> bool:
    """Print and return whether all texts and rules hold."""
    differing = sum(not proof.holds for _, proof in texts)
    broken = sum(not proof.holds for _, proof in rules)
    if differing:
        say(f"Not proved: {differing} of {len(texts)} comparisons differ beyond rounding.")
    if broken:
        say(f"Not proved: {broken} of {len(rules)} tests of verification rules fail.")
    if differing or broken:
        return False
    count, tokens = sum(proof.texts for _, proof in texts), sum(proof.tokens for _, proof in texts)
    ties = count - sum(proof.identical for _, proof in texts)
    excused = f", {ties} except for near-ties in {dtype}" if ties else ""
    say(f"Proved: all {count} texts ({tokens:,} tokens) equal plain decoding's{excused}; every rule holds.", "green")
    return True
