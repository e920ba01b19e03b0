"""`foredraft bench`: paired speed-ups, and what the parts of a step cost.

Parses and prints; the measuring is in `foredraft.bench`.
"""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.generate import EagerOption
from foredraft.cli.screen import counting, say, working
from foredraft.cli.tables import (
    cost_rows,
    show_cost,
    show_loads,
    show_predictions,
    show_reliability,
    show_run,
    show_summaries,
    show_table,
    show_turns,
)
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:  # torch is imported when a verb runs, so that help stays quick
    from foredraft.bench.runner import Account

DEFAULT_METHODS = ("prompt_lookup", "adaptix", "rest", "auto", "transformers")

_PROFILE_COLUMNS = {
    "method": "method", "tokens_a_step": "tokens / step", "nodes_a_step": "nodes / step",
    "acceptance": "accepted / drafted", "share": "/ emitted", "harmonic": "HM", "merged": "through loans",
    "reached": "reached depth 1, 2, ...", "split": "ms / token: draft + forward + other", "speed_up": "speed-up [95%]",
    "modelled": "modelled",
}  # fmt: skip

_ANY_VOCABULARY = 2
"""For checking arguments that no vocabulary makes right or wrong."""

app = typer.Typer(no_args_is_help=True, help="Measure speed-ups and the parts of a step.")

MethodOption = Annotated[list[str] | None, typer.Option(help='NAME or NAME:{"option": value}; repeatable')]
DataOption = Annotated[
    Path | None, typer.Option(help="Folder of the tasks' files; without it, the embedded set, and others from the hub")
]
TaskOption = Annotated[
    list[str] | None,
    typer.Option(help="Repeatable: a task, TASK/CATEGORY, or FILE:FIELD [default: embedded; with --data, three tasks]"),
]
ModelOption = Annotated[str, typer.Option(help="smollm2, a GGUF file, a hub id, or a folder")]
DtypeOption = Annotated[str, typer.Option(help="auto takes the checkpoint's")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]


@app.command()
def run(
    data: DataOption = None,
    model: ModelOption = SMOLLM2,
    task: TaskOption = None,
    method: MethodOption = None,
    prompts: Annotated[int, typer.Option(help="Prompts a task, or a category of a task")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a text")] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; repeatable, a setting each [default: 0]")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Where a temperature is given")] = 1.0,
    dtype: DtypeOption = "auto",
    eager: EagerOption = False,
    seed: Annotated[int, typer.Option(help="Of sampling and of the order of runs")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of cells: what is there is not measured again, what is new is kept")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Speed-up over plain decoding, paired in one process; `--method transformers` adds its own generate."""
    from foredraft.api import load
    from foredraft.bench.cell import CellFolder
    from foredraft.bench.curves import keep_cost, sweep_budgets, write_sweep
    from foredraft.bench.method import chosen_methods
    from foredraft.bench.runner import Plan, run_plan, turns_of
    from foredraft.bench.summary import summarize_cells
    from foredraft.bench.tasks import load_tasks
    from foredraft.drafters import method_names

    methods = chosen_methods(method or DEFAULT_METHODS, method_names())
    chosen = load_tasks(task, data, prompts)
    settings = [setting(each, top_p, max_new_tokens=max_new_tokens, seed=seed) for each in temperature or [0.0]]
    folder = CellFolder(out) if out is not None else None
    if folder is not None:
        folder.check_writable()
    plan = Plan(model, methods, chosen, settings)
    with working("measuring") as tell:
        generator = load(model, method="none", dtype=dtype, compile=False if eager else "auto", progress=tell)
        account = run_plan(generator, plan, folder, counting(tell, turns_of(plan), "measuring"))
        if folder is not None:
            keep_cost(generator, model, folder.folder)
            write_sweep(sweep_budgets(generator, methods, account.cells, account.texts), folder.folder)
    summaries = summarize_cells(account.cells)
    if as_json:
        print(json.dumps([summary.as_dict() for summary in summaries], indent=1))  # the command's output
    else:
        show_run(summaries, account)
    for sentence in account.replaced:
        say(sentence, "yellow")
    _tell_failures(account)


def _tell_failures(account: "Account") -> None:
    """Say which cells failed, and exit with status 1 if any did."""
    for cell in account.failures:
        say(f"{cell.place.method} failed on {cell.place.task}[{cell.place.number}]: {cell.failure}.")
    if account.failures:
        raise typer.Exit(1)


def setting(temperature: float, top_p: float = 1.0, **arguments: int) -> dict[str, Any]:
    """Return generation arguments, checked before a model is loaded.

    Raises:
        UsageError: an argument out of range.
    """
    from foredraft.request import GenerationOptions

    found: dict[str, Any] = dict(arguments)
    if temperature:
        found["temperature"] = temperature
        if top_p != 1:
            found["top_p"] = top_p
    GenerationOptions.parse(found).sampling(_ANY_VOCABULARY)
    return found


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Where `bench run --out` put its cells")],
    out: Annotated[Path | None, typer.Option(help="Where the report goes [default: the folder itself]")] = None,
) -> None:
    """One page that needs no network, its pictures as PNG files, and a Markdown table, from a folder of cells."""
    from foredraft.bench.report import write_report

    with working("drawing") as tell:
        written = write_report(folder, folder if out is None else out, tell)
    for path in written:
        print(path)  # the command's output


@app.command()
def profile(
    data: DataOption = None,
    model: ModelOption = SMOLLM2,
    task: TaskOption = None,
    method: MethodOption = None,
    prompts: Annotated[int, typer.Option(help="Prompts a task, or a category of a task")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a text")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Where a temperature is given")] = 1.0,
    dtype: DtypeOption = "auto",
    eager: EagerOption = False,
    seed: Annotated[int, typer.Option(help="Of sampling")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Where a method's tokens and time go: acceptance by depth and by estimate, loans, and the parts of a step."""
    from foredraft.api import load
    from foredraft.bench.method import BASE, chosen_methods
    from foredraft.bench.runner import Plan, run_plan, turns_of
    from foredraft.bench.summary import overall, summarize_cells
    from foredraft.bench.tasks import load_tasks
    from foredraft.drafters import method_names

    methods = chosen_methods([BASE, *(method or ["draft_model", "draft_tree", "draft_graph"])], method_names())
    arguments = setting(temperature, top_p, max_new_tokens=max_new_tokens, seed=seed)
    plan = Plan(model, methods, load_tasks(task, data, prompts), [arguments])
    with working("measuring") as tell:
        generator = load(model, method="none", dtype=dtype, compile=False if eager else "auto", progress=tell)
        account = run_plan(generator, plan, None, counting(tell, turns_of(plan), "measuring"))
    found = overall(summarize_cells(account.cells))
    if as_json:
        print(json.dumps([each.as_dict() for each in found], indent=1))  # the command's output
    else:
        show_summaries(found, _PROFILE_COLUMNS, found[0].settings)
        for each in found:
            show_reliability(f"how far estimates were right: {each.method}", each.counts.reliability)
    _tell_failures(account)


@app.command()
def loans(
    draft_model: Annotated[str, typer.Argument(help="The model that drafts: a hub id, a folder, a GGUF file")],
    data: DataOption = None,
    model: ModelOption = SMOLLM2,
    task: TaskOption = None,
    prompts: Annotated[int, typer.Option(help="Prompts a task, or a category of a task")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a text")] = 128,
    dtype: DtypeOption = "auto",
    eager: EagerOption = False,
    as_json: JsonOption = False,
) -> None:
    """What draft graphs save, and how far what they borrow is from the truth: drafted tokens, KL divergence by tau."""
    from foredraft.api import load
    from foredraft.bench.loans import measure_loans
    from foredraft.bench.tasks import load_tasks

    chosen = load_tasks(task, data, prompts)
    with working("measuring") as tell:
        generator = load(model, method="none", dtype=dtype, compile=False if eager else "auto", progress=tell)
        done = counting(tell, len(chosen), "measuring")
        found = measure_loans(generator, draft_model, chosen, tokens=max_new_tokens, done=done)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))  # the command's output
        return
    headings = (
        "shape", "drafted tokens", "draft rows", "levels", "unpruned tree", "redundant", "compared", "KL, nats",
        "same best",
    )  # fmt: skip
    rows = [
        (
            each.shape, f"{each.nodes:.1f}", f"{each.passes:.1f}", f"{each.depth:.1f}", f"{each.unpruned:.3g}",
            f"{each.redundant:.2f}", str(each.recomputed), f"{each.divergence:.3f}" if each.recomputed else "-",
            f"{each.agreement:.2f}" if each.recomputed else "-",
        )
        for each in found
    ]  # fmt: skip
    show_table(headings, rows)


@app.command()
def micro(
    model: ModelOption = SMOLLM2,
    method: MethodOption = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Node budgets; repeatable [default: 16 and 64]")] = None,
    dtype: DtypeOption = "auto",
    eager: EagerOption = False,
    as_json: JsonOption = False,
) -> None:
    """What verification, drafting, and the rest of a step cost on this machine; `replay` times drafting alone."""
    from foredraft.api import load
    from foredraft.bench.method import Method, parse_method
    from foredraft.bench.micro import PARTS, VERIFIED_ROWS, prefill_rate, step_cost
    from foredraft.model.cost import measure_cost

    budgets = nodes or [16, 64]
    chosen = [parse_method(text) for text in (method or ["prompt_lookup", "adaptix"])]
    with working("measuring") as tell:
        generator = load(model, method="none", dtype=dtype, compile=False if eager else "auto", progress=tell)
        curve = measure_cost(generator.target, VERIFIED_ROWS)
        prefilled, rate = prefill_rate(generator.target)
        variants = [replace(each, nodes=count) for each in chosen for count in budgets]
        steps = [step_cost(generator, each, _PROMPT) for each in [Method("none", "none"), *variants]]
    if as_json:
        figures = {
            "verification": asdict(curve),
            "prefill": {"tokens": prefilled, "tokens_a_second": rate},
            "steps": [step.as_dict() for step in steps],
        }
        print(json.dumps(figures))  # the command's output
        return
    show_cost(cost_rows(curve))
    typer.echo(f"prefill: {rate:.0f} tokens a second, {prefilled} at a time")
    shown = [
        (each.method, str(each.nodes), *(f"{part:.0f}" for part in (*each.parts, each.between, each.beside_forward)))
        for each in steps
    ]
    show_table(("method", "nodes", *PARTS, "between", "beside forward"), shown, "a step, median microseconds")


_PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle, and what she does next."


@app.command()
def serve(
    model: ModelOption = SMOLLM2,
    url: Annotated[str | None, typer.Option(help="A server that runs already; else one is started")] = None,
    data: DataOption = None,
    streams: Annotated[list[int] | None, typer.Option(help="At once; repeatable [default: 1, 4, 8, 16]")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts a task, or a category of a task")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a text")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    rounds: Annotated[int, typer.Option(help="How often each is measured, by turns", min=1)] = 3,
    plain_only: Annotated[
        bool, typer.Option("--plain-only", help="For servers that cannot switch drafting off")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """What a server writes a second for so many clients, with predictions, and with prompts that begin alike."""
    from foredraft.bench import serve as measured
    from foredraft.bench.tasks import default_tasks, load_tasks

    texts = load_tasks(default_tasks(data), data, prompts)
    ways = (measured.PLAIN,) if plain_only else (measured.PLAIN, measured.DRAFTED)
    with nullcontext(url) if url is not None else measured.own_server(model) as address:
        assert address is not None, "one of them has it"
        name = Path(model).stem
        bodies = measured.bodies_of(texts, name, max_new_tokens, temperature)
        loads = list(measured.loads(address, bodies, streams or (1, 4, 8, 16), rounds, ways))
        predicted = [] if plain_only else measured.predictions(address, name, rounds)
        turns = measured.turns(address, name, rounds)
    found = [asdict(each) for each in loads], [asdict(each) for each in predicted], [asdict(each) for each in turns]
    if as_json:
        print(json.dumps(dict(zip(("loads", "predictions", "turns"), found, strict=True))))  # the command's output
        return
    show_loads(loads)
    show_predictions(predicted)
    show_turns(turns)
