"""A step bound to where it runs: the collectives of its group, this rank's cuts, declared sizes.

What is the same at every call is found here once. Two tables of collectives serve the same steps:
:class:`FunctionalCalls` (what captures see) and ``GroupCalls`` (what eager runs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fxboundary._torch_internals import GroupCalls
from fxboundary.mesh import LiveMesh
from fxboundary.placements import chunk_bounds
from fxboundary.transition.relayout import Relayout, relayout
from fxboundary.transition.steps import Step


class Calls(Protocol):
    """The collectives of one group; tensors are contiguous, chunks lie along dimension 0."""

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor: ...
    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...
    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor: ...
    def all_to_all(
        self, x: torch.Tensor, received: Sequence[Any] | None, sent: Sequence[Any] | None
    ) -> torch.Tensor:
        """``received`` and ``sent`` are lengths per rank; ``None`` means equal parts."""


class FunctionalCalls:
    """Collectives as ``_c10d_functional`` operators with explicit waits."""

    def __init__(self, group_name: str, n: int) -> None:
        self._name, self._n = group_name, n

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return _wait(ops.all_reduce.default(x.contiguous(), op, self._name))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return _wait(ops.all_gather_into_tensor.default(x, self._n, self._name))

    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return _wait(ops.reduce_scatter_tensor.default(x, op, self._n, self._name))

    def all_to_all(
        self, x: torch.Tensor, received: Sequence[Any] | None, sent: Sequence[Any] | None
    ) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        equal = [x.shape[0] // self._n] * self._n
        return _wait(ops.all_to_all_single.default(x, received or equal, sent or equal, self._name))


def _wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(x)  # type: ignore[no-any-return]


CallsByDims = Mapping[tuple[int, ...], Calls]  # by the group's mesh dimensions, ascending


def functional_calls(mesh: LiveMesh) -> CallsByDims:
    return {dims: FunctionalCalls(g.name, g.size) for dims, g in mesh.groups.items()}


def eager_calls(mesh: LiveMesh) -> CallsByDims:
    return {dims: GroupCalls(g.group) for dims, g in mesh.groups.items()}


@dataclass(frozen=True)
class Site:
    """Where steps run: the mesh, this rank's coordinate, declared global sizes, the port.

    The coordinate is empty where no step needs it.
    """

    mesh: LiveMesh
    coordinate: tuple[int, ...]
    sizes: Mapping[int, int]
    port: str

    def whole(self, dim: int | None, outer: Sequence[int]) -> int | None:
        """Size of ``dim`` that is cut by nothing but ``outer``, where it is declared."""
        size = None if dim is None else self.sizes.get(dim)
        if size is not None:
            for m in outer:
                size = chunk_bounds(size, self.mesh.spec.sizes[m], self.coordinate[m])[1]
        return size


Cuts = tuple[tuple[int, int], ...]  # start and length, outermost mesh dimension first


@dataclass(frozen=True, eq=False)
class BoundStep:
    """A step at a site.

    ``n`` ranks in the group; ``ranks`` says which cut each of them holds, in the group's order,
    and is ``None`` where that is the order of the cuts; ``place`` is this rank's cut. ``cuts``
    and ``to_cuts`` are those of the step's ``dim`` and ``to_dim`` where their whole size is
    declared.
    """

    step: Step
    site: Site
    calls: Calls | None
    n: int
    ranks: tuple[int, ...] | None
    place: int
    cuts: Cuts | None
    to_cuts: Cuts | None
    relayout: Relayout | None

    @property
    def group_text(self) -> str:
        """``dp=2,tp=4``, for messages."""
        spec = self.site.mesh.spec
        return ",".join(f"{spec.names[m]}={spec.sizes[m]}" for m in self.step.mesh_dims)


def bind_steps(steps: Sequence[Step], site: Site, calls: CallsByDims) -> tuple[BoundStep, ...]:
    """Steps bound to a site and to one of its tables of collectives."""
    return tuple(_bind(step, site, calls) for step in steps)


def _bind(step: Step, site: Site, calls: CallsByDims) -> BoundStep:
    mesh_sizes = site.mesh.spec.sizes
    sizes = tuple(mesh_sizes[m] for m in step.mesh_dims)
    place = 0
    for m, n in zip(step.mesh_dims, sizes, strict=True):
        place = place * n + (site.coordinate[m] if site.coordinate else 0)
    plan = None
    if step.kind == "all_to_all_v":
        declared = tuple(sorted(site.sizes.items()))
        plan = relayout(step.src, step.dst, mesh_sizes, site.coordinate, declared)
    return BoundStep(
        step,
        site,
        calls.get(tuple(sorted(step.mesh_dims))),
        math.prod(sizes),
        _by_group_rank(step.mesh_dims, sizes),
        place,
        _cuts(site.whole(step.dim, step.outer), sizes),
        _cuts(site.whole(step.to_dim, step.to_outer), sizes),
        plan,
    )


def _by_group_rank(mesh_dims: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """A group counts its ranks row-major over ascending mesh dimensions; cuts may nest in
    another order."""
    ascending = sorted(mesh_dims)
    if list(mesh_dims) == ascending:
        return None
    size = dict(zip(mesh_dims, sizes, strict=True))
    found = []
    for index in itertools.product(*(range(size[m]) for m in ascending)):
        at = dict(zip(ascending, index, strict=True))
        place = 0
        for m in mesh_dims:
            place = place * size[m] + at[m]
        found.append(place)
    return tuple(found)


def _cuts(whole: int | None, sizes: Sequence[int]) -> Cuts | None:
    """All cuts of a dimension by nested mesh dimensions, as ``torch.chunk`` cuts."""
    if whole is None:
        return None
    found = [(0, whole)]
    for n in sizes:
        found = [
            (start + offset, length)
            for start, size in found
            for offset, length in (chunk_bounds(size, n, i) for i in range(n))
        ]
    return tuple(found)
