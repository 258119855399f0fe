"""Program: a planned transition of one tensor, for people to read and to run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fxboundary.errors import ContractError, FxBoundaryError, PlacementMismatchError
from fxboundary.mesh import LiveMesh, MeshLike, MeshSpec, mesh_spec, register_mesh
from fxboundary.placements import (
    Layout,
    Placement,
    local_shape,
    normalize_dims,
    parse_placement,
    placement_text,
    reduction_dtype,
    resolve_placements,
)
from fxboundary.transition.cost import DEFAULT_MODEL, CostModel, cost, least_bytes, traffic
from fxboundary.transition.move import bind, redistribute
from fxboundary.transition.planner import Tensor
from fxboundary.transition.steps import Step
from fxboundary.transition.transition import Request, Transition, plan, require_gradient


@dataclass(frozen=True)
class Program:
    """The steps that realise a transition of one tensor on one rank.

    ``shape`` is the global shape. Sizes are in bytes, :attr:`cost` in seconds.
    """

    src: Layout
    dst: Layout
    mesh: MeshSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]
    transition: Transition
    live: LiveMesh | None = None
    model: CostModel = DEFAULT_MODEL

    @property
    def collectives(self) -> int:
        """How many collectives are launched."""
        return sum(step.is_collective for step in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes this rank sends (without a live mesh: rank 0), by ring algorithms."""
        coordinate = self.live.coordinate if self.live else (0,) * len(self.mesh.sizes)
        size = self.dtype.itemsize
        return sum(traffic(self.steps, self.src, self.shape, size, self.mesh.sizes, coordinate))

    @property
    def least_bytes(self) -> int:
        """Bytes that the busiest rank receives at least in any program, with even shards."""
        return least_bytes(self.src, self.dst, self.shape, self.dtype.itemsize, self.mesh)

    @cached_property
    def _cost(self) -> tuple[float, int]:
        size = self.dtype.itemsize
        return cost(self.steps, self.src, self.shape, size, self.mesh, self.model)

    @property
    def cost(self) -> float:
        """Seconds, by the latency-bandwidth model of :class:`CostModel`; alike on all ranks."""
        return self._cost[0]

    @property
    def peak_memory(self) -> int:
        """Bytes that running it needs at most, besides its input; alike on all ranks."""
        return self._cost[1]

    @cached_property
    def backward(self) -> Program:
        """The program of the gradient, from the layout it arrives in.

        Raises:
            UnsupportedTransitionError: the transition has no gradient.
        """
        require_gradient(self.transition, "this program")
        reverse = self.transition.reversed()
        return replace(
            self, src=reverse.src, dst=reverse.dst, steps=reverse.forward, transition=reverse
        )

    def run(self, local_tensor: torch.Tensor) -> torch.Tensor:
        """Change the layout of this rank's tensor; differentiable. All ranks of the mesh join.

        Raises:
            FxBoundaryError: the program was planned on a static mesh.
            PlacementMismatchError: the tensor is not this rank's shard of ``shape``.
        """
        if self.live is None:
            raise FxBoundaryError("planned without processes: plan on a DeviceMesh to run")
        expected = local_shape(self.shape, self.src, self.mesh.sizes, self.live.coordinate)
        if tuple(local_tensor.shape) != expected:
            raise PlacementMismatchError(
                f"program {self}: expected this rank's shard {expected}, "
                f"got {tuple(local_tensor.shape)}"
            )
        sizes = dict(enumerate(self.shape))
        move = bind(self.transition, self.live, "program", self.live.coordinate, sizes)
        return redistribute(local_tensor, move)

    def __str__(self) -> str:
        steps = self.transition.steps_text(self.steps)
        return f"{arrow(self.src, self.dst, self.mesh)}: {steps} {bytes_text(self.bytes)}"


def arrow(src: Layout, dst: Layout, mesh: MeshSpec) -> str:
    """``S(1)→R @tp``, mesh dimensions that change only."""
    parts = [
        f"{placement_text(s)}→{placement_text(d)} @{name}"
        for name, s, d in zip(mesh.names, src, dst, strict=True)
        if s != d
    ]
    return ", ".join(parts) or "identity"


def bytes_text(count: float) -> str:
    """``2.0 MiB``.

    >>> bytes_text(512), bytes_text(2 * 1024 * 1024)
    ('512 B', '2.0 MiB')
    """
    if count < 1024:
        return f"{count:g} B"
    exponent = min(int(math.log(count, 1024)), 3)
    return f"{count / 1024**exponent:.1f} {('B', 'KiB', 'MiB', 'GiB')[exponent]}"


LayoutLike = Mapping[str, "str | Placement"] | Sequence["str | Placement"]


def resolve_layout(layout: LayoutLike, names: Sequence[str]) -> Layout:
    """A layout by name, or one placement per mesh dimension, in mesh order.

    Raises:
        ContractError: another number of placements than mesh dimensions.
    """
    if isinstance(layout, Mapping):
        return resolve_placements(layout, names)
    if isinstance(layout, str) or len(layout) != len(names):
        raise ContractError(
            f"layout {layout!r}: write one placement per mesh dimension ({', '.join(names)}), "
            f"or a mapping by name"
        )
    return tuple(parse_placement(placement) for placement in layout)


def plan_transition(
    src: LayoutLike,
    dst: LayoutLike,
    mesh: MeshLike,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    grad: LayoutLike | None = None,
    *,
    model: CostModel = DEFAULT_MODEL,
    memory_limit: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Program:
    """Plan one change of layout of a tensor of global ``shape``.

    ``src``, ``dst`` and ``grad`` (the layout in which the gradient arrives at ``dst``) are
    ``{"tp": "P"}`` or one placement per mesh dimension. The program of a ``DeviceMesh`` runs;
    that of ``{"dp": 2, "tp": 4}`` is to be read. ``model`` says what steps cost;
    ``memory_limit`` is the most bytes that a direction may need besides its input;
    ``reduce_dtype`` is the dtype in which sums are taken.

    Raises:
        ContractError: a layout that does not fit the mesh, a dtype in which no sum is taken.
        PlacementMismatchError: no shape, or one that lacks a shard dimension.
        UnsupportedTransitionError: a change that has no meaning, as P → P(max).

    >>> print(plan_transition({"tp": "S(1)"}, {}, {"tp": 4}, (64, 1024)))
    S(1)→R @tp: all_gather(dim=1, tp=4) 192.0 KiB
    """
    spec = mesh_spec(mesh)
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise PlacementMismatchError(f"shape {tuple(shape)!r}: sizes are integers, none negative")
    ndim = len(shape)
    s, d = (normalize_dims(resolve_layout(x, spec.names), ndim) for x in (src, dst))
    g = None if grad is None else normalize_dims(resolve_layout(grad, spec.names), ndim)
    reduce = "" if reduce_dtype is None else reduction_dtype(reduce_dtype)
    request = Request(Tensor(tuple(shape), dtype.itemsize), model, memory_limit, reduce)
    transition = plan(s, d, g, spec, request)
    live = None if isinstance(mesh, (Mapping, MeshSpec)) else register_mesh(mesh)
    return Program(s, d, spec, tuple(shape), dtype, transition.forward, transition, live, model)
