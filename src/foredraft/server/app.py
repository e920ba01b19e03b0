"""The HTTP routes, and the checks of every request: body size, API key, fields and model name.

Does not depend on how answers are generated or formatted.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from foredraft.errors import ForedraftError
from foredraft.request import encoded
from foredraft.server.anthropic import MessageShape, anthropic_error, conversation_of
from foredraft.server.bodies import (
    Body,
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    GenerationRequest,
    MessagesRequest,
    ResponsesRequest,
    TextsRequest,
    TokenizeRequest,
)
from foredraft.server.openai import ChatShape, CompletionShape, error_shape, message_of
from foredraft.server.replies import AnswerStream, RequestError, failure_of
from foredraft.server.responses import ResponseShape
from foredraft.server.service import Service
from foredraft.server.stores import Stores
from foredraft.text import decode

AnyBody = TypeVar("AnyBody", bound=Body)

_PAGE = Path(__file__).with_name("page.html")
_TEXTS: dict[str, tuple[type[GenerationRequest], Callable[[Any, str, Any], Any]]] = {
    "/v1/chat/completions": (ChatRequest, ChatShape),
    "/v1/completions": (CompletionRequest, CompletionShape),
    "/v1/responses": (ResponsesRequest, ResponseShape),
    "/v1/messages": (MessagesRequest, MessageShape),
}
"""The routes that generate: the body of each, and the class that translates requests and formats answers."""


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules of a server."""

    keys: tuple[str, ...] = ()  # accepted API keys; empty if none is needed
    hosts: tuple[str, ...] = ()  # allowed host names of requests without keys; empty allows all
    most_bytes: int = 4 << 20  # bytes of a body (chosen)
    most_prompts: int = 64  # texts per request (chosen)


def make_app(
    service: Service, stores: Stores, name: str, access: Access, started: Callable[[], Awaitable[None]]
) -> FastAPI:
    """Return the application for the model `name`; `started` is called once the event loop runs."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await started()
        yield

    app = FastAPI(title="foredraft", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.name, app.state.access = name, access
    for kind in (Exception, RequestError, ForedraftError, ValidationError, TimeoutError, HTTPException):
        app.add_exception_handler(kind, _failed)
    for path, (body, shape) in _TEXTS.items():
        app.post(path)(_answering(service, body, shape))
    _add_tokens(app, service)
    _add_stores(app, service, stores)
    _add_facts(app, service)
    return app


def _answering(
    service: Service, kind: type[GenerationRequest], shape_of: Callable[[Any, str, Any], Any]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a route that generates."""

    async def answer(request: Request) -> Response:
        key, body = await _read(request, kind)
        shape = shape_of(body, request.app.state.name, service.generator.tokenizer)
        text_request, most = shape.text_request(), request.app.state.access.most_prompts
        count = len(text_request.prompts) * text_request.n
        if count > most:
            raise RequestError(400, f"The request needs {count} texts; the limit is {most}.")
        answers = await service.begin(text_request, key)
        if body.stream:
            return AnswerStream(service, answers, shape.events(answers), shape.failed)
        with service.attending(answers):
            return JSONResponse(await _unless_gone(request, shape.whole(answers)))

    return answer


def _add_tokens(app: FastAPI, service: Service) -> None:
    tokenizer, vocabulary = service.generator.tokenizer, service.generator.target.vocabulary

    @app.post("/v1/messages/count_tokens")
    async def _count(request: Request) -> Response:
        _, body = await _read(request, CountRequest)
        ids = await service.prepared_in_turn(encoded, conversation_of(body), tokenizer, vocabulary)
        return JSONResponse({"input_tokens": len(ids)})

    @app.post("/tokenize")
    async def _tokenize(request: Request) -> Response:
        _, body = await _read(request, TokenizeRequest)
        messages = [message_of(message) for message in body.messages or []]
        prompt = messages if body.prompt is None else body.prompt
        ids = await service.prepared_in_turn(encoded, prompt, tokenizer, vocabulary)
        window = service.generator.target.window
        return JSONResponse({"tokens": ids.tolist(), "count": len(ids), "max_model_len": window})

    @app.post("/detokenize")
    async def _detokenize(request: Request) -> Response:
        _, body = await _read(request, DetokenizeRequest)
        if any(not 0 <= token < vocabulary for token in body.tokens):
            raise RequestError(400, f"tokens has an id outside the vocabulary; use ids from 0 to {vocabulary - 1}.")
        return JSONResponse({"prompt": await service.prepared_in_turn(decode, tokenizer, body.tokens)})


def _add_stores(app: FastAPI, service: Service, stores: Stores) -> None:
    @app.get("/v1/stores")
    async def _stores(request: Request) -> Response:
        listed = await service.prepared_in_turn(stores.list, _key(request))
        return JSONResponse({"object": "list", "data": listed})

    @app.post("/v1/stores/{store}/texts")
    async def _add(request: Request, store: str) -> Response:
        key, body = await _read(request, TextsRequest)
        return JSONResponse(await service.prepared_in_turn(stores.add, key, store, body.texts))

    @app.delete("/v1/stores/{store}")
    async def _remove(request: Request, store: str) -> Response:
        await service.prepared_in_turn(stores.remove, _key(request), store)
        return JSONResponse({"id": store, "object": "store", "deleted": True})


def _add_facts(app: FastAPI, service: Service) -> None:
    name, page = app.state.name, _PAGE.read_text("utf-8")

    @app.get("/")
    async def _page() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/health", response_class=PlainTextResponse)
    async def _health() -> str:
        return "ok"

    @app.get("/metrics")
    async def _metrics(request: Request) -> Response:
        _key(request)
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def _models(request: Request) -> Response:
        _key(request)
        return JSONResponse({"object": "list", "data": [_model()]})

    @app.get("/v1/models/{model:path}")
    async def _one_model(request: Request, model: str) -> Response:
        _key(request)
        _check_model(request, model)
        return JSONResponse(_model())

    def _model() -> dict[str, Any]:
        window = service.generator.target.window
        return {"id": name, "object": "model", "created": 0, "owned_by": "foredraft", "max_model_len": window,
                "methods": service.generators.methods}  # fmt: skip


async def _unless_gone(request: Request, work: Any) -> Any:
    """Return the result of `work`; cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=0.2))[0]:
            if await request.is_disconnected():
                raise RequestError(499, "The client disconnected.")
        return task.result()
    finally:
        task.cancel()


async def _read(request: Request, kind: type[AnyBody]) -> tuple[str, AnyBody]:
    """Return the key and the body of a request, after checking its size, key and model."""
    key = _key(request)
    most = request.app.state.access.most_bytes
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise RequestError(413, f"The body has more than {most:,} bytes; send less.", code="body_too_large")
    body = kind.model_validate_json(bytes(data))
    model = getattr(body, "model", None)
    if model is not None:
        _check_model(request, model, "model")
    return key, body


def _check_model(request: Request, model: str, param: str | None = None) -> None:
    name = request.app.state.name
    if model != name:
        raise RequestError(404, f"This server has only the model {name!r}.", param=param, code="model_not_found")


def _key(request: Request) -> str:
    """Return the API key of a request, or "" if none is needed.

    Without keys, requests from another site's pages are rejected by their Origin, and DNS rebinding by the Host.
    """
    access: Access = request.app.state.access
    if access.keys:
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        encoded_key = given.encode("utf-8", "surrogateescape")
        for key in access.keys:
            if hmac.compare_digest(key.encode(), encoded_key):
                return key
        raise RequestError(401, "The API key is missing or wrong.", "authentication_error", code="invalid_api_key")
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    allowed = not access.hosts or urlsplit(f"//{host}").hostname in access.hosts
    if not allowed or (origin and urlsplit(origin).netloc != host):
        raise RequestError(403, "Pages of other sites may not use this server; start it with --api-key to allow them.")
    return ""


def _failed(request: Request, error: Exception) -> Response:
    """Return the error response in the format of the request's protocol."""
    if isinstance(error, HTTPException):
        error = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    failure = failure_of(error)
    body = anthropic_error(failure) if request.url.path.startswith("/v1/messages") else error_shape(failure)
    return JSONResponse(body, failure.status, headers=failure.headers)
