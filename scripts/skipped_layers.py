"""Search for the sub-layers that a model can skip when it drafts for itself (Self-SD).

`python scripts/skipped_layers.py --model MODEL --data TEXTS --out skipped.json` writes the file for `layer_skip`'s
option `skipped`. How the search works is in `layer_search`.
"""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.atomic_file import check_place
from foredraft.cli import flags
from foredraft.cli.job import load_plain, setting
from foredraft.cli.screen import working
from foredraft.cli.stores import words_of
from foredraft.errors import UsageError
from foredraft.model.gguf.files import SMOLLM2

if TYPE_CHECKING:  # torch and transformers are imported when a command runs, so that help is fast
    from foredraft.model.skipping import Skipped
    from layer_search import Found, SkippingFigures

_LEAST_TEXTS = 4  # chosen
_HELD_OUT_ONE_IN = 4  # one in this many texts only checks the result (chosen)


TextsOption = Annotated[
    int, typer.Option(help="Texts to generate; one in four only checks the result", min=_LEAST_TEXTS)
]
WholeLayersOption = Annotated[
    bool, typer.Option(help="Skip attention and MLP of a layer together only, so that it can be compiled")
]


def layer_skip(
    data: Annotated[
        list[Path],
        typer.Option(help="Texts whose beginnings are prompts: .txt .md .py .jsonl (.gz), .parquet, a folder"),
    ],
    out: Annotated[Path, typer.Option(help="The file to write, for layer_skip's option skipped")],
    model: flags.ModelOption = SMOLLM2,
    trials: Annotated[int, typer.Option(help="Sets of sub-layers to try", min=1)] = 300,
    minutes: Annotated[float | None, typer.Option(help="Time limit of the search", min=0.01)] = None,
    texts: TextsOption = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt, a document's beginning", min=1)] = 48,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate after each prompt", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of the texts; 0 is greedy")] = 0.7,
    levels: Annotated[int, typer.Option(help="Maximum number of drafted tokens per step", min=1)] = 12,
    whole_layers: WholeLayersOption = False,
    dtype: flags.DtypeOption = "auto",
    device: flags.DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the texts and the search")] = 0,
    overwrite: flags.OverwriteOption = False,
) -> None:
    """Search for the sub-layers that a model can skip when it drafts for itself (Self-SD)."""
    _check(out, overwrite)
    arguments = setting(temperature)
    prompts = _beginnings(data, model, texts, prompt_tokens)

    import numpy as np

    from foredraft.model.skipping import write_skipped
    from layer_search import WrittenText, figures_of, measure_skipping, search

    with working("loading") as tell:
        generator = load_plain(model, dtype, False, tell, device)
        target, count, written = generator.target, int(generator.target.model.config.num_hidden_layers), []
        tell(0.0, "timing passes")
        costs = measure_skipping(target)
        for number, prompt in enumerate(prompts):
            tell(number / len(prompts), "writing texts")
            given = {**arguments, "seed": seed + number, "max_new_tokens": max_new_tokens}
            ids = np.array([*prompt, *generator.generate(prompt, **given).token_ids], np.int64)
            written.append(WrittenText(ids, len(prompt), generator.arguments(given)["sampling"]))
        start = monotonic()
        held_out, searched = written[::_HELD_OUT_ONE_IN], [w for n, w in enumerate(written) if n % _HELD_OUT_ONE_IN]

        def figures(skipped: "Skipped") -> "SkippingFigures":
            return figures_of(target, skipped, searched, costs, levels)

        for found in search(figures, count, trials=trials, seed=seed, whole_layers=whole_layers):
            elapsed = (monotonic() - start) / 60 / minutes if minutes is not None else 0.0
            done, gain = max(found.trials / trials, elapsed), found.figures.speed_up
            tell(done, f"searching, {found.trials} tried, x{gain:.2f}")
            if elapsed >= 1.0:
                break
        checked = figures_of(target, found.skipped, held_out, costs, levels)
    about = {
        "searched": asdict(found.figures), "held_out": asdict(checked), "trials": found.trials, "texts": len(written),
        "settings": {"model": model, "dtype": str(target.dtype), "seed": seed, **arguments},
    }  # fmt: skip
    write_skipped(out, found.skipped, target.model, about)
    _print(out, count, found, checked)


def _check(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists; give --overwrite to replace it, or another name.")
    check_place(out)


def _beginnings(data: list[Path], model: str, texts: int, prompt_tokens: int) -> list[list[int]]:
    """Return the first ids of the first documents; UsageError for inputs with too few."""
    from foredraft.corpus.documents import ReadReport, find_inputs, read_documents
    from foredraft.training.sources import in_turns

    words = words_of(model)
    tokenizer = words.tokenizer()
    # of the files in turn, so that all kinds of text are included
    readers = [read_documents([file], report=ReadReport(), render=words.render()) for file in find_inputs(data)]
    beginnings = (
        tokenizer.encode(document.text[: 64 * prompt_tokens]).ids[:prompt_tokens]
        for document in in_turns(readers)
    )  # fmt: skip
    prompts = list(islice(filter(None, beginnings), texts))
    if len(prompts) < _LEAST_TEXTS:
        raise UsageError(
            f"{', '.join(map(str, data))}: {len(prompts)} documents can be used, and at least {_LEAST_TEXTS} are "
            "needed; give files with more texts (.jsonl with a field text or messages has one per line)."
        )
    return prompts


def _print(out: Path, layers: int, found: "Found", checked: "SkippingFigures") -> None:
    attention, mlp = list(found.skipped.attention), list(found.skipped.mlp)
    typer.echo(
        f"{out}: of {layers} layers, attention of {attention} and MLPs of {mlp} are skipped.\n"
        f"On texts held out from the search of {found.trials} sets, {checked.agreement:.0%} of the tokens agree, a "
        f"draft pass takes {checked.draft_cost:.2f} of a full pass, and the estimated speed-up over plain decoding "
        f"with {checked.levels} drafted tokens per step is {checked.speed_up:.2f}."
    )
    if checked.speed_up <= 1:
        typer.echo("So layer skipping does not speed up this model on this machine.")
    options = json.dumps({"skipped": str(out)})
    typer.echo(f"foredraft generate --method layer_skip --speculative-config '{options}' ...")


if __name__ == "__main__":
    typer.run(layer_skip)
