"""OpenAI's `/v1/chat/completions` and `/v1/completions`: the requests, and the format of their answers.

Does not depend on how answers are generated.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from foredraft.drafters.prediction import PREDICTION
from foredraft.server import bodies
from foredraft.server.answers import Answers, Delta
from foredraft.server.bodies import Body, FunctionTool, Long, Many, TextRequest, Tools, text_of
from foredraft.server.metrics import drafting_of
from foredraft.server.parts import Call, Part, Piece
from foredraft.server.processors import Position, TokenLogprob

_Part = tuple[dict[str, Any], list[Piece]]  # of a streamed choice: its format, and the pieces of text in it
_MOST_BIASES = 4096  # token ids of `logit_bias` (chosen)
_LEAST_PENALTY = 0.01  # of repetitions, as logits are divided by it; transformers takes any above 0; chosen
_Id = Annotated[int, Field(strict=True)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Biases = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], bodies.at_most(_MOST_BIASES)]
_OneStopOrMore = Annotated[bodies.Stops, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


TopK = Annotated[int, Field(ge=-1), AfterValidator(lambda given: max(given, 0))]
"""All tokens are kept for 0, as in transformers, and for -1, as in vLLM."""


class _StreamOptions(Body):
    within = "stream_options"
    include_usage: bool = False


class _Tool(Body):
    within = "tools"
    type: Literal["function"]
    function: FunctionTool


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

    stream_options: _StreamOptions = _StreamOptions()
    n: Annotated[int, Field(ge=1, le=bodies.MOST_TEXTS)] = 1
    response_format: _ResponseFormat = _ResponseFormat()
    prediction: _Prediction | None = None
    stop: _OneStopOrMore = Field(default_factory=list)
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    logit_bias: _Biases = Field(default_factory=dict)
    top_k: TopK | None = None
    min_p: bodies.Share | None = None
    repetition_penalty: Annotated[float, Field(ge=_LEAST_PENALTY, le=10)] = 1.0
    ignore_eos: bool = False
    return_sources: bool = False

    last_line = b"data: [DONE]\n\n"
    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.return_sources and not self.stream:
            raise ValueError("return_sources needs stream to be true")
        if self.ignore_eos and self.response_format.shape is not None:
            raise ValueError("ignore_eos and response_format exclude each other; leave one of them out")
        return self

    def _request(
        self, prompts: Sequence[Any], most: int | None, logprobs: int | None, tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> TextRequest:  # fmt: skip
        options = self.options(most, top_k=self.top_k, min_p=self.min_p) | {
            "stop_strings": self.stop, "repetition_penalty": self.repetition_penalty,
            "prediction": text_of(self.prediction.content) if self.prediction else None,
            "eos_token_id": () if self.ignore_eos else None,
        }  # fmt: skip
        return TextRequest(
            prompts, options, tools or Tools(), variables or {}, self.n, logprobs, self.logit_bias,
            self.presence_penalty, self.frequency_penalty, self.response_format.shape, self.speculative,
        )  # fmt: skip

    def _whole(self, choices: list[dict[str, Any]], answers: Answers) -> dict[str, Any]:
        counts = {"usage": usage_of(answers), "metrics": drafting_of(answers.records)}
        return self._head(self.whole_object, answers) | {"choices": choices} | counts

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        head = self._head(self.chunk_object, answers)
        counted = self.stream_options.include_usage
        async for choice, pieces in self._parts(answers):
            sources = {"sources": pieces} if self.return_sources else {}
            yield head | {"choices": [choice]} | sources | ({"usage": None} if counted else {})
        if counted:
            yield self._whole([], answers) | head

    def _parts(self, answers: Answers) -> AsyncIterator[_Part]:
        raise NotImplementedError

    def _head(self, kind: str, answers: Answers) -> dict[str, Any]:
        number = f"{self.id_prefix}-{answers.id}"
        return {"id": number, "object": kind, "created": answers.created, "model": self.model}


class ChatRequest(_Request, bodies.ConversationRequest):
    """`/v1/chat/completions`."""

    messages: bodies.Some[bodies.Message]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[_Tool] | None = None
    reasoning_effort: str | None = None

    within, id_prefix, whole_object, chunk_object = "chat", "chatcmpl", "chat.completion", "chat.completion.chunk"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same field; give one of them")
        if self.ignore_eos and self._tools.bound:
            raise ValueError("ignore_eos and tools that are strict, named or required exclude each other; drop one")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def text_request(self) -> TextRequest:
        prompts = [[message.for_template() for message in self.messages]]
        most, logprobs = self.max_completion_tokens or self.max_tokens, self.top_logprobs or 0
        variables = self.variables(self.reasoning_effort)
        return self._request(prompts, most, logprobs if self.logprobs else None, self._tools, variables)

    def whole(self, answers: Answers) -> dict[str, Any]:
        choices = []
        for number, choice in enumerate(answers.choices):
            thought = "".join(part.text for part in choice.blocks if part.kind == "thought")
            calls = [_call(part.call, part.text) for part in choice.blocks if part.call is not None]
            said = choice.text or (None if calls else "")
            message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
            message |= _thought(thought) if thought else {}
            message |= {"tool_calls": calls} if calls else {}
            finish = _finish(choice.finish, called=bool(calls))
            choices.append(self._choice(number, finish, choice.tokens, message=message))
        return self._whole(choices, answers)

    async def _parts(self, answers: Answers) -> AsyncIterator[_Part]:
        calls: list[list[Call]] = [[] for _ in answers.choices]  # begun
        for number in range(len(answers.choices)):
            yield self._choice(number, delta={"role": "assistant", "content": ""}), []
        async for number, delta in answers.deltas():
            tokens = delta.tokens
            for part in delta.blocks or ([Part("text", [])] if tokens else []):
                pieces = part.pieces if part.call is None else []
                yield self._choice(number, None, tokens, delta=_delta(part, calls[number])), pieces
                tokens = []
            if delta.finish is not None:
                yield self._choice(number, _finish(delta.finish, called=bool(calls[number])), delta={}), []

    def _choice(
        self, number: int, finish: str | None = None, tokens: Sequence[Position] = (), **said: Any
    ) -> dict[str, Any]:
        content = [_shown(each.token) | {"top_logprobs": [_shown(other) for other in each.top]} for each in tokens]
        logprobs = {"content": content, "refusal": None} if self.logprobs else None
        return {"index": number, "finish_reason": finish, "logprobs": logprobs} | said


class CompletionRequest(_Request):
    """`/v1/completions`."""

    prompt: str | Many[str] | Long[_Id] | Many[Long[_Id]]
    max_tokens: PositiveInt = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    within, id_prefix, whole_object, chunk_object = "completions", "cmpl", "text_completion", "text_completion"

    def text_request(self) -> TextRequest:
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return self._request([self.prompt] if is_one else self.prompt, self.max_tokens, self.logprobs)

    def whole(self, answers: Answers) -> dict[str, Any]:
        return self._whole([self._choice(*each) for each in enumerate(answers.choices)], answers)

    async def _parts(self, answers: Answers) -> AsyncIterator[_Part]:
        async for number, delta in answers.deltas():
            if delta.parts or delta.tokens or delta.finish:
                pieces = [piece for part in delta.parts for piece in part.pieces]
                yield self._choice(number, delta), pieces

    def _choice(self, number: int, delta: Delta) -> dict[str, Any]:
        tokens = [each.token for each in delta.tokens]
        logprobs = None if self.logprobs is None else {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [{each.text: each.logprob for each in position.top} for position in delta.tokens],
        }  # fmt: skip
        return {"index": number, "text": delta.text, "finish_reason": delta.finish, "logprobs": logprobs}


class TokenizeRequest(Body):
    """vLLM's `/tokenize`: a text without the chat template, or a conversation with it."""

    within = "tokenize"
    model: str | None = None
    prompt: str | None = None
    messages: bodies.Some[bodies.Message] | None = None
    tools: Many[_Tool] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("the chat template adds special tokens; leave add_special_tokens out")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs are for messages; leave them out")
        return self

    def encoded_by(self, encode: Callable[..., Any]) -> Any:
        """Return what `Service.encode` returns for it."""
        if self.messages is None:
            return encode(self.prompt, special=self.add_special_tokens is not False)
        told = Tools.of([tool.function for tool in self.tools or ()], bodies.Choice()).told
        return encode([each.for_template() for each in self.messages], told, self.chat_template_kwargs)


def usage_of(answers: Answers) -> dict[str, Any]:
    """Return token counts of prompt, completion and prediction.

    Rejected prediction tokens are not counted as `completion_tokens`, because they are in no text.
    """
    written = sum(len(record.emitted) for record in answers.records)
    accepted = sum(record.sources.count(PREDICTION) for record in answers.records)
    drafted = sum(choice.prediction.drafted for choice in answers.choices if choice.prediction is not None)
    return {
        "prompt_tokens": answers.prompt_tokens, "completion_tokens": written,
        "total_tokens": answers.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": answers.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.thought_tokens for choice in answers.choices),
            "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
        },
    }  # fmt: skip


def _shown(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def _thought(text: str) -> dict[str, Any]:
    """Return a thought under both names that servers have for it."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: Call, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _delta(part: Part, calls: list[Call]) -> dict[str, Any]:
    """Return a part as a delta, and add its call to those that have `calls` if it is new."""
    if part.call is None:
        return _thought(part.text) if part.kind == "thought" else {"content": part.text}
    if part.call in calls:
        return {"tool_calls": [{"index": calls.index(part.call), "function": {"arguments": part.text}}]}
    calls.append(part.call)
    return {"tool_calls": [{"index": len(calls) - 1} | _call(part.call, part.text)]}


def _finish(finish: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and finish == "stop" else finish
