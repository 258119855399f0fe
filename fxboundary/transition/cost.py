"""What a program costs: bytes on the wire, and seconds by a latency-bandwidth model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fxboundary.placements import chunk_bounds
from fxboundary.transition.planner import sent_bytes
from fxboundary.transition.steps import Step


@dataclass(frozen=True)
class LinkModel:
    """Seconds a collective takes: ``latency + bytes / bandwidth`` (Hockney's model).

    Defaults are of the order of NVLink inside a node: 10 µs, 200 GB/s; a local copy runs at
    2 TB/s of memory traffic.
    """

    latency: float = 10e-6
    bandwidth: float = 200e9
    copy_bandwidth: float = 2e12


DEFAULT_LINK = LinkModel()


def step_bytes(
    steps: Sequence[Step],
    shape: Sequence[int],
    itemsize: int,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    global_shape: Sequence[int] | None = None,
) -> Iterator[tuple[int, int]]:
    """Per step: bytes this rank sends, and bytes its result holds. ``shape`` is local.

    ``global_shape`` is needed where shards are uneven (each then travels as large as the
    largest); the shards are even without it.
    """
    shape = list(shape)
    for step in steps:
        n, index = sizes[step.mesh_dim], coordinate[step.mesh_dim]
        travels = list(shape)
        cut = step.to_dim if step.kind == "all_to_all" else step.dim
        if step.kind in ("all_gather", "all_to_all", "pad"):
            assert step.dim is not None
            whole = shape[step.dim] * n
            if global_shape is not None:
                whole = global_shape[step.dim]
                for m in step.outer:
                    whole = chunk_bounds(whole, sizes[m], coordinate[m])[1]
            shape[step.dim], travels[step.dim] = whole, -(-whole // n)
        if step.kind in ("slice", "reduce_scatter", "all_to_all"):
            assert cut is not None
            travels[cut] = -(-shape[cut] // n) * n
            shape[cut] = chunk_bounds(shape[cut], n, index)[1]
        yield sent_bytes(step, prod(travels) * itemsize, n), prod(shape) * itemsize


def seconds(
    steps: Sequence[Step], traffic: Sequence[tuple[int, int]], link: LinkModel = DEFAULT_LINK
) -> float:
    """Time of a program whose steps have this :func:`step_bytes` traffic."""
    return sum(
        link.latency + sent / link.bandwidth if step.is_collective else held / link.copy_bandwidth
        for step, (sent, held) in zip(steps, traffic, strict=True)
    )
