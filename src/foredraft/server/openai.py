"""OpenAI's `/v1/chat/completions` and `/v1/completions`: what a body wants, and answers in their shapes.

Knows both protocols; not how answers come about.
"""

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from foredraft.sampling import SEED_LIMIT
from foredraft.server.bodies import Asked, ChatRequest, CompletionRequest, Message, Sampled, text_of
from foredraft.server.choice import Choice, Delta, StopFilter, Told
from foredraft.server.events import DONE, event
from foredraft.server.failures import RequestError
from foredraft.server.metrics import speculative_decoding
from foredraft.server.service import Answers, Wanted
from foredraft.server.tools import OPENING, calls_in


def generation_options(body: Asked, most: int | None, **filters: Any) -> dict[str, Any]:
    """Return generation arguments, those that are not given as None; `most` is `max_new_tokens`.

    Greedy decoding takes no filters. Without a temperature it is 1, as OpenAI says.
    """
    seed = None if body.seed is None else body.seed % SEED_LIMIT
    temperature = 1.0 if body.temperature is None else body.temperature
    options = {"max_new_tokens": most, "seed": seed, "temperature": temperature}
    return options | {"do_sample": True, "top_p": body.top_p} | filters if temperature else options


def message_of(message: Message) -> dict[str, Any]:
    """Return a message as chat templates know it."""
    worded: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content),
    }
    if message.tool_calls:
        worded["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id is not None:
        worded["tool_call_id"] = message.tool_call_id
    return worded | ({"name": message.name} if message.name else {})


def wanted_chat(body: ChatRequest) -> Wanted:
    """Return what a body of `/v1/chat/completions` wants."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] if body.tool_choice != "none" else []
    concerned = any(message.role == "tool" or message.tool_calls for message in body.messages)
    return _wanted(
        body,
        prompts=[[message_of(message) for message in body.messages]],
        tools=tools if tools or concerned else None,
        most=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def wanted_completion(body: CompletionRequest) -> Wanted:
    """Return what a body of `/v1/completions` wants."""
    given: Any = body.prompt
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    return _wanted(
        body, prompts=given if several else [given], tools=None, most=body.max_tokens, logprobs=body.logprobs
    )


def _wanted(
    body: Sampled, *, prompts: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None, most: int | None,
    logprobs: int | None,
) -> Wanted:  # fmt: skip
    options = generation_options(body, most, top_k=body.top_k, min_p=body.min_p)
    options["prediction"] = text_of(body.prediction.content) if body.prediction else None
    if body.repetition_penalty != 1.0:
        options["repetition_penalty"] = body.repetition_penalty
    return Wanted(
        prompts, options, tools=tools, n=body.n, stops=body.stops, logprobs=logprobs, bias=body.logit_bias or {},
        presence=body.presence_penalty, frequency=body.frequency_penalty, ignore_eos=body.ignore_eos,
        shape=None if body.response_format is None else body.response_format.shape, speculative=body.speculative,
    )  # fmt: skip


def usage_of(answers: Answers) -> dict[str, Any]:
    """Return what was read and written; of a prediction, what was written and what was drafted and refused.

    Refused tokens are not among the `completion_tokens`, as they are not part of any text.
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


def account_of(answers: Answers) -> dict[str, Any]:
    """Return the usage and the metrics of an answer of OpenAI's."""
    return {"usage": usage_of(answers), "metrics": metrics_of(answers)}


def metrics_of(answers: Answers) -> dict[str, Any]:
    """Return how the answers were drafted."""
    steps = sum(len(choice.records) for choice in answers.choices)
    return {"speculative_decoding": speculative_decoding(answers.choices), "steps": steps}


class ChatShape:
    """How answers of `/v1/chat/completions` look.

    Args:
        body: the request.
        model: the name of the model.
        tokenizer: for the texts of single tokens.
    """

    def __init__(self, body: ChatRequest, model: str, tokenizer: Any) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._has_tools = bool(body.tools) and body.tool_choice != "none"
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the answers in one piece."""
        texts, tokens = await collected(answers)
        choices = []
        for number, choice in enumerate(answers.choices):
            message, finish = self._message(texts[number], choice)
            choices.append({"index": number, "message": message, "finish_reason": finish,
                            "logprobs": self._logprobs(tokens[number])})  # fmt: skip
        return self._head | {"object": "chat.completion", "choices": choices} | account_of(answers)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answers as they grow."""
        for number in range(len(answers.choices)):
            yield self._chunk(number, {"role": "assistant", "content": ""}, None, [])
        # What may be a call of a tool is held back until the end.
        held = [StopFilter([OPENING] if self._has_tools else []) for _ in answers.choices]
        async for number, delta in answers.deltas():
            hold, finish = held[number], delta.finish
            pieces = hold.push(delta.pieces)
            if pieces or delta.tokens:
                shown = {"content": "".join(text for text, _ in pieces)}
                yield self._chunk(number, shown, None, delta.tokens, pieces)
            if finish is not None:
                if calls := calls_in(hold.held):
                    finish = "tool_calls"
                    listed = [{"index": place} | call for place, call in enumerate(calls)]
                    yield self._chunk(number, {"tool_calls": listed}, None, [])
                elif hold.held:
                    yield self._chunk(number, {"content": hold.held}, None, [])
                yield self._chunk(number, {}, finish, [])
        if _tells_usage(self._body):
            yield event(self._head | {"object": "chat.completion.chunk", "choices": []} | account_of(answers))
        yield DONE

    def _chunk(
        self, number: int, delta: dict[str, Any], finish: str | None, tokens: list[Told], pieces: Any = ()
    ) -> bytes:
        choice = {"index": number, "delta": delta, "finish_reason": finish, "logprobs": self._logprobs(tokens)}
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return event(chunk | {"sources": list(pieces)} if self._body.return_sources else chunk)

    def _message(self, text: str, choice: Choice) -> tuple[dict[str, Any], str | None]:
        calls = calls_in(text) if self._has_tools else None
        if calls is None:
            return {"role": "assistant", "content": text, "refusal": None}, choice.finish
        before = text.partition(OPENING)[0].strip() or None
        return {"role": "assistant", "content": before, "refusal": None, "tool_calls": calls}, "tool_calls"

    def _logprobs(self, tokens: list[Told]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = []
        for token_id, (of_chosen, top) in tokens:
            likely = [self._token(each, logprob) for each, logprob in top]
            content.append(self._token(token_id, of_chosen) | {"top_logprobs": likely})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


class CompletionShape:
    """How answers of `/v1/completions` look; the arguments are those of `ChatShape`."""

    def __init__(self, body: CompletionRequest, model: str, tokenizer: Any) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._head |= {"object": "text_completion"}
        self._offsets: dict[int, int] = {}

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the answers in one piece."""
        texts, tokens = await collected(answers)
        choices = [
            self._choice(number, texts[number], tokens[number], choice.finish)
            for number, choice in enumerate(answers.choices)
        ]
        return self._head | {"choices": choices} | account_of(answers)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield the answers as they grow."""
        async for number, delta in answers.deltas():
            if delta.pieces or delta.tokens or delta.finish:
                chunk = self._head | {"choices": [self._choice(number, delta.text, delta.tokens, delta.finish)]}
                yield event(chunk | {"sources": delta.pieces} if self._body.return_sources else chunk)
        if _tells_usage(self._body):
            yield event(self._head | {"choices": []} | account_of(answers))
        yield DONE

    def _choice(self, number: int, text: str, tokens: list[Told], finish: str | None) -> dict[str, Any]:
        return {"index": number, "text": text, "finish_reason": finish, "logprobs": self._logprobs(number, tokens)}

    def _logprobs(self, number: int, tokens: list[Told]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        worded = [self._tokenizer.decode([token]) for token, _ in tokens]
        offsets = []
        for text in worded:
            offsets.append(self._offsets.get(number, 0))
            self._offsets[number] = offsets[-1] + len(text)
        return {
            "tokens": worded,
            "token_logprobs": [logprobs.of_chosen for _, logprobs in tokens],
            "top_logprobs": [
                {self._tokenizer.decode([each]): logprob for each, logprob in told.top} for _, told in tokens
            ],
            "text_offset": offsets,
        }


def _tells_usage(body: Sampled) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def collected(answers: Answers) -> tuple[list[str], list[list[Told]]]:
    """Return the whole texts, and their tokens where log-probabilities were asked for."""
    deltas: list[list[Delta]] = [[] for _ in answers.choices]
    async for number, delta in answers.deltas():
        deltas[number].append(delta)
    texts = ["".join(delta.text for delta in each) for each in deltas]
    return texts, [[token for delta in each for token in delta.tokens] for each in deltas]


def error_shape(failure: RequestError) -> dict[str, Any]:
    """Return a failure as OpenAI words it."""
    return {"error": {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}}
