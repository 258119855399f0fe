"""Text ⇄ placement, layouts by mesh-dimension name, and the shapes that a layout gives.

A *placement* is a ``torch.distributed.tensor`` ``Shard``, ``Replicate`` or ``Partial``; a
*layout* is one placement per mesh dimension, in mesh order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from fxboundary.errors import ContractError, PlacementMismatchError

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement as Placement
    from torch.distributed.tensor import Shard

    Layout: TypeAlias = tuple[Placement, ...]
else:
    Placement = Layout = tuple  # annotations only: see _torch_types

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
_TEXT = re.compile(r"(s|shard|r|replicate|p|partial)(?:\(([^()]*)\))?(?:\[(\d+)\])?")


@cache
def _torch_types() -> Any:
    # torch.distributed.tensor takes half a second to import: `import fxboundary` must not.
    import torch.distributed.tensor

    return torch.distributed.tensor


def replicate() -> Placement:
    return _torch_types().Replicate()  # type: ignore[no-any-return]


def shard(dim: int, order: int | None = None) -> Shard:
    """``S(dim)``, or with an order ``S(dim)[order]``."""
    if order is None:
        return _torch_types().Shard(dim)  # type: ignore[no-any-return]
    return _ordered_shard_type()(dim, order)  # type: ignore[no-any-return]


@cache
def _ordered_shard_type() -> Any:
    class OrderedShard(_torch_types().Shard):  # type: ignore[misc]
        """The ``order``-th cut, from 0, of a tensor dimension that several mesh dimensions cut."""

        def __init__(self, dim: int, order: int) -> None:
            super().__init__(dim)
            self.order = order

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and (self.dim, self.order) == (other.dim, other.order)

        def __hash__(self) -> int:
            return hash((self.dim, self.order))

        def __repr__(self) -> str:
            return f"Shard(dim={self.dim})[{self.order}]"

        def __reduce__(self) -> Any:
            return shard, (self.dim, self.order)

    return OrderedShard


def partial(op: str = "sum") -> Placement:
    return _torch_types().Partial(op)  # type: ignore[no-any-return]


def parse_placement(text: str | Placement) -> Placement:
    """Read one placement: ``S(d)``, ``R``, ``P``, ``P(op)`` or the long forms, in any case.

    ``op`` is one of sum, avg, max, min, product. ``S(d)[k]`` is the k-th cut, from 0, of a
    tensor dimension that several mesh dimensions cut in another order than the mesh's (torch's
    own text of a shard order). A torch placement is returned as it is.

    Raises:
        ContractError: the text is none of these forms.

    >>> parse_placement("shard(-1)"), parse_placement(" p ( avg ) ")
    (Shard(dim=-1), Partial(avg))
    """
    if not isinstance(text, str):
        if _has_text(text):
            return text
        raise ContractError(f"cannot parse {text!r} ({type(text).__name__}): {_forms()}")
    return _parse_text(text)


@cache
def _parse_text(text: str) -> Placement:
    match = _TEXT.fullmatch(re.sub(r"\s+", "", text).lower())
    if match is None:
        raise ContractError(f"cannot parse {text!r}: {_forms()}")
    kind, argument, order = match[1][0], match[2], match[3]
    if order is not None and kind != "s":
        raise ContractError(f"cannot parse {text!r}: {_forms()}")
    if kind == "r" and argument is None:
        return replicate()
    if kind == "s" and argument and re.fullmatch(r"[+-]?[0-9]{1,9}", argument):
        return shard(int(argument), None if order is None else int(order))
    if kind == "p" and (argument or "sum") in REDUCE_OPS and argument != "":
        return partial(argument or "sum")
    raise ContractError(f"cannot parse {text!r}: {_forms()}")


def _has_text(value: object) -> bool:
    """Whether a value is a placement of ours: DTensor's private kinds mean something else."""
    torch_types = _torch_types()
    kinds = (
        torch_types.Shard,
        torch_types.Replicate,
        torch_types.Partial,
        _ordered_shard_type(),
    )
    return type(value) in kinds and getattr(value, "reduce_op", "sum") in REDUCE_OPS


def _forms() -> str:
    return f"write S(dim), R, P or P(op) with op one of {', '.join(REDUCE_OPS)}"


def placement_text(placement: Placement) -> str:
    """The short text of a placement; ``parse_placement`` reads it back.

    >>> placement_text(parse_placement("partial(sum)"))
    'P'
    """
    if placement.is_replicate():
        return "R"
    if placement.is_shard():
        order = shard_order(placement)
        return f"S({shard_dim(placement)})" + ("" if order is None else f"[{order}]")
    op = reduce_op(placement)
    return "P" if op == "sum" else f"P({op})"


def layout_text(layout: Sequence[Placement]) -> str:
    """A layout as one text, placements in mesh order: ``"R,S(1)"``."""
    return ",".join(map(placement_text, layout))


@cache
def parse_layout(text: str) -> Layout:
    """Read what :func:`layout_text` wrote."""
    return tuple(parse_placement(part) for part in text.split(","))


def named_layout_text(layout: Sequence[Placement], names: Sequence[str]) -> str:
    """A layout for people: the mesh dimensions that are not R, ``"tp: S(1)"``; ``"R"`` if none."""
    parts = [
        f"{name}: {placement_text(placement)}"
        for name, placement in zip(names, layout, strict=True)
        if not placement.is_replicate()
    ]
    return ", ".join(parts) or "R"


def resolve_placements(
    named: Mapping[str, str | Placement] | None, mesh_dim_names: Sequence[str]
) -> Layout:
    """One placement per mesh dimension from a layout by name; absent names are ``R``.

    Raises:
        ContractError: a name that is no mesh dimension (the message lists those that are), or
            a placement that cannot be read.

    >>> resolve_placements({"tp": "S(1)"}, ("dp", "tp"))
    (Replicate(), Shard(dim=1))
    """
    named = named or {}
    for name in named:
        if name not in mesh_dim_names:
            raise ContractError(unknown_mesh_dim(name, mesh_dim_names))
    return tuple(parse_placement(named[n]) if n in named else replicate() for n in mesh_dim_names)


def unknown_mesh_dim(name: str, mesh_dim_names: Sequence[str]) -> str:
    return f"no mesh dimension {name!r}; the mesh has {', '.join(mesh_dim_names) or 'none'}" + near(
        name, mesh_dim_names
    )


def near(name: str, known: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for a misspelt name, or nothing."""
    found = get_close_matches(name, known, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def shard_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement shards; ``None`` where it shards none."""
    return placement.dim if placement.is_shard() else None  # type: ignore[attr-defined]


def shard_order(placement: Placement) -> int | None:
    """Which cut of its dimension a shard is, where that is declared."""
    return getattr(placement, "order", None)


def nests(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Per tensor dimension, the mesh dimensions that cut it, outermost first.

    A number says which cut a shard is, or the last one where there are fewer; shards without a
    number take the places that are left, in the mesh's order.

    >>> nests(parse_layout("S(0)[1],R,S(0),S(1)[1]"))
    {0: (2, 0), 1: (3,)}
    """
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(layout):
        if (dim := shard_dim(placement)) is not None:
            cuts.setdefault(dim, []).append(mesh_dim)
    return {dim: _in_order(layout, found) for dim, found in cuts.items()}


def _in_order(layout: Layout, mesh_dims: list[int]) -> tuple[int, ...]:
    numbered = [(order, m) for m in mesh_dims if (order := shard_order(layout[m])) is not None]
    if not numbered:
        return tuple(mesh_dims)
    places: dict[int, int] = {}
    for order, m in sorted(numbered, reverse=True):
        place = min(order, len(mesh_dims) - 1)
        while place in places:  # also of equal numbers, which normalize_dims refuses
            place = (place - 1) % len(mesh_dims)
        places[place] = m
    rest = iter(m for m in mesh_dims if m not in places.values())
    return tuple(places[i] if i in places else next(rest) for i in range(len(mesh_dims)))


def reduce_op(placement: Placement) -> str | None:
    """The reduction that a partial placement waits for; ``None`` where there is none."""
    return placement.reduce_op if placement.is_partial() else None  # type: ignore[attr-defined]


def reduction_dtype(value: Any) -> str:
    """The name of a dtype in which sums may be taken, ``"float32"``.

    Raises:
        ContractError: no floating-point dtype of at least 16 bits.
    """
    import torch

    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ContractError(f"expected a floating-point dtype such as float32, found {value!r}")
    return str(dtype).removeprefix("torch.")


def shard_dims(*layouts: Layout) -> set[int]:
    """The tensor dimensions that layouts shard."""
    return {d for layout in layouts for p in layout if (d := shard_dim(p)) is not None}


def smallest_rank(*layouts: Layout) -> int:
    """The smallest number of dimensions that a tensor of these layouts can have."""
    return max((dim + 1 if dim >= 0 else -dim for dim in shard_dims(*layouts)), default=0)


def normalize_dims(layout: Layout, ndim: int) -> Layout:
    """The same layout with every shard dimension in ``range(ndim)``, and orders where needed.

    Raises:
        PlacementMismatchError: a shard dimension that a tensor of ``ndim`` dimensions lacks;
            two cuts of one dimension with the same number.
    """
    layout = tuple(_normalize(placement, ndim) for placement in layout)
    if all(shard_order(placement) is None for placement in layout):
        return layout
    found = list(layout)
    for dim, mesh_dims in nests(layout).items():
        orders = [k for m in mesh_dims if (k := shard_order(layout[m])) is not None]
        if len(orders) > len(set(orders)):
            raise PlacementMismatchError(
                f"{layout_text(layout)}: two cuts of dimension {dim} have the same number"
            )
        in_order = list(mesh_dims) == sorted(mesh_dims)
        for place, m in enumerate(mesh_dims):
            found[m] = shard(dim, None if in_order else place)
    return tuple(found)


def _normalize(placement: Placement, ndim: int) -> Placement:
    dim = shard_dim(placement)
    if dim is None:
        return placement
    if not -ndim <= dim < ndim:
        raise PlacementMismatchError(
            f"S({dim}) shards a dimension that a tensor of {ndim} dimensions does not have"
        )
    return placement if dim >= 0 else shard(dim + ndim, shard_order(placement))


def chunk_bounds(size: int, n: int, index: int) -> tuple[int, int]:
    """Start and length of chunk ``index`` of ``n``, cut as ``torch.chunk`` cuts.

    >>> [chunk_bounds(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // n)
    start = min(step * index, size)
    return start, min(step, size - start)


def local_shape_and_offset(
    global_shape: Sequence[int],
    layout: Layout,
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of one rank's shard, and where it starts in the global tensor, per dimension.

    Several mesh dimensions on one tensor dimension nest from left to right, as in DTensor, or
    in the order that the layout declares; uneven sizes follow ``torch.chunk``.

    >>> S = (shard(0), shard(0))
    >>> [local_shape_and_offset((5, 3), S, (2, 2), (i, j))[0][0] for i in (0, 1) for j in (0, 1)]
    [2, 1, 1, 1]
    """
    shape, offset = list(global_shape), [0] * len(global_shape)
    for dim, mesh_dims in nests(normalize_dims(layout, len(shape))).items():
        for m in mesh_dims:
            start, shape[dim] = chunk_bounds(shape[dim], mesh_sizes[m], coordinate[m])
            offset[dim] += start
    return tuple(shape), tuple(offset)


def local_shape(
    global_shape: Sequence[int],
    layout: Layout,
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[int, ...]:
    """Shape of one rank's shard; see :func:`local_shape_and_offset`."""
    return local_shape_and_offset(global_shape, layout, mesh_sizes, coordinate)[0]


def global_shape(
    local: Sequence[int], layout: Layout, mesh_sizes: Sequence[int]
) -> tuple[int, ...]:
    """Global shape of a tensor whose shards are all of shape ``local`` (even sharding).

    >>> global_shape((2, 8), (replicate(), shard(1)), (2, 4))
    (2, 32)
    """
    shape = list(local)
    for placement, n in zip(normalize_dims(layout, len(shape)), mesh_sizes, strict=True):
        if (dim := shard_dim(placement)) is not None:
            shape[dim] *= n
    return tuple(shape)
