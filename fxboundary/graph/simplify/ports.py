"""Ports as passes compare and replace them, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxboundary.graph.find import PORT, Port
from fxboundary.mesh import live_mesh
from fxboundary.ops import OP, PortOp
from fxboundary.placements import Layout, layout_text, smallest_rank
from fxboundary.transition.cost import traffic
from fxboundary.transition.steps import REDUCTIONS, Step
from fxboundary.transition.transition import Transition


def identity_of(port: Port) -> Hashable:
    """Equal for ports that do the same to a value: all arguments but the value and the name."""
    _, mesh, src, dst, grad, _, coordinate, *rest = port.node.args
    layouts: Sequence[Any] = (src, dst, grad)
    if (t := port.transition) is not None:
        layouts = [layout_text(layout) for layout in (t.src, t.dst, t.grad)]
    return (mesh, *layouts, tuple(coordinate), *rest)  # type: ignore[arg-type]


def label_of(port: Port) -> str:
    return str(port.node.args[5])


@dataclass(frozen=True)
class Spent:
    """What a transition costs per direction: collectives launched, bytes that rank 0 sends."""

    launches: tuple[int, int] = (0, 0)
    bytes: tuple[int, int] = (0, 0)

    def __add__(self, other: Spent) -> Spent:
        return Spent(_plus(self.launches, other.launches), _plus(self.bytes, other.bytes))

    def at_most(self, other: Spent) -> bool:
        mine, others = (*self.launches, *self.bytes), (*other.launches, *other.bytes)
        return all(a <= b for a, b in zip(mine, others, strict=True))


def _plus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return (a[0] + b[0], a[1] + b[1])


def spent(transition: Transition, ndim: int) -> Spent:
    """For a tensor of a made-up shape that divides evenly.

    The shapes in a graph are one rank's, and may differ on another; what is decided by cost must
    be decided alike on all.
    """
    sizes = transition.mesh.sizes
    shape = (math.prod(sizes) * 8,) * ndim
    itemsize = torch.float32.itemsize

    def sent(steps: Sequence[Step], layout: Layout) -> int:
        return sum(traffic(steps, layout, shape, itemsize, sizes, (0,) * len(sizes)))

    forward, backward = transition.forward, transition.backward
    return Spent(
        (sum(s.is_collective for s in forward), sum(s.is_collective for s in backward)),
        (sent(forward, transition.src), sent(backward, transition.grad)),
    )


def rank_of(*transitions: Transition) -> int:
    """The smallest rank of a tensor that has all the dimensions these transitions name."""
    return max(smallest_rank(t.src, t.dst, t.grad) for t in transitions)


def reduces(steps: Sequence[Step]) -> bool:
    return any(step.kind in REDUCTIONS for step in steps)


def new_port(
    gm: GraphModule, x: Node, like: Port, transition: Transition, label: str, name: str, sizes: str
) -> Node:
    """A port's node at the graph's insertion point; what it gives has the value of ``like``."""
    args = port_args(like.mesh, transition, label, sizes, like.backward)
    node = gm.graph.call_function(OP.default, (x, *args))
    node.meta = _named(like.node, name)
    return node


def port_args(
    mesh: str, transition: Transition, label: str, sizes: str = "", backward: str = ""
) -> tuple[Any, ...]:
    """The arguments of a port's node, after the tensor."""
    declared = {int(d): int(n) for d, _, n in (p.partition(":") for p in sizes.split(",") if p)}
    reduce_dtype = transition.request.reduce_dtype
    layouts = (transition.src, transition.dst, transition.grad)
    return PortOp(live_mesh(mesh), *layouts, label, declared, reduce_dtype, backward).args


def copied_port(gm: GraphModule, x: Node, like: Port, label: str, name: str) -> Node:
    """The same port on another value."""
    _, *args = like.node.args
    node = gm.graph.call_function(OP.default, (x, *args[:4], label, *args[5:]))
    node.meta = _named(like.node, name)
    return node


def rename(port: Port, label: str, name: str) -> None:
    """Give a port's node the name of all that it stands for."""
    args = port.node.args
    port.node.args = (*args[:5], label, *args[6:])
    port.node.meta = _named(port.node, name)


def _named(node: Node, name: str) -> dict[str, Any]:
    return {**node.meta, "custom": {**node.meta.get("custom", {}), PORT: name}}
