"""Paired runs: every method on the same prompts in the same process, by turns, beside plain decoding.

Plain decoding is written anew for each prompt that has a cell to measure, so that a pair never spans two processes. The
order of a prompt's methods follows from the seed and the prompt alone, so a run that was killed and resumed is the same
run. Does not know how methods work, and prints nothing.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.api import Generator
from foredraft.bench.cell import (
    Cell,
    Place,
    append_cell,
    describe_environment,
    differences,
    prepare_folder,
    read_cells,
    settings_name,
)
from foredraft.bench.method import BASE, Method, cold_and_warm
from foredraft.bench.tasks import TaskPrompt
from foredraft.bench.writer import Earlier, Writer, make_writer, write_by_turns
from foredraft.contracts import TokenIds
from foredraft.errors import UsageError

_WARM_TEXTS = 32  # a warm drafter has read at most this many of the task's earlier texts
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure of a model, which is named as the user calls it.

    Plain decoding is always run beside the methods, and is a column only if it is among them. Settings are generation
    arguments, each with `max_new_tokens` and `seed`.
    """

    model: str
    methods: Sequence[Method]
    prompts: Sequence[TaskPrompt]
    settings: Sequence[Mapping[str, Any]]

    @property
    def turns(self) -> int:
        """How often `run_plan` calls `done`."""
        return len(self.settings) * sum(len(prompt.turns) for prompt in self.prompts)


@dataclass(slots=True)
class RunResult:
    """What a run came to.

    Attributes:
        cells: all of the plan's, those found and those measured.
        found: how many were there already.
        replaced: sentences on cells that were damaged, failed or of another prompt, and were measured again.
    """

    cells: list[Cell] = field(default_factory=list)
    found: int = 0
    replaced: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Cell]:
        """The cells whose method raised."""
        return [cell for cell in self.cells if cell.failure]


def run_plan(
    generator: Generator,
    plan: Plan,
    folder: Path | None = None,
    done: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Measure what of a plan is not measured yet.

    Args:
        generator: loaded; its method is changed as the run goes.
        plan: what to measure.
        folder: where cells are found and kept; None keeps none.
        done: called after each turn of each prompt in each setting.
        enough: asked before each prompt whether to leave it and the rest of its setting out.

    Raises:
        UsageError: an option that cannot be honoured, or a folder with cells of an unlike environment.
        StoreError: a cell that cannot be written.
    """
    return _Run(generator, plan, folder).go(done, enough)


class _Run:
    """One call of `run_plan`."""

    def __init__(self, generator: Generator, plan: Plan, folder: Path | None) -> None:
        self._generator, self._plan, self._folder = generator, plan, folder
        self._methods = cold_and_warm(plan.methods)
        self._prompts = list({(prompt.task, prompt.number): prompt for prompt in plan.prompts}.values())
        self._environment = describe_environment(generator.target, plan.model)
        self._writers: dict[str, Writer] = {}
        self._found: dict[Place, Cell] = {}
        self._result = RunResult()

    def go(self, done: Callable[[], None], enough: Callable[[], bool]) -> RunResult:
        wanted = {
            self._place(settings, prompt, method, turn): prompt
            for settings in self._plan.settings
            for prompt in self._prompts
            for turn in range(1, len(prompt.turns) + 1)
            for method in self._methods
        }
        if self._folder is not None:
            self._find(self._folder, wanted)
        if len(self._found) < len(wanted):
            self._warm_up()
        for settings in self._plan.settings:
            for writer in self._writers.values():
                writer.forget()  # the same prompts in another setting, and the warm-up
            earlier: dict[str, list[tuple[TokenIds, TokenIds]]] = {}
            for prompt in self._prompts:
                if enough():
                    break
                self._measure(prompt, settings, earlier.setdefault(prompt.task, []), done)
        return self._result

    def _place(self, settings: Mapping[str, Any], prompt: TaskPrompt, method: Method, turn: int) -> Place:
        dtype = self._environment["model"]["dtype"]
        return Place(self._plan.model, dtype, settings_name(settings), prompt.task, method.label, prompt.number, turn)

    def _find(self, folder: Path, wanted: Mapping[Place, TaskPrompt]) -> None:
        """Read the cells that need not be measured again.

        Raises:
            UsageError: the folder cannot be written to, or has cells of an unlike environment or another version.
        """
        prepare_folder(folder)
        cells, self._result.replaced = read_cells(folder)
        for place in wanted.keys() & cells.keys():
            cell = cells[place]
            unlike = differences(cell.environment, self._environment)
            if unlike:
                raise UsageError(
                    f"{folder} holds cells of another environment ({unlike}), which are not compared with this one's; "
                    "give another folder as --out."
                )
            if cell.prompt_hash != _hash(wanted[place]):
                self._result.replaced.append(f"The cell {place} was of another prompt and is measured again.")
            elif cell.failure:
                self._result.replaced.append(f"The cell {place} had failed and is measured again.")
            else:
                self._found[place] = cell
        self._result.found = len(self._found)

    def _warm_up(self) -> None:
        """Build every drafter and write a little with each, so that no cell holds what is done once."""
        for method in [Method(BASE, BASE), *self._methods]:
            writer = self._writers.setdefault(method.label, make_writer(self._generator, method))
            for settings in self._plan.settings:  # sampling loads, or compiles, what greedy decoding does not
                try:
                    arguments = {**settings, "max_new_tokens": _WARM_UP_TOKENS}
                    for _ in writer.write(self._said(self._prompts[0], ()), arguments, ()):
                        pass
                except Exception:  # noqa: BLE001, S112  # what it does to its cells is recorded there
                    continue

    def _measure(
        self, prompt: TaskPrompt, settings: Mapping[str, Any], earlier: list[tuple[TokenIds, TokenIds]],
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Measure the turns of one prompt; each is asked after plain decoding's answers to those before."""
        answers: tuple[str, ...] = ()
        for turn in range(1, len(prompt.turns) + 1):
            places = {method.label: self._place(settings, prompt, method, turn) for method in self._methods}
            said = self._said(prompt, answers)
            cells = {label: self._found[place] for label, place in places.items() if place in self._found}
            missing = [method for method in self._methods if method.label not in cells]
            if missing:
                cells |= self._write(prompt, turn, said, settings, missing, earlier)
            self._result.cells += [cells[label] for label in places]
            done()
            base = next((cell.base for cell in cells.values() if cell.base is not None), None)
            if base is None:
                break  # there is no answer to ask the next question after
            earlier.append((self._generator.encode(said), np.array(base.token_ids, np.int64)))
            del earlier[:-_WARM_TEXTS]
            answers = (*answers, self._generator.tokenizer.decode(base.token_ids, skip_special_tokens=True))

    def _write(
        self, prompt: TaskPrompt, turn: int, said: Any, settings: Mapping[str, Any], methods: Sequence[Method],
        earlier: Earlier,
    ) -> dict[str, Cell]:  # fmt: skip
        """Write a turn plainly and with every method given, by turns; keep their cells."""
        arguments = {**settings, "seed": settings["seed"] + prompt.number}
        order = random.Random(f"{settings['seed']}/{prompt.task}/{prompt.number}/{turn}")  # noqa: S311  # an order, not a secret
        texts = {
            label: self._writers[label or BASE].write(said, arguments, earlier)
            for label in ("", *(method.label for method in methods))  # "" is plain decoding, which may be a column too
        }
        written = write_by_turns(texts, order)
        base, cells = written[""], {}
        for method in methods:
            own = written[method.label]
            cells[method.label] = cell = Cell(
                place=self._place(settings, prompt, method, turn),
                settings=arguments,
                prompt_hash=_hash(prompt),
                environment=self._environment,
                base=None if isinstance(base, str) else base[0],
                own=None if isinstance(own, str) else own[0],
                counts=None if isinstance(own, str) else own[1],
                learned_texts=len(earlier) if method.memory == "warm" else 0,
                failure=next((each for each in (base, own) if isinstance(each, str)), ""),
            )
            if self._folder is not None:
                append_cell(self._folder, cell)
        return cells

    def _said(self, prompt: TaskPrompt, answers: tuple[str, ...]) -> Any:
        """Return what the model is given; a model without a chat template gets the plain texts, one after the other."""
        asked = prompt.asked(answers)
        if isinstance(asked, str) or getattr(self._generator.tokenizer, "chat_template", None):
            return asked
        return "\n\n".join([*(message["content"] for message in asked), ""])


def _hash(prompt: TaskPrompt) -> str:
    return hashlib.sha256(repr((prompt.turns, prompt.is_question)).encode()).hexdigest()[:16]
