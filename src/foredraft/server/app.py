"""The routes, and what stands before each: the size of the body, the API key, and its fields.

Knows HTTP and where each request goes; not how answers come about, nor their shapes.
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
from foredraft.server import openai
from foredraft.server.anthropic import MessageShape, anthropic_error, conversation_of, failed_message, wanted_message
from foredraft.server.bodies import (
    Body,
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TextsRequest,
    TokenizeRequest,
)
from foredraft.server.events import event, streamed
from foredraft.server.failures import RequestError, failure_of
from foredraft.server.responses import ResponseShape, failed_response, wanted_response
from foredraft.server.service import Service, Wanted
from foredraft.server.stores import Stores
from foredraft.text import decode

_PAGE = Path(__file__).with_name("page.html")
AnyBody = TypeVar("AnyBody", bound=Body)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask for what.

    Attributes:
        keys: API keys, one of which a request must carry; none where anybody may ask.
        hosts: names by which the server may be asked for where there are no keys; none where any will do.
        most_bytes: of a body.
        most_prompts: texts that one request may ask for.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    most_bytes: int = 4 << 20
    most_prompts: int = 64


def make_app(
    service: Service, stores: Stores, name: str, access: Access, started: Callable[[], Awaitable[None]] | None = None
) -> FastAPI:
    """Return the application.

    Args:
        service: writes answers.
        stores: that clients fill.
        name: of the model.
        access: who may ask for what.
        started: called when the server's loop runs.
    """

    @asynccontextmanager
    async def living(_app: FastAPI) -> AsyncIterator[None]:
        if started is not None:
            await started()
        yield

    app = FastAPI(title="foredraft", lifespan=living, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.name, app.state.access = name, access
    _answer_failures(app)
    _add_texts(app, service)
    _add_tokens(app, service)
    _add_stores(app, service, stores)
    _add_facts(app, service)
    return app


def _add_texts(app: FastAPI, service: Service) -> None:
    name, tokenizer = app.state.name, service.generator.tokenizer

    async def answered(request: Request, key: str, wanted: Wanted, shape: Any, stream: bool, failed: Any) -> Response:
        if len(wanted.prompts) * wanted.n > app.state.access.most_prompts:
            most = app.state.access.most_prompts
            raise RequestError(400, f"{len(wanted.prompts) * wanted.n} texts are asked for; ask for at most {most}.")
        answers = await service.begin(wanted, key)
        if stream:
            return streamed(service, answers, shape.events(answers), failed)
        with service.attending(answers):
            return JSONResponse(await _unless_gone(request, shape.whole(answers)))

    def failed_openai(failure: RequestError) -> bytes:
        return event(openai.error_shape(failure))

    @app.post("/v1/chat/completions")
    async def _chat(request: Request) -> Response:
        key, body = await _read(request, ChatRequest)
        shape = openai.ChatShape(body, name, tokenizer)
        return await answered(request, key, openai.wanted_chat(body), shape, body.stream, failed_openai)

    @app.post("/v1/completions")
    async def _completions(request: Request) -> Response:
        key, body = await _read(request, CompletionRequest)
        shape = openai.CompletionShape(body, name, tokenizer)
        return await answered(request, key, openai.wanted_completion(body), shape, body.stream, failed_openai)

    @app.post("/v1/responses")
    async def _responses(request: Request) -> Response:
        key, body = await _read(request, ResponsesRequest)
        shape = ResponseShape(body, name)
        return await answered(request, key, wanted_response(body), shape, body.stream, failed_response)

    @app.post("/v1/messages")
    async def _messages(request: Request) -> Response:
        key, body = await _read(request, MessagesRequest)
        return await answered(request, key, wanted_message(body), MessageShape(name), body.stream, failed_message)


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
        messages = [openai.message_of(message) for message in body.messages or []]
        prompt = messages if body.prompt is None else body.prompt
        ids = await service.prepared_in_turn(encoded, prompt, tokenizer, vocabulary)
        return JSONResponse(
            {"tokens": ids.tolist(), "count": len(ids), "max_model_len": service.generator.target.window}
        )

    @app.post("/detokenize")
    async def _detokenize(request: Request) -> Response:
        _, body = await _read(request, DetokenizeRequest)
        if any(not 0 <= token < vocabulary for token in body.tokens):
            raise RequestError(400, f"tokens holds an id that the model does not have: 0 to {vocabulary - 1}.")
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
        if model != name:
            raise RequestError(404, f"This server has the model {name!r}, and no other.", code="model_not_found")
        return JSONResponse(_model())

    def _model() -> dict[str, Any]:
        window = service.generator.target.window
        return {"id": name, "object": "model", "created": 0, "owned_by": "foredraft", "max_model_len": window,
                "methods": service.generators.methods}  # fmt: skip


async def _unless_gone(request: Request, work: Any) -> Any:
    """Return what comes of `work`; give it up when the client goes."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.2)

    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError(499, "The client went away.")
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


async def _read(request: Request, kind: type[AnyBody]) -> tuple[str, AnyBody]:
    """Return the key and the body of a request.

    Raises:
        RequestError: no valid key, a body that is too large, or another model.
        ValidationError: a body that cannot be honoured.
    """
    key = _key(request)
    most = request.app.state.access.most_bytes
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise RequestError(413, f"The body has more than {most:,} bytes; send less.", code="body_too_large")
    body = kind.model_validate_json(bytes(data))
    asked, name = getattr(body, "model", None), request.app.state.name
    if asked is not None and asked != name:
        raise RequestError(
            404, f"This server has the model {name!r}, and no other.", param="model", code="model_not_found"
        )
    return key, body


def _key(request: Request) -> str:
    """Return the API key of a request, or "" where none is needed.

    Raises:
        RequestError: none that is valid; without keys, a request that a page of another site had a browser make.
    """
    keys: tuple[str, ...] = request.app.state.access.keys
    if not keys:
        _check_site(request)
        return ""
    given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    valid = [key for key in keys if hmac.compare_digest(key.encode(), given.encode("utf-8", "surrogateescape"))]
    if not valid:
        raise RequestError(401, "The API key is missing or wrong.", "authentication_error", code="invalid_api_key")
    return valid[0]


def _check_site(request: Request) -> None:
    """Refuse what another site's page asks for, also under a name of its own for this address.

    Raises:
        RequestError: the origin is not this server, or the server is asked for by a name that it does not have.
    """
    hosts: tuple[str, ...] = request.app.state.access.hosts
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if (hosts and urlsplit(f"//{host}").hostname not in hosts) or (origin and urlsplit(origin).netloc != host):
        raise RequestError(403, "Pages of other sites may not use this server; start it with --api-key to allow them.")


def _answer_failures(app: FastAPI) -> None:
    def answer(request: Request, error: Exception) -> Response:
        failure = failure_of(error)
        anthropic = request.url.path.startswith("/v1/messages")
        body = anthropic_error(failure) if anthropic else openai.error_shape(failure)
        return JSONResponse(body, failure.status, headers=failure.headers)

    def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "it is registered for these"
        return answer(request, RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}."))

    app.add_exception_handler(Exception, answer)
    for kind in (RequestError, ForedraftError, ValidationError, TimeoutError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_http)
