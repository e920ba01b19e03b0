"""What request bodies share, and the small ones; a field that is not supported is an error.

Checks names, types and ranges. Which fields are ignored is in `fields`. Does not depend on the model.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    PrivateAttr,
    field_validator,
    model_validator,
)

from foredraft.options import shown
from foredraft.sampling import SEED_LIMIT
from foredraft.server.fields import is_ignored
from foredraft.server.replies import RequestError

Item = TypeVar("Item")
Long = Annotated[list[Item], Field(fail_fast=True)]
"""A list that may be long: validation stops at the first error, because finding all would block other requests."""
Share = Annotated[float, Field(ge=0, le=1)]
MOST_TEXTS = 64  # per request (chosen)
_MOST_ITEMS = 4096  # messages, tools, parts of a message (chosen)
_MOST_PARTS = 16_384  # in all messages, and calls; as many are checked in 0.2 s (chosen)
_MOST_FIELDS = 100  # names of an object; the largest body here has 34 (chosen)
_MOST_STOPS, _LONGEST_STOP = 16, 1000  # stop strings, and characters of one, all compared per token; chosen
_PATHS = ("store", "table", "memory", "model", "drafter")  # options of methods that are paths
_WORDS = ("request", "off", "measured", "fixed")  # values of others, next to finite numbers, true and false


def at_most(count: int) -> BeforeValidator:
    """Return a check of an object's or a list's length, made before its items are read, which may take seconds."""

    def check(given: Any) -> Any:
        if isinstance(given, dict | list) and len(given) > count:
            raise ValueError(f"it has {len(given)} items; at most {count} are allowed")
        if isinstance(given, list):
            fields = (field for item in given if isinstance(item, dict) for field in item.values())
            if (parts := sum(len(field) for field in fields if isinstance(field, list))) > _MOST_PARTS:
                raise ValueError(f"its items have {parts} parts; at most {_MOST_PARTS} are allowed")
        return given

    return BeforeValidator(check)


Many = Annotated[list[Item], Field(fail_fast=True), at_most(_MOST_ITEMS)]
Some = Annotated[list[Item], Field(fail_fast=True, min_length=1), at_most(_MOST_ITEMS)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]], at_most(_MOST_STOPS)]

Shape = str | dict[str, Any]  # what a text must match: a regular expression, or a JSON schema


class Body(BaseModel):
    """A body that rejects unknown fields. What is null has its default, or is left out, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    within: ClassVar[str] = ""  # what `fields.TABLE` calls this body

    @model_validator(mode="before")
    @classmethod
    def _used_fields(cls, given: Any) -> Any:
        """Leave out what is null or ignored."""
        if not isinstance(given, dict):
            return given
        if len(given) > _MOST_FIELDS:
            raise ValueError(f"an object has {len(given)} fields; at most {_MOST_FIELDS} are allowed")
        known = {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}
        return {
            name: each for name, each in given.items() if (each is not None or known.get(name))
            and (name in known or not is_ignored(cls.within, name, each, known))
        }  # fmt: skip


def by_type(default: str, *others: str) -> Discriminator:
    """Return what chooses among bodies by their field `type`."""

    def kind(given: Any) -> str:
        found = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return found if found in others else default

    return Discriminator(kind)


class TextPart(Body):
    """A part of a content."""

    within = "message.content"
    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("type")
        if kind == "refusal":  # of an earlier answer
            return {"type": "text", "text": given.get("refusal")}
        if isinstance(kind, str) and kind not in get_args(cls.model_fields["type"].annotation):
            raise ValueError(f"this model reads text only; leave out the part of type {kind[:80]!r}")
        return given


Content = str | Many[TextPart]


def text_of(content: Content | None) -> str:
    """Return a content's text."""
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


class Turn(Body):
    """A message of a conversation, as all protocols have it."""

    within = "message"
    role: str
    content: Content | None

    def for_template(self) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


def _arguments(given: Any) -> Any:
    """Read the arguments of an earlier call, which chat templates take as an object.

    Those that max_tokens has cut, so that they are no JSON, are left out, as in `/v1/messages`: clients keep a cut call
    in the conversation, and could not go on if it were refused.
    """
    try:
        read = (json.loads(given) if isinstance(given, str) else given) or {}
    except (ValueError, RecursionError):
        read = {}
    if not isinstance(read, dict):
        raise ValueError(f"{shown(given)} is no object; send the call as it came")  # noqa: TRY004  # as pydantic wants it
    return read


Arguments = Annotated[dict[str, Any], PlainValidator(_arguments)]


class _Function(Body):
    within = "message.tool_calls.function"
    name: str
    arguments: Arguments


class _ToolCall(Body):
    within = "message.tool_calls"
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
    refusal: str | None = None  # what an earlier answer said instead of a content
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError(f"a message of role {self.role} needs a content")
        return self

    def for_template(self) -> dict[str, Any]:
        said = super().for_template()
        said["content"] = said["content"] or self.refusal or ""
        calls = [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or []]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name}
        said |= {name: each for name, each in optional.items() if each}
        return with_parts(said, self.reasoning_content or self.reasoning, calls)


def with_parts(
    message: dict[str, Any], thought: str | None, calls: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return an assistant's message with its thought and calls (id, name, arguments), as chat templates read them."""
    if thought:
        message["reasoning_content"] = message["thinking"] = thought  # templates read one of them
    for number, name, arguments in calls:
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": number, "type": "function", "function": function})
    return message


class Choice(NamedTuple):
    """Whether tools are called: as the model likes ("auto"), never ("none") or surely ("required"); and which."""

    mode: str = "auto"
    names: Sequence[str] | None = None  # all if None
    parallel: bool = True  # whether there may be several calls
    given: Any = "auto"  # as the protocol has it


def _choice(given: Any) -> Choice:
    """Read a choice in the form of any protocol."""
    if isinstance(given, str):
        given = {"type": given}
    try:
        kind, several = given["type"], not given.get("disable_parallel_tool_use", False)
        if kind in ("function", "tool"):
            return Choice("required", [given.get("function", given)["name"]], parallel=False, given=given)
        if kind == "allowed_tools":
            allowed = given.get("allowed_tools", given)
            names = [each.get("function", each)["name"] for each in allowed["tools"]]
            return Choice({"required": "required"}.get(allowed["mode"], "auto"), names, several, given)
        mode = {"auto": "auto", "none": "none", "required": "required", "any": "required"}[kind]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it must be 'auto', 'none', 'required', or name a tool as the protocol has it") from error
    return Choice(mode, None, several, kind if set(given) == {"type"} else given)


ToolChoice = Annotated[Choice, PlainValidator(_choice)]


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    within = "tools.function"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_properties(self) -> Self:
        given = (self.parameters or {}).get("properties", {})
        if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
            raise ValueError("the properties of parameters must be objects, as in a JSON schema")
        return self


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. Those that are told to the model are all of it, also if only some may be called."""

    told: Sequence[Mapping[str, Any]] = ()  # for the chat template
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of the arguments, by name, of those to call
    bound: bool = False  # whether calls are constrained to these tools and their schemas
    required: bool = False
    parallel: bool = True  # whether there may be several calls

    @classmethod
    def of(cls, functions: Sequence[FunctionTool], choice: Choice, *, parallel: bool = True) -> "Tools":
        """Return the tools; ValueError for a choice of a tool that is not there."""
        names = [each.name for each in functions]
        missing = [name for name in choice.names or () if name not in names]
        if missing or choice.names == [] or (choice.mode == "required" and not names):
            needed = missing[0] if missing else "a tool"
            raise ValueError(f"tool_choice needs {needed!r} in tools; there is {names or 'none'}")
        if choice.mode == "none":
            return cls()
        told = [
            {"type": "function", "function": each.model_dump(exclude={"strict", "type"}, exclude_none=True)}
            for each in functions
        ]
        callable_ = [each for each in functions if choice.names is None or each.name in choice.names]
        required = choice.mode == "required"
        bound = required or choice.names is not None or any(each.strict for each in callable_)
        schemas = {each.name: each.parameters or {"type": "object", "properties": {}} for each in callable_}
        return cls(told, schemas, bound, required, parallel and choice.parallel)


class Speculation(Body):
    """Drafting options of one request; missing ones have the server's values.

    `options` are the method's, and may name what is learned and the control.
    """

    method: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=256)] | None = None
    options: Annotated[dict[str, Any], at_most(_MOST_FIELDS)] = {}

    @field_validator("options")
    @classmethod
    def _are_for_a_request(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if name in _PATHS:
                raise ValueError(f"{name} names a file of the server, and is chosen when it starts; leave it out")
            if value not in _WORDS and not (isinstance(value, int | float) and abs(value) < math.inf):
                raise ValueError(f"{name} is {shown(value)}; give a number, true, false, or one of {_WORDS}")
        return given


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for texts, independent of the protocol."""

    prompts: Sequence[Any]  # texts, conversations or ids
    options: Mapping[str, Any]  # generation arguments, None for missing ones
    tools: Tools = Tools()
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
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
    speculative: Speculation | bool | None = None

    last_line: ClassVar[bytes] = b""

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


class ConversationRequest(GenerationRequest):
    """The fields of all requests that go through the chat template; some are extensions to some protocols."""

    tools: Sequence[Any] | None = None  # each is a `FunctionTool`, or has it as its `function`
    tool_choice: ToolChoice = Choice()
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    _tools: Tools = PrivateAttr(default_factory=Tools)

    @model_validator(mode="after")
    def _tools_are_there(self) -> Self:
        functions = [getattr(tool, "function", tool) for tool in self.tools or ()]
        self._tools = Tools.of(functions, self.tool_choice, parallel=self.parallel_tool_calls)
        return self

    def variables(self, effort: str | None, thinks: bool | None = None) -> dict[str, Any]:
        """Return the chat template's variables. `effort` "none" is no thought, and another one is a thought."""
        if effort is not None:
            thinks = effort != "none" if thinks is None else thinks
        given = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        return given | ({} if effort in (None, "none") else {"reasoning_effort": effort}) | self.chat_template_kwargs
