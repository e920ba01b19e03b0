"""Compile a model's forward ahead of time for this machine, and keep the packages in the cache folder.

One package covers what generation asks for, made of kernels in which a row comes out the same to the last bit whatever
rows stand beside it; so plain and drafted steps find the same weights in the processor's cache. Where a row alone comes
out otherwise, it has a package of its own. Each is timed against the model itself, so that the slower one is never
used. Knows torch's exporter and compiler. Does not know who calls the result.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foredraft.atomic_file import TEMPORARY_SUFFIX, place_file
from foredraft.errors import ForedraftError, UsageError, told
from foredraft.model.attention_kernel import register_attention_kernel
from foredraft.model.blocking import own_blocking
from foredraft.model.compiled import (
    EAGER,
    MOST_ROWS,
    CompiledRecord,
    FloatArray,
    PackageRecord,
    compiled_folder,
    load_package,
    package_record,
    read_record,
    run_package,
    runs_on_cpu,
    write_record,
)
from foredraft.model.functional import FunctionalForward, compiled_attention
from foredraft.model.int8_kernel import register_int8_kernel
from foredraft.model.lowering import angles_once, merge_products
from foredraft.model.micro_kernel import own_micro_kernel
from foredraft.model.quantized import INT8, dtype_name
from foredraft.model.support import inspect

MOST_BYTES = 2**30
"""Each package holds the weights once more, and a larger model spends its time reading them, not between them."""

_TIMED_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, MOST_ROWS)
_CONTEXT = 200
_ROUNDS = 4
_REPEATS = 2
_TRIED_ROWS = 11
_DTYPES = ("float32", "bfloat16", INT8)

_LEAST_SHARED, _LEAST_SHARED_FLOAT64 = 16 * 1024, 512
"""Numbers of each thread from which on what is made of them one by one is divided among threads.

torch's 512 has two threads meet twelve times a layer for a draft of four rows. In float32 and bfloat16 that takes
longer than the numbers do; in float64, which surrounds products in eight bits, it does not.
"""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to compile; the first that succeeds is taken.

    Attributes:
        own: whether with kernels and rewritings of our own, or with what torch's compiler writes.
        backends: what products may be made of: "CPP" are kernels, "ATEN" calls into the vendor's library.
    """

    own: bool
    backends: str


_ATTEMPTS = (
    _Attempt(own=True, backends="CPP"),
    _Attempt(own=True, backends="CPP,ATEN"),  # without AVX-512 VNNI there is no kernel for products of integers
    _Attempt(own=False, backends="CPP,ATEN"),
)


@dataclass(frozen=True, slots=True)
class Package:
    """What one package is compiled for.

    Attributes:
        name: of the package.
        rows: it is traced with this many.
        least_rows: the fewest it takes.
        most_rows: the most; more than the least makes the number of rows symbolic.
    """

    name: str
    rows: int
    least_rows: int
    most_rows: int


ANY = Package("any", 4, 2, MOST_ROWS)  # the exporter takes a dimension that may be 1 for a constant
ONE = Package("one", 1, 1, 1)

Progress = Callable[[float, str], None]


class _Subject:
    """A model as what is compiled and timed: its functional forward, with arguments for it.

    Args:
        model: a transformers model.

    Raises:
        UsageError: a layer that keeps no keys and values of its own.
    """

    def __init__(self, model: Any) -> None:
        support = inspect(model.config)
        self.forward = FunctionalForward(model, support.layer_types, support.windows).eval()
        self.config = model.config
        self.dtype = model.dtype
        self._windows = support.windows
        self._spans = list(dict.fromkeys(support.windows))
        self.shapes = tuple(_buffer_shapes(model))

    def dynamic(self, package: Package) -> tuple[Any, ...]:
        """Say which dimensions of the arguments vary: the slots in use and allocated of each window, and the rows."""
        several = package.most_rows > package.least_rows
        rows = torch.export.Dim("rows", min=package.least_rows, max=package.most_rows) if several else None
        # the exporter wants room behind the slots in use; where there is none, the code runs as well
        visible = [torch.export.Dim(f"visible{number}", min=2, max=2**20 - 1) for number in range(len(self._spans))]
        capacity = [torch.export.Dim(f"capacity{number}", min=3, max=2**20) for number in range(len(self._spans))]
        buffers = [{2: capacity[self._spans.index(window)]} for window in self._windows]
        by_row = {1: rows} if several else None
        masks = [{2: rows, 3: dim} if several else {3: dim} for dim in visible]
        slots = [{0: rows} if several else None for _ in self._spans]
        return (by_row, by_row, masks, slots, buffers, list(buffers))

    def arguments(self, rows: int) -> tuple[Any, ...]:
        """Return arguments of `FunctionalForward.forward`: a chain of `rows` rows behind some context."""
        # windows differ in what is allocated, lest the exporter take them for one
        capacity = {window: _CONTEXT + MOST_ROWS + 56 + 8 * number for number, window in enumerate(self._spans)}
        keys = [
            torch.zeros(1, heads, capacity[window], size, dtype=self.dtype)
            for (heads, size), window in zip(self.shapes, self._windows, strict=True)
        ]
        positions = torch.arange(_CONTEXT, _CONTEXT + rows)
        mask = torch.zeros(1, 1, rows, _CONTEXT + rows, dtype=self.dtype)
        later = ~torch.ones(rows, rows, dtype=torch.bool).tril()
        mask[..., _CONTEXT:].masked_fill_(later, torch.finfo(self.dtype).min)
        return (
            torch.zeros(1, rows, dtype=torch.int64),
            positions[None],
            [mask.clone() for _ in self._spans],
            [positions.clone() for _ in self._spans],
            keys,
            [key.clone() for key in keys],
        )


def compile_forward(
    model: Any, cache: Path, *, again: bool = False, seconds: float | None = None, progress: Progress | None = None
) -> tuple[Path, CompiledRecord]:
    """Compile what is missing of a model's packages, and time them all anew.

    A killed compilation leaves what was complete.

    Args:
        model: a transformers model in evaluation mode, on the CPU.
        cache: the cache folder, there and writable.
        again: compile also what is there.
        seconds: begin no further package after this many.
        progress: told about each package.

    Returns:
        The folder of the packages, and what it holds now.

    Raises:
        UsageError: a model that cannot be compiled here, with the reason.
        StoreError: what lies in the folder is damaged.
        ForedraftError: no compiler, a forward that cannot be compiled, or no room for the result.
    """
    _check(model)
    start = perf_counter()
    tell = progress or (lambda _share, _what: None)
    with _as_sentence():
        folder = compiled_folder(model, cache)
        folder.mkdir(parents=True, exist_ok=True)
        record = earlier = None if again else read_record(folder)
        subject = _Subject(model)
        for share, package, rows in ((0.0, ANY, "any number of rows"), (0.5, ONE, "one row")):
            packages = record.packages if record is not None else ()
            late = packages and seconds is not None and perf_counter() - start > seconds
            if late or any(each.name == package.name or each.least_rows == 1 for each in packages):
                continue
            tell(share, f"compiling the forward for {rows}")
            path = _compiled(subject, package, folder)
            described = package_record(path, package.name, (package.least_rows, package.most_rows))
            record = _time(subject, folder, (*packages, described))  # from now on others can use it
        assert record is not None  # the first package is compiled whatever the time
        if record is earlier:
            tell(0.0, "timing what was compiled earlier")
            record = _time(subject, folder, record.packages)
    return folder, record


def _time(subject: _Subject, folder: Path, packages: tuple[PackageRecord, ...]) -> CompiledRecord:
    """Try whether rows come out alike, time every package and the model itself, and keep what was found.

    Where a row alone comes out of the package for any number as it does beside others, that package takes it too.
    """
    loaded = {package.name: load_package(folder / package.file) for package in packages}
    alike = _same_bits(subject, loaded)
    least = 1 if alike and ONE.name not in loaded else ANY.least_rows
    takes = tuple(replace(package, least_rows=least) if package.name == ANY.name else package for package in packages)
    record = CompiledRecord(takes, _TIMED_ROWS, _timed(subject, takes, loaded), alike, subject.shapes)
    write_record(folder, record)
    return record


def _check(model: Any) -> None:
    """Refuse what cannot be compiled, or gains nothing by it.

    Raises:
        UsageError: with the reason.
    """
    support = inspect(model.config)
    size = sum(each.numel() * each.element_size() for each in chain(model.parameters(), model.buffers()))
    if not hasattr(torch._C._aoti.AOTIModelPackageLoader, "boxed_run"):  # noqa: SLF001  # what older torch lacks
        raise UsageError(f"This is torch {torch.__version__}; foredraft compiles with 2.8 or newer.")
    if not runs_on_cpu(model):
        raise UsageError(f"The model is on {model.device}; foredraft compiles for the CPU. Load it with --device cpu.")
    if dtype_name(model) not in _DTYPES or getattr(model, "is_quantized", False):
        raise UsageError(f"The model's dtype is {dtype_name(model)}; foredraft compiles {', '.join(_DTYPES)}.")
    if size > MOST_BYTES:
        raise UsageError(
            f"The model's weights take {size / 2**30:.1f} GiB and foredraft compiles up to {MOST_BYTES / 2**30:.0f} "
            "GiB: a larger model spends its time reading its weights, which compiling does not shorten."
        )
    if support.window is not None and support.window < _CONTEXT + MOST_ROWS:
        raise UsageError(
            f"The model's window of {support.window} tokens is too short to compile for: {_CONTEXT + MOST_ROWS}."
        )


@contextmanager
def _as_sentence() -> Iterator[None]:
    """Turn what torch's exporter and compiler raise, of which there is no list, into one sentence."""
    try:
        yield
    except ForedraftError:
        raise
    except OSError as error:
        raise ForedraftError(
            f"The compiled forward cannot be written ({error.strerror or error}); generation goes on without it. Make "
            "room, or set FOREDRAFT_CACHE to a folder you can write to."
        ) from error
    except Exception as error:
        missing = not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
        remedy = "Install a C++ compiler (g++)" if missing else "Please report it with the model's name"
        raise ForedraftError(
            f"The forward cannot be compiled ({told(error)}); generation goes on without it. {remedy}."
        ) from error


def _compiled(subject: _Subject, package: Package, folder: Path) -> Path:
    """Compile one package; the file is there whole or not at all."""
    path = folder / f"{package.name}.pt2"
    beside = folder / f"{package.name}.{os.getpid()}{TEMPORARY_SUFFIX}.pt2"  # torch insists on the ending
    try:
        for attempt in _ATTEMPTS:
            try:
                _compile(subject, package, attempt, beside)
                break
            except Exception as error:  # of what goes wrong inside the compiler there is no list
                if attempt is _ATTEMPTS[-1] or isinstance(error, OSError):  # no room: another attempt finds none either
                    raise
        place_file(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _compile(subject: _Subject, package: Package, attempt: _Attempt, path: Path) -> None:
    """Trace a package and compile it in one way, into `path`."""
    from torch._inductor import aoti_compile_and_package  # the documented compiler; slow to import

    options = {
        "freezing": True, "max_autotune": True, "max_autotune_gemm_backends": attempt.backends,
        "cpp.min_chunk_size": _LEAST_SHARED_FLOAT64 if subject.dtype == torch.float64 else _LEAST_SHARED,
    }  # fmt: skip
    with ExitStack() as contexts:
        contexts.enter_context(torch.no_grad())
        if attempt.own:
            register_attention_kernel()
            register_int8_kernel()
            for ours in (own_micro_kernel(), own_blocking(), angles_once(), compiled_attention(subject.config)):
                contexts.enter_context(ours)
        program = torch.export.export(
            subject.forward, subject.arguments(package.rows), strict=False, dynamic_shapes=subject.dynamic(package)
        )
        if attempt.own:
            merge_products(program)
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def _buffer_shapes(model: Any) -> list[tuple[int, int]]:
    """Return the key heads and the head's size of each layer, as the model itself writes them.

    Raises:
        UsageError: a layer that keeps no keys and values of its own.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), past_key_values=cache, use_cache=True)
    shapes = []
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape != values.shape:
            raise UsageError(f"Layer {number} of this model keeps no keys and values of one shape; it is not compiled.")
        shapes.append((keys.shape[1], keys.shape[3]))
    return shapes


@torch.inference_mode()
def _timed(
    subject: _Subject, packages: tuple[PackageRecord, ...], loaded: Mapping[str, Any]
) -> dict[str, tuple[float, ...]]:
    """Return the least seconds of passes of each of the timed row counts, of the model itself and of each package."""
    takes = {package.name: (package.least_rows, package.most_rows) for package in packages}
    least = {name: np.full(len(_TIMED_ROWS), np.inf) for name in (EAGER, *loaded)}
    for place, rows in enumerate(_TIMED_ROWS):
        arguments = subject.arguments(rows)
        flat = _flat(arguments)
        for _ in range(_ROUNDS):
            for name, times in least.items():
                if name != EAGER and not takes[name][0] <= rows <= takes[name][1]:
                    continue
                for _ in range(_REPEATS):  # as when steps follow each other: the first one finds others' weights cached
                    start = perf_counter()
                    subject.forward(*arguments) if name == EAGER else run_package(loaded[name], list(flat))
                    times[place] = min(times[place], perf_counter() - start)
    # more rows that took less time show that the fewer were disturbed
    return {name: _never_falling(times) for name, times in least.items()}


@torch.inference_mode()
def _same_bits(subject: _Subject, packages: Mapping[str, Any]) -> bool:
    """Run a chain of rows at once, and the same rows one by one; say whether scores and states are the same."""
    together, alone = subject.arguments(_TRIED_ROWS), subject.arguments(_TRIED_ROWS)
    noise = torch.Generator().manual_seed(0)
    for ours, theirs in zip(chain(*together[-2:]), chain(*alone[-2:]), strict=True):
        ours.copy_(torch.randn(ours.shape, generator=noise))
        theirs.copy_(ours)
    together[0].copy_(torch.randint(0, subject.config.get_text_config().vocab_size, (1, _TRIED_ROWS), generator=noise))
    several = run_package(packages[ANY.name], _flat(together))[0]
    alone_by = packages.get(ONE.name, packages[ANY.name])
    ones: list[torch.Tensor] = []
    for row in range(_TRIED_ROWS):
        token, position, masks, slots = subject.arguments(1)[:4]
        token[0, 0], position[0, 0] = together[0][0, row], _CONTEXT + row
        seen = [mask.new_zeros(1, 1, 1, _CONTEXT + row + 1) for mask in masks]
        places = [slot + row for slot in slots]
        try:
            ones.append(run_package(alone_by, _flat((token, position, seen, places, *alone[-2:])))[0][0].clone())
        except RuntimeError:  # traced for two rows and more, it may refuse one
            return False
    states = zip(chain(*together[-2:]), chain(*alone[-2:]), strict=True)
    return torch.equal(several, torch.stack(ones)) and all(torch.equal(ours, theirs) for ours, theirs in states)


def _flat(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return arguments of `FunctionalForward.forward` in the order in which the exporter flattens them."""
    leaves: list[torch.Tensor] = torch.utils._pytree.tree_leaves(arguments)  # noqa: SLF001  # torch has no public name
    return leaves


def _never_falling(times: FloatArray) -> tuple[float, ...]:
    quickest_from_here = np.minimum.accumulate(times[::-1])[::-1]
    return tuple(np.where(np.isfinite(times), quickest_from_here, times).tolist())
