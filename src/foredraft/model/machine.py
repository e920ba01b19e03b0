"""What a process may use of this machine: memory and processors, unless a container limits them further, and caches.

Knows Linux's files of processors and of control groups, version 2. Does not know what is done with either.
"""

import os
from functools import cache
from pathlib import Path

import torch

COMPILING = 2.5
"""Memory that compiling takes over the size of the weights that are compiled: 5.8 GiB for 2.4, of which 0.5 are
Python's, and 9.1 for 4.2 in integers, whose dequantised weights lay in a mapped file."""
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_GROUP = Path("/sys/fs/cgroup")  # where a container finds the limits that it was given


def usable_memory() -> int:
    """Return the bytes of memory of this machine, or of the container that limits it further."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _limit("memory.max")[0]
    return min(machine, int(limit)) if limit.isdigit() else machine


def last_cache() -> int:
    """Return the bytes of the processor's third-level cache; 0 if it has none, or the system does not say."""
    size = _CACHE.read_text(encoding="ascii").strip() if _CACHE.is_file() else "0K"
    return 1024 * int(size.removesuffix("K"))


@cache
def limit_threads() -> None:
    """Let torch use no more threads than the processors that the container may use, unless OMP_NUM_THREADS is set.

    torch counts the physical cores of the machine. Threads without a processor of their own wait for each other. Only
    the first call does something, so that a number that is chosen later stays.
    """
    quota, *period = _limit("cpu.max")  # microseconds of processor time in each period, or "max"
    if quota.isdigit() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), max(int(quota) // int(period[0]), 1)))


def _limit(name: str) -> list[str]:
    """Return the words of a file of limits, "max" where there is none."""
    file = _GROUP / name
    return file.read_text(encoding="ascii").split() if file.is_file() else ["max"]
