"""Run a function over many items on a Ray cluster; each item is a task that is retried if its worker dies.

Starts and stops a local cluster if none is given. All machines must see the same folders under the same paths. Does not
depend on what the function does.
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

RETRIES = 3  # of an item whose worker died
_TASKS_PER_CPU = 2  # tasks submitted ahead of results
_CONNECT_SECONDS = 10.0
_OBJECT_STORE_BYTES = 100 << 20  # results are small; Ray's default is a third of the memory
_VARIABLES = {  # of the environment of a local cluster's processes
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports over the network
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; unset, Ray warns about it
    "RAYON_NUM_THREADS": "1",  # a task has one core, and the tokenizers library would use all
}


def map_on_ray(
    function: Callable[[Item], Result], items: Iterable[Item], address: str | None = None
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order; each call is a task on one processor core.

    The function and the items must be picklable; items are consumed a little ahead of the results. An item whose worker
    dies is retried up to three times, then ForedraftError; so the function must give the same result if called again,
    and must not leave partial output that looks complete. An exception of the function is raised here at once.

    `address` is that of the cluster, as `ray.init` takes it; None starts a local one and stops it at the end. A cluster
    that this process is already connected to is used, and left running. UsageError if Ray is not installed, or no
    cluster answers at the address.
    """
    with _cluster(address) as ray:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(lambda function, item: function(item))
        sent = ray.put(function)
        most = max(2, _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))
        pending: deque[Any] = deque()
        for item in items:
            pending.append(task.remote(sent, item))
            if len(pending) >= most:
                yield _result(ray, pending.popleft())
        while pending:
            yield _result(ray, pending.popleft())


def _result(ray: Any, reference: Any) -> Any:
    """Return a task's result, or raise its function's exception, or a ForedraftError if no worker finished it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ForedraftError(
            f"Ray gave up on a task after {RETRIES + 1} workers died ({type(error).__name__}). Finished work is "
            "kept; see Ray's logs for the reason, give the workers more memory, and run the same command again."
        ) from error


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Yield the connected `ray` module; disconnect at the end if it was not connected before."""
    try:
        with _variables():
            import ray
    except ImportError as error:
        raise UsageError("This needs Ray, which is not installed; run pip install 'foredraft[distributed]'.") from error
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": "error"}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        try:
            host, _, port = (address or "").rpartition("://")[2].rpartition(":")
            if host and port.isdecimal():  # Ray itself would retry for minutes
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            with _variables():
                ray.init(**options)
        except (OSError, OverflowError, ValueError) as error:  # a ConnectionError is an OSError
            where = f"No Ray cluster answers at {address}" if address else "No Ray cluster could be started here"
            raise UsageError(f"{where} ({error}). Check the address, or run without Ray.") from error
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _variables() -> Iterator[None]:
    """Set `_VARIABLES` in the block, for a cluster's processes to inherit; variables that are set already stay."""
    added = {name: value for name, value in _VARIABLES.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
