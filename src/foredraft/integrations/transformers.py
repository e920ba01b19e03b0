"""foredraft as a `custom_generate` of transformers: runs foredraft's loop with everything that `generate` prepared.

`model.generate(**inputs, custom_generate=foredraft.generate, speculative_config={...})`. Rows of a batch are written
one after the other. Unsupported arguments are rejected before the first token. Does not depend on how drafts are made
or verified.
"""

import inspect
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, GenerationMixin, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foredraft.contracts import TokenIds
from foredraft.engine.batch import steps
from foredraft.engine.statistics import Statistics
from foredraft.errors import UsageError
from foredraft.generator import Generator
from foredraft.integrations.bound_tokenizer import refuse_memory, tokenizer_for
from foredraft.model.support import inspect as check_family
from foredraft.model.target import TorchTarget
from foredraft.model.text_part import text_model
from foredraft.request import checked_ids, own_copies
from foredraft.sampling import LEAST_TEMPERATURE, LogitsProcessor, SamplingOptions
from foredraft.speculation import parse_speculation

ATTRIBUTE = "_foredraft"  # of a model: its `GeneratorCache`
MOST_GENERATORS = 4  # kept for a model; the least recently used one is dropped (chosen)

_CACHES = ("past_key_values", "cache", "cache_params")  # the second since transformers 5.24, the third of Mamba
_ACCEPTED = ("attention_mask", "position_ids", *_CACHES, "logits_to_keep", "use_cache")
"""Model arguments that `generate` adds itself; any other one was passed by the caller."""
_OF_OTHER_PARTS = ("mm_encoder_outputs", "token_type_ids", "mm_token_type_ids")
"""Model arguments that are also there for a text alone, of a model with a vision or audio part, but are empty or 0."""
_OWN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_NO_LIMIT = 1 << 40  # maximum new tokens if nothing sets a limit; the model's window then does
_FILTERS = (
    (logits_process.TemperatureLogitsWarper, "temperature", LEAST_TEMPERATURE),
    (logits_process.TopKLogitsWarper, "top_k", 1),
    (logits_process.TopPLogitsWarper, "top_p", 1e-9),
    (logits_process.MinPLogitsWarper, "min_p", 0.0),
)
"""The filters that the engine implements, in the order of their application, and the least value that it accepts."""


def generate(
    model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    speculative_config: Mapping[str, Any] | None = None, streamer: Any = None, assistant_model: Any = None,
    synced_gpus: bool = False, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """Continue `input_ids`; called by `model.generate(..., custom_generate=foredraft.generate)`.

    Sampling is matched: with the same `torch.manual_seed`, the text is the same with every method of foredraft. Each
    call that samples draws one seed a row from torch's default generator.

    The arguments are as `generate` has prepared them: `input_ids`, int64[B, L], are padded on either side according to
    the attention mask; processors are called for each row at every emitted position, and criteria after every token of
    a row; `streamer`, for one row only, receives each token as soon as it is known. `speculative_config` is as
    `foredraft.load` takes it; it may also contain `tokenizer`, an object or a name.

    Returns int64[B, L + new], shorter rows padded as transformers does; or with `return_dict_in_generate` a
    `GenerateDecoderOnlyOutput` without a cache. UsageError for an argument that is not supported, UnsupportedModelError
    for a model that cannot be verified as a tree, StoreError for a table or store that is damaged or belongs to another
    tokenizer.
    """
    dropped = _dropped_arguments(inspect.currentframe())
    streamer = dropped.get("streamer") if streamer is None else streamer
    assistant = dropped.get("assistant_model") if assistant_model is None else assistant_model
    config = generation_config
    mode, given = config.get_generation_mode(assistant), dropped.get("kwargs", {})
    own_cache = any(given.get(name) is not None for name in _CACHES)
    _refuse(model, input_ids, config, mode, streamer, synced_gpus, own_cache, model_kwargs)
    generators = generators_of(model)
    generator = generators.generator(model, speculative_config or {})
    max_length, eos, criteria = split_criteria(stopping_criteria)
    # as in transformers, at least one token, and its criteria end a row after it
    limit = _NO_LIMIT if max_length is None else max(max_length - input_ids.shape[1], 1)
    _check_padding(len(input_ids), config, ends=bool(eos or criteria))
    keeps_scores = config.return_dict_in_generate and config.output_scores
    keeps_logits = config.return_dict_in_generate and config.output_logits
    left, filters = (logits_processor, {}) if keeps_scores or not config.do_sample else split_filters(logits_processor)
    shown = model_kwargs.get("attention_mask")
    shown = torch.ones_like(input_ids) if shown is None else shown
    size, pairs = generator.target.vocabulary, zip(input_ids, shown, strict=True)
    prompts = [checked_ids(row[kept != 0].tolist(), size) for row, kept in pairs]
    own, ends = own_copies(left, len(prompts), model), _own_criteria(criteria, len(prompts), model)
    rows = [
        Row(
            number, input_ids, prompt, own[number], ends[number],
            [] if keeps_scores else None, [] if keeps_logits else None,
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    seeds = torch.randint(1 << 62, (len(rows),)).tolist() if config.do_sample else [0] * len(rows)
    runs = [
        generator.begin(
            row.prompt, SamplingOptions(do_sample=bool(config.do_sample), seed=seed, **filters), max_new_tokens=limit,
            eos=eos, processors=row.engine_processors(), stop=row.stops,
        )
        for row, seed in zip(rows, seeds, strict=True)
    ]  # fmt: skip  # all prompts are checked before any row is written
    for run in runs:
        for record in steps(run):
            if streamer is not None:
                for token in record.emitted:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
    generators.last = tuple(run.statistics for run in runs)
    return _output(input_ids, rows, config)


def last_statistics(model: Any) -> tuple[Statistics, ...]:
    """Return the statistics of the last call of `generate` on `model`, one record for each row; empty before it."""
    return generators_of(model).last


def split_filters(processors: Iterable[Any]) -> tuple[LogitsProcessorList, dict[str, Any]]:
    """Return the processors but for the last ones that the engine implements, and these as sampling options."""
    left, options = list(processors), {}
    for kind, name, least in reversed(_FILTERS):
        last = left[-1] if left else None
        # a subclass may behave differently, as does a filter that always keeps some tokens
        if type(last) is not kind or getattr(last, name) < least or getattr(last, "min_tokens_to_keep", 1) != 1:
            continue
        if getattr(last, "filter_value", -math.inf) == -math.inf:
            options[name] = getattr(left.pop(), name)
    return LogitsProcessorList(left), options


def split_criteria(criteria: Iterable[Any]) -> tuple[int | None, tuple[int, ...], StoppingCriteriaList]:
    """Return a row's maximum length, padding included, the ids that end it, and the remaining criteria."""
    lengths, eos, others = [], [], StoppingCriteriaList()
    for each in criteria:
        if type(each) is MaxLengthCriteria:
            lengths.append(each.max_length)
        elif type(each) is EosTokenCriteria:
            eos.extend(each.eos_token_id.flatten().tolist())
        else:
            others.append(each)
    return min(lengths, default=None), tuple(eos), others


@dataclass(slots=True)
class Row:
    """One row of a batch: the inputs of its processors and criteria, and their results."""

    number: int  # index of the row
    batch: torch.Tensor  # int64[B, L], the prompts as passed to `generate`, padding included
    prompt: TokenIds  # int64[n], the row without padding
    processors: LogitsProcessorList  # the remaining ones; the row's own copies if the batch has several rows
    criteria: StoppingCriteriaList  # the same; called after every token
    scores: list[torch.Tensor] | None  # processed logits, float32[V] for each token; None if they are not returned
    logits: list[torch.Tensor] | None  # the same before processing
    tokens: list[int] = field(default_factory=list)  # the tokens written

    def engine_processors(self) -> tuple[LogitsProcessor, ...]:
        """Return the processors for the engine to call at every emitted position; none if there is nothing to do."""
        is_needed = bool(self.processors) or self.scores is not None or self.logits is not None
        return (self._process,) if is_needed else ()

    def stops(self, token: int) -> bool:
        """Record an emitted token, and return whether a criterion ends the row with it."""
        self.tokens.append(token)
        if not self.criteria:
            return False
        rows, new = len(self.batch), torch.tensor([self.tokens], dtype=torch.long, device=self.batch.device)
        ids = torch.cat([self.batch[self.number : self.number + 1], new], dim=1)
        scores = None if self.scores is None else tuple(each.expand(rows, -1) for each in self.scores)
        # as processors, criteria may index their data by row
        return bool(torch.as_tensor(self.criteria(ids.repeat(rows, 1), scores)).expand(rows)[self.number])

    def _process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process float32[1, V] as transformers would, with the whole batch."""
        scores = scores.to(self.batch.device)
        if self.logits is not None:
            self.logits.append(scores[0].clone())
        if self.processors:
            # processors may index their data by row, so this row is at its own index in a batch of copies
            prompt = self.batch[self.number : self.number + 1]
            ids = torch.cat([prompt, input_ids[:, len(self.prompt) :].to(prompt.device)], dim=1)
            rows = len(self.batch)
            processed = self.processors(ids.repeat(rows, 1), scores.repeat(rows, 1))  # type: ignore[arg-type]  # ids are int64
            scores = processed[self.number : self.number + 1]
        if self.scores is not None:
            self.scores.append(scores[0].clone())
        return scores


def _copied(value: Any) -> Any:
    """Return a value with copies of the mappings and lists in it."""
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


class GeneratorCache:
    """The generators of one model, by configuration, and `last`, the last call's statistics of each row.

    They are an attribute of the model, so they are freed with it.
    """

    def __init__(self) -> None:
        self.last: tuple[Statistics, ...] = ()
        self._lock = threading.Lock()
        self._made: list[tuple[tuple[Any, ...], Generator]] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # drafters hold locks and mapped files, and belong to one model: copies and pickles contain None instead
        return type(None), ()

    def generator(self, model: Any, config: Mapping[str, Any]) -> Generator:
        """Return the generator for a configuration, an existing or a new one; errors are those of `generate`."""
        weight = model.get_input_embeddings().weight
        # a model that was moved, cast or resized, or runs another kernel, gets a new generator
        state = weight.device, weight.dtype, weight.shape, getattr(model.config, "_attn_implementation", None)
        with self._lock:
            for number, (known, generator) in enumerate(self._made):
                if known == (state, config):
                    self._made.append(self._made.pop(number))
                    return generator
            is_mapping = isinstance(config, Mapping)  # anything else is refused
            own = {name: each for name, each in config.items() if name != "tokenizer"} if is_mapping else config
            asked, given = parse_speculation(None, own), config.get("tokenizer")
            refuse_memory(asked.options)
            tokenizer = tokenizer_for(str(getattr(model, "name_or_path", None) or ""), given, asked.options)
            generator = Generator(TorchTarget(text_model(model)), tokenizer, **asked.drafting)
            # a copy, so that the caller's later changes do not matter; models in it are not copied
            self._made = [*self._made, ((state, _copied(config)), generator)][-MOST_GENERATORS:]
            return generator


def generators_of(model: Any) -> GeneratorCache:
    """Return a model's generator cache, a new one if it has none."""
    if not isinstance(vars(model).get(ATTRIBUTE), GeneratorCache):
        setattr(model, ATTRIBUTE, GeneratorCache())
    cache: GeneratorCache = getattr(model, ATTRIBUTE)
    return cache


def _own_criteria(criteria: StoppingCriteriaList, rows: int, model: Any) -> list[StoppingCriteriaList]:
    """Return the criteria of each row: copies, or shared ones where one cannot be copied, such as one with a lock."""
    try:
        return own_copies(criteria, rows, model)
    except UsageError:
        return [criteria] * rows


def _check_padding(rows: int, config: Any, *, ends: bool) -> None:
    if rows > 1 and ends and getattr(config, "_pad_token_tensor", None) is None:
        raise UsageError("The rows of a batch can end after different numbers of tokens; give pad_token_id.")


def _output(input_ids: torch.Tensor, rows: Sequence[Row], config: Any) -> Any:
    lengths = [len(row.tokens) for row in rows]
    longest, pad = max(lengths), getattr(config, "_pad_token_tensor", None)
    if pad is None and min(lengths) < longest:
        raise UsageError(
            f"The rows of this batch ended after {sorted(set(lengths))} tokens and there is no id to pad the shorter "
            "ones with; give pad_token_id."
        )
    new = torch.full((len(rows), longest), 0 if pad is None else int(pad), device=input_ids.device)
    for row in rows:
        new[row.number, : len(row.tokens)] = torch.tensor(row.tokens)
    sequences = torch.cat([input_ids, new], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    kind: Any = GenerateDecoderOnlyOutput  # its annotations require tuples of one
    scores, logits = _by_step([row.scores for row in rows]), _by_step([row.logits for row in rows])
    return kind(sequences=sequences, scores=scores, logits=logits)


def _by_step(values: Sequence[Sequence[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """Return float32[B, V] for each step, zeros for rows that had ended; None if nothing was kept."""
    kept = [torch.stack(list(row)) for row in values if row is not None]
    return tuple(pad_sequence(kept).unbind()) if kept else None


def _dropped_arguments(frame: FrameType | None) -> Mapping[str, Any]:
    """Return `generate`'s arguments as its caller gave them; model arguments are in `kwargs`.

    transformers 5 passes only those that its `_sample` does not have (`_extract_generation_mode_kwargs`), so without
    `streamer` and `assistant_model`, and passes a cache whether or not the caller gave one. They are read from the
    stack frame of the calling `generate`, which is one to four frames up, because of wrappers.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    for _ in range(4):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code is code:
            return frame.f_locals
    return {}


def _refuse(
    model: Any, input_ids: torch.Tensor, config: Any, mode: GenerationMode, streamer: Any, synced_gpus: bool,
    own_cache: bool, model_kwargs: Mapping[str, Any],
) -> None:  # fmt: skip
    is_wrapper = model.config.get_text_config() is not model.config
    foreign = [
        name for name, value in model_kwargs.items() if value is not None and name not in _ACCEPTED
        and not (is_wrapper and name in _OF_OTHER_PARTS and _is_of_text(value))
    ]  # fmt: skip
    outputs = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, None)]
    cache = config.cache_implementation
    refusals = (
        (mode == GenerationMode.ASSISTED_GENERATION,
         "assistant_model, prompt_lookup_num_tokens, use_mtp or assistant_early_exit",
         "leave it out, as foredraft drafts itself, or leave custom_generate out"),
        (mode not in _OWN_MODES, f"{mode.value.replace('_', ' ')} (num_beams is {config.num_beams})",
         "use greedy decoding or sampling with num_beams=1, or leave custom_generate out"),
        (model.training, "a model in training mode", "call model.eval() first"),
        (synced_gpus, "synced_gpus", "leave it out, and shard the model with device_map"),
        (bool(foreign) and is_wrapper, f"images or sounds ({', '.join(foreign)})",
         "it reads text only: leave them out, or leave custom_generate out"),
        (bool(foreign), f"{', '.join(foreign)} (model arguments)", "give input_ids and attention_mask only"),
        (input_ids.shape[1] == 0, "inputs_embeds alone", "give input_ids"),
        (bool(outputs) and config.return_dict_in_generate, " and ".join(outputs),
         "run the finished sequences through the model once for them"),
        (own_cache, "past_key_values",
         "leave it out: foredraft keeps a cache of its own, and reads the whole prompt again"),
        (cache is not None and ("offloaded" in cache or "quantized" in cache), f"cache_implementation={cache!r}",
         "leave it out: foredraft keeps a cache of its own"),
        (streamer is not None and len(input_ids) > 1, f"a streamer for {len(input_ids)} rows", "stream one row a call"),
        (_has_own_positions(model_kwargs), "position_ids of your own: each row's positions are 0, 1, 2, ...",
         "leave them out"),
    )  # fmt: skip
    check_family(model.config)  # first, as other kinds of models have other arguments
    for is_refused, what, remedy in refusals:
        if is_refused:
            raise UsageError(f"foredraft.generate does not take {what}; {remedy}.")


def _is_of_text(value: Any) -> bool:
    """Return whether an argument of `_OF_OTHER_PARTS` says that there is text only."""
    if isinstance(value, Mapping):  # encoders' results by kind of input
        return all(each is None for each in value.values())
    return not bool(torch.as_tensor(value).any())


def _has_own_positions(model_kwargs: Mapping[str, Any]) -> bool:
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return False
    # a model with images may have several positions for each token, [P, B, L], which are the same in a text
    each = positions if positions.ndim > 2 else positions[None]
    shown = torch.ones_like(each[0]) if mask is None else mask.to(positions.device)
    expected = shown.long().cumsum(-1) - 1
    return each.shape[1:] != expected.shape or bool(((each != expected) & (shown != 0)).any())
