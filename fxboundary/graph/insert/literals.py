"""Operators that carry literal sizes: what their outputs stem from, and their sizes here.

A rule gets a :class:`Call` and returns the dimensions of the outputs; where the call's arguments
name a global size that is another one on this rank, the rule changes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxboundary.graph.insert.dims import Dim, Place, Unclear, chunks, regroup, whole
from fxboundary.graph.insert.values import Number, Value

Dims = tuple[Dim, ...]


@dataclass
class Call:
    """A node that is about to run: ``args`` and ``kwargs`` hold values in place of nodes.

    ``captured`` is what the node gave in the capture.
    """

    node: Node
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    captured: Any
    place: Place

    @property
    def first(self) -> Value:
        found = self.args[0] if self.args else next(iter(self.kwargs.values()))
        assert isinstance(found, Value)
        return found

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[index] if index < len(self.args) else default

    def set_argument(self, index: int, name: str, value: Any) -> None:
        """Change an argument of the node, and of this call."""
        if name in self.kwargs:
            self.kwargs[name] = value
            self.node.kwargs = {**self.node.kwargs, name: value}
        else:
            self.args[index] = value
            args = list(self.node.args)
            args[index] = value
            self.node.args = tuple(args)


Rule = Callable[[Call], "Dims | list[Dims]"]


def _view(call: Call) -> Dims:
    sizes = _Sizes.of(call, 1)
    dims = regroup(call.first.dims, call.captured.shape, call.place)
    if sizes is not None:
        sizes.localize(dims)
    return dims


def _flatten(call: Call) -> Dims:
    return regroup(call.first.dims, call.captured.shape, call.place)


def _unflatten(call: Call) -> Dims:
    dims = regroup(call.first.dims, call.captured.shape, call.place)
    sizes = _Sizes.of(call, 2)
    if sizes is not None:
        at = _axis(call.argument(1, "dim"), len(call.first.dims))
        sizes.localize(dims[at : at + len(sizes.values)])
    return dims


def _expand(call: Call) -> Dims:
    x, shape = call.first, call.captured.shape
    new = len(shape) - len(x.dims)
    dims = tuple(
        x.dims[i - new] if i >= new and _is(x.dims[i - new].size, size) else whole(size)
        for i, size in enumerate(shape)
    )
    sizes = _Sizes.of(call, 1)
    assert sizes is not None
    sizes.localize(dims)
    return dims


def _repeat(call: Call) -> Dims:
    x, shape = call.first, call.captured.shape
    new = len(shape) - len(x.dims)
    return tuple(
        whole(size)
        if i < new or not x.dims[i - new].mesh_dims
        else Dim(x.dims[i - new].parts * (size // x.dims[i - new].size))
        for i, size in enumerate(shape)
    )


def _split(call: Call) -> list[Dims]:
    x = call.first
    at = _axis(call.argument(2, "dim", 0), len(x.dims))
    sizes = [piece.shape[at] for piece in call.captured]
    pieces = chunks(x.dims[at], sizes)
    local = [call.place.size(piece) for piece in pieces]
    if call.name in ("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes"):
        name = _name_of(call, "split_size", "split_size_or_sections", "split_sizes")
        if x.dims[at].mesh_dims:
            listed = isinstance(call.argument(1, name), (list, tuple))
            equal = len(set(local[:-1])) <= 1 and local[-1] <= local[0]
            call.set_argument(1, name, local[0] if equal and not listed else local)
    return [(*x.dims[:at], piece, *x.dims[at + 1 :]) for piece in pieces]


def _slice(call: Call) -> Dims:
    x = call.first
    at = _axis(call.argument(1, "dim", 0), len(x.dims))
    step = call.argument(4, "step", 1)
    given = call.argument(2, "start"), call.argument(3, "end")
    start, stop = map(_globally, given)
    piece, local_start, local_stop = _piece(call.place, x.dims[at], start, stop, step)
    cut = bool(x.dims[at].mesh_dims)
    if isinstance(given[0], Number) or (cut and start):
        call.set_argument(2, "start", local_start)
    if isinstance(given[1], Number) or (cut and stop is not None and stop < _TO_THE_END):
        call.set_argument(3, "end", local_stop)
    return (*x.dims[:at], piece, *x.dims[at + 1 :])


def _narrow(call: Call) -> Dims:
    x = call.first
    at = _axis(call.argument(1, "dim"), len(x.dims))
    given = call.argument(2, "start"), call.argument(3, "length")
    start, length = map(_globally, given)
    start = start + x.dims[at].size if start < 0 else start
    piece, local_start, local_stop = _piece(call.place, x.dims[at], start, start + length, 1)
    if x.dims[at].mesh_dims or any(isinstance(number, Number) for number in given):
        call.set_argument(2, "start", local_start)
        call.set_argument(3, "length", local_stop - local_start)
    return (*x.dims[:at], piece, *x.dims[at + 1 :])


def _select(call: Call) -> Dims:
    x = call.first
    at = _axis(call.argument(1, "dim"), len(x.dims))
    if x.dims[at].mesh_dims:
        raise Unclear(f"it takes one entry of dimension {at}, which is cut")
    return (*x.dims[:at], *x.dims[at + 1 :])


def _unbind(call: Call) -> list[Dims]:
    x = call.first
    at = _axis(call.argument(1, "dim", 0), len(x.dims))
    if x.dims[at].mesh_dims:
        raise Unclear(f"it takes apart dimension {at}, which is cut")
    return [(*x.dims[:at], *x.dims[at + 1 :])] * len(call.captured)


def _cat(call: Call) -> Dims:
    xs = call.argument(0, "tensors")
    if any(not isinstance(x, Value) for x in xs):
        raise Unclear("not all that it joins are tensors")
    xs = [x for x in xs if x.dims != (whole(0),)]
    at = _axis(call.argument(1, "dim", 0), len(xs[0].dims))
    found = []
    for i, dims in enumerate(zip(*(x.dims for x in xs), strict=True)):
        if i == at:
            joined = Dim(tuple(p for d in dims for p in d.parts))
            found.append(joined if joined.mesh_dims else whole(joined.size))
        else:
            found.append(agreed(dims, call.place))
    return tuple(found)


def _getitem(call: Call) -> Dims:
    x, index = call.first, call.args[1]
    entries = index if isinstance(index, tuple) else (index,)
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if any(isinstance(entry, (Value, list)) for entry in entries):
        return _indexed(call, entries)
    filled: list[Any] = []
    for entry in entries:
        filled += [slice(None)] * (len(x.dims) - used) if entry is Ellipsis else [entry]
    filled += [slice(None)] * (len(x.dims) - sum(entry is not None for entry in filled))
    found, changed, at = [], list(filled), 0
    for i, entry in enumerate(filled):
        if entry is None:
            found.append(whole(1))
            continue
        dim, at = x.dims[at], at + 1
        if isinstance(entry, slice):
            bounds = [_globally(b) for b in (entry.start, entry.stop, entry.step)]
            piece, start, stop = _piece(call.place, dim, *bounds)
            found.append(piece)
            numbers = isinstance(entry.start, Number) or isinstance(entry.stop, Number)
            if (dim.mesh_dims and entry != slice(None)) or numbers:
                changed[i] = slice(start, stop, entry.step)
        elif dim.mesh_dims:
            raise Unclear(f"it takes one entry of dimension {at - 1}, which is cut")
    if changed != filled:
        call.args[1] = tuple(changed)
        call.node.args = (call.node.args[0], tuple(changed))
    return tuple(found)


def _indexed(call: Call, entries: Sequence[Any]) -> Dims:
    """Indexing by tensors: no dimension that is looked up may be cut; others keep their places."""
    x = call.first
    if any(dim.mesh_dims for dim in x.dims) or any(
        isinstance(entry, Value) and entry.is_cut for entry in entries
    ):
        raise Unclear("it looks up entries of a tensor that is cut")
    return tuple(whole(size) for size in call.captured.shape)


def _piece(place: Place, dim: Dim, start: Any, stop: Any, step: Any) -> tuple[Dim, Any, Any]:
    """A slice of a dimension: what it is made of, and its bounds on this rank."""
    if not dim.mesh_dims:
        size = dim.size
        if all(x is None or isinstance(x, int) for x in (start, stop, step)) and isinstance(
            size, int
        ):
            return whole(len(range(*slice(start, stop, step).indices(size)))), start, stop
        return whole(size), start, stop
    size = dim.size
    first, last, stride = slice(start, stop, step).indices(size)
    if stride != 1:
        raise Unclear("it takes every few entries of a dimension that is cut")
    lengths = [first, max(last - first, 0), size - max(last, first)]
    pieces = iter(chunks(dim, [length for length in lengths if length]))
    before, taken, _ = (next(pieces) if length else whole(0) for length in lengths)
    begin = place.size(before)
    return taken, begin, begin + place.size(taken)


def _globally(bound: Any) -> Any:
    """A bound of a slice that was read from the shape of a tensor which is cut."""
    if not isinstance(bound, Number):
        return bound
    if not isinstance(bound.whole, int):
        raise Unclear("it slices by a dynamic size of a dimension that is cut")
    return bound.whole


def agreed(dims: Sequence[Dim], place: Place) -> Dim:
    """The dimension of an output that several inputs share.

    Raises:
        Unclear: they are cut differently, or one is whole.
    """
    cut = [dim for dim in dims if dim.mesh_dims]
    wide = [dim for dim in dims if not _is(dim.size, 1)]
    if not cut:
        return wide[0] if wide else dims[0]
    if len({dim.mesh_dims for dim in wide}) > 1:
        raise Unclear("one of its inputs is cut where another is whole, or cut otherwise")
    return place.joined(cut)


@dataclass
class _Sizes:
    """The literal sizes of a call, wherever they stand in its arguments."""

    call: Call
    values: list[Any]
    key: int | str
    spread: bool

    @classmethod
    def of(cls, call: Call, index: int) -> _Sizes | None:
        """Those from position ``index`` on; ``None`` where the call has none."""
        for key in ("shape", "size", "sizes"):
            if key in call.kwargs:
                return cls(call, list(call.kwargs[key]), key, False)
        if len(call.args) <= index:
            return None
        given = call.args[index]
        if isinstance(given, (list, tuple)):
            return cls(call, list(given), index, False)
        if isinstance(given, (torch.dtype, Value)):
            return None
        return cls(call, list(call.args[index:]), index, True)

    def localize(self, dims: Sequence[Dim]) -> None:
        """Write this rank's sizes of dimensions that are cut."""
        place, nodes = self.call.place, self._nodes()
        for i, dim in enumerate(dims):
            if not dim.mesh_dims or self.values[i] == -1:
                continue
            local = place.size(dim)
            if getattr(self.values[i], "local", None) == local:
                continue  # computed from a tensor that is cut itself
            self.values[i] = local
            nodes[i] = local if isinstance(local, int) else self._divided(nodes[i], dim)
        self._write(nodes)

    def _nodes(self) -> list[Any]:
        node = self.call.node
        if isinstance(self.key, str):
            return list(node.kwargs[self.key])  # type: ignore[arg-type]
        given = node.args[self.key :] if self.spread else node.args[self.key]
        return list(given)  # type: ignore[arg-type]

    def _divided(self, size: Any, dim: Dim) -> Node:
        """A dynamic size divided by the number of ranks that cut it."""
        node = self.call.node
        with node.graph.inserting_before(node):
            found = node.graph.call_function(
                operator.floordiv, (size, self.call.place.ranks(dim.mesh_dims))
            )
        found.meta.update({k: v for k, v in node.meta.items() if k not in ("val", "example_value")})
        return found

    def _write(self, nodes: list[Any]) -> None:
        call, node = self.call, self.call.node
        if isinstance(self.key, str):
            call.kwargs[self.key] = self.values
            node.kwargs = {**node.kwargs, self.key: nodes}
            return
        local = self.values if self.spread else [self.values]
        written = nodes if self.spread else [nodes]
        end = len(call.args) if self.spread else self.key + 1
        call.args[self.key : end] = local
        node.args = (*node.args[: self.key], *written, *node.args[end:])


_TO_THE_END = 1 << 62  # larger ends of slices mean this


def _axis(dim: Any, ndim: int) -> int:
    return int(dim) % ndim if ndim else 0


def _name_of(call: Call, *names: str) -> str:
    return next((name for name in names if name in call.kwargs), names[0])


def _is(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "view_as", "reshape_as"), _view),
    "flatten": _flatten,
    "unflatten": _unflatten,
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(
        ("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk"), _split
    ),
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "getitem": _getitem,
}
