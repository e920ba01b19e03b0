"""Paired runs: every method and plain decoding on the same prompts, in one process, in random order.

Plain decoding runs again for each prompt with a missing cell, so that a pair never spans two processes. The order of a
prompt's methods depends only on the seed and the prompt, so a resumed run has the same order. Does not depend on how
methods work, and prints nothing.
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
    keep_cost,
    prepare_folder,
    read_cells,
    settings_name,
)
from foredraft.bench.method import BASE, Method, cold_and_warm
from foredraft.bench.tasks import TaskPrompt
from foredraft.bench.writer import Earlier, Writer, make_writer, write_interleaved
from foredraft.contracts import TokenIds
from foredraft.errors import UsageError

_WARM_TEXTS = 32  # maximum number of earlier texts that a warm drafter reads (chosen)
_WARM_UP_TOKENS = 8  # chosen


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a run; `model` is the name given by the user.

    Plain decoding always runs, but is a column only if it is among the methods. Settings are generation arguments, each
    with `max_new_tokens` and `seed`.
    """

    model: str
    methods: Sequence[Method]
    prompts: Sequence[TaskPrompt]
    settings: Sequence[Mapping[str, Any]]

    @property
    def turns(self) -> int:
        """Number of times `run_plan` calls `done`."""
        return len(self.settings) * sum(len(prompt.turns) for prompt in self.prompts)


@dataclass(slots=True)
class RunResult:
    """The result of a run: all cells of the plan, and how many of them existed before."""

    cells: list[Cell] = field(default_factory=list)
    found: int = 0
    replaced: list[str] = field(default_factory=list)  # messages on existing cells that are measured again

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
    """Measure the missing cells of a plan; changes the generator's method.

    Args:
        generator: with the model.
        plan: the measurements.
        folder: folder of existing and new cells, and of the cost curve; None for none.
        done: called after each turn of each prompt in each setting.
        enough: called before each prompt; True skips it and the rest of its setting.

    Raises:
        UsageError: an invalid option, or a folder with cells of another environment.
        StoreError: a cell that cannot be written.
    """
    result = _Run(generator, plan, folder).go(done, enough)
    if folder is not None:
        keep_cost(generator.cost, folder)
    return result


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
                writer.forget()  # drop what was learned from the warm-up and from other settings
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
        """Read the cells that need not be measured again, and collect the reasons for the others."""
        prepare_folder(folder)
        cells, self._result.replaced = read_cells(folder)
        for place in wanted.keys() & cells.keys():
            cell = cells[place]
            unlike = differences(cell.environment, self._environment)
            if unlike:
                raise UsageError(
                    f"{folder} has cells of another environment ({unlike}), which cannot be compared with this one; "
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
        """Build every drafter and generate a short text with each, so that cells exclude one-time costs."""
        for method in [Method(BASE, BASE), *self._methods]:
            writer = self._writers.setdefault(method.label, make_writer(self._generator, method))
            for settings in self._plan.settings:  # sampling compiles code that greedy decoding does not use
                try:
                    arguments = {**settings, "max_new_tokens": _WARM_UP_TOKENS}
                    for _ in writer.write(self._input(self._prompts[0], ()), arguments, ()):
                        pass
                except Exception:  # noqa: BLE001, S112  # the same failure is recorded in the method's cells
                    continue

    def _measure(
        self, prompt: TaskPrompt, settings: Mapping[str, Any], earlier: list[tuple[TokenIds, TokenIds]],
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Measure the turns of one prompt; each turn follows plain decoding's answers to the earlier ones."""
        answers: tuple[str, ...] = ()
        for turn in range(1, len(prompt.turns) + 1):
            places = {method.label: self._place(settings, prompt, method, turn) for method in self._methods}
            given = self._input(prompt, answers)
            cells = {label: self._found[place] for label, place in places.items() if place in self._found}
            missing = [method for method in self._methods if method.label not in cells]
            if missing:
                cells |= self._write(prompt, turn, given, settings, missing, earlier)
            self._result.cells += [cells[label] for label in places]
            done()
            base = next((cell.base for cell in cells.values() if cell.base is not None), None)
            if base is None:
                break  # the next turn needs this answer
            earlier.append((self._generator.encode(given), np.array(base.token_ids, np.int64)))
            del earlier[:-_WARM_TEXTS]
            answers = (*answers, self._generator.tokenizer.decode(base.token_ids, skip_special_tokens=True))

    def _write(
        self, prompt: TaskPrompt, turn: int, given: Any, settings: Mapping[str, Any], methods: Sequence[Method],
        earlier: Earlier,
    ) -> dict[str, Cell]:  # fmt: skip
        """Measure a turn with plain decoding and the methods, interleaved; save and return the cells."""
        arguments = {**settings, "seed": settings["seed"] + prompt.number}
        order = random.Random(f"{settings['seed']}/{prompt.task}/{prompt.number}/{turn}")  # noqa: S311  # an order, not a secret
        texts = {
            label: self._writers[label or BASE].write(given, arguments, earlier)
            for label in ("", *(method.label for method in methods))  # "" is plain decoding, which may be a column too
        }
        written = write_interleaved(texts, order)
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

    def _input(self, prompt: TaskPrompt, answers: tuple[str, ...]) -> Any:
        """Return the model's input; without a chat template, the messages are joined to one text."""
        messages = prompt.after(answers)
        if isinstance(messages, str) or getattr(self._generator.tokenizer, "chat_template", None):
            return messages
        return "\n\n".join([*(message["content"] for message in messages), ""])


def _hash(prompt: TaskPrompt) -> str:
    return hashlib.sha256(repr((prompt.turns, prompt.is_question)).encode()).hexdigest()[:16]
