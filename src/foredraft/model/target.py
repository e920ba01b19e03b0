"""The target: any transformers causal language model, which scores the rows of a layout.

It runs the model's own code with a prepared four-dimensional mask, explicit positions and our KV cache. Does not depend
on how rows were drafted or which of them will be kept.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch

from foredraft.contracts import Scores, TokenIds
from foredraft.errors import ForedraftError, OutOfMemoryError, UnsupportedModelError, told
from foredraft.graph.layout import Layout, lay_out, lay_out_text
from foredraft.model.compiled.blocks import round_weights
from foredraft.model.compiled.export import row_arguments
from foredraft.model.compiled.package import MOST_ROWS, CompiledForward, kept_forward
from foredraft.model.gguf.files import quantised_file
from foredraft.model.heads import ids_of
from foredraft.model.kv_cache import TreeCache
from foredraft.model.layers import scored_states
from foredraft.model.mask import attention_mask
from foredraft.model.recordings import RecordedForward
from foredraft.model.rounding import error_beyond_rounding
from foredraft.model.support import Support, cache_argument, inspect, warn_where_rows_depend
from foredraft.model.waiting import Waiting
from foredraft.sampling.logits import best_on_device, top_by_blocks

PREFILL_ROWS = 512  # tokens of a pass of an uncompiled model in prefill; limits the mask's memory; chosen
_PROBES = 3  # texts with which a new kind of model is tried; chosen


class TorchTarget:
    """A causal language model of transformers, in evaluation mode and on its device or devices, as foredraft's target.

    Its forward may be compiled for this machine, or recorded on a CUDA device; both may be set between passes. Raises
    UnsupportedModelError if the model's rows cannot be verified as a tree.
    """

    def __init__(
        self, model: Any, compiled: CompiledForward | None = None, recordings: RecordedForward | None = None
    ) -> None:
        self.model, self.compiled, self.recordings = model, compiled, recordings
        _check_model(model)
        warn_where_rows_depend(model.config)
        self.support: Support = inspect(model.config)
        self.window = self.support.window  # maximum tokens of a sequence, or None
        embedding = model.get_input_embeddings().weight
        self.ids = ids_of(model.get_output_embeddings())  # int32[N], the token of each logit; None for all
        self.vocabulary = int((model.get_output_embeddings().weight if self.ids is None else embedding).shape[0])
        self.device: torch.device = embedding.device
        usual = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        # of the activations: that of the first floating-point weight of ordinary precision
        self.dtype = next((each.dtype for each in model.parameters() if each.dtype in usual), torch.get_default_dtype())
        self._can_score_last = "logits_to_keep" in signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self.waiting = Waiting(torch.get_num_threads())
        if not self.support.tested:
            self._probe()

    def new_cache(self) -> TreeCache:
        # where passes are recorded, every layer keeps all positions, so that slots stay where they are
        windows = self.support.windows if self.recordings is None else (None,) * len(self.support.windows)
        cache = TreeCache(windows)
        if self.compiled is not None:  # compiled code writes to existing buffers
            cache.take_shapes(self.compiled.record.shapes, self.dtype)
        return cache

    def with_model(self, model: Any, *, rounded: bool = False) -> "TorchTarget":
        """Return a target for `model`, a copy or part of this one's; compiled if this one is and its package exists.

        If it only drafts, it may be `rounded`: on the CPU in bfloat16, its matrices are rounded to 8 bits, except those
        that are quantised with this model. Passes that draft then read half of the bytes.
        """
        if rounded and self.device.type == "cpu" and self.dtype == torch.bfloat16:
            quantised = quantised_file(self.model) is not None
            round_weights(model, {each.data_ptr() for each in self.model.parameters()} if quantised else frozenset())
        other = copy.copy(self)
        other.compiled = kept_forward(model) if self.compiled is not None else None
        other.model, other.recordings = model, None
        other.support, other.ids = inspect(model.config), ids_of(model.get_output_embeddings())
        return other

    @torch.inference_mode()
    def prefill(self, token_ids: TokenIds, cache: TreeCache) -> None:
        """Run tokens, int64[n], after those in the cache, and commit them; every pass may raise OutOfMemoryError."""
        compiled = self.compiled is not None and self.compiled.package_for(MOST_ROWS) is not None
        most = MOST_ROWS if compiled else PREFILL_ROWS
        cache.reserve_text(len(token_ids))
        for start in range(0, len(token_ids), most):
            chunk = token_ids[start : start + most]
            self.run(lay_out_text(chunk, cache.length), cache)
            cache.commit(range(len(chunk)))

    @torch.inference_mode()
    def forward(self, layout: Layout, cache: TreeCache, *, hidden: bool = False) -> Scores:
        """Score every row of `layout`; the rows stay after the committed ones until `cache.commit`."""
        with device_errors(layout.rows, cache.length):
            compiled = self._run_compiled(layout, cache)
            if compiled is not None:
                return scores_of_pass(*compiled, hidden=hidden)
            if self.recordings is not None:
                scores = self.recordings.forward(
                    layout, cache, lambda: self._run(layout, cache).logits[0], hidden=hidden
                )
                if scores is not None:
                    return scores
            with scored_states(self.model) as states:
                logits = self._run(layout, cache).logits[0]
            on_host = logits.device.type == "cpu"
            # waits for the device, whose errors and time are then those of this pass
            best = None if on_host else best_on_device(logits).cpu().numpy()
        return Scores(logits, states[0][0] if hidden else None, best)

    @torch.inference_mode()
    def run(self, layout: Layout, cache: TreeCache) -> None:
        """Run rows through the model for their keys, values and states; only the last row is scored."""
        with device_errors(layout.rows, cache.length):
            if self._run_compiled(layout, cache, scored=1) is None:
                float(self._run(layout, cache, scored=1).logits[0, -1, 0])  # waits for the device, as `forward` does

    def _run(self, layout: Layout, cache: TreeCache, *, scored: int | None = None) -> Any:
        """Run the uncompiled model; only the last `scored` rows are scored, if the model supports that."""
        cache.reserve(layout.rows)
        options = {} if scored is None or not self._can_score_last else {"logits_to_keep": scored}
        with self.waiting.one_pass(compiled=False):
            return self.model(
                input_ids=torch.from_numpy(layout.token_ids).unsqueeze(0).to(self.device),
                attention_mask=self._masks(layout, cache),
                position_ids=torch.from_numpy(layout.positions).unsqueeze(0).to(self.device),
                use_cache=True,
                **{self._cache_argument: cache},
                **options,
            )

    def _run_compiled(
        self, layout: Layout, cache: TreeCache, *, scored: int | None = None
    ) -> list[torch.Tensor] | None:
        """Return the results for the last `scored` rows, or all; None if the model must run uncompiled."""
        package = self.compiled.package_for(layout.rows) if self.compiled is not None else None
        buffers = cache.reserved_buffers(layout.rows) if package is not None else []
        if package is None or not buffers:
            return None
        ids, positions, which, masks, slots, ranges = row_arguments(
            layout, cache.spans.values(), self.dtype, ranges=package.ranges, scored=scored
        )
        with self.waiting.one_pass(compiled=True):
            return package.run([ids, positions, which, *masks, *slots, *(ranges or ()), *buffers])

    def _masks(self, layout: Layout, cache: TreeCache) -> torch.Tensor | dict[str, torch.Tensor] | None:
        kinds = dict(zip(self.support.layer_types, self.support.windows, strict=True))
        if layout.rows == 1 and not cache.held and all(window is None for window in kinds.values()):
            return None  # one row sees all; unmasked attention need not repeat grouped keys and values
        masks = {}
        for kind, window in kinds.items():
            span = cache.spans.get(window) or cache.spans[None]  # a layer with a window may keep all slots
            masks[kind] = attention_mask(layout, span, window, self.dtype).to(self.device)
        return masks if len(masks) > 1 else masks[kind]

    @torch.inference_mode()
    def _probe(self) -> None:
        """Raise UnsupportedModelError if logits depend on rejected drafts, on a fork, or on a row's index in the pass.

        A model for which they do is wrong in every text; in 16 bits, rounding alone is too large in a few.
        """
        for text in range(_PROBES):
            try:
                error = self._probe_error((self.vocabulary * np.arange(1, 9) // 9 + text) % self.vocabulary)
            except ForedraftError:
                raise
            except Exception as raised:  # there is no list of what the code of unknown models raises
                raise UnsupportedModelError(
                    f"This {self.support.family} model does not run with foredraft's masks, positions and cache "
                    f"({told(raised)}); foredraft supports decoder-only attention models that take transformers' cache."
                ) from raised
            if not error:
                return
        raise UnsupportedModelError(
            f"This {self.support.family} model scores a token differently after a rejected draft or inside a tree "
            f"(relative error {error:.1e}), as models with a recurrent state or with positions of their own do, so "
            "drafts cannot be verified exactly; foredraft supports attention with rotary or learned positions."
        )

    def _probe_error(self, ids: TokenIds) -> float:
        """Return the largest relative error beyond rounding of logits after some of eight tokens; it may be NaN.

        They are compared with one pass of the model alone, without foredraft's cache and masks.
        """
        wrong, cache, errors = int(ids[0]), self.new_cache(), []
        fork = np.array([wrong, ids[5], ids[6]], np.int32), np.array([-1, -1, 1], np.int32)
        passes = (
            (lay_out_text(np.array([ids[3], wrong, wrong]), 3), [0]),  # both drafts are rejected
            (lay_out(int(ids[4]), *fork, at=4), [0, 2, 3]),  # the first child is
            (lay_out_text(ids[7:], 7), [0]),
        )
        rows = torch.from_numpy(ids).unsqueeze(0).to(self.device)
        positions = torch.arange(len(ids), device=self.device).unsqueeze(0)  # as `generate` gives them
        expected = self.model(
            input_ids=rows, attention_mask=torch.ones_like(rows), position_ids=positions, use_cache=False
        ).logits[0]
        self.prefill(ids[:3], cache)
        for layout, kept in passes:
            logits = self.forward(layout, cache).logits
            cache.commit(kept)
            errors += [error_beyond_rounding(logits[i], expected[layout.positions[i]], self.model) for i in kept]
        return float(np.max(errors))  # NaN if one is


def scores_of_pass(
    logits: torch.Tensor, states: torch.Tensor, maxima: torch.Tensor, totals: torch.Tensor, *, hidden: bool
) -> Scores:
    """Return the scores of a compiled pass, whose forward summarises its logits."""
    best, top = top_by_blocks(logits, maxima, totals)
    return Scores(logits, states if hidden else None, best, top)


@contextmanager
def device_errors(rows: int, context: int) -> Iterator[None]:
    """Turn errors of allocation into an OutOfMemoryError, and those of a CUDA device into a ForedraftError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        what = str(error)
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if full or "allocate memory" in what or "out of memory" in what:
            raise OutOfMemoryError(
                f"There is no memory left for {rows} more rows after {context} tokens; ask for fewer tokens, or use a "
                "smaller model or dtype."
            ) from error
        if "CUDA error" in what:
            raise ForedraftError(
                f"The device failed in a pass of {rows} rows after {context} tokens ({told(error)}). It takes no more "
                "work from this process: start it again, and check the device with nvidia-smi if that repeats."
            ) from error
        raise


def _check_model(model: Any) -> None:
    """Raise UnsupportedModelError without a language model head, or for attention that takes no prepared mask."""
    config = getattr(model, "config", None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if config is None or head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is no causal language model of transformers: it has no output embeddings to score "
            "tokens with. Load it with AutoModelForCausalLM."
        )
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in (None, "eager", "sdpa"):  # these take a prepared mask
        raise UnsupportedModelError(
            f"This model runs the attention kernel {kernel!r}, which does not take the mask of a tree; choose one that "
            "does: model.set_attn_implementation('sdpa')."
        )
