"""Parses and validates the prompt and generation arguments of one request, under transformers' names.

Of the model, it depends on the vocabulary size only.
"""

import copy
import dataclasses
import inspect
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch

from foredraft.contracts import TokenIds
from foredraft.errors import UsageError
from foredraft.options import check_known, check_range, options_from, shown, whole_number
from foredraft.sampling import LogitsProcessor, SamplingOptions

_UNSUPPORTED: Mapping[str, str] = {
    "num_beams": "beam search is not supported; use do_sample or greedy decoding",
    "num_return_sequences": "use generate_all with count=, which generates them in one batch",
    "assistant_model": "use method='draft_model' with speculative_config={'model': ...}",
    "prompt_lookup_num_tokens": "use method='prompt_lookup' with speculative_config={'prompt_lookup_num_tokens': ...}",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "typical_p": "pass transformers' TypicalLogitsWarper in logits_processor",
    "no_repeat_ngram_size": "pass transformers' NoRepeatNGramLogitsProcessor in logits_processor",
    "generation_config": "pass its values as separate arguments",
}
Processors = TypeVar("Processors", bound=Sequence[Any])
_ONE = ("num_beams", "num_return_sequences")  # arguments that have no effect when they are 1
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_PROMPT_TYPES = "A prompt is a text, a list of messages, or a flat list of token ids"


class GenerationArguments(TypedDict, total=False):
    """The keyword arguments of `generate` and `stream`, for editors and type checkers; see `GenerationOptions`."""

    max_new_tokens: int
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop_strings: str | Sequence[str]
    eos_token_id: int | Sequence[int] | None
    logits_processor: Sequence[LogitsProcessor]
    seed: int | None
    prediction: str | None


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Checked arguments of `generate`, made by `parse`."""

    max_new_tokens: int = 256  # maximum number of new tokens; at least 1
    # sample tokens; None means yes if a sampling argument other than temperature 0 is given
    do_sample: bool | None = None
    temperature: float | None = None  # divides the logits; 0 is greedy decoding
    top_k: int | None = None  # keep this many most probable tokens; 0 keeps all
    top_p: float | None = None  # keep the smallest set of most probable tokens with at least this probability mass
    min_p: float | None = None  # drop tokens whose probability is below this share of the highest one
    repetition_penalty: float = 1.0  # above 1 discourages tokens that occurred before
    stop_strings: tuple[str, ...] = ()  # the text ends after any of them, and includes it, as in transformers
    # ids that end the text; None for the model's own, an empty list for none
    eos_token_id: tuple[int, ...] | None = None
    # transformers' processors, called in order with the prefix of each emitted position
    logits_processor: tuple[LogitsProcessor, ...] = ()
    seed: int | None = None  # of the sampling; None draws one, which the result reports
    # a text similar to the expected one, such as the file to change; drafts are taken from it
    prediction: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "GenerationOptions":
        """Build from keyword arguments; UsageError for an unknown, unsupported, wrong or ineffective one."""
        known = [field.name for field in dataclasses.fields(cls)]
        readers = {"stop_strings": _strings, "logits_processor": _processors, "eos_token_id": end_ids}
        taken = {}
        for name, value in given.items():
            if name not in _UNSUPPORTED:
                check_known(name, known, "generate has no argument", "It takes")
            if value is None or (name in _ONE and whole_number(value) == 1):
                continue  # it means the default, as in transformers
            if name in _UNSUPPORTED:
                raise UsageError(f"generate does not take {name}: {_UNSUPPORTED[name]}.")
            taken[name] = readers[name](value) if name in readers else value
        return options_from(cls, taken, "generate")

    def __post_init__(self) -> None:
        check_range(self, "max_new_tokens", least=1)
        if self.temperature == 0 and self.do_sample:
            raise UsageError(
                "temperature is 0 with do_sample; use do_sample=False for greedy decoding, or a temperature above 0."
            )
        sampling = [name for name in _SAMPLING if getattr(self, name) is not None]
        if self.temperature == 0:
            sampling.remove("temperature")
        greedy = self.do_sample is False or (self.do_sample is None and self.temperature == 0)
        if greedy and sampling:
            how = "do_sample=False" if self.do_sample is False else "temperature=0"
            raise UsageError(
                f"{' and '.join(sampling)} would be ignored with {how}; leave "
                f"{'it' if len(sampling) == 1 else 'them'} out, or sample."
            )
        if "" in self.stop_strings:
            raise UsageError("A stop string is empty and would end every text at once; leave it out.")

    def eos(self, default: Sequence[int], vocabulary: int) -> tuple[int, ...]:
        """Return the ids that end the text; `default` are the model's own. UsageError for an unknown one."""
        if self.eos_token_id is None:
            return tuple(default)
        for token in self.eos_token_id:
            if not 0 <= token < vocabulary:
                raise UsageError(f"eos_token_id holds {token}; the model has ids 0 to {vocabulary - 1}, so use one.")
        return self.eos_token_id

    def sampling(self, vocabulary: int) -> SamplingOptions:
        """Return the sampling options, with a random seed if none was given; UsageError for a value out of range."""
        if self.top_k is not None and self.top_k > vocabulary:
            raise UsageError(
                f"top_k is {self.top_k} and the model has {vocabulary} tokens; use at most {vocabulary}, or 0 to keep "
                "all."
            )
        given = any(getattr(self, name) is not None for name in _SAMPLING)
        return SamplingOptions(
            do_sample=self.do_sample if self.do_sample is not None else given and self.temperature != 0,
            temperature=self.temperature or 1.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
        )


def encoded(
    prompt: Any, tokenizer: Any, vocabulary: int, tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> TokenIds:  # fmt: skip
    """Return the ids, int64[n], of a text, a conversation (by the tokenizer's chat template), or ids.

    `tools` are a conversation's, in transformers' format, and `variables` the template's. UsageError for an empty
    prompt, another type, ids outside the vocabulary, or a conversation without a chat template or rejected by it.
    """
    if isinstance(prompt, str):
        ids = tokenizer(checked_text(prompt)).input_ids if prompt else []
    elif (messages := conversation(prompt)) is not None:
        text = checked_text(templated(messages, tokenizer, tools, variables))
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        ids = prompt
    return checked_ids(ids, vocabulary)


def checked_text(text: str) -> str:
    """Return a prompt's text; UsageError for a lone surrogate, left when bytes that are not UTF-8 are read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The text has {text[error.start]!a} at character {error.start}, which UTF-8 cannot encode; read it as "
            "UTF-8, or leave the character out."
        ) from error
    return text


def conversation(prompt: Any) -> list[dict[str, Any]] | None:
    """Return the messages of a prompt that is a conversation, or None; UsageError for a malformed one."""
    if isinstance(prompt, Mapping):
        remedy = "put a message in a list" if "role" in prompt else "pass the input_ids of a tokenizer's result"
        raise UsageError(f"{_PROMPT_TYPES}; this one is a {type(prompt).__name__}: {remedy}.")
    if not isinstance(prompt, Sequence) or not any(isinstance(each, Mapping) for each in prompt):
        return None
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise UsageError(f"Message {number} is {shown(message)}; each is a mapping with 'role' and 'content'.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                wrong = f"has {key} {shown(message[key])}" if key in message else f"has no {key}"
                raise UsageError(f"Message {number} {wrong}; give each message a 'role' and a 'content' that are text.")
    return [dict(message) for message in prompt]


def templated(
    messages: list[dict[str, Any]], tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Return the conversation formatted by the tokenizer's chat template, up to where the answer begins.

    Variables that the template does not name are left out. UsageError if there is no template, or it rejects the
    messages or the variables.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UsageError("This model's tokenizer has no chat template; give the prompt as a text.")
    ours = {"messages", "documents", *inspect.signature(tokenizer.apply_chat_template).parameters}
    named, given = set(re.findall(r"\w+", str(template))), variables or {}
    if refused := sorted(name for name in ours & named & given.keys() if given[name] not in (None, True)):
        raise UsageError(
            f"The chat template's variable {refused[0]} cannot be set; leave it out, and say it in a message."
        )
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True,
            **{name: value for name, value in given.items() if name in named - ours},
        )  # fmt: skip
    except Exception as error:  # a template is a program that came with the model
        raise UsageError(
            f"The model's chat template rejects the conversation ({error}); change the messages accordingly, or give a "
            "text."
        ) from error
    return text


def checked_ids(given: Any, vocabulary: int) -> TokenIds:
    """Return ids as int64[n], given a sequence, or an array or tensor of one dimension or one row; else UsageError."""
    if isinstance(given, torch.Tensor | np.ndarray):
        if given.ndim != 1 and (given.ndim != 2 or len(given) != 1):
            raise UsageError(f"{_PROMPT_TYPES}; this array has shape {tuple(given.shape)}.")
        given = given.reshape(-1).tolist()
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray | memoryview):
        remedy = "decode the bytes" if isinstance(given, Sequence) else "give one of them"
        raise UsageError(f"{_PROMPT_TYPES}; this one is a {type(given).__name__}, so {remedy}.")
    for each in given:
        if whole_number(each) is None:
            remedy = "a text: use generate_all for many" if isinstance(each, str) else "so remove that"
            raise UsageError(f"{_PROMPT_TYPES}; this list holds {shown(each)}, {remedy}.")
        if not 0 <= each < vocabulary:
            raise UsageError(
                f"The prompt holds token id {each}; the model has ids 0 to {vocabulary - 1}, so use its own tokenizer."
            )
    if not given:
        raise UsageError("The prompt is empty; give at least one token to continue.")
    return np.asarray(given, np.int64)


def _strings(given: Any) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise UsageError(f"stop_strings is {shown(given)}; it must be a text or a list of texts.")
    return tuple(strings)


def _processors(given: Any) -> tuple[LogitsProcessor, ...]:
    if not isinstance(given, Sequence) or not all(callable(each) for each in given):
        raise UsageError(
            f"logits_processor is {shown(given)}; it must be a list of callables: if it is one, put it in a list."
        )
    return tuple(given)


def end_ids(given: Any, *, nested: bool = False) -> tuple[int, ...]:
    """Return the ids given as a number, an array or tensor of at most one dimension, or a sequence of these.

    UsageError for anything else.
    """
    array = isinstance(given, torch.Tensor | np.ndarray)
    listed = given.tolist() if array else given
    token = whole_number(listed)
    if token is not None:
        return (token,)
    if isinstance(listed, Sequence) and not isinstance(listed, str | bytes | bytearray) and (array or not nested):
        return tuple(token for each in listed for token in end_ids(each, nested=True))
    raise UsageError(f"eos_token_id holds {shown(given)}; it must be a token id or a flat list of token ids.")


def own_copies(made: Processors, rows: int, model: Any) -> list[Processors]:
    """Return processors or criteria of each of `rows` rows; copies if there are several, as some keep state.

    The model itself is not copied. One that cannot be copied is a UsageError.
    """
    if rows == 1 or not made:
        return [made] * rows
    try:
        return [copy.deepcopy(made, {id(model): model}) for _ in range(rows)]
    except Exception as error:  # they are others' code, and raise what they like when copied
        names = ", ".join(type(each).__name__ for each in made)
        raise UsageError(
            f"The logits processors or stopping criteria ({names}) cannot be copied ({error}), and each row of a batch "
            "needs its own; generate each row in a separate call."
        ) from error
