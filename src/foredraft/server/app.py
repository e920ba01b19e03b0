"""The HTTP routes, the checks of every request (body size, API key, fields, model name).

Does not depend on how answers are generated or formatted.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from foredraft.errors import ForedraftError
from foredraft.server import bodies
from foredraft.server.answers import Answers
from foredraft.server.anthropic import CountRequest, MessagesRequest
from foredraft.server.openai import ChatRequest, CompletionRequest, TokenizeRequest
from foredraft.server.replies import RequestError, failure_of, sent, written
from foredraft.server.responses import ResponsesRequest
from foredraft.server.service import Service

AnyBody = TypeVar("AnyBody", bound=bodies.Body)

_MOST_BYTES = 4 << 20  # of a body (chosen)
_LONG = 1 << 15  # bytes of a body that is prepared by the threads for long ones; 20 ms of tokenizing (chosen)
_BODY_SECONDS = 30.0  # for receiving a body, and for sending the end of a late answer (chosen)
_PAGE = Path(__file__).with_name("page.html")
_GENERATING = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}


def make_app(service: Service, keys: tuple[str, ...], hosts: tuple[str, ...], origins: tuple[str, ...] = ()) -> FastAPI:
    """Return the application.

    `keys` are the accepted API keys; without any, `hosts` are the allowed host names, and none means all. `origins` are
    those of other sites whose pages may use it, or "*".
    """
    app = FastAPI(title="foredraft", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service, app.state.keys, app.state.hosts, app.state.origins = service, keys, hosts, origins
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    for kind in (Exception, RequestError, ForedraftError, ValidationError, TimeoutError, HTTPException):
        app.add_exception_handler(kind, _failed)
    for path, body in _GENERATING.items():
        app.post(path)(_answering(service, body))
    _add_tokens(app, service)
    _add_facts(app, service)
    return app


def _answering(service: Service, kind: type[Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a route that generates, whose body is of `kind`."""

    async def answer(request: Request) -> Response:
        key, body, long = await _read(request, kind)
        body.model = service.name
        answers = await service.begin(body.text_request(), key, long=long)
        if body.stream:
            return _AnswerStream(service, answers, body)
        try:
            await _unless_gone(request, answers.ended())
            return Response(written(body.whole(answers)), media_type="application/json")
        finally:
            service.end(answers)

    return answer


class _AnswerStream(StreamingResponse):
    """Streams answers, and cancels unfinished ones at the end, also if the client leaves before the first event."""

    def __init__(self, service: Service, answers: Answers, body: Any) -> None:
        self._service, self._answers, self._body = service, answers, body
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._content(), media_type="text/event-stream", headers=headers)

    async def _content(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._body.events(self._answers):
                yield sent(event)
            yield self._body.last_line
        except Exception as error:  # noqa: BLE001  # the response has started, so the error goes into the stream
            yield sent(self._body.failed(failure_of(error)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):  # the client does not read
                async with asyncio.timeout_at(self._answers.until + _BODY_SECONDS):
                    await super().__call__(scope, receive, send)
        finally:
            self._service.end(self._answers)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages/count_tokens")
    async def _count(request: Request) -> Response:
        _, body, long = await _read(request, CountRequest)
        asked = body.text_request()
        ids = await service.in_turn(service.encode, asked.prompts[0], asked.tools.told, asked.variables, long=long)
        return JSONResponse({"input_tokens": len(ids)})

    @app.post("/tokenize")
    async def _tokenize(request: Request) -> Response:
        _, body, long = await _read(request, TokenizeRequest)
        ids = (await service.in_turn(body.encoded_by, service.encode, long=long)).tolist()
        named = service.generator.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return JSONResponse({
            "tokens": ids, "count": len(ids), "max_model_len": service.generator.target.window, "token_strs": named,
        })  # fmt: skip


def _add_facts(app: FastAPI, service: Service) -> None:
    model = {"id": service.name, "object": "model", "created": 0, "owned_by": "foredraft",
             "max_model_len": service.generator.target.window, "methods": service.methods}  # fmt: skip

    async def shown(_request: Request) -> Response:
        return FileResponse(_PAGE)

    async def health(_request: Request) -> Response:
        if not service.writer.alive:
            raise RequestError(503, "The server is stopping.", "server_error")
        return PlainTextResponse("ok")

    async def metrics(request: Request) -> Response:
        _key(request)
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(request: Request) -> Response:
        _key(request)
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        _key(request)
        _check_model(request, request.path_params["named"])
        return JSONResponse(model)

    for path, answer in {
        "/": shown, "/health": health, "/metrics": metrics, "/v1/models": models, "/v1/models/{named:path}": one_model,
    }.items():  # fmt: skip
        app.add_route(path, answer)  # to GET and HEAD


async def _unless_gone(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`; cancel it when the client disconnects."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=0.2))[0]:
            if await request.is_disconnected():
                raise RequestError(499, "The client disconnected.")
        task.result()  # raises its failure
    finally:
        task.cancel()


async def _read(request: Request, kind: type[AnyBody]) -> tuple[str, AnyBody, bool]:
    """Return the key and the body of a request, and whether it is long, after checking its size, key and model."""
    key, data = _key(request), bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > _MOST_BYTES:
                    problem = f"The body has more than {_MOST_BYTES:,} bytes; send less."
                    raise RequestError(413, problem, code="body_too_large")
    except TimeoutError as error:
        raise RequestError(408, f"The body took more than {_BODY_SECONDS:.0f} seconds; send it at once.") from error
    except ClientDisconnect as error:
        raise RequestError(499, "The client disconnected.") from error
    validated, long = partial(kind.model_validate_json, bytes(data)), len(data) > _LONG
    body = await request.app.state.service.in_turn(validated, long=True) if long else validated()
    _check_model(request, getattr(body, "model", None), "model")
    return key, body, long


def _check_model(request: Request, model: str | None, param: str | None = None) -> None:
    name = request.app.state.service.name
    if model not in (None, name):
        raise RequestError(404, f"This server has only the model {name!r}.", param=param, code="model_not_found")


def _key(request: Request) -> str:
    """Return the API key of a request, or "" if none is needed.

    Without keys, requests from another site's pages are rejected by their Origin, and DNS rebinding by the Host.
    """
    keys, hosts = request.app.state.keys, request.app.state.hosts
    if keys:
        header = request.headers.get("authorization", "")
        scheme, _, token = header.partition(" ")
        given = request.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else header)
        for key in keys:
            if hmac.compare_digest(key.encode(), given.encode("latin-1")):  # headers are bytes, shown as Latin-1
                return str(key)
        raise RequestError(401, "The API key is missing or wrong.", "authentication_error", code="invalid_api_key")
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    try:
        allowed = not hosts or urlsplit(f"//{host}").hostname in hosts
        known = origin in request.app.state.origins or "*" in request.app.state.origins
        allowed = allowed and (not origin or known or urlsplit(origin).netloc == host)
    except ValueError:  # it is no address
        allowed = False
    if not allowed:
        problem = "Pages of other sites may not use this server; --cors-origin allows those of a site."
        raise RequestError(403, problem)
    return ""


def _failed(request: Request, error: Exception) -> Response:
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        headers = error.headers or {}  # of status 405: the methods that are allowed
        routes = {route.path for route in request.app.routes if isinstance(route, Route) and route.path != "/"}
        remedy = f"use {headers['Allow']}" if "Allow" in headers else f"the routes are {', '.join(sorted(routes))}"
        error = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}; {remedy}.")
    failure, is_anthropics = failure_of(error), request.url.path.startswith("/v1/messages")
    body = MessagesRequest.failed(failure) if is_anthropics else bodies.GenerationRequest.failed(failure)
    return JSONResponse(body, failure.status, headers={**headers, **failure.headers})
