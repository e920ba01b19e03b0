"""`foredraft prove`: is the text the same, for this model, these methods and these settings?

Parses and prints; the comparison is `foredraft.bench.prove`.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.generate import EagerOption
from foredraft.cli.screen import counting, say, working
from foredraft.cli.tables import show_table
from foredraft.model.gguf import SMOLLM2


def prove(
    data: Annotated[Path | None, typer.Option(help="Folder of the tasks' files; without it, the embedded set")] = None,
    model: Annotated[str, typer.Option(help="smollm2, a GGUF file, a hub id, or a folder")] = SMOLLM2,
    task: Annotated[
        list[str] | None, typer.Option(help="Repeatable [default: embedded; with --data, three tasks]")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help='NAME or NAME:{"option": value}; repeatable')] = None,
    prompts: Annotated[int, typer.Option(help="Prompts in all, spread over the tasks")] = 30,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a text")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the sampled half of the comparison; 0 leaves it out")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Of the sampled half")] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32 must hold without exception")] = "float32",
    eager: EagerOption = False,
    seed: Annotated[int, typer.Option(help="Of the sampling")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Compare methods with plain decoding token for token, and test their verification rules.

    Exit status 1 if anything differs that rounding does not excuse, or a rule does not keep the target's law. Rounding
    excuses near-ties in 16-bit numbers, unless every pass is compiled.
    """
    from foredraft.api import load
    from foredraft.bench.method import chosen_methods
    from foredraft.bench.prove import keeps_tokens
    from foredraft.bench.prove import prove as compare
    from foredraft.bench.rule import prove_rule
    from foredraft.drafters import method_names
    from foredraft.request import GenerationOptions

    methods = chosen_methods(method or ["prompt_lookup", "adaptix"], method_names())
    chosen = _prompts(task, data, prompts)
    settings: list[tuple[str, dict[str, Any]]] = [("greedy", {})]
    if temperature:
        settings.append((f"T={temperature:g}", {"temperature": temperature, "top_p": top_p}))
    rows: list[tuple[str, Any]] = []
    rules: list[tuple[str, Any]] = []
    with working("comparing") as tell:
        generator = load(model, method="none", dtype=dtype, compile=False if eager else "auto", progress=tell)
        done = counting(tell, len(settings) * (len(methods) + 1) * len(chosen), "comparing")
        for name, arguments in settings:
            given = {**arguments, "max_new_tokens": max_new_tokens}
            vocabulary = generator.target.vocabulary
            alike = [each for each in methods if keeps_tokens(each, given, vocabulary)]
            rows += [(name, proof) for proof in compare(generator, alike, chosen, given, seed=seed, done=done)]
            sampling = GenerationOptions.parse(given).sampling(vocabulary)
            for rule in sorted({each.verification for each in methods}):
                rules += [(name, proof) for proof in prove_rule(rule, sampling)]
    if as_json:
        tables: dict[str, list[tuple[str, Any]]] = {"texts": rows, "rules": rules}
        shown = {key: [{"setting": name, **asdict(proof)} for name, proof in table] for key, table in tables.items()}
        print(json.dumps(shown, indent=1))  # the command's output
    else:
        _show(rows, dtype)
        _show_rules(rules)
    if not _tell_verdict(rows, rules, dtype):
        raise typer.Exit(1)


def _tell_verdict(rows: list[tuple[str, Any]], rules: list[tuple[str, Any]], dtype: str) -> bool:
    """Say whether all texts and rules hold, and return it."""
    differing = sum(not proof.holds for _, proof in rows)
    broken = sum(not proof.holds for _, proof in rules)
    if differing:
        say(f"Not proved: {differing} of {len(rows)} comparisons differ beyond rounding.")
    if broken:
        say(f"Not proved: {broken} of {len(rules)} tests of verification rules fail.")
    if differing or broken:
        return False
    texts, tokens = sum(proof.texts for _, proof in rows), sum(proof.tokens for _, proof in rows)
    ties = texts - sum(proof.identical for _, proof in rows)
    excused = f", {ties} but for near-ties of {dtype}" if ties else ""
    say(f"Proved: all {texts} texts ({tokens} tokens) are plain decoding's{excused}; every rule holds.", "green")
    return True


def _prompts(task: list[str] | None, data: Path | None, prompts: int) -> list[Any]:
    """Return so many prompts in all, spread over the tasks and their categories."""
    from foredraft.bench.tasks import default_tasks, load_task

    tasks = task or default_tasks(data)
    share = [prompts // len(tasks) + (i < prompts % len(tasks)) for i in range(len(tasks))]
    chosen: list[Any] = []
    for name, count in zip(tasks, share, strict=True):
        every = load_task(name, data, max(count, 1))
        chosen += [every[i * len(every) // count] for i in range(min(count, len(every)))] if count else []
    return chosen


def _show(rows: list[tuple[str, Any]], dtype: str) -> None:
    headings = ("setting", "method", "dtype", "texts", "identical", "tokens compared", "near-ties", "beyond rounding")
    ties = [sum(difference.near_tie for difference in proof.differences) for _, proof in rows]
    shown = [
        (
            name, proof.method, dtype, str(proof.texts), str(proof.identical), str(proof.tokens), str(tied),
            str(len(proof.differences) - tied),
        )
        for (name, proof), tied in zip(rows, ties, strict=True)
    ]  # fmt: skip
    show_table(headings, shown)
    for name, proof in rows:
        for each in proof.differences:
            kind = "near-tie" if each.near_tie else "DIFFERENCE"
            typer.echo(
                f"{kind}: {name} {proof.method} {each.task}[{each.number}] token {each.position}, "
                f"top-2 gap {each.gap:.3g}, rounding {each.tolerance:.3g}"
            )


def _show_rules(rules: list[tuple[str, Any]]) -> None:
    shown = []
    for name, proof in rules:
        limit = f"{'below' if proof.test == 'enumeration' else 'at least'} {proof.limit:g}"
        holds = "yes" if proof.holds else "NO"
        shown.append((name, proof.rule, proof.test, proof.of, f"{proof.figure:.2g}", limit, holds))
    if shown:
        show_table(("setting", "rule", "test", "of", "figure", "limit", "holds"), shown)
