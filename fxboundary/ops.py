"""``fxboundary::redistribute``: the operator that stands for a port.

The operator has a composite implementation that calls an autograd function: Dynamo and export
keep it as one node, AOTAutograd and eager autograd see through it, so plain Inductor and every
other backend run it too. Its arguments are the same on all ranks, but for ``coordinate``, which
is given only where a step cuts: torch's caches cover arguments, not the body, and a rank read
inside would be served to the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fxboundary._torch_internals import in_transform, is_plain_eager
from fxboundary.errors import PlacementMismatchError
from fxboundary.mesh import LiveMesh, live_mesh
from fxboundary.placements import (
    Layout,
    layout_text,
    normalize_dims,
    parse_layout,
    shard_dims,
    smallest_rank,
)
from fxboundary.recompute import remember_origin
from fxboundary.transition.move import Move, bind, redistribute
from fxboundary.transition.transition import Request, plan

_LIB = torch.library.Library("fxboundary", "DEF")
_LIB.define(
    "redistribute(Tensor x, str mesh, str src, str dst, str grad, str port, "
    'SymInt[] coordinate, str sizes, str reduce_dtype="", str backward="") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _implementation(
    x: torch.Tensor,
    mesh: str,
    src: str,
    dst: str,
    grad: str,
    port: str,
    coordinate: Sequence[Any],
    sizes: str,
    reduce_dtype: str = "",
    backward: str = "",
) -> torch.Tensor:
    # A capture with dynamic sizes makes symbols of all numbers; the steps need this one.
    at = tuple(int(index) for index in coordinate)
    arguments = (src, dst, grad, port, at, sizes, reduce_dtype)
    move = _move(live_mesh(mesh), *arguments, x.dim())
    return redistribute(x, move)


_LIB.impl("redistribute", _implementation, "CompositeImplicitAutograd")
OP = torch.ops.fxboundary.redistribute


@cache
def _move(
    mesh: LiveMesh,
    src: str,
    dst: str,
    grad: str,
    port: str,
    coordinate: tuple[int, ...],
    sizes: str,
    reduce_dtype: str,
    ndim: int,
) -> Move:
    try:
        s, d, g = (normalize_dims(parse_layout(text), ndim) for text in (src, dst, grad))
    except PlacementMismatchError as error:
        raise PlacementMismatchError(f"{port}: {error}") from None
    transition = plan(s, d, g, mesh.spec, Request(reduce_dtype=reduce_dtype))
    return bind(transition, mesh, port, coordinate, _parse_sizes(sizes, ndim))


def sizes_text(sizes: Mapping[int, int]) -> str:
    """Declared global sizes as text, ``"0:5,-1:50257"``."""
    return ",".join(f"{dim}:{size}" for dim, size in sorted(sizes.items()))


def _parse_sizes(text: str, ndim: int) -> dict[int, int]:
    pairs = (part.split(":") for part in text.split(",") if part)
    return {int(dim) % ndim: int(size) for dim, size in pairs}


def port_label(module: str) -> str:
    """The module's own name, the same for all layers of a list: ``mlp``, ``layers.*``."""
    parts = module.split(".")
    if parts[-1].isdigit() and len(parts) > 1:
        return f"{parts[-2]}.*"
    return parts[-1] or "<root>"


class PortOp:
    """One port's redistribution, bound to its mesh: tensor in, tensor out.

    Captures record the operator; eager execution skips it and runs the planned move.
    """

    def __init__(
        self,
        mesh: LiveMesh,
        src: Layout,
        dst: Layout,
        grad: Layout,
        port: str,
        sizes: Mapping[int, int] | None = None,
        reduce_dtype: str = "",
        backward: str = "",
    ) -> None:
        sizes = sizes or {}
        needs = bool(sizes) or _cuts(src, dst, grad, mesh)
        self.port = port
        self.args = (
            mesh.name,
            layout_text(src),
            layout_text(dst),
            layout_text(grad),
            port,
            list(mesh.coordinate) if needs else [],
            sizes_text(sizes),
            reduce_dtype,
            backward,
        )
        self._mesh, self._again = mesh, backward == "recompute"
        self._moves: dict[int, Move] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not (is_plain_eager(x) or in_transform()):
            if not hasattr(x, "dim"):  # a tracer's proxy is no Tensor, but has all of its names
                raise PlacementMismatchError(f"{self.port}: expected a tensor, got {x!r}")
            return OP(x, *self.args)  # type: ignore[no-any-return]
        move = self._moves.get(x.dim())
        if move is None:
            move = self._plan(x.dim())
        moved = redistribute(x, move)
        if self._again and moved is not x and moved.requires_grad and not in_transform():
            remember_origin(moved, x, move.run, self.port)
        return moved

    def _plan(self, ndim: int) -> Move:
        _, src, dst, grad, port, coordinate, sizes, reduce_dtype, _ = self.args
        layouts = (src, dst, grad)
        move = _move(self._mesh, *layouts, port, tuple(coordinate), sizes, reduce_dtype, ndim)
        self._moves[ndim] = move
        return move

    def __repr__(self) -> str:
        return f"PortOp({self.port})"


def _cuts(src: Layout, dst: Layout, grad: Layout, mesh: LiveMesh) -> bool:
    """Whether a step of the transition depends on which rank runs it."""
    dims = shard_dims(src, dst, grad)
    if any(dim < 0 for dim in dims) and any(dim >= 0 for dim in dims):
        return True  # which of them are equal, and so the steps, depends on the tensor's rank
    ndim = smallest_rank(src, dst, grad)
    s, d, g = (normalize_dims(layout, ndim) for layout in (src, dst, grad))
    return plan(s, d, g, mesh.spec).needs_coordinate
