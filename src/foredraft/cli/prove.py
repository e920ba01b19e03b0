"""`foredraft prove`: tests that methods are lossless for a model and settings.

Does not depend on how they are compared; that is in `foredraft.bench.prove`.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.bench.tasks import load_tasks, spread
from foredraft.cli import flags
from foredraft.cli.job import load_plain, setting
from foredraft.cli.screen import counting, say, show_json, show_table, working
from foredraft.model.gguf.files import SMOLLM2

if TYPE_CHECKING:
    from foredraft.bench.prove import Proof

    Texts = list[tuple[str, Proof]]


def prove(
    data: flags.DataOption = None,
    model: flags.ModelOption = SMOLLM2,
    task: flags.TaskOption = None,
    method: flags.MethodsOption = None,
    prompts: Annotated[int, flags.in_text(help="Prompts in all, spread over those of all tasks")] = 30,
    max_new_tokens: flags.TokensOption = 128,
    temperature: Annotated[float, flags.in_text(help="Temperature of the sampled half; 0 skips it")] = 0.7,
    dtype: Annotated[str, flags.in_model(help="float32 allows no difference")] = "float32",
    eager: flags.EagerOption = False,
    seed: flags.SeedOption = 0,
    as_json: flags.JsonOption = False,
) -> None:
    """Compare methods with plain decoding token by token.

    Exit status 1 if a text differs beyond rounding, which explains near-ties in 16-bit arithmetic, unless every pass is
    compiled.
    """
    from foredraft.bench import prove as proving
    from foredraft.bench.method import chosen_methods
    from foredraft.bench.summary import finite
    from foredraft.model.rounding import dtype_name

    methods = chosen_methods(method or ["auto", "prompt_lookup", "adaptix"])
    chosen = spread(load_tasks(task, data, prompts), prompts)
    setting(0.0, seed=seed)  # refused before the model is loaded
    settings = [("greedy", setting(0.0, max_new_tokens=max_new_tokens))]
    if temperature:
        settings.append((f"T={temperature:g}", setting(temperature, max_new_tokens=max_new_tokens)))
    texts: Texts = []
    with working("comparing") as tell:
        generator = load_plain(model, dtype, eager, tell)
        done = counting(tell, len(settings) * (len(methods) + 1) * len(chosen), "comparing")
        for name, arguments in settings:
            proofs = proving.prove(generator, methods, chosen, arguments, seed=seed, done=done)
            texts += [(name, proof) for proof in proofs]
    dtype = dtype_name(generator.target.outline)
    if as_json:
        rows = [{"setting": name, **asdict(proof), "identical": proof.identical} for name, proof in texts]
        show_json({"texts": finite(rows)})
    else:
        show(texts, dtype)
    if differing := sum(not proof.holds for _, proof in texts):
        say(f"Not proved: {differing} of {len(texts)} comparisons differ beyond rounding.")
        raise typer.Exit(1)
    count, tokens, same = (sum(getattr(each, of) for _, each in texts) for of in ("texts", "tokens", "identical"))
    excused = f", {count - same} except for near-ties in {dtype}" if same < count else ""
    say(f"Proved: all {count} texts ({tokens:,} tokens) equal plain decoding's{excused}.", "green")


def show(texts: "Texts", dtype: str) -> None:
    """Print a table of the proofs, and a line for each difference."""
    rows, differences = [], []
    for name, proof in texts:
        ties, wrong = proof.near_ties, len(proof.differences) - proof.near_ties
        counts = (proof.texts, proof.identical, proof.tokens, ties, wrong)
        rows.append((name, proof.method, dtype, *counts))
        differences += [
            f"{'near-tie' if each.near_tie and not proof.exact else 'DIFFERENCE'}: {name} {proof.method} {each.prompt} "
            f"token {each.position}, below the best by {each.gap:.3g}, rounding {each.tolerance:.3g}"
            for each in proof.differences
        ]
    headings = ("setting", "method", "dtype", "texts", "identical", "tokens compared", "near-ties", "beyond rounding")
    show_table(headings, rows)
    for line in differences:
        typer.echo(line)
