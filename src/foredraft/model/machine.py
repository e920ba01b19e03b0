"""This machine: memory and processors that a process may use, and caches and instructions that kernels are made for.

A container may limit the first two further. Knows torch's tests, and Linux's files of processors and of control groups,
version 2. Does not know the kernels.
"""

import os
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

COMPILING = 2.5
"""Memory that compiling takes over the size of the weights that are compiled: 5.8 GiB for 2.4, of which 0.5 are
Python's, and 9.1 for 4.2 in integers, whose dequantised weights lay in a mapped file."""
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_GROUP = Path("/sys/fs/cgroup")  # where a container finds the limits that it was given
AVX2, AVX512 = 8, 16
"""Numbers of float32 in a vector."""
_ARM = 4  # the same
_AMD = "AuthenticAMD"  # how /proc/cpuinfo names the vendor


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


@cache
def multiplies_by_pairs() -> bool:
    """Return whether bfloat16 is multiplied by an instruction for pairs: on AMD's processors that have it (Zen 4).

    Intel's have it too, and are slower with it. Elsewhere two fused additions give the same bits, but for products
    under 2**-126, which the instruction takes for zero.
    """
    amd = any(_AMD in line for line in processor_lines("vendor_id"))
    return amd and torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001  # torch has no public name for it


def multiplies_integers() -> bool:
    """Return whether this processor has instructions that products with quantised weights are written for."""
    arm = platform.machine() == "arm64" or " asimddp" in "".join(processor_lines("features"))  # Apple's all have them
    return has_avx2() or arm


@cache
def vector_lanes() -> int:
    """Return how many numbers of float32 a vector of this processor holds."""
    if torch.cpu._is_avx512_supported():  # noqa: SLF001  # torch has no public name for it
        return AVX512
    return AVX2 if has_avx2() else _ARM


def has_avx2() -> bool:
    """Return whether this processor has vectors of 256 bits with fused additions."""
    return torch.cpu._is_avx2_supported()  # noqa: SLF001  # torch has no public name for it


def has_tiles() -> bool:
    """Return whether this processor multiplies tiles of bfloat16 (Intel's AMX)."""
    return torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # torch has no public name for it


def registers(lanes: int) -> int:
    """Return how many vectors of so many numbers fit into the registers; ARM's are as many as AVX-512's."""
    return 16 if lanes == AVX2 else 32


def machine_facts() -> dict[str, str | int]:
    """Return the processor's name, how many there are and torch uses, and the versions of the libraries."""
    names = (line.partition(":")[2].strip() for line in processor_lines("model name"))
    versions = {name: version(name) for name in ("torch", "transformers")}
    processor = next(names, platform.processor() or platform.machine())
    return {"processor": processor, "cores": os.cpu_count() or 1, "threads": torch.get_num_threads(), **versions}


def processor_lines(*names: str) -> list[str]:
    """Return the distinct lines of /proc/cpuinfo that begin with one of these names; none without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.lower().startswith(names)})
