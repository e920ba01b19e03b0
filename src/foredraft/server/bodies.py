"""What request bodies share, and the small ones; a field that is not supported is an error.

Checks names, types and ranges. Does not depend on the model.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from foredraft.sampling import SEED_LIMIT
from foredraft.server.replies import RequestError

Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list that may be long: validation stops at the first error, because finding all would block other requests."""
Some = Annotated[list[Item], Field(fail_fast=True, min_length=1)]

Share = Annotated[float, Field(ge=0, le=1)]
MOST_TEXTS = 64  # per request (chosen)
_MOST_FIELDS = 100  # names of an object; the largest body here has 34 (chosen)
_MOST_STOPS, _LONGEST_STOP = (
    16,
    1000,
)  # stop strings, and characters of one, all of which are compared per token; chosen
_MOST_METADATA = 16  # pairs, as in OpenAI's API
_MOST_OPTIONS = 32  # options of a method, and stores that one request searches (chosen)


def at_most(count: int) -> BeforeValidator:
    """Return a check of an object's or a list's length, made before its items are read, which may take seconds."""

    def check(given: Any) -> Any:
        if isinstance(given, dict | list) and len(given) > count:
            raise ValueError(f"it has {len(given)} items; at most {count} are allowed")
        return given

    return BeforeValidator(check)


Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]], at_most(_MOST_STOPS)]

Shape = str | dict[str, Any]  # what a text must match: a regular expression, or a JSON schema


class Body(BaseModel):
    """A body that rejects unknown fields. What is null has its default, or is left out, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > _MOST_FIELDS:
            raise ValueError(f"an object has {len(given)} fields; at most {_MOST_FIELDS} are allowed")
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: each for name, each in given.items() if each is not None or name in required}


class TextPart(Body):
    """A part of a content."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


Content = str | Many[TextPart]


def text_of(content: Content | None) -> str:
    """Return a content's text."""
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


class Turn(Body):
    """A message of a conversation, as all protocols have it."""

    role: str
    content: Content | None

    def for_template(self) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class _Function(Body):
    name: str
    arguments: str


class _ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class Message(Turn):
    """A message of OpenAI's conversations."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[_ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role {self.role} needs a content")
        return self

    def for_template(self) -> dict[str, Any]:
        optional = self.model_dump(include={"tool_calls", "tool_call_id", "name"})
        for call in optional["tool_calls"] or []:
            with suppress(ValueError, RecursionError):  # templates expect arguments as an object
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return super().for_template() | {name: each for name, each in optional.items() if each}


class Speculation(Body):
    """Drafting options of one request; missing ones have the server's values.

    `stores` names stores of `/v1/stores`; `options` are the method's, and may name what is learned and the control.
    """

    method: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=256)] | None = None
    stores: Annotated[list[str], at_most(_MOST_OPTIONS)] = []
    # no other text, which may name a path
    options: Annotated[
        dict[str, bool | int | float | Literal["request", "off", "measured", "fixed"]], at_most(_MOST_OPTIONS)
    ] = {}


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for texts, independent of the protocol."""

    prompts: Sequence[Any]  # texts, conversations or ids
    options: Mapping[str, Any]  # generation arguments, None for missing ones
    tools: Sequence[Mapping[str, Any]] = ()  # for the chat template
    n: int = 1  # answers per prompt
    logprobs: int | None = None  # most probable tokens reported per position; None for no log-probabilities
    bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits, by token id
    presence: float = 0.0
    frequency: float = 0.0
    shape: Shape | None = None
    speculative: Speculation | bool | None = None


class GenerationRequest(Body):
    """The fields of all requests for a text; `seed` and `speculative` are extensions to some protocols.

    A subclass is one route's body. It also translates itself (`text_request`), and formats the answers: all of them
    when they have ended (`whole`), or the `events` of a stream, which ends with `failed` if one fails, and else with
    `last_line` if there is one.
    """

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    seed: int | None = None
    metadata: Annotated[dict[str, str | None], at_most(_MOST_METADATA)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    speculative: Speculation | bool | None = None
    _id: str = PrivateAttr(default_factory=lambda: uuid.uuid4().hex)  # of the answer
    _created: int = PrivateAttr(default_factory=lambda: int(time.time()))

    last_line: ClassVar[bytes] = b""

    @property
    def number(self) -> str:
        """The answer's id, which each protocol prefixes."""
        return self._id

    @staticmethod
    def failed(failure: RequestError) -> dict[str, Any]:
        told = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
        return {"error": told}

    def options(self, most: int | None, **filters: Any) -> dict[str, Any]:
        """Return generation arguments, with None for missing ones; `most` is `max_new_tokens`.

        The default temperature is 1, as in OpenAI's API. Filters are dropped for greedy decoding, of which `top_p` 0 is
        another name.
        """
        seed = None if self.seed is None else self.seed % SEED_LIMIT
        temperature = 1.0 if self.temperature is None else self.temperature
        is_greedy = not temperature or self.top_p == 0
        options = {"max_new_tokens": most, "seed": seed, "temperature": 0.0 if is_greedy else temperature}
        return options if is_greedy else options | {"do_sample": True, "top_p": self.top_p} | filters


class TokenizeRequest(Body):
    """`/tokenize`: a text without the chat template, or a conversation with it."""

    model: str | None = None
    prompt: str | None = None
    messages: Some[Message] | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: Many[int]


class TextsRequest(Body):
    """Texts to add to a store."""

    texts: Some[str]
