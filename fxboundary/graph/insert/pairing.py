"""Operators that pair dimensions of several tensors: those must be cut alike.

Where a rank holds one entry of a cut dimension, torch would broadcast it against a whole one, and
where two mesh dimensions cut alike, sizes fit though entries do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from fxboundary.graph.insert.dims import Dim, Unclear, whole
from fxboundary.graph.insert.literals import Call
from fxboundary.graph.insert.values import Value


def refuse_unlike_cuts(call: Call) -> None:
    """Raise Unclear where dimensions that the operator pairs are cut differently."""
    rule = _RULES.get(call.name)
    if rule is not None:
        rule(call)


def _alike(call: Call, dims: Iterable[Dim], grouped: bool = False) -> None:
    """Sizes of 1 are broadcast; ``grouped`` dimensions may be multiples of each other."""
    wide = [dim for dim in dims if not (isinstance(dim.size, int) and dim.size == 1)]
    if len({dim.mesh_dims for dim in wide}) > 1:
        raise Unclear("its operands are cut differently in dimensions that it pairs")
    if not wide or not wide[0].mesh_dims:
        return
    if grouped and len({dim.size for dim in wide}) > 1:
        for dim in wide:
            if not call.place.is_shard(dim) or dim.size % call.place.ranks(dim.mesh_dims):
                raise Unclear(f"groups of a dimension of {dim.size} lie on several ranks")
    else:
        call.place.joined(wide)


def _batches(call: Call, values: Sequence[Value], count: int, grouped: bool = False) -> None:
    """The dimensions before the last ``count``, paired from the right."""
    kept = [list(reversed(value.dims[: len(value.dims) - count])) for value in values]
    for dims in zip_longest(*kept, fillvalue=whole(1)):
        _alike(call, dims, grouped)


def _matmul(call: Call) -> None:
    x, y = call.args[0], call.argument(1, "other", call.argument(1, "mat2"))
    if isinstance(x, Value) and isinstance(y, Value):
        _alike(call, (x.dims[-1], y.dims[-min(2, len(y.dims))]))
        _batches(call, [value for value in (x, y) if len(value.dims) > 2], 2)


def _added(call: Call) -> None:
    """addmm, baddbmm: what is added comes first."""
    x, y = call.argument(1, "batch1"), call.argument(2, "batch2")
    if isinstance(x, Value) and isinstance(y, Value):
        _alike(call, (x.dims[-1], y.dims[-2]))
        _batches(call, [x, y], 2)


def _linear(call: Call) -> None:
    weight = call.argument(1, "weight")
    if isinstance(weight, Value):
        _alike(call, (call.first.dims[-1], weight.dims[-1]))


def _attention(call: Call) -> None:
    q, k, v = (call.argument(i, n) for i, n in enumerate(("query", "key", "value")))
    _batches(call, [q, k, v], 2, grouped=bool(call.argument(7, "enable_gqa", False)))
    _alike(call, (k.dims[-2], v.dims[-2]))
    _alike(call, (q.dims[-1], k.dims[-1]))


def _einsum(call: Call) -> None:
    equation, *rest = call.args
    operands = rest[0] if rest and isinstance(rest[0], (tuple, list)) else rest
    if not isinstance(equation, str) or not all(isinstance(x, Value) for x in operands):
        raise Unclear("its equation is not a string")
    labeled: dict[str, list[Dim]] = {}
    for labels, value in zip(equation.partition("->")[0].split(","), operands, strict=True):
        for label, dim in zip(_labels(labels.replace(" ", ""), value), value.dims, strict=True):
            labeled.setdefault(label, []).append(dim)
    for dims in labeled.values():
        _alike(call, dims)


def _labels(text: str, value: Value) -> list[str]:
    """One label of each dimension; those of the ellipsis are numbers, from the right."""
    before, dots, after = text.partition("...")
    several = len(value.dims) - len(before) - len(after) if dots else 0
    return [*before, *(str(i) for i in reversed(range(several))), *after]


def _looked_up(call: Call) -> None:
    """gather, scatter: index and source, but along the dimension that is looked up."""
    named = [call.argument(2, "index"), call.argument(3, "src")]
    values = [call.first, *(value for value in named if isinstance(value, Value))]
    at = call.argument(1, "dim", 0) % max(len(call.first.dims), 1)
    for i, dims in enumerate(zip(*(value.dims for value in values), strict=True)):
        if len({dim.mesh_dims for dim in dims[1 if i == at else 0 :]}) > 1:
            raise Unclear(f"what it looks up is cut otherwise than its index, in dimension {i}")


def _assigned(call: Call) -> None:
    """``x[index] = value``"""
    x, index, value = call.args
    entries = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(e, slice) or e is None or e is Ellipsis for e in entries)
    if any(dim.mesh_dims for dim in x.dims) and (
        not plain or any(e != slice(None) for e in entries if isinstance(e, slice))
    ):
        raise Unclear("it writes to some entries of a tensor that is cut")
    if isinstance(value, Value):
        if not plain and value.is_cut:
            raise Unclear("it writes what is cut to entries that it looks up")
        ends = zip(reversed(x.dims), reversed(value.dims), strict=False)
        if any(a.mesh_dims != b.mesh_dims for a, b in ends):
            raise Unclear("it writes to a tensor that is cut otherwise than what is written")


_RULES: Mapping[str, Callable[[Call], Any]] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "__matmul__", "rmatmul"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _added),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    **dict.fromkeys(("gather", "take_along_dim", "scatter", "scatter_add"), _looked_up),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce"), _looked_up),
    "setitem": _assigned,
}
