"""Measure a server with concurrent clients, with predictions, and with repeated prompt prefixes.

`python scripts/bench_server.py --data PROMPTS` starts one; `--url ADDRESS --plain-only` measures any other that is
compatible with OpenAI's.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import typer

from foredraft.bench.tasks import interleaved, load_tasks
from foredraft.cli import flags
from foredraft.cli.screen import show_json, show_table
from foredraft.cli.serve import name_of
from foredraft.model.gguf.files import SMOLLM2
from server_load import DRAFTED, PLAIN, Load, bodies_of, loads, own_server, predictions, turns


def serve(
    model: flags.ModelOption = SMOLLM2,
    url: Annotated[str | None, typer.Option(help="A running server; otherwise one is started")] = None,
    data: flags.DataOption = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; repeatable [default: 1, 4, 8, 16]")
    ] = None,
    prompts: flags.PromptsOption = 8,
    max_new_tokens: flags.TokensOption = 128,
    temperature: flags.TemperatureOption = 0.0,
    rounds: Annotated[int, typer.Option(help="Measurements of each", min=1)] = 2,  # the embedded prompts allow 2
    plain_only: Annotated[
        bool, typer.Option("--plain-only", help="For servers that cannot switch drafting off")
    ] = False,
    as_json: flags.JsonOption = False,
) -> None:
    """Measure a server with concurrent clients, with predictions, and with repeated prompt prefixes."""
    counts = streams or (1, 4, 8, 16)
    # different prompts for each load, of all kinds
    texts = interleaved(load_tasks(None, data, prompts * len(counts) * rounds))
    ways = (PLAIN,) if plain_only else (PLAIN, DRAFTED)
    with nullcontext(url) if url is not None else own_server(model) as address:
        assert address is not None, "url or own_server gives one"
        name = name_of(model)
        bodies = bodies_of(texts, name, max_new_tokens, temperature)
        loaded = asyncio.run(loads(address, bodies, counts, rounds, ways))
        predicted = [] if plain_only else asyncio.run(predictions(address, name, rounds))
        two = asyncio.run(turns(address, name, rounds))
    if as_json:
        show_json({"loads": [asdict(each) for each in loaded], "predictions": predicted, "turns": two})
        return
    _show_loads(loaded)
    if predicted:
        _show_predictions(predicted)
    figures = [(1e3 * each["first"], 1e3 * each["second"], each["second"] / each["first"]) for each in two]
    row = [median(column) for column in zip(*figures, strict=True)]
    counted = two[0]["prompt_tokens"]
    title = f"Two turns of a conversation{'' if counted is None else f'; the first has {counted} tokens'}"
    show_table(("first turn, ms to text|.0f", "second|.0f", "share|.3f"), [row], title)


def _show_loads(loads: Sequence[Load]) -> None:
    """Print a row for each number of streams and way: tokens per second, and their ratio to plain decoding's."""
    groups: dict[tuple[int, str], list[Load]] = {}
    for load in loads:
        groups.setdefault((load.streams, load.way), []).append(load)
    alone: dict[str, float] = {}  # tokens per second of the first number of streams
    rows, same = [], True
    for (streams, way), group in groups.items():
        speed, first = (median(getattr(each, of) for each in group) for of in ("tokens_per_second", "first"))
        rounds = list(zip(group, groups[streams, "plain"], strict=True))
        same &= all(each.texts == plain.texts for each, plain in rounds)
        ratios = [each.tokens_per_second / plain.tokens_per_second for each, plain in rounds]
        ratio = "-" if way == "plain" else f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((streams, way, speed, speed / alone.setdefault(way, speed), 1e3 * first, ratio))
    compared = len({load.way for load in loads}) > 1
    verdict = f"; {'all texts are equal' if same else 'THE TEXTS DIFFER'}" if compared else ""
    headings = ("streams", "way", "tokens/s|.0f", "of one stream's|.2f", "ms to first|.0f", "of plain's")
    show_table(headings, rows, f"Concurrent streams{verdict}")


def _show_predictions(found: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for name in found[0]["seconds"]:
        times = [tuple(each["seconds"][case] for case in (name, "plain", "drafted")) for each in found]
        figures = [(own, plain / own, own / drafted) for own, plain, drafted in times]
        rows.append([name, *(median(column) for column in zip(*figures, strict=True))])
    same = "all texts are equal" if all(each["same"] for each in found) else "THE TEXTS DIFFER"
    counts = f"{found[0]['tokens']} tokens, {found[0]['accepted']} of them from the edited prediction"
    headings = ("prediction", "seconds|.2f", "times as fast as plain|.2f", "time / drafted|.2f")
    show_table(headings, rows, f"{counts}; {same}")


if __name__ == "__main__":
    typer.run(serve)
