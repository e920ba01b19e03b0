"""Changes of a traced forward before it is compiled: products are merged, take their gates in, or become sums.

Works on the exporter's graph, whose numbers stay as they are. Does not depend on models, or on how it was traced.
"""

from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

import foredraft.model.compiled.block_layers  # noqa: F401  # imported for the operations that it registers
from foredraft.model.compiled.blocks import STRIP

_LINEAR = torch.ops.aten.linear.default
_BLOCKS = torch.ops.foredraft.multiply_blocks.default
_EXPERT_BLOCKS = torch.ops.foredraft.multiply_expert_blocks.default
_TURNED = (torch.ops.aten.transpose.int, torch.ops.aten.permute.default)
_TAKEN_APART = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.unflatten.int)
_SHORT = 16  # numbers that a product is over, at most, to be written as a sum of as many terms; Gemma 3n's are over 4
_SLICE, _CHUNK = torch.ops.aten.slice.Tensor, torch.ops.aten.chunk.default
_GATES: dict[tuple[Any, Any], str] = {
    (torch.ops.aten.silu.default, "none"): "silu",
    (torch.ops.aten.gelu.default, "tanh"): "gelu_tanh",
}
"""By function, and how it is approximated: its name among `GATES`."""


def gate_products(program: torch.export.ExportedProgram) -> None:
    """Have a product with quantised weights return the gated half of its columns, where nothing else reads them.

    So much of a feed-forward layer is `act(x W_gate) * (x W_up)`, of one product after `merge_products`. A thread then
    applies the gate to what it has just summed; what is rounded is the same. The program is changed in place.
    """
    graph: Any = program.graph_module.graph
    for scaled in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        for given in (scaled.args, scaled.args[::-1]):
            if (found := _gated(*given)) is not None:
                product, name = found
                rows, blocks, other = product.args[:3]
                strips = 0 if product.target is _BLOCKS else 1  # the dimension
                with graph.inserting_before(scaled):
                    # strip by strip, so that weights are read one after another
                    halves = _call(graph, torch.ops.aten.unflatten.int, blocks, strips, [2, -1])
                    turned = _call(graph, torch.ops.aten.transpose.int, halves, strips, strips + 1)
                    paired = _call(graph, torch.ops.aten.flatten.using_ints, turned, strips, strips + 1)
                    scaled.replace_all_uses_with(_call(graph, product.target, rows, paired, other, name))
                break
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _gated(activated: Any, up: Any) -> tuple[Any, str] | None:
    """Return the product whose first half is read for `activated` alone, and whose second is `up`; and the gate."""
    if not (isinstance(activated, Node) and isinstance(up, Node)) or len(activated.users) + len(up.users) != 2:
        return None
    function: Any = activated.target
    name = _GATES.get((function, activated.kwargs.get("approximate", "none")))
    gate: Any = activated.args[0] if name else None
    if name is None or len(gate.users) != 1 or gate.target not in (_SLICE, getitem):
        return None
    source = gate.args[0]
    product = source.args[0] if source.target is _CHUNK else source
    if product.target not in (_BLOCKS, _EXPERT_BLOCKS) or (product.target is _BLOCKS and product.args[2]):
        return None  # no quantised weights, or a result that is not rounded
    width = product.meta["val"].shape[-1] // 2
    if source.target is _CHUNK:
        halves = source.args[1:] == (2, -1) and gate.args == (source, 0) and up.args == (source, 1)
        alone = len(product.users) == 1
    else:
        halves = gate.args == (product, -1, 0, width) and up.args == (product, -1, width, 2 * width)
        alone = len(product.users) == 2
    return (product, name) if halves and alone and width % STRIP == 0 else None


def turn_rows(program: torch.export.ExportedProgram) -> None:
    """Have rows of linear maps that were transposed written row by row, as the kernels read them.

    Convolutions' results are: in torch they lie so already, but the compiler lays results out anew. The program is
    changed in place, without a change of a number.
    """
    graph = program.graph_module.graph
    for node in graph.nodes:
        if node.target in (_LINEAR, _BLOCKS) and node.args[0].target in _TURNED:
            with graph.inserting_before(node):
                node.replace_input_with(node.args[0], _call(graph, torch.ops.foredraft.written.default, node.args[0]))
    program.graph_module.recompile()


def sum_short_products(program: torch.export.ExportedProgram) -> None:
    """Write products of activations over a few numbers, such as Gemma 3n's of four streams, as the sums that they are.

    There is no kernel for them. The program is changed in place; sums are in float32, and rounded once.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default):
        left, right = node.args
        count, dtype = left.meta["val"].shape[-1], node.meta["val"].dtype
        if isinstance(count, int) and count <= _SHORT and right.meta["val"].ndim > 1:
            with graph.inserting_before(node):
                columns, rows = (_call(graph, torch.ops.aten.to.dtype, each, torch.float32) for each in node.args)
                terms = [
                    _call(
                        graph, torch.ops.aten.mul.Tensor,
                        _call(graph, _SLICE, columns, -1, number, number + 1),
                        _call(graph, _SLICE, rows, -2, number, number + 1),
                    )
                    for number in range(count)
                ]  # fmt: skip
                total = reduce(lambda one, other: _call(graph, torch.ops.aten.add.Tensor, one, other), terms)
                node.replace_all_uses_with(_call(graph, torch.ops.aten.to.dtype, total, dtype))
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def merge_products(program: torch.export.ExportedProgram, *, apart: bool = False) -> None:
    """Make one product of linear maps of the same rows whose results are taken apart into heads: queries, keys, values.

    The program is changed in place; each number that comes out is the same as before. Those whose results go through a
    function stay apart, as the compiler computes that within the product, unless their weights are quantised, or the
    functions are computed `apart`.
    """
    graph = program.graph_module.graph
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.target is _BLOCKS:
            blocks = node.args[1].meta["val"]
            groups.setdefault((node.args[0], blocks.shape[1:], blocks.dtype, *node.args[2:]), []).append(node)
        if node.target is not _LINEAR or not (apart or all(user.target in _TAKEN_APART for user in node.users)):
            continue
        rows, *weights = node.args
        if all(isinstance(weight, Node) and weight.op == "placeholder" for weight in weights):  # there from the start
            groups.setdefault((rows, len(weights)), []).append(node)  # with a bias or without
    for group in groups.values():
        if len(group) > 1:
            _merge(graph, group)
    program.graph_module.recompile()


def _merge(graph: Graph, group: list[Node]) -> None:
    operation, (rows, *others) = group[0].target, group[0].args
    with graph.inserting_before(group[0]):
        given = [
            _call(graph, torch.ops.aten.cat.default, [node.args[1 + place] for node in group])
            if isinstance(first, Node)
            else first
            for place, first in enumerate(others)
        ]
        together = _call(graph, operation, rows, *given)
        start = 0
        for node in group:
            end = start + node.meta["val"].shape[-1]
            node.replace_all_uses_with(_call(graph, torch.ops.aten.slice.Tensor, together, -1, start, end))
            start = end
    for node in group:
        graph.erase_node(node)


def _call(graph: Graph, operation: Any, *arguments: Any) -> Node:
    """Insert a call, with the shape and dtype of its result, as the exporter notes them."""
    node = graph.call_function(operation, arguments)
    values = torch.fx.map_arg(arguments, lambda given: given.meta["val"])
    with enable_python_dispatcher():  # sizes are symbols
        node.meta["val"] = operation(*values)
    return node
