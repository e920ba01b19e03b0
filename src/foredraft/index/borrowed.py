"""Arrays whose references compiled code does not count.

numba counts a reference whenever a function takes an array out of a tuple, by an atomic addition. `auto` reads a few
numbers of dozens of arrays at every node: without counting, and with fewer accesses to tuples, it drafts 63 nodes in
133 microseconds instead of 304 (AMD EPYC, Zen 5). Does not depend on what the arrays are.
"""

from typing import Any, TypeVar

from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaTypeError
from numba.extending import intrinsic, overload

T = TypeVar("T")


def borrowed(arrays: T) -> T:
    """Return a tuple of arrays, or of such tuples, whose references are not counted.

    For compiled code only, which must not return them, as their memory may be freed once its caller drops them.
    """
    return arrays


@intrinsic
def _without_owners(_typing: Any, arrays: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _stripped(context, builder, signature.args[0], values[0])

    return arrays(arrays), codegen


def _stripped(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    helpers: Any = cgutils
    if isinstance(kind, types.BaseTuple):
        of_parts: Any = kind
        parts = zip(of_parts, helpers.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [_stripped(context, builder, *each) for each in parts])
    if isinstance(kind, types.Number | types.Boolean):
        return value
    if not isinstance(kind, types.Array):
        raise NumbaTypeError(f"{kind} cannot be borrowed, only arrays and numbers can.")
    array = context.make_array(kind)(context, builder, value)
    array.meminfo, array.parent = (helpers.get_null_value(each.type) for each in (array.meminfo, array.parent))
    return array._getvalue()  # noqa: SLF001  # as numba's own guide to extending it does


@overload(borrowed)
def _borrowed(arrays: Any) -> Any:  # noqa: ARG001  # numba reads its type
    strip: Any = _without_owners

    def implementation(arrays: Any) -> Any:
        return strip(arrays)

    return implementation
