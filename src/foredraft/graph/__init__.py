"""Token trees and graphs as flat arrays. Does not depend on models, text or drafters, nor on any other package here.

Its modules are the first that numba compiles, so what numba does where a compiled kernel cannot be kept is set here.
"""

from contextlib import suppress
from typing import Any

from numba.core import caching

_cache: Any = caching.Cache
_keep = _cache.save_overload


def _keep_where_possible(cache: Any, *kernel: Any) -> None:
    """Do without the file of a kernel if the disk is full: the next process compiles it again."""
    with suppress(OSError):
        _keep(cache, *kernel)


_cache.save_overload = _keep_where_possible
