"""The life of a server: it listens, serves, and at a stop finishes or fails the texts in progress.

Uses uvicorn and signals. Does not depend on routes.
"""

import logging
import socket
import threading
from types import FrameType

import uvicorn

from foredraft.errors import UsageError
from foredraft.server.app import make_app
from foredraft.server.service import Service

_GRACE = 30.0  # seconds to finish texts after a stop (chosen)
# An idle connection is closed after so long. Clients must close theirs first (httpx after 5 seconds, nginx and load
# balancers after 60): a request that arrives as the server closes the connection is lost
_IDLE_SECONDS = 75
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; UsageError for an address on which nothing can listen. `port` 0 is a free port."""
    if not host:  # sockets take it for all addresses
        raise UsageError("The address to listen on is empty; give one, such as 127.0.0.1.")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        problem = f"Nothing can listen on {host}, port {port} ({error}); choose another --port or --host."
        raise UsageError(problem) from error
    # asyncio switches off Nagle's delay, 40 ms per answer of a kept connection, only where TCP is named
    return socket.socket(made.family, made.type, socket.IPPROTO_TCP, fileno=made.detach())


class Listening(uvicorn.Server):
    """A server that listens once it is built, so that its address is known, and serves when `run` is called.

    `port` 0 is a free port, `keys` are the accepted API keys, if one is needed, and `origins` those of other sites
    whose pages may use it. `access_log` is whether each request is logged. An address that it cannot listen on is a
    UsageError.
    """

    def __init__(
        self, service: Service, *, host: str = "127.0.0.1", port: int = 8000, keys: tuple[str, ...] = (),
        origins: tuple[str, ...] = (), access_log: bool = False,
    ) -> None:  # fmt: skip
        self._socket = listen(host, port)
        self._service, self._signalled = service, False
        app = make_app(service, keys, LOOPBACK if host in LOOPBACK else (), origins)
        settings = uvicorn.Config(
            app, http="h11", log_config=None, log_level="warning", access_log=access_log, timeout_graceful_shutdown=5,
            timeout_keep_alive=_IDLE_SECONDS,
        )  # fmt: skip  # h11 limits headers to 64 KiB, and httptools does not
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has left
        super().__init__(settings)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop` or a signal; then finish the texts in progress."""
        super().run(sockets or [self._socket])
        self._service.close()

    def stop(self) -> None:
        """Reject new texts, finish those in progress within the grace period, and end `run`; from any thread."""
        self._service.writer.close(_GRACE)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's signature
        """Stop after a signal, and at once after a second one; uvicorn's own handler would drop every answer."""
        if self._signalled:
            self.force_exit = self.should_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # it prints a traceback for each request that is dropped
        self._signalled = True
        threading.Thread(target=self.stop).start()
