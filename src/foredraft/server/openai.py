"""OpenAI's `/v1/chat/completions` and `/v1/completions`: the requests, and the format of their answers.

Tool calls are parsed in the format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Does
not depend on how answers are generated.
"""

import json
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from foredraft.drafters.prediction import PREDICTION
from foredraft.server import bodies
from foredraft.server.bodies import Body, Count, Many, TextRequest, text_of
from foredraft.server.choice import Delta, Piece, StopFilter
from foredraft.server.metrics import drafting_of
from foredraft.server.processors import TokenLogprobs
from foredraft.server.replies import RequestError, event
from foredraft.server.service import TOOL_CALL, Answers

_DONE = b"data: [DONE]\n\n"
_CALL = re.compile(TOOL_CALL + r"\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_OneStopOrMore = Annotated[bodies.Stops, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


class _StreamOptions(Body):
    include_usage: bool = False


class _FunctionDefinition(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a schema; generated arguments are not checked against it
    strict: Literal[False] | None = None


class _Tool(Body):
    type: Literal["function"]
    function: _FunctionDefinition


class JsonSchema(Body):
    """A named schema."""

    name: str = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex"] = "text"  # "regex" is an extension
    json_schema: JsonSchema | None = None
    pattern: str | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        given = {"json_schema": self.json_schema, "regex": self.pattern}
        if any((value is not None) != (self.type == kind) for kind, value in given.items()):
            raise ValueError("type json_schema needs json_schema, type regex needs pattern, and no other takes them")
        return self

    @property
    def shape(self) -> bodies.Shape | None:
        if self.json_schema is not None:
            return self.json_schema.schema_ or {}
        return {"type": "object"} if self.type == "json_object" else self.pattern


class _Prediction(Body):
    type: Literal["content"]
    content: bodies.Content


class _Request(bodies.GenerationRequest):
    """The common part of both routes; the fields from `top_k` on are extensions."""

    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    response_format: _ResponseFormat | None = None
    prediction: _Prediction | None = None
    stop: _OneStopOrMore | None = None
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    top_k: bodies.TopK | None = None
    min_p: bodies.Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    ignore_eos: bool = False
    return_sources: bool = False

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @model_validator(mode="after")
    def _streams_with_stream_fields(self) -> Self:
        if not self.stream and (self.stream_options is not None or self.return_sources):
            raise ValueError("stream_options and return_sources need stream to be true")
        return self

    def failed(self, failure: RequestError) -> bytes:
        return event(error_shape(failure))

    def _request(
        self, prompts: Sequence[Any], most: int | None, logprobs: int | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> TextRequest:  # fmt: skip
        options = self.options(most, top_k=self.top_k, min_p=self.min_p)
        options["prediction"] = text_of(self.prediction.content) if self.prediction else None
        options["repetition_penalty"] = self.repetition_penalty
        shape = None if self.response_format is None else self.response_format.shape
        return TextRequest(
            prompts, options, tools, self.n, self.stop or (), logprobs, self.logit_bias or {}, self.presence_penalty,
            self.frequency_penalty, shape, self.ignore_eos, self.speculative,
        )  # fmt: skip

    def _whole(self, choices: list[dict[str, Any]], answers: Answers) -> dict[str, Any]:
        counts = {"usage": usage_of(answers), "metrics": drafting_of(answers.records)}
        return self._choices(self.whole_object, choices) | counts

    def _chunk(self, choice: dict[str, Any], pieces: Sequence[Piece] = ()) -> bytes:
        sources = {"sources": pieces} if self.return_sources else {}
        return event(self._choices(self.chunk_object, [choice]) | sources)

    def _end(self, answers: Answers) -> bytes:
        if self.stream_options is None or not self.stream_options.include_usage:
            return _DONE
        return event(self._whole([], answers) | {"object": self.chunk_object}) + _DONE

    def _choices(self, object_: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"{self.id_prefix}-{self._id}", "created": self._created, "model": self.model}
        return head | {"object": object_, "choices": choices}


class ChatRequest(_Request):
    """`/v1/chat/completions`."""

    messages: bodies.Some[bodies.Message]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same field; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def text_request(self) -> TextRequest:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []] if self._has_tools else []
        prompts = [[message.for_template() for message in self.messages]]
        most, logprobs = self.max_completion_tokens or self.max_tokens, self.top_logprobs or 0
        return self._request(prompts, most, logprobs if self.logprobs else None, tools)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        choices = []
        for number, delta in enumerate(await answers.whole()):
            content, finish = delta.text, delta.finish
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if self._has_tools and (calls := _calls_in(content)):
                finish = "tool_calls"
                message |= {"content": content.partition(TOOL_CALL)[0].strip() or None, "tool_calls": calls}
            choices.append(self._choice(number, finish, delta.tokens, message=message))
        return self._whole(choices, answers)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        for number in range(len(answers.choices)):
            yield self._chunk(self._choice(number, delta={"role": "assistant", "content": ""}))
        # a possible tool call is held back until the end
        filters = [StopFilter([TOOL_CALL] if self._has_tools else []) for _ in answers.choices]
        async for number, delta in answers.deltas():
            finish, pieces = delta.finish, filters[number].push(delta.pieces)
            if pieces or delta.tokens:
                content = {"content": "".join(text for text, _ in pieces)}
                yield self._chunk(self._choice(number, None, delta.tokens, delta=content), pieces)
            if finish is not None:
                held = filters[number].held
                if calls := _calls_in(held):
                    finish = "tool_calls"
                    listed = [{"index": place} | call for place, call in enumerate(calls)]
                    yield self._chunk(self._choice(number, delta={"tool_calls": listed}))
                elif held:
                    yield self._chunk(self._choice(number, delta={"content": held}))
                yield self._chunk(self._choice(number, finish, delta={}))
        yield self._end(answers)

    @property
    def _has_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def _choice(
        self, number: int, finish: str | None = None, tokens: Sequence[TokenLogprobs] = (), **said: Any
    ) -> dict[str, Any]:
        content = [
            _token(each.text, each.logprob) | {"top_logprobs": [_token(*other) for other in each.top]}
            for each in tokens
        ]
        logprobs = {"content": content, "refusal": None} if self.logprobs else None
        return {"index": number, "finish_reason": finish, "logprobs": logprobs} | said


class CompletionRequest(_Request):
    """`/v1/completions`."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    suffix: None = None
    best_of: Literal[1] | None = None

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def text_request(self) -> TextRequest:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return self._request([self.prompt] if is_one else self.prompt, self.max_tokens, self.logprobs)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        return self._whole([self._choice(*each) for each in enumerate(await answers.whole())], answers)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        offsets = [0] * len(answers.choices)
        async for number, delta in answers.deltas():
            if delta.pieces or delta.tokens or delta.finish:
                yield self._chunk(self._choice(number, delta, offsets[number]), delta.pieces)
                offsets[number] += sum(len(each.text) for each in delta.tokens)
        yield self._end(answers)

    def _choice(self, number: int, delta: Delta, offset: int = 0) -> dict[str, Any]:
        """Return an answer, or the part of it that follows the tokens whose texts have `offset` characters."""
        tokens = delta.tokens
        logprobs = None if self.logprobs is None else {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [dict(each.top) for each in tokens],
            "text_offset": [offset + sum(len(each.text) for each in tokens[:place]) for place in range(len(tokens))],
        }  # fmt: skip
        return {"index": number, "text": delta.text, "finish_reason": delta.finish, "logprobs": logprobs}


def usage_of(answers: Answers) -> dict[str, Any]:
    """Return token counts of prompt, completion and prediction.

    Rejected prediction tokens are not counted as `completion_tokens`, because they are in no text.
    """
    written = sum(len(record.emitted) for record in answers.records)
    accepted = sum(record.sources.count(PREDICTION) for record in answers.records)
    drafted = sum(choice.predicting.drafted for choice in answers.choices if choice.predicting is not None)
    return {
        "prompt_tokens": answers.prompt_tokens, "completion_tokens": written,
        "total_tokens": answers.prompt_tokens + written,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
        },
    }  # fmt: skip


def error_shape(failure: RequestError) -> dict[str, Any]:
    """Return a failure in OpenAI's format."""
    return {"error": {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


class _Call(BaseModel):
    name: str
    arguments: Any = {}


def _calls_in(text: str) -> list[dict[str, Any]]:
    """Return the tool calls of a text in OpenAI's format; none if one cannot be parsed."""
    try:
        calls = [_Call.model_validate_json(body) for body in _CALL.findall(text)]
    except ValidationError:
        return []
    found = []
    for name, given in ((call.name, call.arguments) for call in calls):
        function = {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
        found.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return found
