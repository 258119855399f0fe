"""What programs cost: bytes on the wire, seconds by a latency-bandwidth model, memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from fxboundary.errors import ContractError
from fxboundary.mesh import MeshSpec
from fxboundary.placements import Layout, local_shape, replicate
from fxboundary.transition.relayout import (
    busiest_fraction,
    held_wanted_own,
    is_permutation,
    relayout,
    sent_units,
)
from fxboundary.transition.steps import Kind, Step, layout_after


@dataclass(frozen=True)
class Link:
    """How fast one mesh dimension is: a collective takes ``latency + bytes / bandwidth``.

    ``latency`` in seconds, ``bandwidth`` in bytes per second (Hockney's model).
    """

    latency: float
    bandwidth: float

    @classmethod
    def fit(cls, samples: Iterable[tuple[float, float]]) -> Link:
        """The link that fits measured ``(bytes, seconds)`` best, by least squares.

        Raises:
            ContractError: fewer than two sizes, or times that do not grow with them.

        >>> Link.fit([(0, 1e-5), (1e9, 0.01001)])
        Link(latency=1e-05, bandwidth=100000000000.0)
        """
        points = [(float(size), float(time)) for size, time in samples]
        n = len(points)
        if len({size for size, _ in points}) < 2:
            raise ContractError("a link needs measurements of at least two sizes")
        mean_size, mean_time = (sum(column) / n for column in zip(*points, strict=True))
        slope = sum((s - mean_size) * (t - mean_time) for s, t in points) / sum(
            (s - mean_size) ** 2 for s, _ in points
        )
        if slope <= 0:
            raise ContractError("measured times do not grow with the number of bytes")
        return cls(round(max(mean_time - slope * mean_size, 0.0), 12), 1 / slope)


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of programs; ``links`` are by mesh-dimension name.

    A mesh dimension without a link of its own is ``inside`` a node where it and the dimensions
    after it span at most ``node_size`` ranks, else ``across`` nodes. The defaults are of the
    order of NVLink (200 GB/s) and of InfiniBand (25 GB/s) as one rank sees them; local copies
    write 1 TB/s.
    """

    links: Mapping[str, Link] = field(default_factory=dict)
    inside: Link = Link(10e-6, 200e9)
    across: Link = Link(20e-6, 25e9)
    node_size: int = 8
    copy_bandwidth: float = 1e12

    def __hash__(self) -> int:
        key = (self.inside, self.across, self.node_size, self.copy_bandwidth)
        return hash((tuple(sorted(self.links.items(), key=lambda item: item[0])), key))

    def link(self, mesh: MeshSpec, mesh_dims: Sequence[int]) -> Link:
        """Of several dimensions flattened: the slowest of them in both respects."""
        links = [self._link(mesh, m) for m in mesh_dims]
        return Link(max(x.latency for x in links), min(x.bandwidth for x in links))

    def _link(self, mesh: MeshSpec, m: int) -> Link:
        default = self.inside if math.prod(mesh.sizes[m:]) <= self.node_size else self.across
        return self.links.get(mesh.names[m], default)


DEFAULT_MODEL = CostModel()


def sent_bytes(kind: Kind, local_bytes: int, n: int) -> int:
    """Bytes one of ``n`` ranks sends in a step whose input holds ``local_bytes``.

    all_gather (n-1)·b, reduce_scatter and all_to_all (n-1)/n·b, all_reduce 2(n-1)/n·b: the
    bandwidth-optimal counts of Thakur, Rabenseifner, Gropp, "Optimization of Collective
    Communication Operations in MPICH" (2005).
    """
    match kind:
        case "all_gather":
            return (n - 1) * local_bytes
        case "reduce_scatter" | "all_to_all":
            return (n - 1) * local_bytes // n
        case "all_reduce":
            return 2 * (n - 1) * local_bytes // n
    return 0


@dataclass(frozen=True)
class Weights:
    """Cost of a step: linear in the bytes of its input and of its output on the largest shard.

    Seconds are ``latency + before·b + after·a``; memory in bytes ``held_before·b + held_after·a``,
    the input itself not counted.
    """

    latency: float
    before: float
    after: float
    held_before: float
    held_after: float


@cache
def weights(step: Step, mesh: MeshSpec, model: CostModel) -> Weights:
    """The weights of a step on a mesh."""
    copy = 1 / model.copy_bandwidth
    if not step.is_collective:
        return Weights(0.0, 0.0, copy, 0.0, 1.0)
    link = model.link(mesh, step.mesh_dims)
    n = math.prod(mesh.sizes[m] for m in step.mesh_dims)
    wire = 1 / link.bandwidth
    in_order = list(step.mesh_dims) == sorted(step.mesh_dims)
    apart = step.dim != 0 or not in_order  # chunks are not where the collective puts them
    match step.kind:
        case "all_gather":
            return Weights(link.latency, (n - 1) * wire, apart * copy, 0.0, 1.0 + apart)
        case "reduce_scatter":
            return Weights(link.latency, apart * copy, (n - 1) * wire, apart, 1.0)
        case "all_reduce":
            return Weights(link.latency, 2 * (n - 1) / n * wire, 0.0, 0.0, 1.0)
        case "all_to_all":
            packs = step.to_dim != 0 or not in_order
            time = (n - 1) / n * wire + packs * copy
            return Weights(link.latency, time, apart * copy, packs, 1.0 + apart)
    fraction = busiest_fraction(step.src, step.dst, mesh.sizes)
    if is_permutation(step.src, step.dst, mesh.sizes):
        return Weights(link.latency, fraction * wire, 0.0, 0.0, 1.0)
    return Weights(link.latency, fraction * wire + copy, copy, 1.0, 2.0)


def largest_bytes(layout: Layout, shape: Sequence[int], itemsize: int, mesh: MeshSpec) -> int:
    """Bytes of the largest shard: the first one."""
    return math.prod(local_shape(shape, layout, mesh.sizes, (0,) * len(mesh.sizes))) * itemsize


def cost(
    steps: Sequence[Step],
    layout: Layout,
    shape: Sequence[int],
    itemsize: int,
    mesh: MeshSpec,
    model: CostModel,
) -> tuple[float, int]:
    """Seconds of a program from ``layout``, and its peak memory in bytes besides its input.

    Both are those of the largest shard, so that all ranks agree on them.
    """
    seconds, peak = 0.0, 0.0
    before = largest_bytes(layout, shape, itemsize, mesh)
    for i, step in enumerate(steps):
        layout = layout_after(step, layout)
        after = largest_bytes(layout, shape, itemsize, mesh)
        w = weights(step, mesh, model)
        seconds += w.latency + w.before * before + w.after * after
        held = w.held_before * before + w.held_after * after + (before if i else 0)
        peak, before = max(peak, held), after
    return seconds, math.ceil(peak)


def least_bytes(
    src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, mesh: MeshSpec
) -> int:
    """Bytes that the busiest rank must receive, whatever the program; even shards.

    It lacks what it wants and does not hold. Of a sum over p ranks each element takes p - 1
    transfers, (p-1)/p of a shard per rank, and leaves 1/p of a shard where it was added: for an
    all_reduce the bound of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009).
    Copies that become shards may share that work. What becomes a term of a sum need not move.
    """
    terms = shared = 1
    ends = []
    for s, d, n in zip(src, dst, mesh.sizes, strict=True):
        if s.is_partial() and not d.is_partial():
            terms *= n
        if s.is_replicate() and d.is_shard():
            shared *= n
        ends.append((replicate() if s.is_partial() else s, s if d.is_partial() else d))
    before = tuple(s for s, _ in ends)
    after = tuple(replicate() if d.is_partial() else d for _, d in ends)
    held, wanted, own = held_wanted_own(before, after, mesh.sizes)
    if terms > 1:
        held /= shared
        own = min(wanted, held / terms)
    received = (terms - 1) / terms * held + wanted - own
    return round(received * math.prod(shape) * itemsize)


def traffic(
    steps: Sequence[Step],
    layout: Layout,
    shape: Sequence[int],
    itemsize: int,
    sizes: tuple[int, ...],
    coordinate: Sequence[int],
) -> Iterator[int]:
    """Bytes that the rank at ``coordinate`` sends, per step; ``shape`` is the global shape.

    Where shards are uneven each travels as large as the largest, but in an ``all_to_all_v``.
    """
    for step in steps:
        after = layout_after(step, layout)
        first = tuple(0 if m in step.mesh_dims else i for m, i in enumerate(coordinate))
        n = math.prod(sizes[m] for m in step.mesh_dims)
        local = list(local_shape(shape, layout, sizes, first))
        cut = local_shape(shape, after, sizes, first)
        if step.kind == "all_to_all_v":
            declared = tuple(enumerate(shape))
            plan = relayout(step.src, step.dst, sizes, tuple(coordinate), declared)
            others = math.prod(size for d, size in enumerate(local) if d not in plan.dims)
            yield sent_units(plan) * others * itemsize
        else:
            if step.kind in ("reduce_scatter", "all_to_all"):
                to = step.dim if step.kind == "reduce_scatter" else step.to_dim
                assert to is not None
                local[to] = cut[to] * n
            size = getattr(torch, step.dtype).itemsize if step.dtype else itemsize
            yield sent_bytes(step.kind, math.prod(local) * size, n)
        layout = after
