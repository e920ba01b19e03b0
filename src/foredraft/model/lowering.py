"""What a traced forward is rewritten to before torch's compiler makes code of it.

Sines and cosines of the positions are computed once and not by each layer, and linear maps of the same rows, whose
results are taken apart into heads, are one product. Knows the exporter's graphs and torch's compiler's interface. Does
not know models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node

_ANGLES = (torch.ops.aten.cos.default, torch.ops.aten.sin.default)
_LINEAR = torch.ops.aten.linear.default
_TAKEN_APART = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.unflatten.int)


@contextmanager
def angles_once() -> Iterator[None]:
    """Have torch's compiler keep sines and cosines, until the block ends.

    It counts them as cheap, and would compute those of every position again for every head of every layer.
    """
    import torch._inductor.lowering as lowerings  # slow to import, and needed by those who compile alone

    table: dict[Any, Any] = lowerings.lowerings
    theirs = {angle: table[angle] for angle in _ANGLES}
    table.update({angle: _kept(lowering) for angle, lowering in theirs.items()})
    try:
        yield
    finally:
        table.update(theirs)


def _kept(lowering: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def keep(values: Any) -> Any:
        result = lowering(values)
        result.realize()
        return result

    return keep


def merge_products(program: torch.export.ExportedProgram) -> None:
    """Make one product of linear maps of the same rows whose results are taken apart into heads: queries, keys, values.

    Each number that comes out is the same as before. Those whose results go through a function stay apart, as the
    compiler computes that within the product.

    Args:
        program: an exported forward, changed in place.
    """
    graph = program.graph_module.graph
    groups: dict[tuple[Any, int], list[Node]] = {}
    for node in graph.nodes:
        if node.target is not _LINEAR or not all(user.target in _TAKEN_APART for user in node.users):
            continue
        rows, *weights = node.args
        if all(isinstance(weight, Node) and weight.op == "placeholder" for weight in weights):  # there from the start
            groups.setdefault((rows, len(weights)), []).append(node)  # with a bias or without
    for group in groups.values():
        if len(group) > 1:
            _merge(graph, group)
    program.graph_module.recompile()


def _merge(graph: Graph, group: list[Node]) -> None:
    """Put one linear map in the place of several of the same rows."""
    rows = group[0].args[0]
    with graph.inserting_before(group[0]):
        weights = zip(*(node.args[1:] for node in group), strict=True)
        together = _call(
            graph, _LINEAR, rows, *(_call(graph, torch.ops.aten.cat.default, list(each)) for each in weights)
        )
        start = 0
        for node in group:
            end = start + node.meta["val"].shape[-1]
            node.replace_all_uses_with(_call(graph, torch.ops.aten.slice.Tensor, together, -1, start, end))
            start = end
    for node in group:
        graph.erase_node(node)


def _call(graph: Graph, operation: Any, *arguments: Any) -> Node:
    """Insert a call, with the shape and dtype of what comes out, as the exporter notes them."""
    node = graph.call_function(operation, arguments)
    values = torch.fx.map_arg(arguments, lambda given: given.meta["val"])
    node.meta["val"] = operation(*values)
    return node
