"""The recipe of the embedded models: prepare text, train a small Llama, measure it. Resumable at any step.

    python -m foredraft.training.pretrain prepare DATA chat=chat.jsonl.gz code=/usr/lib/python3.11
    python -m foredraft.training.pretrain train DATA RUN --shape demo --share chat=0.5 --threads 2 --compile
    python -m foredraft.training.pretrain evaluate RUN/model --sets evaluation.toml --root FOLDER

Muon moves the weight matrices, AdamW the embedding (tied with the output) and the norms; the rate warms up and decays
linearly or as a cosine. A run's weights depend on its recipe, its shape and its text alone: no step draws random
numbers (there is no dropout, and the order of windows is a function of seed and step), so a resumed run on the same
machine ends with the very weights of an uninterrupted one. Does not know what the weights will be used for.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from foredraft.corpus.documents import ReadReport
from foredraft.errors import ForedraftError, NumericsError, UsageError
from foredraft.training.checkpoints import read_checkpoint, save_model, weights_hash, write_checkpoint
from foredraft.training.evaluate import DomainLoss, domain_loss, encoded, held_out_documents, read_sets
from foredraft.training.muon import Muon
from foredraft.training.packing import PreparedText, WindowOrder, open_prepared
from foredraft.training.recipe import SHAPES, Machine, Recipe, Shape, assigned, named_numbers, named_paths
from foredraft.training.text_data import PrepareOptions, documents_in, load_tokenizer, prepare, write_atomically

Report = Callable[[str], None]
Pass = Callable[[torch.Tensor], torch.Tensor]


class Optimizers:
    """Muon and AdamW over one model, stepped together."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe) -> None:
        """Deal out the model's parameters: matrices inside the layers to Muon, everything else to AdamW."""
        inner = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
        theirs = {id(parameter) for parameter in inner}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in theirs]
        self._recipe, self._parameters = recipe, [*inner, *rest]
        self._muon = Muon(
            inner,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            dtype=torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32,
        )
        self._adamw = torch.optim.AdamW(rest, lr=recipe.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, number: int) -> None:
        """Move every parameter by its gradient, at the rates of step `number`, and forget the gradients."""
        if self._recipe.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip)
        share = self._recipe.rate(number)
        for group in self._adamw.param_groups:
            group["lr"] = self._recipe.embedding_rate * share
        self._muon.step(self._recipe.matrix_rate * share)
        self._adamw.step()
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over both states."""
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def first_weights(text: PreparedText, shape: Shape, recipe: Recipe, start: Path | None) -> LlamaForCausalLM:
    """Return the model that a run begins with, float32: from the seed, or the weights in the folder `start`.

    Raises:
        UsageError: the weights of `start` belong to another tokenizer than the text was prepared with.
    """
    if start is None:
        with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers as they were
            torch.manual_seed(recipe.seed)
            return LlamaForCausalLM(shape.config(text.vocabulary))
    if load_tokenizer(start).get_vocab() != load_tokenizer(text.folder).get_vocab():
        raise UsageError(
            f"The text in {text.folder} was prepared with another tokenizer than {start} has. "
            f"Prepare it again with --tokenizer {start}."
        )
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    return model


def train(
    data: Path,
    run: Path,
    *,
    shape: Shape = SHAPES["demo"],
    recipe: Recipe | None = None,
    machine: Machine | None = None,
    shares: Mapping[str, float] | None = None,
    start: Path | None = None,
    report: Report = print,
) -> Path | None:
    """Train, or resume, the run in the folder `run`, and save the finished model as `run/model` in bfloat16.

    Args:
        data: a folder written by `text_data.prepare`.
        run: made if needed; holds the checkpoint, which is continued when there is one.
        shape: of a new model; ignored with `start`.
        recipe: see `Recipe`.
        machine: see `Machine`.
        shares: domain -> share of it in an epoch; see `WindowOrder`.
        start: a transformers folder whose weights are trained further.
        report: receives lines of progress.

    Returns:
        The model's folder, or None when the run stopped early as `machine.stop_after` asked.

    Raises:
        UsageError: settings that do not fit the data, or that differ from those the run was begun with.
        StoreError: the data or the checkpoint is damaged, or nothing can be written.
        NumericsError: the loss is no longer a number.
    """
    recipe, machine, shares = recipe or Recipe(), machine or Machine(), shares or {}
    text = open_prepared(data)
    order = WindowOrder(text, recipe.window, shares, recipe.seed)
    identity = {
        "recipe": asdict(recipe),
        "shape": asdict(shape) if start is None else {},
        "shares": dict(shares),
        "text": text.fingerprint,
        "start": "" if start is None else weights_hash(start),
    }
    run.mkdir(parents=True, exist_ok=True)
    state = read_checkpoint(run, identity)
    model = first_weights(text, shape, recipe, start)
    if recipe.window > model.config.max_position_embeddings:
        raise UsageError(f"window is {recipe.window}, the model's positions {model.config.max_position_embeddings}.")
    module: torch.nn.Module = model  # transformers' decorated `to` has no usable signature
    module.to(machine.device).train()
    optimizers = Optimizers(model, recipe)
    step, history = 0, []
    if state is not None:
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        step, history = int(state["step"]), list(state["history"])
        report(f"resumed at step {step}")
    one_step = partial(_one_step, _pass_function(model, recipe, machine), optimizers, order, recipe, machine)
    until, began, first = min(recipe.steps, machine.stop_after or recipe.steps), time.perf_counter(), step
    while step < until:
        loss = one_step(step)
        step += 1
        if step % machine.report_every == 0 or step == until:
            speed = (step - first) * recipe.tokens_per_step / (time.perf_counter() - began)
            history.append({"step": step, "loss": loss})
            report(f"step {step}/{recipe.steps}  loss {loss:.4f}  {speed:,.0f} tokens/s")
        if step % machine.checkpoint_every == 0 or step == until:
            states = {"model": model.state_dict(), "optimizers": optimizers.state_dict()}
            write_checkpoint(run, {"identity": identity, "step": step, "history": history, **states})
    if step < recipe.steps:
        return None
    write_atomically(run / "training.json", json.dumps({"identity": identity, "history": history}, indent=1).encode())
    if not (run / "model").exists():
        save_model(model, load_tokenizer(data), run / "model")
    return run / "model"


def _pass_function(model: LlamaForCausalLM, recipe: Recipe, machine: Machine) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return windows, int64[B, window + 1] -> mean loss in nats, under autocast and compiled when asked for."""
    half = recipe.precision == "bfloat16"
    kind = torch.device(machine.device).type

    def mean_loss(windows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=half):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    if not machine.compile:
        return mean_loss
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(mean_loss)
    return compiled


def _one_step(
    passed: Callable[[torch.Tensor], torch.Tensor],
    optimizers: Optimizers,
    order: WindowOrder,
    recipe: Recipe,
    machine: Machine,
    step: int,
) -> float:
    """Do one optimiser step; return its mean loss in nats per token."""
    total = 0.0
    for part in range(recipe.accumulation):
        first = (step * recipe.accumulation + part) * recipe.micro_batch
        windows = torch.from_numpy(order.batch(first, recipe.micro_batch)).to(machine.device)
        loss = passed(windows) / recipe.accumulation
        loss.backward()
        total += loss.item()
    if not math.isfinite(total):
        raise NumericsError(
            f"The loss became {total} at step {step}. Lower matrix_rate and embedding_rate, or warm up longer."
        )
    optimizers.step(step)
    return total


# --- the command


def _prepare(
    folder: Annotated[Path, typer.Argument(help="Where the prepared text goes.")],
    sources: Annotated[list[str], typer.Argument(help="DOMAIN=PATH: a .jsonl(.gz), .parquet, .py, .txt, or a folder.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer, or model folder's, as it is.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of PrepareOptions.")] = None,
) -> None:
    """Tokenise text into a prepared folder, one document in 50 (by the hash of its key) held out."""
    options = assigned(PrepareOptions, settings or [], "prepare")
    reports = {name: ReadReport() for name in named_paths(sources)}
    readers = {name: partial(documents_in, path, reports[name]) for name, path in named_paths(sources).items()}
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    manifest = prepare(readers, folder, options, given)
    for name, entry in manifest["domains"].items():
        typer.echo(
            f"{name:12} {entry['train']['tokens']:>12,} tokens to train on, {entry['held']['tokens']:,} held out"
        )
        if reports[name].skipped:
            typer.echo(f"{name:12} {reports[name].skipped} rows or files left out (counted once for each reading)")


def _train(
    data: Annotated[Path, typer.Argument(help="A prepared folder.")],
    run: Annotated[Path, typer.Argument(help="The run's folder: checkpoint, progress, and at the end model/.")],
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}, or sizes such as layers=4,width=256.")] = "demo",
    start: Annotated[Path | None, typer.Option("--from", help="Train these weights further.")] = None,
    share: Annotated[list[str] | None, typer.Option(help="DOMAIN=SHARE of it in an epoch, such as chat=0.5.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of Recipe, such as steps=500.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    stop_after: Annotated[int, typer.Option(help="Stop, with a checkpoint, after this step; 0 for never.")] = 0,
) -> None:
    """Train a model, or resume the run that the folder holds."""
    if threads:
        torch.set_num_threads(threads)
    sizes = SHAPES[shape] if shape in SHAPES else assigned(Shape, shape.split(","), "shape")
    machine = Machine(device, compiled, checkpoint_every, stop_after=stop_after)
    recipe = assigned(Recipe, settings or [], "the recipe")
    shares = named_numbers(share or [])
    done = train(data, run, shape=sizes, recipe=recipe, machine=machine, shares=shares, start=start, report=typer.echo)
    typer.echo(f"The model is in {done}." if done else f"Stopped after step {stop_after}; the same command goes on.")


def _evaluate(
    model: Annotated[Path, typer.Argument(help="A transformers folder.")],
    sets: Annotated[Path | None, typer.Option(help="A TOML file of evaluation sets.")] = None,
    root: Annotated[Path, typer.Option(help="The folder that the sets' files lie in.")] = Path(),
    data: Annotated[Path | None, typer.Option(help="Measure on the held-out side of this prepared folder.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Read so many tokens of each domain.")] = 200_000,
    window: Annotated[int, typer.Option(help="Tokens that the model sees at once.")] = 512,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
) -> None:
    """Measure the loss of a model on each domain, in float32."""
    if threads:
        torch.set_num_threads(threads)
    if (sets is None) == (data is None):
        raise UsageError("Say what to measure on: either --sets FILE (with --root FOLDER) or --data FOLDER.")
    tokenizer = load_tokenizer(model)
    if data is not None:
        if load_tokenizer(data).get_vocab() != tokenizer.get_vocab():
            raise UsageError(f"The text in {data} was prepared with another tokenizer than {model} has.")
        domains = {name: held_out_documents(ids) for name, ids in open_prepared(data).held.items()}
    else:
        known = read_sets(sets) if sets is not None else {}
        domains = {name: encoded(entry.documents(root), tokenizer) for name, entry in known.items()}
    weights: torch.nn.Module = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    weights.to(device)
    typer.echo(
        f"{'domain':12} {'documents':>9} {'tokens':>9} {'nats/token':>11} {'answers only':>13} {'bits/byte':>10}"
    )
    for name, documents in domains.items():
        typer.echo(_line(name, domain_loss(weights, documents, window=window, max_tokens=max_tokens)))


def _line(name: str, loss: DomainLoss) -> str:
    """Return one row of the table; a dash where a domain has no such figure."""
    bits = f"{loss.nats / math.log(2) / loss.utf8_bytes:.3f}" if loss.utf8_bytes else "-"
    answers = f"{loss.answer_loss:.3f}" if loss.answer_tokens else "-"
    return f"{name:12} {loss.documents:>9,} {loss.tokens:>9,} {loss.loss:>11.3f} {answers:>13} {bits:>10}"


def main() -> None:
    """Run the command line: prepare, train, evaluate. Exit status 2 for usage errors, 1 for other refusals."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Pretrain and measure small Llama models.")
    app.command("prepare")(_prepare)
    app.command("train")(_train)
    app.command("evaluate")(_evaluate)
    try:
        app()
    except ForedraftError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None


if __name__ == "__main__":
    main()
