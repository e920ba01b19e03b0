"""Compiles a model's forward ahead of time for this machine, and keeps the packages in the cache folder.

Plain and drafted steps use one package, and so the same weights in the processor's cache. Its rows are compared: our
kernels give a row the same bits whatever other rows are in the pass. Uses torch's exporter and compiler. Does not
depend on what runs the packages.
"""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from foredraft.atomic_file import TEMPORARY_SUFFIX, place_file
from foredraft.errors import ForedraftError, UsageError, told
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled.attention import LANES, compiled_attention
from foredraft.model.compiled.block_layers import dequantised_told, product_bytes, quantised_weights
from foredraft.model.compiled.blocks import QuantisedRows, packed_bytes, stored_integers
from foredraft.model.compiled.experts import SUMMED, by_rows, compiled_experts, expert_matrices
from foredraft.model.compiled.export import CONTEXT, Subject, run_pass
from foredraft.model.compiled.latents import attended_latents, real_rotations
from foredraft.model.compiled.library import CompiledLibrary, return_memory, weights_apart, weights_beside
from foredraft.model.compiled.package import (
    MOST_ROWS,
    CompiledRecord,
    checked_record,
    compiled_folder,
    kernels_in,
    package_hash,
    package_path,
    records_of,
    remove_unnamed,
    runs_on_cpu,
    write_record,
)
from foredraft.model.compiled.rewriting import gate_products, merge_products, sum_short_products, turn_rows
from foredraft.model.families import COMPILED_RECURRENT, INDEXED
from foredraft.model.fingerprint import LIBRARIES
from foredraft.model.kv_cache import Span
from foredraft.model.machine import COMPILING, has_avx2, last_cache, multiplies_integers, usable_memory
from foredraft.model.quantised import UNCOMPILED
from foredraft.model.rounding import dtype_name
from foredraft.model.support import inspect

_TRACED_ROWS, _TRACED_SCORED = 4, 3  # different numbers, so that the exporter tells the two dimensions apart
_PROBED_ROWS = (*range(1, 17), 17, 24, 31, 32, 33, 48, 63, 64, 65, 128, 255)
"""Numbers of rows whose passes are compared with a pass of the most rows: all up to two blocks of any kernel, and those
around the sizes at which rows are divided among threads and caches."""
_PROBED_AT_LEAST = 32  # rows compared for each number, in several passes if it is smaller (chosen)
_DTYPES = ("float32", "bfloat16")
_OLDEST_TORCH = "2.13"
"""The first version that compiles all families; 2.12 fails with Nemotron-H, and older ones with the default model."""
_LEAST_SHARED = 16 * 1024
"""Elements per thread above which elementwise work is divided among threads. With torch's 512, two threads synchronise
twelve times per layer for a draft of four rows, which takes longer than the work."""

OPTIONS = {
    "freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP",  # kernels alone
    "cpp.min_chunk_size": _LEAST_SHARED,
    "aot_inductor.precompile_headers": False,  # for one package it takes longer than it saves
    # of what calls the kernels: it compiles 6 s longer, and a pass of one row takes 0.97 of the time without
    "aot_inductor.compile_wrapper_opt_level": "O1",
}  # fmt: skip
"""Settings of torch's compiler."""

_CODE_BYTES = 64 * 2**20  # a package beside its weights; those measured had 3 to 8 MiB; chosen
Progress = Callable[[float, str], None]


def compile_forward(
    model: Any, cache: Path, *, again: bool = False, precise: bool | None = None, progress: Progress | None = None
) -> tuple[Path, CompiledRecord]:
    """Compile a model's forward unless it is compiled, or `again`.

    Where its weights are integers, rows are rounded to 15 bits if `precise`, and to 8 in most blocks if not; None takes
    what was chosen last for these weights, with any torch.
    The model is in evaluation mode on the CPU, and the cache folder writable. `progress` is called before each step.
    Returns the folder of the package and its record. Waits for another process that compiles the same. A killed or
    failed compilation leaves a complete package as it is. Raises UsageError with the reason for a model that cannot be
    compiled here, StoreError if what was compiled is damaged, and ForedraftError without a compiler, for a forward that
    cannot be compiled or gives a row other bits beside other rows, or if the disk is full.
    """
    _check(model, precise=bool(precise))
    tell = progress or (lambda _share, _what: None)
    folder = compiled_folder(model, cache)
    with _as_sentence(), FileLock(folder / "compiling.wait"), _unfinished(folder) as beside:
        record = None if again else checked_record(folder)
        if record is None or precise not in (None, record.precise):
            subject, before = Subject(model), records_of(folder)
            _check_room(model, folder)
            tell(0.0, "compiling the forward")
            chosen = before[-1].precise if precise is None and before else bool(precise)
            record = _compiled(subject, beside, precise=chosen)
            tell(0.9, "comparing the bits of its rows")
            if not _same_bits(subject, CompiledLibrary(beside)):
                raise ForedraftError(
                    "A row of this model's compiled forward rounds otherwise beside other rows on this processor, so "
                    "drafts could change a text; generation goes on without it."
                )
            path = package_path(folder, record)
            place_file(weights_beside(beside), weights_beside(path))
            place_file(beside, path)
            write_record(folder, record)
            remove_unnamed(folder, record)
    return folder, record


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Yield where a package is made, and remove what is there after the block, or since a killed compilation."""
    path = folder / f"forward{TEMPORARY_SUFFIX}.pt2"  # torch insists on the ending
    made = (path, weights_beside(path))
    try:
        for each in made:
            each.unlink(missing_ok=True)
        yield path
    finally:
        for each in made:
            each.unlink(missing_ok=True)


def _check(model: Any, *, precise: bool) -> None:
    """Raise UsageError with the reason for a model that cannot be compiled, or would gain nothing."""
    support, size = inspect(model.config), _weights_bytes(model)
    if torch.__version__ < _OLDEST_TORCH:
        raise UsageError(f"This is torch {torch.__version__}; foredraft compiles with {_OLDEST_TORCH} or newer.")
    if getattr(model, "is_quantized", False):
        raise UsageError(UNCOMPILED)
    if not runs_on_cpu(model):
        raise UsageError(f"The model is on {model.device}; foredraft compiles for the CPU. Load it with --device cpu.")
    if dtype_name(model) not in _DTYPES:
        raise UsageError(f"The model's dtype is {dtype_name(model)}; foredraft compiles {', '.join(_DTYPES)}.")
    if (altered := _altered(model)) is not None:
        raise UsageError(
            f"The {altered} of this model has a hook, or a forward of its own, and what is compiled is kept for all "
            "models with these weights; remove it, or let the model run uncompiled."
        )
    if precise and stored_integers(model) is None:
        raise UsageError(
            "This model's weights are multiplied as they are, and not as integers, so rows are not rounded; compile it "
            "without --precise."
        )
    if COMPILING * size > (memory := usable_memory()):
        raise UsageError(
            f"Compiling a model of {size / 2**30:.1f} GiB needs {COMPILING * size / 2**30:.1f} GiB of memory, and "
            f"there are {memory / 2**30:.1f} GiB. Compile on a larger machine of the same processor and copy the cache "
            "folder, or take a smaller model."
        )
    _check_experts(model)
    if any(support.recurrent) and support.family not in COMPILED_RECURRENT:
        raise UsageError(f"The recurrent layers of this {support.family} model cannot be compiled; it runs uncompiled.")
    if INDEXED in support.layer_types:
        raise UsageError(
            f"This {support.family} model chooses the tokens that it attends to by an index, for which there is no "
            "kernel; it runs uncompiled."
        )
    if support.window is not None and support.window < CONTEXT + MOST_ROWS:
        raise UsageError(
            f"The model's window of {support.window} tokens is too short to compile; it needs {CONTEXT + MOST_ROWS}."
        )


def _check_experts(model: Any) -> None:
    """Raise UsageError for experts that do not use transformers' interface, and for matrices without a kernel."""
    for module in model.modules():
        if "Experts" in (kind := type(module).__name__) and not hasattr(module, "is_transposed"):
            raise UsageError(f"Experts that run as this model's do have no kernel ({kind}); it runs uncompiled.")
    for module, name, matrices in expert_matrices(model):
        _, width, depth = by_rows(module, matrices).shape
        if width % SUMMED or depth % (2 * LANES):
            raise UsageError(
                f"This model's experts have matrices {name} of {width} x {depth} numbers, and the kernel takes "
                f"multiples of {SUMMED} x {2 * LANES}; it runs uncompiled."
            )


def _altered(model: Any) -> str | None:
    """Return the name of a module that does something else than its class, by its user's hook or function, if any."""
    for name, module in model.named_modules():
        own = vars(module)
        found = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values(), own.get("forward")]
        # transformers' own keep hidden states; None is also the module of torch's functions
        if any((each.__module__ or "foredraft").partition(".")[0] not in LIBRARIES for each in found if each):
            return f"module {name}" if name else type(module).__name__
    return None


def _weights_bytes(model: Any) -> int:
    """Return the bytes of a model's weights in a package, but for what fills blocks up."""
    size: int = sum(each.numel() * each.element_size() for each in chain(model.parameters(), model.buffers()))
    return size if (tensors := stored_integers(model)) is None else min(size, packed_bytes(tensors))


def _check_room(model: Any, folder: Path) -> None:
    """Raise OSError if a package does not fit on a folder's disk; torch ends the process where it finds it full."""
    needed, free = _weights_bytes(model) + _CODE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it needs {needed / 2**20:,.0f} MiB in {folder}, where {free / 2**20:,.0f} MiB are free")


def _rounds_rows(model: Any) -> bool:
    """Return whether rows are rounded to integers where weights are."""
    return multiplies_integers() and model.dtype == torch.bfloat16


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)


@contextmanager
def _as_sentence() -> Iterator[None]:
    """Turn any exception of torch's exporter and compiler into a ForedraftError."""
    try:
        yield
    except ForedraftError:
        raise
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # torch's compiler wraps what is raised while it runs
        if isinstance(cause, OSError):
            raise ForedraftError(
                f"The compiled forward cannot be written ({cause.strerror or cause}); generation goes on without it. "
                "Make room, or set FOREDRAFT_CACHE to a folder you can write to."
            ) from error
        remedy = "Please report it with the model's name" if _has_compiler() else "Install a C++ compiler (g++)"
        raise ForedraftError(
            f"The forward cannot be compiled ({told(cause)}); generation goes on without it. {remedy}."
        ) from error


def _compiled(subject: Subject, path: Path, *, precise: bool) -> CompiledRecord:
    model = subject.model
    dequantised = _compile(subject, path, precise=precise)
    kernels = kernels_in(path)
    if any("linear_pointwise" in kernel for kernel in kernels):
        raise RuntimeError("some products are left to the vendor's library")
    gc.collect()  # the compiler's graphs refer to each other, and hold weights
    return_memory()
    return CompiledRecord(
        sha256=package_hash(path),
        torch=torch.__version__,
        kernels=kernels,
        dequantised=dequantised,
        shapes=subject.shapes,
        taps=subject.forward.taps,
        dtype=dtype_name(model),
        vocabulary=model.get_output_embeddings().weight.shape[0],
        parameters=sum(each.numel() for each in model.parameters()),
        precise=precise,
    )


def _compile(subject: Subject, path: Path, *, precise: bool) -> str:
    """Trace the forward and compile it to the file `path`; return the record's `dequantised`."""
    from torch._inductor import aoti_compile_and_package  # the documented compiler; slow to import
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from foredraft.model.compiled.kernels import own_kernels  # slow to import too

    if has_avx2() and _has_compiler() and not valid_vec_isa_list():  # torch's products would take the place of ours
        raise ForedraftError(
            f"torch cannot run what the C++ compiler makes in {cache_dir()}, as in a folder that is full or takes no "
            "programs (noexec). Set TORCHINDUCTOR_CACHE_DIR to another one; generation goes on without compiled passes."
        )
    dequantised, quantised = "", 0
    token_ids = np.zeros(_TRACED_ROWS, np.int64)
    with ExitStack() as contexts:
        contexts.enter_context(torch.no_grad())
        contexts.enter_context(real_rotations(subject.model))
        contexts.enter_context(attended_latents(subject.model))
        apart = contexts.enter_context(weights_apart(weights_beside(path)))
        if _rounds_rows(subject.model):
            rows = QuantisedRows(stored_integers(subject.model), subject.dtype)
            if quantised := contexts.enter_context(quantised_weights(subject.model, rows)):
                dequantised = dequantised_told(subject.model)
        cached = product_bytes(subject.model) <= last_cache()
        contexts.enter_context(own_kernels(cached=cached, tiles=not quantised, precise=precise))
        contexts.enter_context(compiled_experts(subject.model))
        # the LM head returns its sums, which are in float32: rounded to bfloat16, the two most probable tokens of a row
        # in twenty have equal logits
        head = subject.model.get_output_embeddings()
        contexts.enter_context(head.register_forward_hook(lambda _module, _inputs, logits: logits.float()))
        contexts.enter_context(compiled_attention(subject.forward))
        arguments = (*subject.arguments(token_ids, _TRACED_SCORED), *subject.buffers())
        program = torch.export.export(subject.forward, arguments, strict=False, dynamic_shapes=subject.dynamic())
        sum_short_products(program)
        merge_products(program)
        turn_rows(program)
        gate_products(program)
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS | apart)
    return dequantised


@torch.inference_mode()
def _same_bits(subject: Subject, library: CompiledLibrary) -> bool:
    """Return whether every row has the same bits in one pass of the most rows and in passes of each probed number.

    The logits of the rows and their keys and values are compared.
    """
    noise = torch.Generator().manual_seed(0)
    vocabulary = subject.model.config.get_text_config().vocab_size
    token_ids = torch.randint(0, vocabulary, (MOST_ROWS,), generator=noise).numpy()
    embedded = subject.embedded(MOST_ROWS)

    def outcome(together: int, rows: int) -> list[torch.Tensor]:
        """Return the scores of the first `rows` rows, `together` at a time, and all keys and values up to them."""
        cache, noise = subject.new_cache(), torch.Generator().manual_seed(1)
        cache.reserve_text(CONTEXT + MOST_ROWS)
        shapes = (*subject.shapes, *subject.shapes)  # of keys, then of values
        kept = [each for each, shape in zip(cache.reserved_buffers(0), shapes, strict=True) if not shape.taps]
        for each in kept:
            each[:, :, :CONTEXT] = torch.randn((*each.shape[:2], CONTEXT, each.shape[3]), generator=noise)
        cache.length = CONTEXT
        spans = dict[int | None, Span]()
        for span in cache.spans.values():  # one, as all layers keep all positions; none without attention
            span.stored, spans = CONTEXT, dict.fromkeys(subject.forward.windows, span)
        scores = []
        for first in range(0, rows, together):
            of_pass = slice(first, min(first + together, rows))
            ids, given = token_ids[of_pass], None if embedded is None else embedded[of_pass]
            layout = lay_out_text(ids, CONTEXT + first)
            result = run_pass(library, layout, cache, spans, subject.dtype, embedded=given)
            assert result is not None, "all layers are initialised"
            scores.append(result[0].clone())
            cache.commit(range(len(ids)))
        return [torch.cat(scores), *(each[:, :, : CONTEXT + rows].clone() for each in kept)]

    scores, *states = outcome(MOST_ROWS, MOST_ROWS)
    for together in _PROBED_ROWS:
        rows = max(together, _PROBED_AT_LEAST)
        expected = (scores[:rows], *(each[:, :, : CONTEXT + rows] for each in states))
        if not all(map(torch.equal, outcome(together, rows), expected)):
            return False
    return True
