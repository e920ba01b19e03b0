"""The request bodies, with the field names of OpenAI and Anthropic; a field that is not supported is an error.

Checks names, types and ranges. Does not depend on the model.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list that may be long: validation stops at the first error, because finding all would block other requests."""
Some = Annotated[list[Item], Field(fail_fast=True, min_length=1)]

Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
OneStopOrMore = Annotated[Stops, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


class Body(BaseModel):
    """A body that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


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


class Function(Body):
    """The function of a tool call."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role {self.role} needs a content")
        return self


class FunctionDefinition(Body):
    """A tool's function; generated arguments are not checked against the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class JsonSchema(Body):
    """A named schema."""

    name: str = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The format that the text must have; `regex` is an extension."""

    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    pattern: str | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> "ResponseFormat":
        given = {"json_schema": self.json_schema, "regex": self.pattern}
        if any((value is not None) != (self.type == kind) for kind, value in given.items()):
            raise ValueError("type json_schema needs json_schema, type regex needs pattern, and no other takes them")
        return self

    @property
    def shape(self) -> tuple[str, Any] | None:
        """The kind and the schema or regular expression, as `Constraint` takes them; None for text."""
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_ or {}
        return self.type, self.pattern if self.type == "regex" else schema


class Prediction(Body):
    """A text similar to the expected one, used for drafting."""

    type: Literal["content"]
    content: Content


class Speculation(Body):
    """Drafting options of one request; missing ones have the server's values.

    `stores` names stores of `/v1/stores`; `options` are the method's.
    """

    method: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=256)] | None = None
    stores: list[str] = []
    options: dict[str, bool | int | float] = {}


class GenerationRequest(Body):
    """The fields of all requests for a text; `seed` and `speculative` are extensions to some protocols."""

    model: str | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: int | None = None
    metadata: dict[str, Any] | None = None
    speculative: Speculation | bool | None = None


class OpenAIRequest(GenerationRequest):
    """The common fields of `/v1/chat/completions` and `/v1/completions`; those from `top_k` on are extensions."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    stop: OneStopOrMore | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    ignore_eos: bool = False
    return_sources: bool = False

    @model_validator(mode="after")
    def _streams_with_stream_fields(self) -> "OpenAIRequest":
        if not self.stream and (self.stream_options is not None or self.return_sources):
            raise ValueError("stream_options and return_sources need stream to be true")
        return self


class ChatRequest(OpenAIRequest):
    """`/v1/chat/completions`."""

    messages: Some[Message]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "ChatRequest":
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same field; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class CompletionRequest(OpenAIRequest):
    """`/v1/completions`."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    suffix: None = None
    best_of: Literal[1] | None = None


class ResponsesItem(Body):
    """A message of `/v1/responses`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponsesFormat(JsonSchema):
    """The format that the text must have, in `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class ResponsesText(Body):
    """The text options of `/v1/responses`."""

    format: ResponsesFormat = ResponsesFormat()


class ResponsesRequest(GenerationRequest):
    """`/v1/responses`, text only; nothing is stored."""

    input: str | Some[ResponsesItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: ResponsesText = ResponsesText()
    store: bool | None = None
    user: str | None = None


class AnthropicMessage(Body):
    """A message of `/v1/messages`."""

    role: Literal["user", "assistant"]
    content: Content


class CountRequest(Body):
    """`/v1/messages/count_tokens`."""

    model: str | None = None
    messages: Some[AnthropicMessage]
    system: Content | None = None


class MessagesRequest(CountRequest, GenerationRequest):
    """`/v1/messages`, text only."""

    max_tokens: Count
    stop_sequences: Stops = []
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class TokenizeRequest(Body):
    """`/tokenize`: a text without the chat template, or a conversation with it."""

    model: str | None = None
    prompt: str | None = None
    messages: Some[Message] | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> "TokenizeRequest":
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
