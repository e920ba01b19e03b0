"""The forward of a recorded pass, from rows on the device alone; on a CUDA device it is compiled.

Compiling fuses what lies between the products into few kernels, and makes one product of those of the same rows, whose
weights are moved beside each other. Attention is ours (position_attention.py) where the model lets transformers choose
it. Knows transformers' attention interface and torch's exporter and compiler. Does not record, nor know what rows mean.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from foredraft.contracts import TOP
from foredraft.errors import ForedraftWarning, told
from foredraft.model.compiled.attention import compiled_attention
from foredraft.model.compiled.export import FunctionalForward
from foredraft.model.compiled.rewriting import merge_products
from foredraft.model.mask import slot_mask
from foredraft.model.position_attention import attend_by_position, near_slots
from foredraft.sampling.logits import best_on_device, top_on_device

COLUMNS = 256  # maximum number of held rows and rows of a pass together: the width of the ancestor mask; chosen
# the first that is not the cache's number of heads or their size, so that compilers tell the dimensions apart; chosen
_TRACED_ROWS, _TRACED_SLOTS = (5, 6, 7), (512, 768)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that our attention takes

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits float[R, V], last hidden states float[R, D], and int32[R, 1 + 2 K]: the most probable token after each row, or
-1 if its logit is not finite, and the tokens and bits of `top_on_device`."""


class ScoredPass(nn.Module):
    """Scores rows with a model, whose layers have these `windows`, from inputs on its device.

    It attends as the model does, with masks, or `by_position`, for which the caller has to replace its attention.
    """

    def __init__(self, model: Any, windows: tuple[int | None, ...], *, by_position: bool) -> None:
        super().__init__()
        self.functional, self._windows, self._by_position = FunctionalForward(model), windows, by_position

    def forward(
        self,
        bounds: torch.Tensor,  # int64[2], the number of tokens committed, and of slots in use
        token_ids: torch.Tensor,  # int64[R]
        positions: torch.Tensor,  # int64[R]
        sees: torch.Tensor,  # bool[windows, R, COLUMNS], whether a row sees each slot after the committed ones
        keys: list[torch.Tensor],  # for each layer, float[1, heads, C, head_dim], written in place
        values: list[torch.Tensor],  # the same
    ) -> Outputs:
        """Score R rows, which attend to the C slots and are written after the slots in use."""
        committed, stored = bounds.unbind()
        slots = stored + torch.arange(token_ids.shape[0], device=bounds.device)
        kinds, ranges = list(zip(sees.unbind(), self._windows, strict=True)), None
        if self._by_position:
            found = [near_slots(committed, positions, seen, window) for seen, window in kinds]
            masks, ranges = [near[None, None] for near, _ in found], [bounds_of_rows for _, bounds_of_rows in found]
        else:
            shape = keys[0].shape[2], keys[0].dtype
            masks = [slot_mask(committed, positions, seen, window, *shape) for seen, window in kinds]
        logits, hidden = self.functional(
            token_ids[None], positions[None], None, masks, [slots] * len(masks), ranges, None, keys, values, []
        )
        best = best_on_device(logits)
        return logits, hidden, torch.cat([best[:, None], *top_on_device(logits, min(TOP, logits.shape[1]))], dim=1)


Pass = Callable[..., Outputs]
"""What `ScoredPass.forward` does."""


def scored_pass(model: Any, windows: tuple[int | None, ...], store: torch.Tensor) -> Pass:
    """Return the `ScoredPass` of a model: compiled if the store, float[2 L, heads, C, head_dim], is on a CUDA device.

    If it cannot be compiled, a warning says why, and it is not.
    """
    if store.is_cuda:
        try:
            return compiled_pass(model, windows, store)
        except Exception as error:  # noqa: BLE001  # compilers can raise anything, and the model can run without them
            sentence = f"This model's forward cannot be compiled for its device ({told(error)}); it runs uncompiled."
            warnings.warn(sentence, ForedraftWarning, stacklevel=5)
    return ScoredPass(model, windows, by_position=False)


@torch.no_grad()
def compiled_pass(model: Any, windows: tuple[int | None, ...], store: torch.Tensor, backend: str = "inductor") -> Pass:
    """Compile the scored pass of a model for any number of rows, two at least, and of slots; this takes a minute.

    The weights of products of the same rows are moved into one block of memory.
    """
    rows, slots = torch.export.Dim("rows", min=2, max=COLUMNS), torch.export.Dim("slots", min=3)
    of_layers = [{2: slots}] * (len(store) // 2)
    dimensions = None, {0: rows}, {0: rows}, {1: rows}, of_layers, of_layers
    count, heads, _, size = store.shape
    few, long = (next(n for n in each if n not in {heads, size}) for each in (_TRACED_ROWS, _TRACED_SLOTS))
    numbers = torch.zeros(3, few, dtype=torch.int64, device=store.device)
    sees = torch.ones(len(windows), few, COLUMNS, dtype=torch.bool, device=store.device)
    keys, values = (list(half.split(1)) for half in store.new_zeros(count, heads, long, size).chunk(2))
    bounds, token_ids, positions = (each.clone() for each in numbers)  # the exporter takes one tensor for one input
    example = bounds[:2], token_ids, positions, sees, keys, values
    export = partial(torch.export.export, args=example, strict=False, dynamic_shapes=dimensions)
    program = None
    if model.config._attn_implementation == "sdpa" and store.dtype in _DTYPES:  # noqa: SLF001  # no public name
        if store.is_cuda:  # where Triton is
            import foredraft.model.device_attention  # noqa: F401  # registers itself
        own = ScoredPass(model, windows, by_position=True).eval()
        # whether all layers ask transformers which attention to use shows when they run; the others may raise anything
        with suppress(Exception), compiled_attention(own.functional, attend_by_position) as attended:
            traced = export(own)
            program = traced if len(set(attended)) == len(of_layers) else None
    if program is None:
        program = export(ScoredPass(model, windows, by_position=False).eval())
    merge_products(program, apart=True)
    module = program.module()
    _join_weights(module)
    compiled: Pass = torch.compile(module, backend=backend, dynamic=True, fullgraph=True)
    compiled(*example)  # compiles now, so that a failure is told before anything is recorded
    return compiled


@torch.inference_mode(mode=False)  # weights made in inference mode could not be trained or traced later
def _join_weights(module: Any) -> None:
    """Put joined weights in the place of their concatenation in a traced module; the separate ones become views."""
    graph = module.graph
    for number, node in enumerate(graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)):
        parts = node.args[0]
        if not all(part.op == "get_attr" for part in parts):
            continue
        weights = [attrgetter(part.target)(module) for part in parts]
        joined = torch.cat(weights).detach()
        for weight, place in zip(weights, joined.split([len(each) for each in weights]), strict=True):
            weight.data = place
        module.register_buffer(f"joined_{number}", joined)
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(f"joined_{number}"))
        graph.erase_node(node)
    module.recompile()
