"""The same work on a Ray cluster: a function over many items, each item a task that outlives its worker.

Knows Ray, and how to start and stop a local cluster quietly. Does not know what the function does. All machines must
see the same folders.
"""

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from foredraft.errors import ForedraftError, UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

RETRIES = 3
"""How often an item is tried again when its worker dies."""
_TASKS_PER_CPU = 2
_KNOCK_SECONDS = 10.0
_OBJECT_STORE_BYTES = 100 << 20  # results are small; Ray's default is a third of the memory
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported over the network
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this will be its default
    "RAYON_NUM_THREADS": "1",  # a task has one core, and the tokenizers library would use them all
}
"""What the processes of a cluster that is started here find set."""


def map_on_ray(
    function: Callable[[Item], Result], items: Iterable[Item], address: str | None = None
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, each worked out in a task of one processor core.

    An item whose worker dies is tried again, up to three times; what the function raises is raised here at once. So
    the function should do the same whenever it is called again, and leave nothing half-done that looks finished.

    Args:
        function: picklable; sent to the cluster once.
        items: picklable; a few more than there are cores are sent at a time.
        address: of the cluster, as `ray.init` takes it; None starts one on this machine and stops it at the end. A
            cluster that this process is connected to already is used, and stays.

    Raises:
        UsageError: Ray is not installed, or no cluster answers at the address.
        ForedraftError: an item's workers kept dying.
    """
    with _cluster(address) as ray:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)
        sent = ray.put(function)
        most = max(2, _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))
        pending: deque[Any] = deque()
        for item in items:
            pending.append(task.remote(sent, item))
            if len(pending) >= most:
                yield _result(ray, pending.popleft())
        while pending:
            yield _result(ray, pending.popleft())


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    return function(item)


def _result(ray: Any, reference: Any) -> Any:
    """Wait for a task; raise what its function raised, or a sentence where no worker lived to the end."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ForedraftError(
            f"Ray gave a task up after {RETRIES + 1} workers had died ({type(error).__name__}). What was finished is "
            "kept; see Ray's logs for the reason, give the workers more memory, and run the same command again."
        ) from error


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Give the `ray` module, connected; whoever connected it disconnects it."""
    try:
        with _variables():
            import ray
    except ImportError as error:
        raise UsageError("This needs Ray, which is not installed: pip install foredraft[distributed]") from error
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": "error"}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        try:
            _knock(address)
            with _variables():
                ray.init(**options)
        except (OSError, ValueError) as error:  # a ConnectionError is an OSError
            where = f"No Ray cluster answers at {address}" if address else "No Ray cluster could be started here"
            raise UsageError(f"{where} ({error}). Check the address, or do without Ray.") from error
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """Raise OSError where nothing listens at a `host:port`: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()


@contextlib.contextmanager
def _variables() -> Iterator[None]:
    """Set variables, which a cluster's processes inherit, until the block ends; the user's own stay."""
    added = {name: value for name, value in _VARIABLES.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
