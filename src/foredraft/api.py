"""The composition root: names and paths in, a ready `Generator` out.

The only place where models, drafters, budgets and text meet. Does not know how any of them works.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foredraft.cache_folder import cache_path
from foredraft.contracts import Control, CostCurve, DraftContext, Drafter, StepRecord, TokenIds
from foredraft.control import MOST_NODES, FixedControl, MeasuredControl
from foredraft.corpus.fingerprint import tokenizer_hash, vocabulary_size
from foredraft.demo import EMBEDDED
from foredraft.drafters import Resources, drafter_class, make_drafter
from foredraft.engine.single import decode as decode_steps
from foredraft.engine.single import prefill
from foredraft.engine.state import FinishReason, SequenceState
from foredraft.engine.statistics import Statistics, summarize
from foredraft.errors import UsageError
from foredraft.model.cost import measured_cost
from foredraft.model.loading import load_config, load_model, load_tokenizer
from foredraft.model.support import inspect
from foredraft.model.target import TorchTarget
from foredraft.options import options_from, shown, whole_number
from foredraft.request import GenerationOptions, checked_ids, checked_text, conversation, templated
from foredraft.standard_library import default_store, default_table
from foredraft.text import StopStrings, TextStream, decode

DEFAULT_METHOD = "adaptix"

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A text to continue, a conversation (`role` and `content` each), or token ids."""

Progress = Callable[[float, str], None]
"""Told about work that takes over a second: the share done, 0 to 1, and what it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One emitted token of a stream.

    Attributes:
        text: the text that it completes; may be empty, as a character can span tokens. Joined, pieces are the text.
        token_id: the token; -1 for a last piece that only releases text held back.
        drafted_by: the drafter that guessed it, or None for the target's own.
    """

    text: str
    token_id: int
    drafted_by: str | None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was written, and how.

    Attributes:
        text: the new text, without special tokens.
        token_ids: the new ids, with the end id if one ended the text.
        finish_reason: "eos", "stop", "length", or "window" where the model's window ended the text.
        prompt_length: ids of the prompt.
        seed: of the sampling; the same seed gives the same text with any method.
        steps: a record of every step.
        statistics: what they add up to.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_length: int
    seed: int
    steps: tuple[StepRecord, ...]
    statistics: Statistics


def load(
    model: Any = "demo",
    *,
    method: str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    progress: Progress | None = None,
) -> "Generator":
    """Load a model and a drafter for it.

    Args:
        model: "demo" (embedded), a hub id, a folder, or a pair (transformers model, tokenizer).
        method: one of `foredraft methods`; "adaptix" if neither this nor the config says.
        speculative_config: vLLM's keys `method`, `num_speculative_tokens`, and the method's own options.
            `num_speculative_tokens` fixes the number of drafted nodes a step; without it, the number follows the
            cost of verification measured on this machine.
        dtype: a torch dtype or its name; "auto" takes the checkpoint's.
        device: "cpu", "cuda", "auto" (spread), ...; None takes the first GPU, else the CPU.
        progress: told about work that takes over a second.

    Raises:
        UsageError: an unknown name, option or value.
        UnsupportedModelError: a model that cannot be verified as a tree.
        StoreError: a table that is damaged or belongs to another tokenizer.
    """
    chosen, nodes, options = _parse_config(method, {} if speculative_config is None else speculative_config)
    options_from(drafter_class(chosen).Options, options, f"Method {chosen!r}")  # refused now, not after the weights
    if isinstance(model, str | Path):
        name = str(model)
        inspect(load_config(name))  # refused now, not after the weights
        tokenizer, transformer = load_tokenizer(name), load_model(name, dtype, device)
    else:
        name = ""
        if dtype != "auto" or device is not None:
            raise UsageError(
                "dtype and device belong to models that foredraft loads; move or cast yours before passing it."
            )
        transformer, tokenizer = _pair(model)
    return Generator(
        TorchTarget(transformer),
        tokenizer,
        method=chosen,
        options=options,
        nodes=nodes,
        progress=progress,
        embedded=name in EMBEDDED,
    )


class Generator:
    """A model, its tokenizer, and a drafter, ready to write.

    Attributes:
        target: the model.
        tokenizer: its tokenizer.
        method: the name of the drafting method.
        drafter: the drafter.
    """

    def __init__(
        self,
        target: TorchTarget,
        tokenizer: Any,
        *,
        method: str,
        options: Mapping[str, Any],
        nodes: int | None,
        progress: Progress | None = None,
        embedded: bool = False,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self._embedded = embedded
        self._progress = progress
        self._curve: CostCurve | None = None
        _check_vocabulary(target, tokenizer)
        self.use(method, options, nodes)

    def use(self, method: str, options: Mapping[str, Any] | None = None, nodes: int | None = None) -> None:
        """Change the drafting method; `nodes` fixes the number of drafted nodes a step."""
        if nodes is not None:
            FixedControl(nodes)  # refuses a negative number now, not at the first token
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        own = backend if self._embedded else None
        resources = Resources(
            vocabulary=self.target.vocabulary,
            tokenizer_hash=tokenizer_hash(backend) if backend is not None else "",
            default_table=partial(default_table, own, self._progress) if own else None,
            default_store=partial(default_store, own, self._progress) if own else None,
        )
        self.attach(method, make_drafter(method, options or {}, resources), nodes)

    def attach(self, method: str, drafter: Drafter, nodes: int | None = None) -> None:
        """Draft with a drafter that exists already, under the name `method`: one built elsewhere, or used before."""
        self.method = method
        self.drafter = drafter
        self._nodes = nodes

    @property
    def cost(self) -> CostCurve:
        """What a forward pass costs by its rows: measured at first use, then read from the cache folder."""
        if self._curve is None:
            self._curve = measured_cost(self.target, cache_path())
        return self._curve

    def save(self) -> None:
        """Write what the drafter was asked to remember (`share` and `memory`); nothing where it was not.

        Raises:
            StoreError: the file cannot be written.
        """
        save = getattr(self.drafter, "save", None)
        if save is not None and getattr(getattr(self.drafter, "options", None), "memory", None):
            save()

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Write the continuation of `prompt`.

        Args:
            prompt: a text, a conversation, or token ids.
            **options: see `foredraft.request.GenerationOptions`; names are transformers'.

        Raises:
            UsageError: what cannot be honoured, before the first token.
            NumericsError: scores from which no token can be chosen.
        """
        run = self._start(prompt, options)
        for _ in run.steps():
            pass
        return run.result(self.tokenizer)

    def stream(self, prompt: Prompt, **options: Any) -> "Stream":
        """Begin to write; iterate over the result for pieces, and read its `generation` afterwards.

        Takes and raises what `generate` does.
        """
        return Stream(self._start(prompt, options), self.tokenizer)

    def encode(self, prompt: Prompt) -> TokenIds:
        """Return the prompt's ids, int64[n]; a conversation goes through the model's chat template.

        Raises:
            UsageError: an empty prompt, something that is no prompt, ids that the model does not have, or a
                conversation without a chat template or that the template refuses.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer(checked_text(prompt)).input_ids if prompt else []
        elif (messages := conversation(prompt)) is not None:
            text = checked_text(templated(messages, self.tokenizer))
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = prompt
        return checked_ids(ids, self.target.vocabulary)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text by default: the model's generation configuration's, else the tokenizer's."""
        given = getattr(getattr(self.target.model, "generation_config", None), "eos_token_id", None)
        if given is None:
            given = self.tokenizer.eos_token_id
        if given is None:
            return ()
        return (given,) if isinstance(given, int) else tuple(given)

    def _start(self, prompt: Prompt, given: Mapping[str, Any]) -> "_Run":
        options = GenerationOptions.parse(given)
        ids = self.encode(prompt)
        window = self.target.window
        if window is not None and len(ids) >= window:
            raise UsageError(
                f"The prompt has {len(ids)} tokens and the model's window is {window}; shorten the prompt to at most "
                f"{window - 1}."
            )
        sampling = options.sampling(self.target.vocabulary)
        seq = SequenceState(
            ids,
            self.target.new_cache(),
            sampling,
            max_new_tokens=options.max_new_tokens,
            window=window,
            eos=options.eos(self.eos_token_ids(), self.target.vocabulary),
            processors=options.logits_processor,
            stop=StopStrings(self.tokenizer, options.stops) if options.stops else None,
        )
        context = DraftContext(self.target.vocabulary, sampling.seed, self._nodes or MOST_NODES)
        return _Run(seq, self.target, self.drafter, self._control(), context, sampling.seed)

    def _control(self) -> Control:
        if self.method == "none":
            return FixedControl(0)
        return FixedControl(self._nodes) if self._nodes is not None else MeasuredControl(self.cost)


class _Run:
    """One generation in progress: the sequence, its records, and the time before the first step."""

    def __init__(
        self,
        seq: SequenceState,
        target: TorchTarget,
        drafter: Drafter,
        control: Control,
        context: DraftContext,
        seed: int,
    ) -> None:
        self._parts = (seq, drafter, control, target, context)
        self._records: list[StepRecord] = []
        self._prefill_seconds = 0.0
        self._seed = seed

    def steps(self) -> Iterator[StepRecord]:
        """Prefill, then yield each step's record."""
        seq, _, _, target, _ = self._parts
        self._prefill_seconds = prefill(seq, target) / 1e9
        for record in decode_steps(*self._parts):
            self._records.append(record)
            yield record

    def result(self, tokenizer: Any) -> Generation:
        """Return what has been written so far; the finish reason is "length" while it is unfinished."""
        seq = self._parts[0]
        # from the records: an interrupt can fall between a step's commit and its record
        ids = tuple(token for record in self._records for token in record.emitted)
        return Generation(
            text=decode(tokenizer, ids),
            token_ids=ids,
            finish_reason=seq.finish or "length",
            prompt_length=seq.prompt_length,
            seed=self._seed,
            steps=tuple(self._records),
            statistics=summarize(self._records, self._prefill_seconds),
        )


class Stream:
    """An iterator over the pieces of a generation."""

    def __init__(self, run: _Run, tokenizer: Any) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._pieces = self._iterate()

    def __iter__(self) -> Iterator[Piece]:
        """Return the pieces; there is one pass."""
        return self._pieces

    def __next__(self) -> Piece:
        """Return the next piece."""
        return next(self._pieces)

    @property
    def generation(self) -> Generation:
        """What has been written so far; complete once the pieces are exhausted."""
        return self._run.result(self._tokenizer)

    def _iterate(self) -> Iterator[Piece]:
        text = TextStream(self._tokenizer)
        for record in self._run.steps():
            for token, source in zip(record.emitted, record.sources, strict=True):
                yield Piece(text.push(token), token, source)
        rest = text.finish()
        if rest:
            yield Piece(rest, -1, None)


def _parse_config(method: str | None, config: Any) -> tuple[str, int | None, dict[str, Any]]:
    """Return the method, the fixed number of nodes or None, and the method's own options."""
    if not isinstance(config, Mapping):
        raise UsageError(f'speculative_config is {shown(config)}; give a mapping such as {{"table": "none"}}.')
    options = dict(config)
    named = options.pop("method", None)
    for value in (method, named):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"method is {shown(value)}; give a method's name as text.")
    if method is not None and named is not None and method != named:
        raise UsageError(f"method is {method!r} and speculative_config names {named!r}; give one of them.")
    nodes = options.pop("num_speculative_tokens", None)
    number = whole_number(nodes)
    if nodes is not None and (number is None or not 0 <= number <= 1024):
        raise UsageError(f"num_speculative_tokens is {shown(nodes)}; it must be a whole number, 0 to 1024.")
    return method or named or DEFAULT_METHOD, number, options


def _pair(model: Any) -> tuple[Any, Any]:
    try:
        transformer, tokenizer = model
    except (TypeError, ValueError) as error:
        raise UsageError("Give a model as a name, a folder, or a pair (transformers model, tokenizer).") from error
    return transformer.eval(), tokenizer


def _check_vocabulary(target: TorchTarget, tokenizer: Any) -> None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    size = vocabulary_size(backend) if backend is not None else len(tokenizer)
    if size > target.vocabulary:
        raise UsageError(
            f"The tokenizer has ids up to {size - 1} and the model scores ids below {target.vocabulary}; this is not "
            "the model's tokenizer, or its embeddings were not resized."
        )
