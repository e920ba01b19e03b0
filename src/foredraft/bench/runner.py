"""Paired runs: every method on the same prompts in the same process, by turns, beside plain decoding.

Knows prompts, methods and where cells go. Does not know how methods work, and prints nothing. Plain decoding is written
anew for each prompt that has a cell to measure, so that a pair never spans two processes; whatever order a prompt's
methods take turns in follows from the seed and the prompt alone, so a run that was killed and resumed is the same run.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from foredraft.api import Generator
from foredraft.bench.cell import Cell, CellFolder, Place, Writing, settings_name
from foredraft.bench.environment import Environment, describe_environment, differences
from foredraft.bench.method import BASE, Method, check_labels, cold_and_warm
from foredraft.bench.tasks import TaskPrompt
from foredraft.bench.writer import Begun, Ready, Written, make_ready
from foredraft.contracts import TokenIds
from foredraft.errors import StoreError, UsageError, told

_WARM_TEXTS = 32
"""A warm drafter has read at most this many of the task's earlier texts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        model: as the user calls it.
        methods: the columns; plain decoding is always run beside them, and is a column only if it is among them.
        prompts: what to write about.
        settings: generation arguments, one mapping for each setting, each with `max_new_tokens` and `seed`.
    """

    model: str
    methods: Sequence[Method]
    prompts: Sequence[TaskPrompt]
    settings: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Account:
    """What a run came to.

    Attributes:
        cells: all of the plan's, those found and those measured.
        found: how many were there already.
        replaced: sentences on cells that were damaged, failed or of another prompt, and were measured again.
        seconds: of the measuring loop by the clock, warm-up apart.
        writing_seconds: of them, spent in writing texts; the rest is the harness, a warm drafter's reading included.
        texts: by setting, pairs of prompt ids and plain decoding's ids, int64[n] each.
    """

    cells: list[Cell] = field(default_factory=list)
    found: int = 0
    replaced: list[str] = field(default_factory=list)
    seconds: float = 0.0
    writing_seconds: float = 0.0
    texts: dict[str, list[tuple[TokenIds, TokenIds]]] = field(default_factory=dict)

    @property
    def harness_share(self) -> float:
        """The share of the loop's time that was not spent in writing texts."""
        return 1 - self.writing_seconds / self.seconds if self.seconds else 0.0

    @property
    def failures(self) -> list[Cell]:
        """The cells whose method raised."""
        return [cell for cell in self.cells if cell.failure]


def run_plan(
    generator: Generator,
    plan: Plan,
    folder: CellFolder | None = None,
    done: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> Account:
    """Measure what of a plan is not measured yet.

    Args:
        generator: loaded; its method is changed as the run goes.
        plan: what to measure.
        folder: where cells are found and kept; None keeps none.
        done: called after each turn of each prompt in each setting.
        enough: asked before each prompt whether to leave it and the rest of its setting out.

    Raises:
        UsageError: two columns of one name, an option that cannot be honoured, or a folder with cells of an unlike
            environment.
        StoreError: a cell that cannot be written.
    """
    return _Run(generator, plan, folder).go(done, enough)


def turns_of(plan: Plan) -> int:
    """Return how often `run_plan` calls `done`."""
    return len(plan.settings) * sum(len(prompt.turns) for prompt in plan.prompts)


@dataclass(slots=True)
class _Task:
    """What is known of a task so far in one setting: its first prompt, and the texts that a warm drafter reads."""

    first: TaskPrompt
    texts: list[tuple[TokenIds, TokenIds]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What is written at one time: a question, plainly and with the methods whose cells are missing."""

    prompt: TaskPrompt
    number: int
    said: Any
    settings: Mapping[str, Any]
    methods: Sequence[Method]
    task: _Task

    @property
    def arguments(self) -> dict[str, Any]:
        """Generation arguments, with a seed of the prompt's own."""
        return {**self.settings, "seed": self.settings["seed"] + self.prompt.number}


class _Run:
    """One call of `run_plan`."""

    def __init__(self, generator: Generator, plan: Plan, folder: CellFolder | None) -> None:
        self._generator = generator
        self._plan = plan
        self._folder = folder
        self._methods = cold_and_warm(plan.methods)
        check_labels(self._methods)
        self._environment: Environment = describe_environment(generator.target, plan.model)
        self._ready: dict[str, Ready] = {}
        self._account = Account()

    def go(self, done: Callable[[], None], enough: Callable[[], bool]) -> Account:
        prompts = {(prompt.task, prompt.number): prompt for prompt in self._plan.prompts}.values()
        found = {place: self._read(place, prompt) for place, prompt in self._places(prompts)}
        if any(cell is None for cell in found.values()):
            self._warm_up()
        start = perf_counter()
        for settings in self._plan.settings:
            for ready in self._ready.values():
                ready.forget()  # of the same prompts in another setting, and of the warm-up
            tasks: dict[str, _Task] = {}
            for prompt in prompts:
                if enough():
                    break
                task = tasks.setdefault(prompt.task, _Task(prompt))
                self._measure(prompt, settings, task, found, done)
        self._account.seconds = perf_counter() - start
        return self._account

    def _places(self, prompts: Any) -> list[tuple[Place, TaskPrompt]]:
        return [
            (self._place(settings, prompt, method, turn), prompt)
            for settings in self._plan.settings
            for prompt in prompts
            for turn in range(1, len(prompt.turns) + 1)
            for method in self._methods
        ]

    def _place(self, settings: Mapping[str, Any], prompt: TaskPrompt, method: Method, turn: int) -> Place:
        dtype = self._environment["model"]["dtype"]
        return Place(self._plan.model, dtype, settings_name(settings), prompt.task, method.label, prompt.number, turn)

    def _read(self, place: Place, prompt: TaskPrompt) -> Cell | None:
        """Return the cell if it is there and can stand.

        Raises:
            UsageError: it is of an unlike environment, or of another version.
        """
        if self._folder is None:
            return None
        try:
            cell = self._folder.read(place)
        except StoreError as error:
            self._account.replaced.append(str(error))
            return None
        if cell is None:
            return None
        unlike = differences(cell.environment, self._environment)
        if unlike:
            raise UsageError(
                f"{self._folder.folder} holds cells of another environment ({'; '.join(unlike[:3])}), which are not "
                "compared with this one's; give another folder as --out."
            )
        if cell.prompt_hash != _hash(prompt):
            self._account.replaced.append(f"The cell {place.path()} was of another prompt and is measured again.")
            return None
        if cell.failure:
            self._account.replaced.append(f"The cell {place.path()} had failed and is measured again.")
            return None
        self._account.found += 1
        return cell

    def _warm_up(self) -> None:
        """Build every drafter and write a little with each: compilation, first allocations, tables, measured costs."""
        first = self._plan.prompts[0]
        for method in [Method(BASE, BASE), *self._methods]:
            ready = self._ready.setdefault(method.label, make_ready(self._generator, method))
            for settings in self._plan.settings:  # sampling loads, or compiles, what greedy decoding does not
                try:
                    begun = ready.begin(self._said(first, ()), {**settings, "max_new_tokens": 8}, ())
                    while begun.go_on():
                        pass
                    begun.written()  # which measures what passes cost, where no method has by then
                except Exception:  # noqa: BLE001, S112  # what it does to its cells is recorded there
                    continue

    def _measure(
        self, prompt: TaskPrompt, settings: Mapping[str, Any], task: _Task, found: Mapping[Place, Cell | None],
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Measure the turns of one prompt; each goes on behind plain decoding's answers."""
        answers: tuple[str, ...] = ()
        for turn in range(1, len(prompt.turns) + 1):
            places = {method.label: self._place(settings, prompt, method, turn) for method in self._methods}
            cells = {label: found[place] for label, place in places.items()}
            missing = [method for method in self._methods if cells[method.label] is None]
            said = self._said(prompt, answers)
            if missing:
                cells |= self._write(_Turn(prompt, turn, said, settings, missing, task))
            kept = [cell for cell in cells.values() if cell is not None]
            self._account.cells += kept
            done()
            base = next((cell.base for cell in kept if cell.base is not None), None)
            if base is None:
                break  # there is no answer to go on behind
            text = (self._generator.encode(said), np.array(base.token_ids, np.int64))
            self._account.texts.setdefault(settings_name(settings), []).append(text)
            task.texts = [*task.texts, text][-_WARM_TEXTS:]
            answers = (*answers, self._generator.tokenizer.decode(base.token_ids, skip_special_tokens=True))

    def _write(self, turn: _Turn) -> dict[str, Cell]:
        """Write a turn plainly and with every method that is missing, and keep their cells."""
        prompt, task = turn.prompt, turn.task
        written = self._by_turns(turn)
        base = written.pop(None)
        cells = {}
        for method in turn.methods:
            own = written[method.label]
            failed = [each for each in (base, own) if isinstance(each, str)]
            shown = prompt is task.first and turn.number == 1
            cells[method.label] = Cell(
                place=self._place(turn.settings, prompt, method, turn.number),
                settings=turn.arguments,
                prompt_hash=_hash(prompt),
                environment=self._environment,
                base=_writing(base),
                own=_writing(own),
                counts=own.counts if isinstance(own, Written) else None,
                example=own.steps() if shown and isinstance(own, Written) else (),
                learned_texts=len(task.texts) if method.memory == "warm" else 0,
                failure=failed[0] if failed else "",
            )
            if self._folder is not None:
                self._folder.write(cells[method.label])
        return cells

    def _by_turns(self, turn: _Turn) -> dict[str | None, Written | str]:
        """Write a turn with all its methods, plainly under None: slice by slice, in an order that is drawn each time.

        In the place of what raised stands the sentence.
        """
        seed = f"{turn.settings['seed']}/{turn.prompt.task}/{turn.prompt.number}/{turn.number}"
        order = random.Random(seed)  # noqa: S311  # an order of runs, not a secret
        begun: dict[str | None, Begun] = {}
        written: dict[str | None, Written | str] = {}

        def attempt(label: str | None) -> bool:
            """Write a slice of a text; return whether there is more."""
            try:
                if label not in begun:
                    begun[label] = self._ready[label or BASE].begin(turn.said, turn.arguments, turn.task.texts)
                if begun[label].go_on():
                    return True
                written[label] = text = begun[label].written()
                self._account.writing_seconds += text.writing.total_seconds
            except Exception as error:  # noqa: BLE001  # whatever it is, the other cells go on
                written[label] = told(error)
            return False

        unfinished: list[str | None] = [None, *(method.label for method in turn.methods)]
        while unfinished:
            order.shuffle(unfinished)
            unfinished = [label for label in unfinished if attempt(label)]
        return written

    def _said(self, prompt: TaskPrompt, answers: tuple[str, ...]) -> Any:
        """Return what the model is given; a model without a chat template gets the plain texts, one after the other."""
        asked = prompt.asked(answers)
        if isinstance(asked, str) or getattr(self._generator.tokenizer, "chat_template", None):
            return asked
        return "\n\n".join([*(message["content"] for message in asked), ""])


def _writing(written: Written | str) -> Writing | None:
    return written.writing if isinstance(written, Written) else None


def _hash(prompt: TaskPrompt) -> str:
    return hashlib.sha256(repr((prompt.turns, prompt.is_question)).encode()).hexdigest()[:16]
