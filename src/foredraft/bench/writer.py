"""Timed generation of texts by one method: its drafter is built once, then texts are timed and drafts counted.

A text is generated in slices, and the methods' slices of a text are interleaved, so that variations of the machine's
speed affect all methods alike. transformers' `generate`, the peer, uses one slice; its sampled texts have the same
distribution as ours but other random draws, and its forward passes are counted by a hook. Does not depend on cells or
tasks.
"""

import random
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foredraft import api
from foredraft.bench.cell import Writing
from foredraft.bench.drafts import DraftCounts, count_drafts
from foredraft.bench.method import BASE, Method
from foredraft.bench.replay import replay_steps
from foredraft.contracts import CostCurve, Learner, StepRecord, TokenIds
from foredraft.control import StepCosts
from foredraft.engine.statistics import Statistics
from foredraft.errors import ForedraftWarning, told
from foredraft.model.loading import load_model
from foredraft.options import check_known
from foredraft.testing.recording import Recorder

_REPLAY_NODES = 16  # drafted nodes per step while a warm drafter reads earlier texts (chosen)
_SLICE = 16  # tokens (chosen): shorter than speed variations of the machine, long enough for warm CPU caches
_STALL = 5.0  # a pass that takes this many times its expected time is stalled (chosen)
_PEER_OPTIONS = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model", "num_assistant_tokens")
_PEER_SAMPLING = ("temperature", "top_k", "top_p", "min_p")

Earlier = Sequence[tuple[TokenIds, TokenIds]]  # texts for a warm drafter to read: prompt and output ids, int64[n]
Written = tuple[Writing | None, DraftCounts | None, str]
"""A text's measurements, its draft counts (None for the peer and plain decoding), and the error of a failed one."""
Text = Generator[None, None, Written]  # a text that is generated slice by slice while it is iterated over


class MethodWriter:
    """Generates texts with a method of foredraft; errors of the drafter are raised to the caller."""

    def __init__(self, generator: api.Generator, method: Method) -> None:
        generator.use(**method.drafting)
        self._generator, self._method = generator, method
        self._drafter, self._costs = generator.drafter, StepCosts()

    def write(self, prompt: Any, arguments: Mapping[str, Any], earlier: Earlier) -> Text:
        """Generate a text; the drafter keeps what it learned for the next text, unless the method is cold or warm."""
        generator, method, drafter = self._generator, self._method, self._drafter
        if method.memory:
            generator.use(**method.drafting)
            drafter = generator.drafter
        if method.memory == "warm":
            for read, written in earlier:
                for _ in replay_steps(drafter, read, written, _REPLAY_NODES, generator.target.vocabulary):
                    pass
        recorded = None if method.method == BASE else Recorder(drafter)
        generator.attach(
            method.method, recorded or drafter, **method.amount, verification=method.verification, costs=self._costs
        )
        writing = yield from _in_slices(generator, prompt, arguments)
        return writing, None if recorded is None else count_drafts(recorded.verdicts, recorded.source_names), ""

    def forget(self) -> None:
        self._costs = StepCosts()
        if isinstance(self._drafter, Learner):
            self._drafter.forget()


def _in_slices(generator: api.Generator, prompt: Any, arguments: Mapping[str, Any]) -> Generator[None, None, Writing]:
    """Generate with the attached drafter; in one slice if passes are recorded, because recordings use one KV cache."""
    size = _SLICE if generator.target.recordings is None else float("inf")
    start = perf_counter()
    run = generator.start(prompt, **arguments)
    steps, tokens, seconds = run.steps(), size, perf_counter() - start
    while tokens >= size:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=ForedraftWarning)  # a failed drafter makes a failed cell
            start, tokens = perf_counter(), 0
            while tokens < size and (step := next(steps, None)) is not None:
                tokens += len(step.emitted)
            seconds += perf_counter() - start
        if tokens >= size:
            yield
    start = perf_counter()
    text = generator.result(run)
    seconds += perf_counter() - start
    nanoseconds = sum((Counter(step.nanoseconds) for step in text.steps), Counter())
    parts = {part: nanoseconds.pop(part, 0) / 1e9 for part in ("draft", "forward", "verify", "commit")}
    parts["other"] = nanoseconds.total() / 1e9
    stalled = stalled_seconds(text.steps, generator.cost)
    parts["forward"] -= stalled
    statistics = replace(text.statistics, decode_seconds=text.statistics.decode_seconds - stalled)
    return Writing(text.token_ids, text.prompt_length, statistics, seconds, parts, stalled)


class PeerWriter:
    """Generates texts with transformers' `generate`: plain, with prompt lookup, or with an assistant model."""

    def __init__(self, generator: api.Generator, options: Mapping[str, Any]) -> None:
        self._generator, self._options = generator, dict(options)
        for name in options:
            check_known(name, _PEER_OPTIONS, "The peer transformers has no option", "Its options are")
        if "assistant_model" in options:
            target, name = generator.target, str(options["assistant_model"])
            self._options["assistant_model"] = load_model(name, target.dtype, str(target.device))

    def write(self, prompt: Any, arguments: Mapping[str, Any], earlier: Earlier) -> Text:  # noqa: ARG002  # the peer does not learn
        yield from ()
        return self.written(prompt, arguments), None, ""

    @torch.inference_mode()
    def written(self, prompt: Any, arguments: Mapping[str, Any]) -> Writing:
        model = self._generator.target.model
        ids = torch.from_numpy(self._generator.encode(prompt))[None].to(self._generator.target.device)
        names = ("max_new_tokens", "repetition_penalty", *_PEER_SAMPLING)
        options = {name: arguments[name] for name in names if name in arguments}
        sampled = any(name in options for name in _PEER_SAMPLING)
        if sampled:
            options.setdefault("top_k", 0)
        torch.manual_seed(arguments["seed"])
        passes: list[None] = []
        counting = model.register_forward_pre_hook(lambda *_: passes.append(None))
        try:
            start = perf_counter()
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=sampled, pad_token_id=0, **options, **self._options
            )
            new = tuple(output[0, ids.shape[1] :].tolist())
            seconds = perf_counter() - start
        finally:
            counting.remove()
        statistics = Statistics(len(new), len(passes), 0, 0, 0, prefill_seconds=0.0, decode_seconds=seconds)
        return Writing(new, ids.shape[1], statistics, seconds, parts={})

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
                written[label] = None, None, told(error)
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
