"""The shared library in a compiled package, called through the C interface that torch keeps stable for it.

torch's own loader holds Python's global lock during a pass, so that no other thread runs: a server could neither read a
request nor send a token. A call through ctypes lets go of it. The weights lie in a file beside the package, which is
mapped: processes share them, and while a large model is compiled they are not in memory once more. Knows tensors, and
what the compiler does with constants; not what a package was compiled from.
"""

import ctypes
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_USE_WEIGHTS = "UpdateUserManagedConstantBufferPairs"
_SOFTLY = 1  # omp_pause_soft: settings are kept
_CAPSULE_ADDRESS = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_CAPSULE_OF = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def can_load() -> bool:
    """Say whether this torch hands tensors to compiled libraries and takes them back."""
    return hasattr(torch._C, "_aoti") and hasattr(torch._C._aoti, "alloc_tensors_by_stealing_from_void_ptrs")  # noqa: SLF001  # torch has no public name for it


def weights_beside(package: Path) -> Path:
    """Return where the weights of a package lie; without such a file they are in its library."""
    return package.with_suffix(".weights")


@contextmanager
def weights_apart(path: Path) -> Iterator[dict[str, Any]]:
    """Have torch's compiler write a library's weights to `path` until the block ends; yields options that it needs.

    An older torch, whose libraries cannot be given weights, keeps them inside. Compiling raises RuntimeError for
    weights that only the vendor's library can read.
    """
    from torch._inductor.codecache import AotCodeCompiler  # slow to import, and needed by those who compile alone

    interface = Path(torch.__file__).with_name("include") / "torch/csrc/inductor/aoti_runtime/interface.h"
    if not interface.exists() or _USE_WEIGHTS not in interface.read_text(encoding="utf-8"):
        yield {}
        return

    theirs = AotCodeCompiler.compile  # which packs the graph's constants into the library

    def compile_apart(graph: Any, *args: Any, **options: Any) -> Any:
        names = [name for name in graph.constants if name not in graph.folded_constants]
        weights = {name: graph.get_original_value_of_constant(name).detach() for name in names}
        if any(each.is_mkldnn for each in weights.values()):
            raise RuntimeError("some weights are laid out for the vendor's library")
        for name, each in weights.items():
            if each.untyped_storage().nbytes() != each.nbytes:  # of a part of a file, all of it would be written
                weights[name] = each.clone()
        torch.save(weights, path)
        del weights
        graph.constants |= torch.load(path, mmap=True, weights_only=True)  # the copies in memory can go
        return_memory()
        return theirs(graph, *args, **options)

    with patch.object(AotCodeCompiler, "compile", compile_apart):
        yield {"aot_inductor.package_constants_in_so": False}


def release_threads() -> None:
    """Let go of the threads that share the calling thread's passes; called before another thread runs them.

    Every thread from which passes are run has threads of its own. As soon as there are more of them than processors,
    OpenMP no longer has them wait actively for each other, and a pass of SmolLM2 takes three times as long.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # OpenMP 5.0; older ones lack it
    if pause is not None:
        pause(_SOFTLY)


def return_memory() -> None:
    """Give the system back what was freed; glibc keeps blocks of up to 32 MB, of which weights are made."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


class _Weight(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("tensor", ctypes.c_void_p))


class CompiledLibrary:
    """The loaded library of the package `path`, with the weights beside it; one pass at a time.

    With `ranges`, each row has its own range of slots. Raises OSError if the package cannot be read or unpacked,
    BadZipFile if it is no archive, and RuntimeError if it holds no library, or one that cannot be loaded.
    """

    def __init__(self, path: Path, *, ranges: bool) -> None:
        self.ranges = ranges
        torch.cpu._init_amx()  # noqa: SLF001  # asks the system for the tiles that kernels may use, as torch's compiler does
        with zipfile.ZipFile(path) as package, tempfile.TemporaryDirectory() as folder:
            name = next((name for name in package.namelist() if name.endswith(".so")), None)
            if name is None:
                raise RuntimeError("it holds no library")
            library = ctypes.CDLL(package.extract(name, folder))  # stays in memory when the file is gone
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
        self._delete = function("Delete", pointer)
        self._weights: list[int] = []
        if weights_beside(path).exists():
            weights = torch.load(weights_beside(path), mmap=True, weights_only=True)
            self._weights = _pointers(list(weights.values()))
            named = [_Weight(name.encode(), each) for name, each in zip(weights, self._weights, strict=True)]
            use = function(_USE_WEIGHTS, pointer, pointer, size, ctypes.c_bool, ctypes.c_bool)
            # not those of the buffer out of use; and all weights must be given
            _check(use(self._handle, (_Weight * len(named))(*named), len(named), False, True))

    def __del__(self) -> None:
        if hasattr(self, "_delete"):
            self._delete(self._handle)
        _tensors(getattr(self, "_weights", []))

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the library makes of its inputs, whose shapes are not checked; RuntimeError if it refuses."""
        given = _pointers(tensors)
        inputs, outputs = (ctypes.c_void_p * len(given))(*given), (ctypes.c_void_p * self._outputs)()
        _check(self._run(self._handle, inputs, len(given), outputs, self._outputs, None, None))
        return _tensors(outputs)


def _pointers(tensors: list[torch.Tensor]) -> list[int]:
    """Return pointers to tensors, for a library that takes these over, or for `_tensors`."""
    exchange = torch._C._aoti  # noqa: SLF001  # torch has no public name for it
    return [_CAPSULE_ADDRESS(each, None) for each in exchange.unsafe_alloc_void_ptrs_from_tensors(tensors)]


def _tensors(pointers: Iterable[int]) -> list[torch.Tensor]:
    """Take over tensors from pointers to them."""
    exchange = torch._C._aoti  # noqa: SLF001  # torch has no public name for it
    found: list[torch.Tensor] = exchange.alloc_tensors_by_stealing_from_void_ptrs(
        [_CAPSULE_OF(each, None, None) for each in pointers]
    )
    return found


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError("the compiled library refused; the standard error says why")
