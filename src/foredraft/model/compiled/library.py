"""Runs the shared library of a compiled package through the C interface that torch keeps stable for it.

torch's own loader holds Python's global lock during a pass, so a server could neither read a request nor send a token.
A call through ctypes releases it. The weights are in a mapped file beside the package: processes share them, and
compiling a large model needs no second copy in memory. Does not depend on what a package was compiled from.
"""

import ctypes
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from foredraft.errors import told

# bytes of weights that are written at once, which Linux 6.18 then keeps in pages of 2 MB: a pass of one row of SmolLM2
# takes 0.98 of the time (measured on Zen 4)
_WRITTEN = 16 * 2**20
_SOFTLY = 1  # omp_pause_soft: settings are kept
_CAPSULE_ADDRESS = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_CAPSULE_OF = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def weights_beside(package: Path) -> Path:
    """Return the file of a package's weights."""
    return package.with_suffix(".weights")


@contextmanager
def weights_apart(path: Path) -> Iterator[dict[str, Any]]:
    """Make torch's compiler write a library's weights to `path` until the block ends; yields the options it needs.

    Compiling raises RuntimeError for weights in a layout that only the vendor's library can read, and OSError if they
    cannot be written.
    """
    from torch._inductor.codecache import AotCodeCompiler  # slow to import, and needed by those who compile alone

    theirs = AotCodeCompiler.compile  # which packs the graph's constants into the library

    def compile_apart(graph: Any, *args: Any, **options: Any) -> Any:
        names = [name for name in graph.constants if name not in graph.folded_constants]
        weights = {name: graph.get_original_value_of_constant(name).detach() for name in names}
        if any(each.is_mkldnn for each in weights.values()):
            raise RuntimeError("some weights are laid out for the vendor's library")
        for name, each in weights.items():
            if each.untyped_storage().nbytes() != each.nbytes:  # of a part of a file, all of it would be written
                # code reads them by their strides, which `clone` does not keep where numbers lie apart
                weights[name] = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype).copy_(each)
        try:
            with path.open("wb", buffering=_WRITTEN) as file:
                torch.save(weights, file)
        except RuntimeError as error:
            raise OSError(f"{path.name}: {told(error)}") from error
        del weights
        graph.constants |= torch.load(path, mmap=True, weights_only=True)  # the copies in memory can go
        return_memory()
        return theirs(graph, *args, **options)

    with patch.object(AotCodeCompiler, "compile", compile_apart):
        yield {"aot_inductor.package_constants_in_so": False}


def release_threads() -> None:
    """Release OpenMP's threads of the calling thread, before another thread runs passes.

    Each thread that runs passes gets OpenMP threads of its own. If these outnumber the processors, they no longer wait
    actively for each other, and a pass of SmolLM2 takes three times as long.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # OpenMP 5.0; older ones lack it
    if pause is not None:
        pause(_SOFTLY)


def return_memory() -> None:
    """Return freed memory to the system; glibc keeps blocks of up to 32 MB, such as weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


class _Weight(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("tensor", ctypes.c_void_p))


class CompiledLibrary:
    """The loaded library of the package `path`, with the weights beside it; one pass at a time.

    Raises OSError if the package cannot be read or unpacked, BadZipFile if it is not an archive, and RuntimeError
    without a library that can be loaded.
    """

    def __init__(self, path: Path) -> None:
        torch.cpu._init_amx()  # noqa: SLF001  # asks the system for AMX, as torch's compiler does
        with zipfile.ZipFile(path) as package:
            name = next((name for name in package.namelist() if name.endswith(".so")), None)
            if name is None:
                raise RuntimeError("it holds no library")
            try:
                library = _loaded(package, name)
            except OSError:  # the system's temporary folder is full, or takes no programs
                library = _loaded(package, name, path.parent)
        pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p

        def function(name: str, *types: Any) -> Any:
            found = getattr(library, f"AOTInductorModelContainer{name}")
            found.argtypes = types
            return found

        self._handle, count = pointer(), size()
        create = function("CreateWithDevice", pointer, size, text, text)
        _check(create(ctypes.byref(self._handle), 1, b"cpu", None))
        _check(function("GetNumOutputs", pointer, pointer)(self._handle, ctypes.byref(count)))
        self._outputs = count.value
        self._run = function("RunSingleThreaded", pointer, pointer, size, pointer, size, pointer, pointer)
        kept: list[int] = []
        # not when the process ends: another thread may be in a pass then
        weakref.finalize(self, _close, function("Delete", pointer), self._handle, kept).atexit = False
        weights = torch.load(weights_beside(path), mmap=True, weights_only=True)
        kept += _pointers(list(weights.values()))
        named = [_Weight(name.encode(), each) for name, each in zip(weights, kept, strict=True)]
        use = function("UpdateUserManagedConstantBufferPairs", pointer, pointer, size, ctypes.c_bool, ctypes.c_bool)
        # of the buffer in use; all weights must be given
        _check(use(self._handle, (_Weight * len(named))(*named), len(named), False, True))

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the library's outputs; shapes of inputs are not checked. RuntimeError if the library fails."""
        given = _pointers(tensors)
        inputs, outputs = (ctypes.c_void_p * len(given))(*given), (ctypes.c_void_p * self._outputs)()
        _check(self._run(self._handle, inputs, len(given), outputs, self._outputs, None, None))
        return _tensors(outputs)


def _loaded(package: zipfile.ZipFile, name: str, place: Path | None = None) -> ctypes.CDLL:
    """Load a library of an archive through a folder in `place`; it stays in memory when the file is gone."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        return ctypes.CDLL(package.extract(name, folder))


def _close(delete: Callable[[ctypes.c_void_p], int], handle: ctypes.c_void_p, weights: list[int]) -> None:
    """Free a library's model, and its weights, of which torch never frees its own handles."""
    delete(handle)
    for each in _tensors(weights):
        each.set_(torch.empty(0).untyped_storage(), 0, (0,), (1,))


def _pointers(tensors: list[torch.Tensor]) -> list[int]:
    """Return owning pointers to tensors, for a library or for `_tensors`."""
    exchange = torch._C._aoti  # noqa: SLF001  # torch has no public name for it
    return [_CAPSULE_ADDRESS(each, None) for each in exchange.unsafe_alloc_void_ptrs_from_tensors(tensors)]


def _tensors(pointers: Iterable[int]) -> list[torch.Tensor]:
    """Return the tensors of owning pointers."""
    exchange = torch._C._aoti  # noqa: SLF001  # torch has no public name for it
    found: list[torch.Tensor] = exchange.alloc_tensors_by_stealing_from_void_ptrs(
        [_CAPSULE_OF(each, None, None) for each in pointers]
    )
    return found


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError("the compiled library failed; see standard error")
