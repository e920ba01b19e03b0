"""OpenAI's `/v1/chat/completions` and `/v1/completions`: translates requests and formats answers.

Tool calls are parsed in the format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Does
not depend on how answers are generated.
"""

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from foredraft.sampling import SEED_LIMIT
from foredraft.server.bodies import ChatRequest, CompletionRequest, GenerationRequest, Message, OpenAIRequest, text_of
from foredraft.server.choice import Choice, StopFilter
from foredraft.server.metrics import drafting_of
from foredraft.server.processors import TokenLogprobs
from foredraft.server.replies import DONE, RequestError, event
from foredraft.server.service import TOOL_CALL, Answers, TextRequest

_CALL = re.compile(TOOL_CALL + r"\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def generation_options(body: GenerationRequest, most: int | None, **filters: Any) -> dict[str, Any]:
    """Return generation arguments, with None for missing ones; `most` is `max_new_tokens`.

    The default temperature is 1, as in OpenAI's API. Filters are dropped for greedy decoding.
    """
    seed = None if body.seed is None else body.seed % SEED_LIMIT
    temperature = 1.0 if body.temperature is None else body.temperature
    options = {"max_new_tokens": most, "seed": seed, "temperature": temperature}
    return options | {"do_sample": True, "top_p": body.top_p} | filters if temperature else options


def message_of(message: Message) -> dict[str, Any]:
    """Return a message in the format of chat templates."""
    role = "system" if message.role == "developer" else message.role
    optional = message.model_dump(include={"tool_calls", "tool_call_id", "name"})
    return {"role": role, "content": text_of(message.content)} | {name: each for name, each in optional.items() if each}


def _text_request(
    body: OpenAIRequest, *, prompts: Sequence[Any], most: int | None, logprobs: int | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> TextRequest:  # fmt: skip
    options = generation_options(body, most, top_k=body.top_k, min_p=body.min_p)
    options["prediction"] = text_of(body.prediction.content) if body.prediction else None
    if body.repetition_penalty != 1.0:
        options["repetition_penalty"] = body.repetition_penalty
    return TextRequest(
        prompts, options, tools=tools, n=body.n, stops=body.stop or (), logprobs=logprobs, bias=body.logit_bias or {},
        presence=body.presence_penalty, frequency=body.frequency_penalty, ignore_eos=body.ignore_eos,
        shape=None if body.response_format is None else body.response_format.shape, speculative=body.speculative,
    )  # fmt: skip


def usage_of(answers: Answers) -> dict[str, Any]:
    """Return token counts of prompt, completion and prediction.

    Rejected prediction tokens are not counted as `completion_tokens`, because they are in no text.
    """
    written = sum(len(record.emitted) for choice in answers.choices for record in choice.records)
    predicted = [choice.predicted for choice in answers.choices]
    return {
        "prompt_tokens": answers.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": answers.prompt_tokens + written,
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(accepted for accepted, _ in predicted),
            "rejected_prediction_tokens": sum(rejected for _, rejected in predicted),
        },
    }


def error_shape(failure: RequestError) -> dict[str, Any]:
    """Return a failure in OpenAI's format."""
    return {"error": {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}}


class _Shape:
    """The common part of both routes."""

    kind: str  # prefix of the answer's id

    def __init__(self, body: Any, model: str, tokenizer: Any) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._head = {"id": f"{self.kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def failed(self, failure: RequestError) -> bytes:
        """Return the event that ends a failed stream."""
        return event(error_shape(failure))

    def _whole(self, object_: str, choices: list[dict[str, Any]], answers: Answers) -> dict[str, Any]:
        counts = {"usage": usage_of(answers), "metrics": drafting_of(answers.choices)}
        return self._head | {"object": object_, "choices": choices} | counts

    def _chunk(self, object_: str, choice: dict[str, Any], pieces: Any) -> bytes:
        sources = {"sources": list(pieces)} if self._body.return_sources else {}
        return event(self._head | {"object": object_, "choices": [choice]} | sources)

    def _end(self, object_: str, answers: Answers) -> bytes:
        has_usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        return event(self._whole(object_, [], answers)) + DONE if has_usage else DONE


class ChatShape(_Shape):
    """A request of `/v1/chat/completions`, and the format of its answers."""

    kind = "chatcmpl"
    _body: ChatRequest

    def text_request(self) -> TextRequest:
        """Translate the body."""
        body = self._body
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] if self._has_tools else []
        has_calls = any(message.role == "tool" or message.tool_calls for message in body.messages)
        return _text_request(
            body,
            prompts=[[message_of(message) for message in body.messages]],
            tools=tools if tools or has_calls else None,
            most=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the complete answers."""
        choices = []
        for number, delta in enumerate(await answers.whole()):
            message, finish = self._message(delta.text, answers.choices[number])
            choices.append({"index": number, "message": message, "finish_reason": finish,
                            "logprobs": self._logprobs(delta.tokens)})  # fmt: skip
        return self._whole("chat.completion", choices, answers)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answers as a stream of events."""
        for number in range(len(answers.choices)):
            yield self._delta(number, {"role": "assistant", "content": ""})
        # a possible tool call is held back until the end
        filters = [StopFilter([TOOL_CALL] if self._has_tools else []) for _ in answers.choices]
        async for number, delta in answers.deltas():
            calls_filter, finish = filters[number], delta.finish
            pieces = calls_filter.push(delta.pieces)
            if pieces or delta.tokens:
                content = {"content": "".join(text for text, _ in pieces)}
                yield self._delta(number, content, tokens=delta.tokens, pieces=pieces)
            if finish is not None:
                if calls := _calls_in(calls_filter.held):
                    finish = "tool_calls"
                    yield self._delta(number, {"tool_calls": [{"index": n} | call for n, call in enumerate(calls)]})
                elif calls_filter.held:
                    yield self._delta(number, {"content": calls_filter.held})
                yield self._delta(number, {}, finish)
        yield self._end("chat.completion.chunk", answers)

    def _delta(
        self, number: int, delta: dict[str, Any], finish: str | None = None, tokens: Sequence[TokenLogprobs] = (),
        pieces: Any = (),
    ) -> bytes:  # fmt: skip
        choice = {"index": number, "delta": delta, "finish_reason": finish, "logprobs": self._logprobs(tokens)}
        return self._chunk("chat.completion.chunk", choice, pieces)

    @property
    def _has_tools(self) -> bool:
        return bool(self._body.tools) and self._body.tool_choice != "none"

    def _message(self, text: str, choice: Choice) -> tuple[dict[str, Any], str | None]:
        calls = _calls_in(text) if self._has_tools else None
        if calls is None:
            return {"role": "assistant", "content": text, "refusal": None}, choice.finish
        before = text.partition(TOOL_CALL)[0].strip() or None
        return {"role": "assistant", "content": before, "refusal": None, "tool_calls": calls}, "tool_calls"

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = []
        for token, of_chosen, top in tokens:
            likely = [self._token(each, logprob) for each, logprob in top]
            content.append(self._token(token, of_chosen) | {"top_logprobs": likely})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


class CompletionShape(_Shape):
    """A request of `/v1/completions`, and the format of its answers."""

    kind = "cmpl"
    _body: CompletionRequest

    def text_request(self) -> TextRequest:
        """Translate the body."""
        body, prompt = self._body, self._body.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts: Any = prompt if several else [prompt]
        return _text_request(body, prompts=prompts, most=body.max_tokens, logprobs=body.logprobs)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the complete answers."""
        choices = [
            self._choice(number, delta.text, delta.finish, self._logprobs(delta.tokens, 0))
            for number, delta in enumerate(await answers.whole())
        ]
        return self._whole("text_completion", choices, answers)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answers as a stream of events."""
        offsets = [0] * len(answers.choices)
        async for number, delta in answers.deltas():
            if delta.pieces or delta.tokens or delta.finish:
                logprobs = self._logprobs(delta.tokens, offsets[number])
                offsets[number] += sum(map(len, logprobs["tokens"])) if logprobs else 0
                choice = self._choice(number, delta.text, delta.finish, logprobs)
                yield self._chunk("text_completion", choice, delta.pieces)
        yield self._end("text_completion", answers)

    def _choice(self, number: int, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": number, "text": text, "finish_reason": finish, "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens whose text begins at `offset` in the answer."""
        if self._body.logprobs is None:
            return None
        decode = self._tokenizer.decode
        texts = [decode([each.token]) for each in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [each.of_chosen for each in tokens],
            "top_logprobs": [{decode([token]): logprob for token, logprob in each.top} for each in tokens],
            "text_offset": [offset + sum(map(len, texts[:number])) for number in range(len(texts))],
        }


def _calls_in(text: str) -> list[dict[str, Any]] | None:
    """Return the tool calls of a text in OpenAI's format; None if it has none or one cannot be parsed."""
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str):
            return None
        function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return calls or None
