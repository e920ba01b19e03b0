"""The target: any transformers causal language model, which scores the rows of a layout.

It runs the model's own code with a prepared four-dimensional mask, explicit positions and our KV cache. Does not depend
on how rows were drafted or which of them will be kept.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch

from foredraft.contracts import Scores, TokenIds
from foredraft.errors import ForedraftError, OutOfMemoryError, UnsupportedModelError, UsageError, is_interrupt, told
from foredraft.graph.layout import Layout, lay_out, lay_out_text
from foredraft.graph.tree import IntArray
from foredraft.model.compiled.block_layers import round_weights
from foredraft.model.compiled.blocks import stored_integers
from foredraft.model.compiled.export import run_pass
from foredraft.model.compiled.package import MOST_ROWS, CompiledForward, kept_forward
from foredraft.model.families import UNMASKED_LAYERS
from foredraft.model.heads import ids_of
from foredraft.model.kv_cache import TreeCache, TreeLayer
from foredraft.model.layers import LAST, tapped_states
from foredraft.model.mask import joined_mask
from foredraft.model.recordings import RecordedForward
from foredraft.model.recurrent.adoption import adopt
from foredraft.model.recurrent.state import StateLayer, begin
from foredraft.model.rounding import error_beyond_rounding
from foredraft.model.support import Support, cache_argument, inspect, warn_where_rows_depend
from foredraft.model.waiting import Waiting, waiting_of
from foredraft.sampling.logits import best_on_device, top_by_blocks

PREFILL_ROWS = 512  # tokens of a pass of an uncompiled model in prefill; limits the mask's memory; chosen
_STATE_ROWS = 128  # the same of a recurrent model, whose operators' time grows with the square; chosen
_PROBES = 3  # texts with which a new kind of model is tried; chosen


class TorchTarget:
    """A causal language model of transformers, in evaluation mode and on its device or devices, as foredraft's target.

    Its forward may be compiled for this machine, or recorded on a CUDA device; both may be set between passes. A
    compiled model may be given as an `Outline` of `loading`, if `read` returns the model, on the CPU; it ran uncompiled
    before. Raises UnsupportedModelError if the model's rows cannot be verified as a tree.
    """

    def __init__(
        self, model: Any, compiled: CompiledForward | None = None, recordings: RecordedForward | None = None, *,
        read: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        self.outline = model
        """The model, or its `Outline`: for its configuration, dtype and generation configuration."""
        self.compiled, self.recordings, self._read = compiled, recordings, read
        if read is None:
            _check_model(model)
        warn_where_rows_depend(model.config)
        self.support: Support = inspect(model.config)
        self.window = self.support.window  # maximum tokens of a sequence, or None
        self._takes_positions = bool(self.support.masks)  # a model without attention has none
        self.waiting = Waiting(torch.get_num_threads)
        self.ids: IntArray | None = None  # int32[N], the token of each logit; None for all
        if read is not None:
            self.vocabulary, self.parameters = model.vocabulary, model.parameters
            self.dtype, self.device = model.dtype, torch.device("cpu")
            return
        embedding = model.get_input_embeddings().weight
        self.ids = ids_of(model.get_output_embeddings())
        self.vocabulary = int((model.get_output_embeddings().weight if self.ids is None else embedding).shape[0])
        self.device = embedding.device
        if self.device.type == "meta":
            raise UnsupportedModelError(
                "The embeddings of this model are offloaded, where they cannot be read; load it with a device_map that "
                "keeps its embeddings and its LM head on a device."
            )
        usual = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        # of the activations: that of the first floating-point weight of ordinary precision
        self.dtype = next((each.dtype for each in model.parameters() if each.dtype in usual), torch.get_default_dtype())
        self.parameters = sum(each.numel() for each in model.parameters())
        self._take(model)
        if any(self.support.recurrent) or not self.support.tested:
            with self.waiting.lock:  # another target may run the model meanwhile
                self._probe()

    def _take(self, model: Any) -> None:
        """Run the uncompiled `model` from now on."""
        self.waiting = waiting_of(model, self.waiting)
        with self.waiting.lock:
            adopt(model)
        self._can_score_last = "logits_to_keep" in signature(model.forward).parameters
        self._cache_argument = cache_argument(model)

    @property
    def model(self) -> Any:
        """The model with its weights, which are read at the first use."""
        if self._read is not None:
            self.outline, self._read = self._read(), None
            self._take(self.outline)
        return self.outline

    @property
    def most_rows(self) -> int:
        """The most rows of a pass over a prompt, and of a pass of several sequences."""
        if self.compiled is not None:
            return MOST_ROWS
        return _STATE_ROWS if any(self.support.recurrent) else PREFILL_ROWS

    def new_cache(self, tokens: int = 0) -> TreeCache:
        """Return an empty cache for one sequence, with room for so many tokens where it is known what they take."""
        # where passes are recorded, every layer keeps all positions, so that slots stay where they are
        windows = self.support.windows if self.recordings is None else (None,) * len(self.support.windows)
        if self.compiled is not None:  # compiled code writes to existing buffers
            cache = TreeCache.of_shapes(windows, self.compiled.record.shapes, self.dtype)
        else:
            cache = TreeCache(windows, [StateLayer if each else TreeLayer for each in self.support.recurrent])
        if tokens:
            cache.reserve_text(tokens)
        return cache

    def with_model(self, model: Any, *, rounded: bool = False) -> "TorchTarget":
        """Return a target for `model`, a copy or part of this one's; compiled if this one is and its package exists.

        If it only drafts, it may be `rounded`: on the CPU in bfloat16, its matrices are rounded to 8 bits, except those
        that are quantised with this model. Passes that draft then read half of the bytes.
        """
        own = self.model  # whose weights are read now, if they were not, so that the copy is of a target with weights
        if rounded and self.device.type == "cpu" and self.dtype == torch.bfloat16:
            quantised = own.parameters() if stored_integers(own) is not None else ()
            round_weights(model, {each.data_ptr() for each in quantised})
        other = copy.copy(self)
        other.compiled = kept_forward(model) if self.compiled is not None else None
        other.outline, other.recordings = model, None
        adopt(model)
        other.support, other.ids = inspect(model.config), ids_of(model.get_output_embeddings())
        return other

    @torch.inference_mode()
    def prefill(self, token_ids: TokenIds, cache: TreeCache, hidden: tuple[int, ...] = ()) -> torch.Tensor | None:
        """Run tokens, int64[n], after those in the cache, and commit them; every pass may raise OutOfMemoryError.

        Returns the states of the layers `hidden`, float[m, K * D], of the last m tokens: all, except for the last
        hidden states, which only scored rows have.
        """
        most = self.most_rows
        cache.reserve_text(len(token_ids))
        states = []
        for start in range(0, len(token_ids), most):
            chunk = token_ids[start : start + most]
            states.append(self.run(lay_out_text(chunk, cache.length), cache, hidden))
            cache.commit(range(len(chunk)))
        found = [each for each in states if each is not None]
        return None if not found else found[-1] if LAST in hidden else torch.cat(found)

    def forward(self, layout: Layout, cache: TreeCache, *, hidden: tuple[int, ...] = ()) -> Scores:
        """Score every row of `layout`; the rows stay after the committed ones until `cache.commit`."""
        with device_errors(layout.rows, cache.length):
            compiled = self._run_compiled(layout, cache, hidden)
            # before torch's inference mode, which takes 0.5 % of a small model's pass
            return self._forward(layout, cache, hidden) if compiled is None else scores_of_pass(compiled, hidden)

    @torch.inference_mode()
    def _forward(self, layout: Layout, cache: TreeCache, hidden: tuple[int, ...]) -> Scores:
        """Do what `forward` does, by recordings or by the uncompiled model."""
        if self.recordings is not None and not set(hidden) - {LAST}:
            scores = self.recordings.forward(
                layout, cache, lambda: self._run(layout, cache).logits[0], hidden=bool(hidden)
            )
            if scores is not None:
                return scores
        with self.waiting.lock, tapped_states(self.model, hidden) as states:
            logits = self._run(layout, cache).logits[0]
        on_host = logits.device.type == "cpu"
        # waits for the device, whose errors and time are then those of this pass
        best = None if on_host else best_on_device(logits).cpu().numpy()
        return Scores(logits, _side_by_side(states, hidden), best)

    @torch.inference_mode()
    def forward_rows(
        self, layout: Layout, cache: TreeCache, embedded: torch.Tensor, scored: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the rows of a layout with a head as `HeadModel`, which takes `embedded`, float[R, 2 D], for their tokens.

        Returns logits, float[S, V], and next states, float[S, D], of the last `scored` rows or all.
        """
        with device_errors(layout.rows, cache.length):
            compiled = self._run_compiled(layout, cache, (), scored=scored, embedded=embedded)
            if compiled is not None:
                return compiled[0], compiled[1]
            cache.reserve(layout.rows)
            with self.waiting.one_pass(compiled=False):
                output = self.model(
                    inputs_embeds=embedded[None],
                    position_ids=torch.from_numpy(layout.positions[None]).to(self.device),
                    past_key_values=cache,
                    attention_mask=self._masks(layout, cache),
                    logits_to_keep=scored or 0,
                )
            return output.logits[0], output.hidden_states[-1][0]

    @torch.inference_mode()
    def run(self, layout: Layout, cache: TreeCache, hidden: tuple[int, ...] = ()) -> torch.Tensor | None:
        """Run rows of a prompt for what the cache keeps of them, and return what `prefill` does."""
        cache.prompt = cache.length + layout.rows + 1
        with device_errors(layout.rows, cache.length):
            compiled = self._run_compiled(layout, cache, hidden, scored=1)
            if compiled is not None:
                return states_of_pass(compiled, hidden)
            with self.waiting.lock, tapped_states(self.model, hidden) as states:
                logits = self._run(layout, cache, scored=1).logits
            float(logits[0, -1, 0])  # waits for the device, as `forward` does
        return _side_by_side(states, hidden)

    def _run(self, layout: Layout, cache: TreeCache, *, scored: int | None = None) -> Any:
        """Run the uncompiled model; only the last `scored` rows are scored, if the model supports that."""
        cache.reserve(layout.rows)
        if any(self.support.recurrent):
            begin(cache, layout, self.device)
        options = {} if scored is None or not self._can_score_last else {"logits_to_keep": scored}
        positions = {"position_ids": torch.from_numpy(layout.positions).unsqueeze(0).to(self.device)}
        if not self._takes_positions:
            positions = {}
        with self.waiting.one_pass(compiled=False):
            return self.model(
                input_ids=torch.from_numpy(layout.token_ids).unsqueeze(0).to(self.device),
                attention_mask=self._masks(layout, cache),
                use_cache=True,
                **{self._cache_argument: cache},
                **positions,
                **options,
            )

    def _run_compiled(
        self, layout: Layout, cache: TreeCache, hidden: tuple[int, ...], *, scored: int | None = None,
        embedded: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:  # fmt: skip
        """Return the results for the last `scored` rows, or all; None if the model must run uncompiled."""
        compiled, package = self.compiled, None
        if compiled is not None and layout.rows <= MOST_ROWS and compiled.returns(hidden):
            package = compiled.library
        if any(self.support.recurrent) and (package is None) != (cache.records is None):
            if package is not None:  # this cache was begun before the model was compiled
                return None
            raise UsageError(
                f"This model's layers keep a state, and it runs compiled, so a pass takes up to {MOST_ROWS} rows, not "
                f"{layout.rows}, and the states of no other layers than the last; draft otherwise."
            )
        if package is None:
            return None
        with self.waiting.one_pass(compiled=True):
            return run_pass(package, layout, cache, cache.spans, self.dtype, scored, embedded)

    def _masks(self, layout: Layout, cache: TreeCache) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        kinds = self.support.masks
        if not kinds or (layout.rows == 1 and not cache.held and all(window is None for window in kinds.values())):
            return None  # one row sees all; unmasked attention need not repeat grouped keys and values
        masks: dict[str, torch.Tensor | None] = {}
        for kind, window in kinds.items():
            span = cache.spans.get(window) or cache.spans[None]  # a layer with a window may keep all slots
            committed = span.stored - len(layout.held)
            masks[kind] = joined_mask([layout], [committed], self.dtype, window).to(self.device)
        if len(masks) == 1:
            return masks[kind]
        return masks | dict.fromkeys(("linear_attention", *UNMASKED_LAYERS.intersection(self.support.layer_types)))

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
        given = {"position_ids": positions} if self._takes_positions else {}
        expected = self.model(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False, **given).logits[0]
        self.prefill(ids[:3], cache)
        cache.prompt = len(ids)  # all are, in the pass to compare with
        for layout, kept in passes:
            logits = self.forward(layout, cache).logits
            cache.commit(kept)
            errors += [error_beyond_rounding(logits[i], expected[layout.positions[i]], self.model) for i in kept]
        return float(np.max(errors))  # NaN if one is


def loaded_target(target: Any, method: str, what: str) -> TorchTarget:
    """Return the target of a method that drafts by `what` it has; UsageError if no model is loaded."""
    if not isinstance(target, TorchTarget):
        raise UsageError(f"Method {method!r} drafts {what}, and no model is loaded here.")
    return target


def _side_by_side(states: dict[int, torch.Tensor], layers: tuple[int, ...]) -> torch.Tensor | None:
    """Return the states of one sequence's rows, float[R, K * D], in the order of `layers`; None for no layers."""
    return torch.cat([states[number][0] for number in layers], dim=-1) if layers else None


def scores_of_pass(results: Sequence[torch.Tensor], hidden: tuple[int, ...]) -> Scores:
    """Return the scores of a pass from what `FunctionalForward` returns, with the states of `hidden`."""
    logits, _, *summed = results
    best, top = top_by_blocks(logits, *summed[:2]) if summed else (None, None)
    return Scores(logits, states_of_pass(results, hidden), best, top)


def states_of_pass(results: Sequence[torch.Tensor], hidden: tuple[int, ...]) -> torch.Tensor | None:
    """Return the states of these layers from what `FunctionalForward` returns, as `TorchTarget.prefill` does."""
    return None if not hidden else results[1] if LAST in hidden else results[4 if len(hidden) > 1 else 5]


@contextmanager
def device_errors(rows: int, context: int) -> Iterator[None]:
    """Turn errors of allocation into OutOfMemoryError, of a CUDA device into ForedraftError, of Ctrl-C into its own."""
    try:
        yield
    except (RuntimeError, MemoryError, SystemError) as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
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
