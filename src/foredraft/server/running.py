"""The life of a server: it is built, listens, serves, and at a stop finishes or fails the texts in progress.

Uses uvicorn and signals. Does not depend on routes.
"""

import asyncio
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

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


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server; the limits are chosen."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0 for a free port
    max_num_seqs: int = 16  # texts in the batch
    max_waiting: int = 64  # texts that wait for the batch; more are rejected with status 429
    cache_bytes: int = CACHE_BYTES  # bytes of the KV cache, including prefixes kept from earlier requests
    timeout: float = 600.0  # seconds after which an answer fails
    stores: Path | None = None  # folder for the stores that clients fill; None for none
    keys: tuple[str, ...] = ()  # accepted API keys; empty if none is needed


class Listening:
    """A server that listens once it is built, so that its address is known, and serves when `run` is called.

    `generator` and `config` are those of `Generators`, and `name` is the model's name for clients. An address that it
    cannot listen on is a UsageError.
    """

    def __init__(self, generator: Generator, name: str, config: Mapping[str, Any], options: ServerOptions) -> None:
        host, port = options.host, options.port
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except (OSError, OverflowError) as error:
            problem = f"Nothing can listen on {host}, port {port} ({error}); choose another --port or --host."
            raise UsageError(problem) from error
        stores = Stores(options.stores, generator.tokenizer.backend_tokenizer)
        self._service = Service(
            Generators(generator, config, stores), Metrics(name), most_at_once=options.max_num_seqs,
            most_waiting=options.max_waiting, cache_bytes=options.cache_bytes, timeout=options.timeout,
        )  # fmt: skip
        release_threads()  # from now on, passes run in the writer's thread
        hosts = _LOOPBACK if host in _LOOPBACK else ()
        app = make_app(self._service, stores, name, options.keys, hosts, self._started)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(settings)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Serve until `stop` or a signal; then finish the texts in progress."""
        self._server.run(sockets=[self._socket])
        self._service.close(0.0)

    def stop(self) -> None:
        """Reject new texts, finish those in progress within the grace period, and end `run`; from any thread."""
        self._service.writer.close(_GRACE)
        self._server.should_exit = True

    async def _started(self) -> None:
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
