"""Regions: work between ports that all ranks of a mesh dimension do alike, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxboundary.graph.find import Port, is_port, node_tensor, read_port
from fxboundary.graph.simplify.scope import Scope
from fxboundary.graph.simplify.tokenwise import has_tokens, tokens_of
from fxboundary.mesh import MeshSpec
from fxboundary.placements import Layout, replicate, shard_dim


@dataclass(frozen=True)
class Over:
    """The mesh dimension over which tokens are to be split."""

    mesh: str
    spec: MeshSpec
    index: int

    @property
    def name(self) -> str:
        return self.spec.names[self.index]

    @property
    def size(self) -> int:
        return self.spec.sizes[self.index]

    def put(self, placement: Any, layout: Layout | None = None) -> Layout:
        """``layout``, by default replicated, with another placement on this mesh dimension."""
        layout = (replicate(),) * len(self.spec.names) if layout is None else layout
        return (*layout[: self.index], placement, *layout[self.index + 1 :])


@dataclass(frozen=True)
class Region:
    """``entries`` are ports whose values are whole over the mesh dimension, ``work`` the nodes
    that follow from them token by token; both in the order of the graph.
    """

    over: Over
    entries: tuple[Port, ...]
    work: tuple[Node, ...]


@dataclass(frozen=True)
class Ordered:
    """A graph, what is known of its nodes, and their order."""

    gm: GraphModule
    scope: Scope
    order: dict[Node, int]

    @classmethod
    def of(cls, gm: GraphModule) -> Ordered:
        return cls(gm, Scope.of(gm), {node: i for i, node in enumerate(gm.graph.nodes)})

    def sorted(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def add(self, node: Node, beside: Node) -> None:
        """Know a node that a pass has made, in the place and mode of another."""
        self.order[self.scope.add(node, beside)] = self.order[beside]

    def port(self, node: Node) -> Port | None:
        return read_port(node, self.gm) if is_port(node) else None


def regions(graph: Ordered) -> Iterator[Region]:
    """Regions of a graph, each port in one of them; what is found in the graph may be changed."""
    seen: set[Node] = set()
    for node in list(graph.order):
        port = graph.port(node) if node in graph.order else None
        for over in _makes_whole(port):
            if node not in seen:
                assert port is not None
                region = _grow(graph, port, over)
                seen.update(entry.node for entry in region.entries)
                if region.work:
                    yield region


def ends(port: Port | None, over: Over, value: torch.Tensor) -> bool:
    """Whether a port takes a value that is whole over a mesh dimension, and could gather it."""
    t = port.transition if port is not None else None
    if port is None or t is None or port.mesh != over.mesh or not t.differentiable:
        return False
    return t.src[over.index].is_replicate() and _leaves_tokens(port, over, value)


def _makes_whole(port: Port | None) -> Iterator[Over]:
    """The mesh dimensions over which a port makes its value whole."""
    t = port.transition if port is not None else None
    if port is None or t is None:
        return
    for index, placement in enumerate(t.src):
        over = Over(port.mesh, t.mesh, index)
        if not placement.is_replicate() and _begins(port, over):
            yield over


def _begins(port: Port, over: Over) -> bool:
    """Whether ranks of a mesh dimension do alike to a port's value, and could share its tokens.

    The number of tokens is that of all ranks: no mesh dimension splits them.
    """
    t, value, m = port.transition, node_tensor(port.node), over.index
    if t is None or value is None or port.mesh != over.mesh or not has_tokens(value):
        return False
    alike = t.dst[m].is_replicate() and t.grad[m].is_replicate() and t.differentiable
    divides = over.size > 1 and statically_known_true(value.shape[-2] % over.size == 0)
    return alike and divides and _leaves_tokens(port, over, value)


def _leaves_tokens(port: Port, over: Over, value: torch.Tensor) -> bool:
    """Whether no other mesh dimension splits the tokens."""
    t, dim = port.transition, value.dim() - 2
    assert t is not None
    layouts = (t.src, t.dst, t.grad)
    return all(shard_dim(p) != dim for x in layouts for i, p in enumerate(x) if i != over.index)


def _grow(graph: Ordered, seed: Port, over: Over) -> Region:
    """All that follows from a port, with the other ports whose values enter there."""
    entries: dict[Node, Port] = {}
    work: set[Node] = set()
    pending: list[Node] = []

    def enter(port: Port) -> None:
        if port.node not in entries and port.node not in graph.scope.written:
            entries[port.node] = port
            pending.append(port.node)

    enter(seed)
    while pending:
        for user in pending.pop().users:
            operands = () if is_port(user) or user in work else tokens_of(user)
            if not operands or not graph.scope.written.isdisjoint((user, *operands)):
                continue
            work.add(user)
            pending.append(user)
            for operand in operands:
                port = graph.port(operand)
                if port is not None and _begins(port, over):
                    enter(port)
    ports = tuple(entries[node] for node in graph.sorted(entries))
    return Region(over, ports, tuple(graph.sorted(work)))
