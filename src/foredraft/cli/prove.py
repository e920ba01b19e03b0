"""`foredraft prove`: is the text the same, for this model, these methods and these settings?

Parses and prints; the comparison is `foredraft.bench.prove`.
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

    Texts = list[tuple[str, Proof]]
    Rules = list[tuple[str, RuleProof]]


def prove(
    data: flags.DataOption = None,
    model: flags.ModelOption = SMOLLM2,
    task: flags.TaskOption = None,
    method: flags.MethodsOption = None,
    prompts: Annotated[int, flags.in_text(help="Prompts in all, spread over the tasks")] = 30,
    max_new_tokens: flags.TokensOption = 128,
    temperature: Annotated[float, flags.in_text(help="Of the sampled half of the comparison; 0 leaves it out")] = 0.7,
    top_p: Annotated[float, flags.in_text(help="Of the sampled half")] = 1.0,
    dtype: Annotated[str, flags.in_model(help="float32 must hold without exception")] = "float32",
    eager: flags.EagerOption = False,
    seed: flags.SeedOption = 0,
    as_json: flags.JsonOption = False,
) -> None:
    """Compare methods with plain decoding token for token, and test their verification rules.

    Exit status 1 if anything differs that rounding does not excuse, or a rule does not keep the target's distribution.
    Rounding excuses near-ties in 16-bit numbers, unless every pass is compiled.
    """
    from foredraft.bench.method import chosen_methods
    from foredraft.bench.prove import keeps_tokens, prove_rule
    from foredraft.bench.prove import prove as compare
    from foredraft.drafters import method_names
    from foredraft.request import GenerationOptions

    methods = chosen_methods(method or ["prompt_lookup", "adaptix"], method_names())
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
            alike = [each for each in methods if keeps_tokens(each, given, vocabulary)]
            texts += [(name, proof) for proof in compare(generator, alike, chosen, given, seed=seed, done=done)]
            sampling = GenerationOptions.parse(given).sampling(vocabulary)
            for rule in sorted({each.verification for each in methods}):
                rules += [(name, proof) for proof in prove_rule(rule, sampling)]
    if as_json:
        rows = [{"setting": name, **asdict(proof), "identical": proof.identical} for name, proof in texts]
        show_json({"texts": rows, "rules": [{"setting": name, **asdict(proof)} for name, proof in rules]})
    else:
        _show_texts(texts, dtype)
        _show_rules(rules)
    if not _tell_verdict(texts, rules, dtype):
        raise typer.Exit(1)


def _prompts(task: list[str] | None, data: Path | None, prompts: int) -> list[Any]:
    """Return as many prompts in all, spread over the tasks and their categories."""
    from foredraft.bench.tasks import default_tasks, load_task, spread

    tasks = task or default_tasks(data)
    chosen: list[Any] = []
    for number, name in enumerate(tasks):
        count = prompts // len(tasks) + (number < prompts % len(tasks))
        every = load_task(name, data, max(count, 1))
        chosen += spread(every, count)
    return chosen


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


def _tell_verdict(texts: "Texts", rules: "Rules", dtype: str) -> bool:
    """Say whether all texts and rules hold, and return it."""
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
    excused = f", {ties} but for near-ties of {dtype}" if ties else ""
    say(f"Proved: all {count} texts ({tokens:,} tokens) are plain decoding's{excused}; every rule holds.", "green")
    return True
