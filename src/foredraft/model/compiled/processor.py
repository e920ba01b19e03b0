"""The instructions of this processor that kernels are written for, by torch's tests and Linux's /proc/cpuinfo.

Does not know the kernels.
"""

import platform
from functools import cache
from pathlib import Path

import torch

AVX2, AVX512 = 8, 16
"""Numbers of float32 in a vector."""
_ARM = 4  # the same
_AMD = "AuthenticAMD"  # how /proc/cpuinfo names the vendor


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


def processor_lines(*names: str) -> list[str]:
    """Return the distinct lines of /proc/cpuinfo that begin with one of these names; none without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.lower().startswith(names)})
