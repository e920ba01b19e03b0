"""The life of a server: it is built, listens, serves, and at a stop finishes or fails the texts in progress.

Uses uvicorn and signals. Does not depend on routes.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from foredraft.errors import UsageError
from foredraft.generator import CACHE_BYTES, Generator
from foredraft.model.compiled.library import release_threads
from foredraft.server.app import make_app
from foredraft.server.generators import Generators
from foredraft.server.metrics import Metrics
from foredraft.server.service import Service
from foredraft.server.stores import Stores

_GRACE = 30.0  # seconds to finish texts after a stop (chosen)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Listening:
    """A server that listens once it is built, so that its address is known, and serves when `run` is called.

    `generator` and `config` are those of `Generators`, the limits those of `Service`. `name` is the model's name for
    clients, `port` 0 a free port, `stores` the folder for what clients fill, and `keys` the accepted API keys, if one
    is needed. An address that it cannot listen on is a UsageError.
    """

    def __init__(
        self, generator: Generator, name: str, config: Mapping[str, Any], *, host: str = "127.0.0.1", port: int = 8000,
        most_at_once: int = 16, most_waiting: int = 64, cache_bytes: int = CACHE_BYTES, timeout: float = 600.0,
        stores: Path | None = None, keys: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except (OSError, OverflowError) as error:
            problem = f"Nothing can listen on {host}, port {port} ({error}); choose another --port or --host."
            raise UsageError(problem) from error
        kept = Stores(stores, generator.tokenizer.backend_tokenizer)
        self._service = Service(
            Generators(generator, config, kept), Metrics(name), most_at_once=most_at_once, most_waiting=most_waiting,
            cache_bytes=cache_bytes, timeout=timeout,
        )  # fmt: skip
        release_threads()  # from now on, passes run in the writer's thread
        hosts = _LOOPBACK if host in _LOOPBACK else ()
        app = make_app(self._service, kept, name, keys, hosts, self._lifespan)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(settings)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Serve until `stop` or a signal; then finish the texts in progress."""
        self._server.run(sockets=[self._socket])
        self._service.close()

    def stop(self) -> None:
        """Reject new texts, finish those in progress within the grace period, and end `run`; from any thread."""
        self._service.writer.close(_GRACE)
        self._server.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Make signals call `stop`; uvicorn's own handler would drop every answer."""
        loop = asyncio.get_running_loop()
        stopping: list[asyncio.Future[None]] = []  # the loop itself keeps no reference

        def stop() -> None:
            if stopping:  # a second signal stops at once
                self._server.force_exit = self._server.should_exit = True
            stopping.append(loop.run_in_executor(None, self.stop))

        with suppress(RuntimeError, ValueError, NotImplementedError):  # not the main thread, or not supported here
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop)
        yield
