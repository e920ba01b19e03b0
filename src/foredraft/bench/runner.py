"""Paired runs: every method and plain decoding on the same prompts, in one process, in random order.

Plain decoding runs again for each prompt with a missing cell, so that a pair never spans two processes. The order of a
prompt's methods depends only on the seed and the prompt, so a resumed run has the same order. Does not depend on how
methods work, and prints nothing.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.api import Generator
from foredraft.atomic_file import store_file
from foredraft.bench import cell as files
from foredraft.bench.cell import Cell, Place
from foredraft.bench.method import BASE, PEER, Method, cold_and_warm
from foredraft.bench.tasks import TaskPrompt
from foredraft.bench.writer import MethodWriter, PeerWriter, write_interleaved
from foredraft.contracts import TokenIds
from foredraft.errors import UsageError

_WARM_TEXTS = 32  # maximum number of earlier texts that a warm drafter reads (chosen)
_WARM_UP_TOKENS = 8  # chosen


class Run:
    """A run of methods on prompts at several settings; after `measure`, with all its cells.

    `model` is the name given by the user. Plain decoding always runs, and may be one of the methods. The settings are
    generation arguments, each with `max_new_tokens` and `seed`. `folder` is that of existing cells, which are not
    measured again, of new ones, and of the cost curve. Changes the generator's method.

    UsageError for an invalid option, or a folder with cells of another environment.
    """

    def __init__(
        self, generator: Generator, model: str, methods: Sequence[Method], prompts: Sequence[TaskPrompt],
        settings: Sequence[Mapping[str, Any]], folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.generator, self.model, self.settings, self.folder = generator, model, settings, folder
        self.methods = cold_and_warm(methods)
        self.prompts = list({(prompt.task, prompt.number): prompt for prompt in prompts}.values())
        self.turns = len(settings) * sum(len(prompt.turns) for prompt in self.prompts)  # number of calls of `done`
        self.environment = files.describe_environment(generator.target, model)
        self.cells: list[Cell] = []
        self.existing: dict[Place, Cell] = {}
        self.replaced: list[str] = []  # messages on existing cells that are measured again
        self.writers: dict[str, MethodWriter | PeerWriter] = {}
        if folder is not None:
            self.find(folder)
        self.found = len(self.existing)
        if self.found < self.turns * len(self.methods):
            self.warm_up()

    @property
    def failures(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.failure]

    def place(self, settings: Mapping[str, Any], prompt: TaskPrompt, method: Method, turn: int) -> Place:
        name, dtype = files.settings_name(settings), self.environment["model"]["dtype"]
        return Place(self.model, dtype, name, prompt.task, method.label, prompt.number, turn)

    def find(self, folder: Path) -> None:
        """Read the cells that need not be measured again, and collect the reasons for the others."""
        files.prepare_folder(folder)
        cells, self.replaced = files.read_cells(folder)
        wanted = {
            self.place(settings, prompt, method, turn): prompt
            for settings in self.settings
            for prompt in self.prompts
            for turn in range(1, len(prompt.turns) + 1)
            for method in self.methods
        }
        for place in [place for place in wanted if place in cells]:
            cell = cells[place]
            if unlike := files.differences(cell.environment, self.environment):
                raise UsageError(
                    f"{folder} has cells of another environment ({unlike}), which cannot be compared with this one; "
                    "give another folder as --out."
                )
            if cell.prompt_hash != _hash(wanted[place]):
                self.replaced.append(f"The cell {place} was of another prompt and is measured again.")
            elif cell.failure:
                self.replaced.append(f"The cell {place} had failed and is measured again.")
            else:
                self.existing[place] = cell

    def warm_up(self) -> None:
        """Build every drafter and generate a short text with each, so that cells exclude one-time costs."""
        for label, method in {each.label: each for each in [Method(BASE, label=BASE), *self.methods]}.items():
            is_peer = method.method == PEER
            writer = PeerWriter(self.generator, method.options) if is_peer else MethodWriter(self.generator, method)
            self.writers[label] = writer
            for settings in self.settings:  # sampling compiles code that greedy decoding does not use
                arguments = {**settings, "max_new_tokens": _WARM_UP_TOKENS}
                text = writer.write(self.input(self.prompts[0], ()), arguments, ())
                write_interleaved({label: text}, random.Random(0))  # noqa: S311  # an order; failures are recorded in cells

    def measure(self, done: Callable[[], None] = lambda: None, enough: Callable[[], bool] = lambda: False) -> None:
        """Measure the missing cells; StoreError if one cannot be written.

        `done` is called after each turn of each prompt in each setting; `enough` before each prompt, and True skips it
        and the rest of its setting.
        """
        for settings in self.settings:
            for writer in self.writers.values():
                writer.forget()  # drop what was learned from the warm-up and from other settings
            earlier: dict[str, list[tuple[TokenIds, TokenIds]]] = {}
            for prompt in self.prompts:
                if enough():
                    break
                self.measure_prompt(prompt, settings, earlier.setdefault(prompt.task, []), done)
        if self.folder is not None:
            store_file(self.folder / files.COST_FILE, json.dumps(asdict(self.generator.cost)).encode() + b"\n")

    def measure_prompt(
        self, prompt: TaskPrompt, settings: Mapping[str, Any], earlier: list[tuple[TokenIds, TokenIds]],
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Measure the turns of one prompt; each turn follows plain decoding's answers to the earlier ones."""
        answers: tuple[str, ...] = ()
        for turn in range(1, len(prompt.turns) + 1):
            places = {self.place(settings, prompt, method, turn): method for method in self.methods}
            given = self.input(prompt, answers)
            missing = {place: method for place, method in places.items() if place not in self.existing}
            written = self.write(prompt, given, settings, missing, earlier) if missing else {}
            cells = [self.existing.get(place) or written[place] for place in places]
            self.cells += cells
            done()
            base = next((cell.base for cell in cells if cell.base is not None), None)
            if base is None:
                break  # the next turn needs this answer
            earlier.append((self.generator.encode(given), np.array(base.token_ids, np.int64)))
            del earlier[:-_WARM_TEXTS]
            answers = (*answers, self.generator.tokenizer.decode(base.token_ids, skip_special_tokens=True))

    def write(
        self, prompt: TaskPrompt, given: Any, settings: Mapping[str, Any], methods: Mapping[Place, Method],
        earlier: Sequence[tuple[TokenIds, TokenIds]],
    ) -> dict[Place, Cell]:  # fmt: skip
        """Measure a turn with plain decoding and the methods, interleaved; save and return the cells."""
        arguments, turn = {**settings, "seed": settings["seed"] + prompt.number}, next(iter(methods)).turn
        order = random.Random(f"{settings['seed']}/{prompt.task}/{prompt.number}/{turn}")  # noqa: S311  # an order, not a secret
        labels = ("", *(method.label for method in methods.values()))  # "" is plain decoding, which may be a column too
        texts = {label: self.writers[label or BASE].write(given, arguments, earlier) for label in labels}
        written = write_interleaved(texts, order)
        (base, _, base_failure), cells = written[""], {}
        for place, method in methods.items():
            own, counts, failure = written[method.label]
            learned = len(earlier) if method.memory == "warm" else 0
            cells[place] = Cell(
                place, arguments, _hash(prompt), self.environment, base, own, counts, learned, base_failure or failure
            )
            if self.folder is not None:
                files.append_cell(self.folder, cells[place])
        return cells

    def input(self, prompt: TaskPrompt, answers: tuple[str, ...]) -> Any:
        """Return the model's input; without a chat template, the messages are joined to one text."""
        messages = prompt.after(answers)
        if isinstance(messages, str) or getattr(self.generator.tokenizer, "chat_template", None):
            return messages
        return "\n\n".join([*(message["content"] for message in messages), ""])


def _hash(prompt: TaskPrompt) -> str:
    return hashlib.sha256(repr((prompt.turns, prompt.is_question)).encode()).hexdigest()[:16]
