"""A method made ready to write: its drafter is built once, then texts are timed and their drafts counted.

A text is written a slice at a time, so that several methods can write the same text by turns: what the machine does
meanwhile, faster in one second and slower in the next, then happens to all of them alike. transformers' own `generate`,
the peer, writes in one slice: its sampled texts have the same distribution as ours but are drawn otherwise, and its
forwards are counted from outside, as it says nothing of its drafts. Does not know cells or tasks.
"""

import random
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foredraft import api
from foredraft.bench.cell import Writing
from foredraft.bench.drafts import DraftCounts, RecordedDrafter
from foredraft.bench.method import BASE, PEER, Method, use
from foredraft.bench.replay import replay_steps
from foredraft.contracts import CostCurve, Learner, StepRecord, TokenIds
from foredraft.control import StepCosts
from foredraft.engine.statistics import Statistics
from foredraft.errors import ForedraftWarning, UsageError, told
from foredraft.model.loading import load_model
from foredraft.options import nearest

_TAUGHT_NODES = 16  # drafted a step while a warm drafter reads earlier texts
_SLICE = 16  # tokens: the machine's pace lasts longer than writing them takes, and the caches are warm for most of them
_STALL = 5.0  # a pass that takes more than so many times what it should was held up by the machine
_PEER_OPTIONS = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model", "num_assistant_tokens")
_PEER_SAMPLING = ("temperature", "top_k", "top_p", "min_p")

Earlier = Sequence[tuple[TokenIds, TokenIds]]
"""Texts that a warm drafter has read: prompt ids and output ids, int64[n] each."""

Written = tuple[Writing, DraftCounts | None]
"""What a text took, and what became of its drafts; None where that cannot be known."""

Text = Generator[None, None, Written]
"""A text that is written while it is iterated over, a slice at a time, and returns what it took."""


class MethodWriter:
    """A writer of foredraft's own; a drafter that raises while it writes is the caller's to see."""

    def __init__(self, generator: api.Generator, method: Method) -> None:
        use(generator, method)
        self._generator, self._method = generator, method
        self._drafter, self._costs = generator.drafter, StepCosts()

    def write(self, prompt: Any, arguments: Mapping[str, Any], earlier: Earlier) -> Text:
        """Write a text; what the drafter and the control learn is kept for the next text.

        Args:
            prompt: as `Generator.generate` takes it.
            arguments: generation arguments.
            earlier: what a warm drafter has read before; cold and warm ones are made anew for each text.
        """
        generator, method, drafter = self._generator, self._method, self._drafter
        if method.memory:
            use(generator, method)
            drafter = generator.drafter
        if method.memory == "warm":
            for read, written in earlier:
                for _ in replay_steps(drafter, read, written, _TAUGHT_NODES, generator.target.vocabulary):
                    pass
        recorded = None if method.name == BASE else RecordedDrafter(drafter)
        generator.attach(
            method.name, recorded or drafter, **method.amount, verification=method.verification, costs=self._costs
        )
        return (yield from _in_slices(generator, recorded, prompt, arguments))

    def forget(self) -> None:
        """Make the next text the first one."""
        self._costs = StepCosts()
        if isinstance(self._drafter, Learner):
            self._drafter.forget()


def _in_slices(
    generator: api.Generator, recorded: RecordedDrafter | None, prompt: Any, arguments: Mapping[str, Any]
) -> Text:
    """Write by what is attached to the generator; in one slice where passes are recordings, made over one cache."""
    size = _SLICE if generator.target.recordings is None else float("inf")
    seconds = 0.0

    @contextmanager
    def timed() -> Iterator[None]:
        nonlocal seconds
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=ForedraftWarning)  # a drafter that failed is a failed cell
            start = perf_counter()
            yield
            seconds += perf_counter() - start

    with timed():
        run = generator.start(prompt, **arguments)
    steps, tokens = run.steps(), 0
    while True:
        with timed():
            while tokens < size and (step := next(steps, None)) is not None:
                tokens += len(step.emitted)
        if tokens < size:
            break
        tokens = 0
        yield
    with timed():
        text = run.result(generator.tokenizer)
    stalled, parts = stalled_seconds(text.steps, generator.cost), _time_split(text.steps)
    statistics = replace(text.statistics, decode_seconds=text.statistics.decode_seconds - stalled)
    parts["forward"] -= stalled
    writing = Writing(text.token_ids, text.prompt_length, statistics, seconds, parts, stalled)
    return writing, recorded.counts() if recorded is not None else None


class PeerWriter:
    """A writer by transformers' own `generate`, plain, with prompt lookup, or with an assistant model.

    Raises:
        UsageError: an option that `generate` does not take here, or an assistant that cannot be loaded.
    """

    def __init__(self, generator: api.Generator, method: Method) -> None:
        self._generator, self._options = generator, dict(method.options)
        for name in self._options:
            if name not in _PEER_OPTIONS:
                raise UsageError(
                    f"The peer transformers has no option {name!r}.{nearest(name, _PEER_OPTIONS)} Its options are: "
                    f"{', '.join(_PEER_OPTIONS)}."
                )
        if "assistant_model" in self._options:
            target, name = generator.target, str(self._options["assistant_model"])
            self._options["assistant_model"] = load_model(name, target.dtype, str(target.device))

    def write(self, prompt: Any, arguments: Mapping[str, Any], earlier: Earlier) -> Text:  # noqa: ARG002  # it learns nothing
        """Write a text as one slice."""
        yield from ()
        return self.written(prompt, arguments), None

    @torch.inference_mode()
    def written(self, prompt: Any, arguments: Mapping[str, Any]) -> Writing:
        """Return a text, written at once."""
        model = self._generator.target.model
        ids = torch.from_numpy(self._generator.encode(prompt))[None].to(self._generator.target.device)
        names = ("max_new_tokens", "repetition_penalty", *_PEER_SAMPLING)
        options = {name: arguments[name] for name in names if name in arguments}
        sampled = any(name in options for name in _PEER_SAMPLING)
        if sampled:
            options.setdefault("top_k", 0)
        torch.manual_seed(arguments["seed"])
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        counting = model.register_forward_pre_hook(count)
        try:
            start = perf_counter()
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=sampled, pad_token_id=0, **options, **self._options
            )
            new = tuple(output[0, ids.shape[1] :].tolist())
            seconds = perf_counter() - start
        finally:
            counting.remove()
        statistics = Statistics(len(new), forwards, 0, 0, 0, prefill_seconds=0.0, decode_seconds=seconds)
        return Writing(new, ids.shape[1], statistics, seconds, parts={})

    def forget(self) -> None:
        """Do nothing, as nothing is remembered."""


Writer = MethodWriter | PeerWriter


def make_writer(generator: api.Generator, method: Method) -> Writer:
    """Build what the method needs to write.

    Raises:
        UsageError: an unknown name, option or value.
        StoreError: a table that is damaged or belongs to another tokenizer.
    """
    return PeerWriter(generator, method) if method.name == PEER else MethodWriter(generator, method)


def write_by_turns(texts: Mapping[str, Text], order: random.Random) -> dict[str, Written | str]:
    """Write texts, not begun yet, slice by slice, in an order that is drawn anew for each round of slices.

    Returns:
        What was written, by the label of who wrote it; where a method raised, the sentence on it.
    """
    written: dict[str, Written | str] = {}
    while unfinished := [label for label in texts if label not in written]:
        order.shuffle(unfinished)
        for label in unfinished:
            try:
                next(texts[label])
            except StopIteration as ended:
                written[label] = ended.value
            except Exception as error:  # noqa: BLE001  # whatever it is, the others go on
                written[label] = told(error)
    return written


def _time_split(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the seconds that steps spent in `draft`, `forward`, `verify`, `commit` and all `other`."""
    named = {
        part: sum(step.nanoseconds[part] for step in steps) / 1e9 for part in ("draft", "forward", "verify", "commit")
    }
    whole = sum(sum(step.nanoseconds.values()) for step in steps) / 1e9
    return {**named, "other": whole - sum(named.values())}


def stalled_seconds(steps: Sequence[StepRecord], cost: CostCurve) -> float:
    """Return the seconds for which passes were held up: what each took beyond several times what it should have.

    What it should have taken is the curve's, times the median of what the text's passes took of it, if that is more: a
    machine that is slow throughout holds nothing up. Fewer than four steps tell nothing.
    """
    if len(steps) < 4:
        return 0.0
    expected = cost.table(1 + max(step.drafted for step in steps))[[1 + step.drafted for step in steps]]
    taken = np.array([step.nanoseconds["forward"] for step in steps], np.float64) / 1e9
    usual = expected * max(1.0, float(np.median(taken / expected)))
    return float(np.where(taken > _STALL * usual, taken - usual, 0.0).sum())
