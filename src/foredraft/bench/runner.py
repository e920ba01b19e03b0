"""Paired runs: every method and plain decoding on the same prompts, in one process, in random order.

The order of a prompt's methods depends only on the seed and the prompt. A text is generated in slices, and the methods'
slices are interleaved, so that variations of the machine's speed affect all methods alike.
transformers' `generate`, the peer, uses one slice; its sampled texts have the same distribution as ours but other
random draws, and its forward passes are counted by a hook. Does not depend on how methods work, and prints nothing.
"""

import random
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from foredraft import api
from foredraft.bench.cell import Cell, Writing, settings_name
from foredraft.bench.method import BASE, PEER, Method
from foredraft.bench.tasks import TaskPrompt
from foredraft.contracts import CostCurve, Learner, StepRecord
from foredraft.control import StepCosts
from foredraft.engine.batch import steps
from foredraft.engine.statistics import Statistics
from foredraft.errors import ForedraftError, ForedraftWarning, told
from foredraft.model.loading import load_model
from foredraft.options import check_known

_PLAIN = ""  # label of plain decoding, which may be a method of the run too
_WARM_UP_TOKENS = 8  # chosen
_SLICE = 16  # tokens (chosen): shorter than speed variations of the machine, long enough for warm CPU caches
_STALL = 5.0  # a pass that takes this many times its expected time is stalled (chosen)
_PEER_OPTIONS = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model", "num_assistant_tokens")
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # transformers has other defaults

Written = tuple[Writing | None, str]
"""A text's measurements, or the error of a failed one."""
Text = Generator[None, None, Written]  # a text that is generated slice by slice while it is iterated over


class Run:
    """A run of methods on prompts at several settings; after `measure`, with all its cells.

    Plain decoding always runs, and may be one of the methods. The settings are generation arguments, each with
    `max_new_tokens` and `seed`. Changes the generator's method. UsageError for an invalid option.
    """

    def __init__(
        self, generator: api.Generator, methods: Sequence[Method], prompts: Sequence[TaskPrompt],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:  # fmt: skip
        self.generator, self.methods, self.settings = generator, list(methods), settings
        self.prompts = list({(prompt.task, prompt.number): prompt for prompt in prompts}.values())
        self.turns = len(settings) * sum(len(prompt.turns) for prompt in self.prompts)  # number of calls of `done`
        self.cells: list[Cell] = []
        self.writers: dict[str, MethodWriter | PeerWriter] = {}
        self.warm_up()

    @property
    def failures(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.failure]

    def warm_up(self) -> None:
        """Build every drafter and generate a short text with each, so that cells exclude one-time costs.

        ForedraftError if the passes of a model cannot be recorded, although they should be.
        """
        for method in [Method(BASE, label=_PLAIN), *self.methods]:
            is_peer = method.method == PEER
            writer = PeerWriter(self.generator, method.options) if is_peer else MethodWriter(self.generator, method)
            self.writers[method.label] = writer
            for settings in self.settings:  # sampling compiles code that greedy decoding does not use
                arguments = {**settings, "max_new_tokens": _WARM_UP_TOKENS}
                text = writer.write(self.prompts[0].input(self.generator.tokenizer), arguments)
                write_interleaved({method.label: text}, random.Random(0))  # noqa: S311  # an order; failures are recorded in cells
                for model in (self.generator.target, *self.generator.drafter.needs.models):
                    if model.recordings is not None and model.recordings.failed:
                        raise ForedraftError(f"{model.recordings.failed} Measure it as it is, with --eager.")

    def measure(self, done: Callable[[], None] = lambda: None, enough: Callable[[], bool] = lambda: False) -> None:
        """Measure all cells.

        `done` is called after each turn of each prompt in each setting; `enough` before each prompt, and True skips it
        and the rest of its setting.
        """
        for settings in self.settings:
            for writer in self.writers.values():
                writer.forget()  # drop what was learned from the warm-up and from other settings
            for prompt in self.prompts:
                if enough():
                    break
                self.measure_prompt(prompt, settings, done)

    def measure_prompt(self, prompt: TaskPrompt, settings: Mapping[str, Any], done: Callable[[], None]) -> None:
        """Measure the turns of one prompt; each turn follows plain decoding's answers to the earlier ones."""
        answers: tuple[str, ...] = ()
        for turn in range(1, len(prompt.turns) + 1):
            given = prompt.input(self.generator.tokenizer, answers)
            cells = self.measure_turn(prompt, turn, given, settings)
            self.cells += cells
            done()
            base = next((cell.base for cell in cells if cell.base is not None), None)
            if base is None:
                break  # the next turn needs this answer
            answers = (*answers, self.generator.tokenizer.decode(base.token_ids, skip_special_tokens=True))

    def measure_turn(self, prompt: TaskPrompt, turn: int, given: Any, settings: Mapping[str, Any]) -> list[Cell]:
        """Return a turn's cells: the methods' texts are generated interleaved with plain decoding's."""
        arguments = {**settings, "seed": settings["seed"] + prompt.number}
        order = random.Random(f"{settings['seed']}/{prompt.task}/{prompt.number}/{turn}")  # noqa: S311  # an order, not a secret
        texts = {label: writer.write(given, arguments) for label, writer in self.writers.items()}
        written, name = write_interleaved(texts, order), settings_name(settings)
        base, base_failure = written[_PLAIN]
        cells = []
        for method in self.methods:
            own, failure = written[method.label]
            place = (name, prompt.task, method.label, prompt.number, turn)
            cells.append(Cell(*place, base, own, base_failure or failure))
        return cells


# --- texts by one method


class MethodWriter:
    """Generates texts with a method of foredraft; errors of the drafter are raised to the caller."""

    def __init__(self, generator: api.Generator, method: Method) -> None:
        generator.use(**method.drafting)
        self._generator, self._method = generator, method
        self._drafter, self._costs = generator.drafter, StepCosts()

    def write(self, prompt: Any, arguments: Mapping[str, Any]) -> Text:
        """Generate a text; the drafter keeps what it learned for the next one."""
        generator, method = self._generator, self._method
        generator.attach(method.method, self._drafter, **method.amount, costs=self._costs)
        writing = yield from _in_slices(generator, prompt, arguments)
        return writing, ""

    def forget(self) -> None:
        self._costs = StepCosts()
        if isinstance(self._drafter, Learner):
            self._drafter.forget()


def _in_slices(generator: api.Generator, prompt: Any, arguments: Mapping[str, Any]) -> Generator[None, None, Writing]:
    """Generate with the attached drafter; in one slice if passes are recorded, because recordings use one KV cache."""
    size = _SLICE if generator.target.recordings is None else float("inf")
    start = perf_counter()
    run = generator.start(prompt, **arguments)
    records, tokens, seconds = steps(run), size, perf_counter() - start
    while tokens >= size:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=ForedraftWarning)  # a failed drafter makes a failed cell
            start, tokens = perf_counter(), 0
            while tokens < size and (step := next(records, None)) is not None:
                tokens += len(step.emitted)
            seconds += perf_counter() - start
        if tokens >= size:
            yield
    start = perf_counter()
    text = generator.result(run)
    seconds += perf_counter() - start
    stalled = stalled_seconds(text.steps, generator.cost)
    statistics = replace(text.statistics, decode_seconds=text.statistics.decode_seconds - stalled)
    return Writing(text.token_ids, text.prompt_length, statistics, seconds, stalled)


class PeerWriter:
    """Generates texts with transformers' `generate`: plain, with prompt lookup, or with an assistant model."""

    def __init__(self, generator: api.Generator, options: Mapping[str, Any]) -> None:
        self._generator, self._options = generator, dict(options)
        for name in options:
            check_known(name, _PEER_OPTIONS, "The peer transformers has no option", "Its options are")
        if "assistant_model" in options:
            target, name = generator.target, str(options["assistant_model"])
            assistant = load_model(name, target.dtype, str(target.device))
            if "num_assistant_tokens" in options:  # which transformers reads from the assistant's own configuration
                assistant.generation_config.num_assistant_tokens = self._options.pop("num_assistant_tokens")
            self._options["assistant_model"] = assistant
        # of a checkpoint's generation configuration, ours reads these only
        suppressed = generator.target.model.generation_config.suppress_tokens
        self._config = GenerationConfig(eos_token_id=[*generator.eos_token_ids()] or None, suppress_tokens=suppressed)

    def write(self, prompt: Any, arguments: Mapping[str, Any]) -> Text:
        yield from ()
        return self.written(prompt, arguments), ""

    @torch.inference_mode()
    def written(self, prompt: Any, arguments: Mapping[str, Any]) -> Writing:
        model = self._generator.target.model
        ids = torch.from_numpy(self._generator.encode(prompt))[None].to(self._generator.target.device)
        sampled = any(name in arguments for name in _NEUTRAL)
        options = {name: arguments.get(name, default) for name, default in _NEUTRAL.items()} if sampled else {}
        options["max_new_tokens"] = arguments["max_new_tokens"]
        torch.manual_seed(arguments["seed"])
        passes: list[None] = []
        counting = model.register_forward_pre_hook(lambda *_: passes.append(None))
        kept, model.generation_config = model.generation_config, self._config
        try:
            start = perf_counter()
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=sampled, pad_token_id=0, **options, **self._options
            )
            new = tuple(output[0, ids.shape[1] :].tolist())
            seconds = perf_counter() - start
        finally:
            counting.remove()
            model.generation_config = kept
        statistics = Statistics(len(new), len(passes), 0, 0, 0, prefill_seconds=0.0, decode_seconds=seconds)
        return Writing(new, ids.shape[1], statistics, seconds)

    def forget(self) -> None:
        """Do nothing; the peer does not learn."""


def write_interleaved(texts: Mapping[str, Text], order: random.Random) -> dict[str, Written]:
    """Generate texts, slice by slice, in a new random order for each round of slices; return them by their keys."""
    written: dict[str, Written] = {}
    while unfinished := [label for label in texts if label not in written]:
        order.shuffle(unfinished)
        for label in unfinished:
            try:
                next(texts[label])
            except StopIteration as ended:
                written[label] = ended.value
            except Exception as error:  # noqa: BLE001  # no error may stop the other methods
                written[label] = None, told(error)
    return written


def stalled_seconds(steps: Sequence[StepRecord], cost: CostCurve) -> float:
    """Return the excess time of stalled passes: those that took more than `_STALL` times the curve's time.

    On a uniformly slow machine, the curve is scaled by the median ratio. With fewer than four steps, the result is 0.
    """
    if len(steps) < 4:
        return 0.0
    expected = cost.table(1 + max(step.drafted for step in steps))[[1 + step.drafted for step in steps]]
    measured = np.array([step.nanoseconds["forward"] for step in steps], np.float64) / 1e9
    scaled = expected * max(1.0, float(np.median(measured / expected)))
    return float(np.where(measured > _STALL * scaled, measured - scaled, 0.0).sum())
