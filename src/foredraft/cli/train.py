"""`foredraft train`: what drafts for a model, learned from texts that it wrote itself.

Brings together a model, its traces, a task and the loop.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foredraft.atomic_file import check_place, store_file
from foredraft.cli import flags
from foredraft.cli.job import load_plain
from foredraft.cli.screen import working, working_in_phases
from foredraft.cli.traces import Data, Model, alone, assigned, check_texts, made_traces, traces
from foredraft.errors import UsageError
from foredraft.options import check_known, user_path

if TYPE_CHECKING:  # torch is imported when a verb runs, so that help stays quick
    from foredraft.model.head_files import HeadCard
    from foredraft.model.target import TorchTarget
    from foredraft.training.loop import LoopOptions, Run
    from foredraft.training.tasks import Task
    from foredraft.training.traces import Traces

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Make what drafts for a model, from texts that it wrote itself.")
app.command("traces")(traces)

KeepStates = Annotated[
    bool, typer.Option(help="Keep the states that heads learn from on disk: 2 bytes x the model's width for each token")
]


def _checked_dtype(name: str) -> str:
    from foredraft.model.head_files import INT8
    from foredraft.model.loading import DTYPES

    check_known(name, (*DTYPES, INT8), "There is no --save-dtype", "Choose one of")
    return name


@dataclass(frozen=True, slots=True)
class Head:
    """What is trained from which texts, and how it is saved."""

    model: Model
    data: Data
    out: Annotated[Path, typer.Option(help="The folder of the head; a killed training goes on in OUT.run")]
    vocabulary: Annotated[
        int,
        typer.Option(
            help="Score the N tokens most frequent in the traces only, with the model's own LM head; 0 for all"
        ),
    ] = 0
    save_dtype: Annotated[
        str, typer.Option(help="dtype of the saved head; int8 rounds its matrices by row", callback=_checked_dtype)
    ] = "bfloat16"

    @property
    def run(self) -> Path:
        return Path(f"{self.out.resolve()}.run")  # beside it, also of `.` and `..`


@dataclass(frozen=True, slots=True)
class Training:
    """The options of every training."""

    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the training, such as rate=0.0005")
    ] = None
    trace_settings: Annotated[
        list[str] | None, typer.Option("--traces", help="NAME=VALUE of the traces, such as open_tokens=0")
    ] = None
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes of training, with a finished head")
    ] = None
    device: flags.DeviceOption = None
    dtype: flags.DtypeOption = "auto"

    def options(self) -> "LoopOptions":
        from foredraft.training.loop import LoopOptions

        if self.max_minutes is not None and not 0 < self.max_minutes < math.inf:
            raise UsageError(f"--max-minutes is {self.max_minutes:g}; it must be above 0.")
        return assigned(LoopOptions, self.settings, "--set")

    def states(self, head: Head, keep: bool) -> Path | None:
        """Return the file to keep states in, if `keep` says so and they are read more than once."""
        return head.run / "states.npy" if keep and self.options().epochs > 1 else None

    def prepared(
        self, model: str, data: list[Path], run: Path, out: Path, check: Callable[[Any], object]
    ) -> tuple["TorchTarget", "Traces"]:
        """Return the target, and its traces in `data`, or those made of the texts in it and kept in the folder `run`.

        `check` raises for options that do not fit the model, before traces are made; the head will be written to `out`.
        """
        from foredraft.training.traces import TraceOptions, is_traces

        self.options()
        options = assigned(TraceOptions, self.trace_settings, "--traces")
        check_place(out, folder=True)
        _check_out(out)
        ready = data[0] if len(data) == 1 and is_traces(data[0]) else run / "traces"
        if ready != data[0]:
            check_texts(ready, data, options)
        elif self.trace_settings:
            raise UsageError(f"--traces has no effect, as the traces in {ready} are complete; leave it out.")
        with working(f"loading {model}") as tell:
            generator = load_plain(model, self.dtype, False, tell, self.device)
        check(generator.target.model)
        return generator.target, made_traces(generator, model, data, ready, options)

    def train(self, task: "Task", opened: "Traces", card: "HeadCard", run: Path, **identity: Any) -> "Run":
        """Train a task, in a folder where a killed training goes on, and write its curve there.

        `identity` are the settings that determine the weights.
        """
        from foredraft.bench.summary import finite
        from foredraft.training.loop import train

        most = math.inf if self.max_minutes is None else self.max_minutes
        whole = {"kind": card.kind, "model": card.fingerprint, **identity}
        with working_in_phases("training") as tell:
            outcome = train(task, run, opened, self.options(), whole, tell, max_minutes=most)
        store_file(run / "curve.json", (json.dumps(finite(outcome.history)) + "\n").encode())
        return outcome


@app.command()
def eesd(
    *,
    head: Head,
    layers: Annotated[int | None, typer.Option(help="Layers before the exit; a tenth of them, at least 1")] = None,
    keep_states: KeepStates = True,
    training: Training,
) -> None:
    """Train an early-exit head, for `--method eesd`; the same command goes on where a killed one was."""
    from foredraft.model.head_files import card_for, weights_of
    from foredraft.model.heads import ExitHead, exit_model, headed
    from foredraft.training.tasks import ExitTask

    def depth(model: Any) -> int:
        return max(1, round(int(model.config.num_hidden_layers) / 10)) if layers is None else layers

    def check(model: Any) -> None:
        exit_head = ExitHead(model)
        exit_model(model, depth(model), exit_head)  # as it drafts, and as it is trained
        headed(model, (), exit_head.layer, exit_head)
        _check_vocabulary(head.vocabulary, model)

    with alone(head.run):
        target, opened = training.prepared(head.model, head.data, head.run, head.out, check)
        transformer = target.model
        before = depth(transformer)
        card = card_for(transformer, "eesd", head.model, layers=before, dtype=head.save_dtype)
        states = training.states(head, keep_states)
        ids = _scored(opened, head.vocabulary, transformer)
        task = ExitTask(transformer, before, opened, states=states, ids=ids)
        del target, transformer  # what comes after the exit is not needed any more
        outcome = training.train(task, opened, card, head.run, layers=before, vocabulary=head.vocabulary)
        _save(head.out, card, weights_of(task.module), outcome, states)


@app.command()
def cali(
    model: Model,
    data: Data,
    head: Annotated[str, typer.Option(help="The early-exit head that `train eesd` wrote; the predictor goes into it")],
    *,
    training: Training,
) -> None:
    """Train a head's predictor of agreement, for the control `cali_ts`."""
    from foredraft.model.fingerprint import fingerprint
    from foredraft.model.head_files import card_for
    from foredraft.model.heads import PREDICTOR_FOLDER, load_exit_head
    from foredraft.training.tasks import AgreementTask

    folder = user_path(head)
    if not folder.is_dir():
        raise UsageError(f"There is no folder {head}; give the one that `foredraft train eesd` wrote.")
    run, out = Path(f"{folder.resolve()}.cali.run"), folder / PREDICTOR_FOLDER
    with alone(run):
        target, opened = training.prepared(model, data, run, out, lambda model: load_exit_head(folder, model))
        transformer = target.model
        exit_card, exit_head = load_exit_head(folder, transformer)
        task = AgreementTask(transformer, exit_head, exit_card.layers, opened)
        card = card_for(transformer, "cali", model, layers=exit_card.layers, dtype="float32")
        outcome = training.train(task, opened, card, run, head=fingerprint(exit_head), as_greedy=True)
        _save(out, card, task.module.state_dict(), outcome)


@app.command()
def draft(
    *,
    head: Head,
    layers: Annotated[int, typer.Option(help="Layers of the draft model: the model's first ones, and its last")] = 4,
    training: Training,
) -> None:
    """Train a draft model of the model's own layers, for `--method draft_model`, `draft_tree` and `draft_graph`."""
    from foredraft.model.head_files import card_for, weights_of
    from foredraft.model.heads import FirstLayers, draft_model
    from foredraft.training.tasks import DraftTask

    def check(model: Any) -> None:
        draft_model(model, FirstLayers(model, layers))
        _check_vocabulary(head.vocabulary, model)

    with alone(head.run):
        target, opened = training.prepared(head.model, head.data, head.run, head.out, check)
        transformer = target.model
        card = card_for(transformer, "draft", head.model, layers=layers, dtype=head.save_dtype)
        task = DraftTask(transformer, layers, opened, _scored(opened, head.vocabulary, transformer))
        outcome = training.train(task, opened, card, head.run, layers=layers, vocabulary=head.vocabulary)
        _save(head.out, card, weights_of(task.module), outcome)


@app.command()
def medusa(
    *,
    head: Head,
    heads: Annotated[int, typer.Option(help="How many heads, each for one more token ahead", min=1, max=16)] = 3,
    keep_states: KeepStates = True,
    training: Training,
) -> None:
    """Train Medusa heads, for `--method medusa`, and measure how often each is right."""
    from foredraft.model.head_files import IDS, card_for
    from foredraft.model.heads import RANKS
    from foredraft.training.tasks import MedusaTask
    from foredraft.training.traces import spread

    with alone(head.run):
        target, opened = training.prepared(
            head.model, head.data, head.run, head.out, lambda model: _check_vocabulary(head.vocabulary, model, RANKS)
        )
        transformer = target.model
        card = card_for(transformer, "medusa", head.model, dtype=head.save_dtype, count=heads)
        ids = _scored(opened, head.vocabulary, transformer)
        states = training.states(head, keep_states)
        task = MedusaTask(transformer, heads, opened, ids, states)
        outcome = training.train(task, opened, card, head.run, heads=heads, vocabulary=head.vocabulary)
        trained, held = opened.split
        task.module.accuracies.copy_(task.measured(spread(held if len(held) else trained, 200)))
        kept = {} if ids is None else {IDS: ids.int()}
        _save(head.out, card, {**task.module.state_dict(), **kept}, outcome, states)


@app.command()
def eagle3(
    *,
    head: Head,
    keep_states: KeepStates = False,
    lm_head: Annotated[
        bool, typer.Option(help="Store the LM head's rows, which other programs than foredraft need")
    ] = True,
    training: Training,
) -> None:
    """Train a head for `--method eagle3`, in the `speculators` format."""
    from foredraft.model.head_files import INT8, card_for
    from foredraft.model.layers import model_parts
    from foredraft.model.loading import DTYPES
    from foredraft.model.speculators import save_eagle3
    from foredraft.training.eagle3 import Eagle3Task

    if head.save_dtype == INT8:
        raise UsageError("--save-dtype is int8, which the format of eagle3 does not have; choose bfloat16.")

    def check(model: Any) -> None:
        model_parts(model)
        _check_vocabulary(head.vocabulary, model)

    with alone(head.run):
        target, opened = training.prepared(head.model, head.data, head.run, head.out, check)
        card = card_for(target.model, "eagle3", head.model, dtype=head.save_dtype)
        ids = _scored(opened, head.vocabulary, target.model)
        states = training.states(head, keep_states)
        task = Eagle3Task(target, opened, ids, states)
        outcome = training.train(task, opened, card, head.run, vocabulary=head.vocabulary)
        dtype = DTYPES[head.save_dtype]
        save_eagle3(head.out, target.model, head.model, task.module, task.reads, ids, dtype, lm_head=lm_head)
        _tell(head.out, outcome, states)


def _save(out: Path, card: "HeadCard", weights: Mapping[str, Any], outcome: "Run", states: Path | None = None) -> None:
    """Write a head in foredraft's own format, and do what `_tell` does."""
    from foredraft.model.head_files import save_head

    save_head(out, card, weights)
    _tell(out, outcome, states)


def _tell(out: Path, outcome: "Run", states: Path | None) -> None:
    """Remove the states that a head learned from, and print what came of the training."""
    if states is not None:
        states.unlink(missing_ok=True)
    last = outcome.history[-1]
    agreement = "" if math.isnan(last["agreement"]) else f", {last['agreement']:.1%} held-out agreement"
    typer.echo(
        f"{out}: {outcome.step:,} steps in {outcome.minutes:.1f} minutes, loss {last['loss']:.3f}{agreement}, "
        f"{last['tokens_per_second']:,.0f} tokens/s at the end."
    )


def _check_out(out: Path) -> None:
    from foredraft.model.speculators import TYPE

    config = out / "config.json"
    if config.is_file() and TYPE not in config.read_text("utf-8", "replace"):
        raise UsageError(f"{out} is the folder of a model, whose files would be replaced. Name another --out.")


def _check_vocabulary(count: int, transformer: Any, least: int = 1) -> None:
    known = int(transformer.get_output_embeddings().weight.shape[0])
    if count and not least <= count <= known:
        raise UsageError(f"--vocabulary is {count}; it may be 0 (all), or {least} to {known}.")


def _scored(opened: "Traces", count: int, transformer: Any) -> Any:
    """Return the ids, int64[count], that what is trained is to score; None for all."""
    import torch

    from foredraft.training.traces import frequent_tokens

    known = int(transformer.get_output_embeddings().weight.shape[0])
    return torch.from_numpy(frequent_tokens(opened, count, known)) if count else None
