"""Paired runs: every method on the same prompts in the same process, in random order, against plain decoding.

Knows the generator's surface and prompts. Does not know how methods work, and prints nothing.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foredraft.api import Generator
from foredraft.bench.metrics import LOOP_SHARE, Ratio, repeated_share, speed_up
from foredraft.bench.tasks import TaskPrompt
from foredraft.contracts import Verification
from foredraft.errors import UsageError
from foredraft.generation import Generation
from foredraft.speculation import take_amount, take_verification

BASE = "none"
PEER = "transformers"
"""The pseudo-method that runs transformers' own `generate`."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its options, as a column of the comparison.

    Attributes:
        label: what it is called in the report.
        name: the method, or `transformers` for the peer.
        options: the method's own.
        nodes: drafted nodes a step, or their cap; None follows the measured cost, or what `control` does without.
        control: the name of a control; None for the one that `nodes` implies.
        control_options: the control's own.
        verification: "matched" or "rejection"; under the latter sampled texts differ from plain decoding's.
    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    nodes: int | None = None
    control: str | None = None
    control_options: Mapping[str, Any] | None = None
    verification: Verification = "matched"

    @property
    def amount(self) -> dict[str, Any]:
        """How much to draft, as `Generator.use` and `attach` take it."""
        return {"nodes": self.nodes, "control": self.control, "control_options": self.control_options}


def parse_method(text: str) -> Method:
    """Read a method as the command line gives it: `NAME` or `NAME:{"option": value, ...}`.

    `num_speculative_tokens`, `control` and `control_options` among the options say how much to draft, `verification`
    how drafts are verified.

    Raises:
        UsageError: what follows the colon is not a JSON object, or an amount that cannot be honoured.
    """
    name, _, rest = text.partition(":")
    if not rest:
        return Method(name, name)
    try:
        options = json.loads(rest)
    except ValueError as error:
        raise UsageError(f"The options of {name!r} are not JSON ({error}): {rest}") from error
    if not isinstance(options, dict):
        raise UsageError(f'The options of {name!r} must be a JSON object such as {{"num_speculative_tokens": 16}}.')
    amount, verification = take_amount(options), take_verification(options)
    return Method(text, name, options, **amount, verification=verification)


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one prompt.

    Attributes:
        task: the prompt's task.
        number: the prompt's place in it.
        method: the method's label.
        tokens: emitted.
        steps: target forwards after prefill; 0 for the peer, which does not say.
        drafted: nodes verified.
        accepted: drafted tokens emitted.
        decode_seconds: after prefill; the peer's are all its seconds.
        total_seconds: prefill included.
        identical: whether the ids are those of plain decoding.
        first_difference: place of the first id that differs; -1 where none does.
        repeated: share of repeated 8-grams in the output.
    """

    task: str
    number: int
    method: str
    tokens: int
    steps: int
    drafted: int
    accepted: int
    decode_seconds: float
    total_seconds: float
    identical: bool
    first_difference: int
    repeated: float


def run_paired(
    generator: Generator,
    methods: Sequence[Method],
    prompts: Sequence[TaskPrompt],
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Cell]:
    """Run every method, and plain decoding, on every prompt.

    Args:
        generator: loaded; its method is changed as the run goes.
        methods: without the base, which is always run.
        prompts: what to write about.
        settings: generation arguments, the same for all.
        seed: of the order of methods and of sampling.
        done: called after each prompt.
    """
    order = random.Random(seed)  # noqa: S311  # an order of runs, not a secret
    everyone = [Method(BASE, BASE), *methods]
    ready = {method.label: _prepared(generator, method) for method in everyone}
    for method in everyone:  # warm-up, apart: compilation, first allocations, tables
        ready[method.label](prompts[0].prompt, {**settings, "max_new_tokens": 8, "seed": seed})
    cells: list[Cell] = []
    for prompt in prompts:
        order.shuffle(everyone)
        arguments = {**settings, "seed": seed + prompt.number}
        outputs = {method.label: ready[method.label](prompt.prompt, arguments) for method in everyone}
        base_ids = outputs[BASE].ids
        cells += [_cell(prompt, label, output, base_ids) for label, output in outputs.items()]
        done()
    return cells


def use(generator: Generator, method: Method) -> None:
    """Make the generator draft by `method`."""
    generator.use(method.name, method.options, **method.amount, verification=method.verification)


def prepared(generator: Generator, method: Method) -> Callable[[Any, Mapping[str, Any]], Generation]:
    """Build the method's drafter now; return what writes with it, whatever the generator was used for in between."""
    use(generator, method)
    drafter = generator.drafter

    def write(prompt: Any, arguments: Mapping[str, Any]) -> Generation:
        generator.attach(method.name, drafter, **method.amount, verification=method.verification)
        return generator.generate(prompt, **arguments)

    return write


@dataclass(frozen=True, slots=True)
class _Output:
    ids: tuple[int, ...]
    steps: int
    drafted: int
    accepted: int
    decode_seconds: float
    total_seconds: float


def _prepared(generator: Generator, method: Method) -> Callable[[Any, Mapping[str, Any]], _Output]:
    if method.name == PEER:
        return lambda prompt, arguments: _run_peer(generator, prompt, arguments)
    write = prepared(generator, method)

    def run(prompt: Any, arguments: Mapping[str, Any]) -> _Output:
        start = perf_counter()
        result = write(prompt, arguments)
        total = perf_counter() - start
        counts = result.statistics
        return _Output(result.token_ids, counts.steps, counts.drafted, counts.accepted, counts.decode_seconds, total)

    return run


@torch.inference_mode()
def _run_peer(generator: Generator, prompt: Any, arguments: Mapping[str, Any]) -> _Output:
    ids = torch.from_numpy(generator.encode(prompt))[None].to(generator.target.device)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    options = {name: arguments[name] for name in names if name in arguments}
    sampled = any(name in options for name in ("temperature", "top_k", "top_p", "min_p"))
    torch.manual_seed(arguments["seed"])
    start = perf_counter()
    output = generator.target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=sampled, pad_token_id=0,
        **({"top_k": 0} if sampled else {}), **options,
    )  # fmt: skip
    new = tuple(output[0, ids.shape[1] :].tolist())
    total = perf_counter() - start
    return _Output(new, 0, 0, 0, total, total)


def _cell(prompt: TaskPrompt, label: str, output: _Output, base: tuple[int, ...]) -> Cell:
    same = output.ids == base
    shorter = min(len(output.ids), len(base))
    first = next((i for i in range(shorter) if output.ids[i] != base[i]), shorter)
    return Cell(
        prompt.task, prompt.number, label, len(output.ids), output.steps, output.drafted, output.accepted,
        output.decode_seconds, output.total_seconds, same, -1 if same else first, repeated_share(output.ids),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """One method on one task.

    Attributes:
        task: its name.
        method: the label.
        prompts: how many.
        identical: how many outputs are those of plain decoding.
        tokens_per_target_step: micro average; NaN for the peer.
        nodes_per_step: drafted a step.
        milliseconds_per_token: decode time; for the peer, all its time.
        speed_up: paired with plain decoding, decode time per token (for the peer: total time).
        honest_speed_up: the same over prompts whose plain output does not loop.
        honest_prompts: how many those are.
        repeated: mean share of repeated 8-grams in the output.
    """

    task: str
    method: str
    prompts: int
    identical: int
    tokens_per_target_step: float
    nodes_per_step: float
    milliseconds_per_token: float
    speed_up: Ratio
    honest_speed_up: Ratio
    honest_prompts: int
    repeated: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        return asdict(self)


def summarize_cells(cells: Iterable[Cell]) -> list[Summary]:
    """Return one summary for each task and method, in order of appearance, plain decoding first."""
    cells = list(cells)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.method != BASE):
        groups.setdefault((cell.task, cell.method), []).append(cell)
    return [_summary(group, groups[task, BASE]) for (task, _), group in groups.items()]


def _summary(group: list[Cell], base: list[Cell]) -> Summary:
    steps = sum(cell.steps for cell in group)
    tokens = sum(cell.tokens for cell in group)
    seconds = sum(cell.decode_seconds for cell in group)
    calm = [i for i, cell in enumerate(base) if cell.repeated <= LOOP_SHARE]
    return Summary(
        task=group[0].task,
        method=group[0].method,
        prompts=len(group),
        identical=sum(cell.identical for cell in group),
        tokens_per_target_step=tokens / steps if steps else float("nan"),
        nodes_per_step=sum(cell.drafted for cell in group) / steps if steps else float("nan"),
        milliseconds_per_token=1e3 * seconds / max(tokens, 1),
        speed_up=_ratio(base, group),
        honest_speed_up=_ratio([base[i] for i in calm], [group[i] for i in calm]),
        honest_prompts=len(calm),
        repeated=float(np.mean([cell.repeated for cell in group])),
    )


def _ratio(base: list[Cell], group: list[Cell]) -> Ratio:
    whole = bool(group) and group[0].method == PEER  # it does not tell prefill apart, so neither does the pair

    def column(cells: list[Cell], name: str) -> np.ndarray:
        return np.array([getattr(cell, name) for cell in cells], np.float64)

    seconds = "total_seconds" if whole else "decode_seconds"
    return speed_up(column(base, seconds), column(base, "tokens"), column(group, seconds), column(group, "tokens"))
