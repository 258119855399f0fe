"""Random graphs with ports, in which the layout of each value is known and true.

Gradients are true as well: what ranks do to a replicated value each in a way of its own goes
through a port whose gradient is partial.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxboundary.mesh import register_mesh
from fxboundary.ops import OP, PortOp
from fxboundary.placements import Layout, parse_layout, partial, replicate
from fxboundary.transition.gradient import default_gradient

SHAPE = (8, 8)
PLACEMENTS = ("R", "S(0)", "S(1)", "P")

index = st.integers(0, 7)
layout = st.tuples(*[st.sampled_from(PLACEMENTS)] * 2)
INSTRUCTIONS = st.one_of(
    st.tuples(st.just("move"), index, layout),
    st.tuples(st.just("move"), index, layout),
    st.tuples(st.just("work"), index, st.integers(0, 1)),
    st.tuples(st.just("sum of moves"), index, layout),
    st.tuples(st.just("narrowed move"), index, layout),
    st.tuples(st.just("add"), index, index),
    st.tuples(st.just("scale"), index, st.sampled_from([0.5, -1.0, 2.0])),
    st.tuples(st.just("negate"), index, st.none()),
    st.tuples(st.just("bend"), index, st.none()),
    st.tuples(st.just("cast"), index, st.sampled_from([torch.float32, torch.float64])),
)
PROGRAMS = st.lists(INSTRUCTIONS, min_size=3, max_size=10)


class Builder:
    """A graph that grows by instructions: input ``x`` and output are replicated."""

    def __init__(self, mesh: Any) -> None:
        self.live = register_mesh(mesh)
        self.whole: Layout = (replicate(),) * mesh.ndim
        self.graph = Graph()
        x = self.graph.placeholder("x")
        self.weights = [self.graph.placeholder(f"w{m}") for m in range(mesh.ndim)]
        self.values: list[tuple[Node, Layout, torch.dtype]] = [(x, self.whole, torch.float64)]

    def port(self, node: Node, src: Layout, dst: Layout, grad: Layout | None = None) -> Node:
        grad = default_gradient(dst) if grad is None else grad
        made = PortOp(self.live, src, dst, grad, f"m{len(self.graph.nodes)}:in.x")
        return self.graph.call_function(OP.default, (node, *made.args))

    def add(self, name: str, at: int, what: Any) -> None:
        node, src, dtype = self.values[at % len(self.values)]
        call = self.graph.call_function
        dims = len(self.whole)
        if name == "move":
            dst = parse_layout(",".join(what[:dims]))
            self.values.append((self.port(node, src, dst), dst, dtype))
        elif name == "work":
            m = what % dims
            dst = self.whole if _is_partial(src) else _with(src, m, replicate())
            after = _with(dst, m, partial())
            x = self.port(node, src, dst, _with(default_gradient(dst), m, partial()))
            y = call(torch.mul, (call(torch.tanh, (x,)), self.weights[m]))
            self.values.append((y, after, torch.float64))
        elif name == "add":
            alike = [v for v, *known in self.values if known == [src, dtype]]
            self.values.append((call(torch.add, (node, alike[what % len(alike)])), src, dtype))
        elif name == "sum of moves":
            dst = parse_layout(",".join(what[:dims]))
            halves = call(torch.mul, (node, 0.5)), self.graph.call_method("neg", (node,))
            moved = [self.port(half, src, dst) for half in halves]
            total = call(torch.add, (call(torch.mul, (moved[0], 3.0)), moved[1]))
            self.values.append((total, dst, dtype))
        elif name == "narrowed move":
            dst = parse_layout(",".join(what[:dims]))
            moved = self.port(node, src, dst)
            narrow = self.graph.call_method("to", (moved, torch.float32))
            self.values.append((narrow, dst, torch.float32))
        elif name == "scale":
            self.values.append((call(torch.mul, (node, what)), src, dtype))
        elif name == "negate":
            self.values.append((self.graph.call_method("neg", (node,)), src, dtype))
        elif name == "bend" and not _is_partial(src):
            self.values.append((call(torch.sin, (node,)), src, dtype))
        elif name == "cast":
            self.values.append((self.graph.call_method("to", (node, what)), src, what))

    def finish(self) -> GraphModule:
        """All values, whole again, added; with the fake values that a capture would record."""
        total = None
        for node, src, _ in self.values:
            whole = self.graph.call_method("to", (self.port(node, src, self.whole), torch.float64))
            total = whole if total is None else self.graph.call_function(torch.add, (total, whole))
        self.graph.output(total)
        gm = GraphModule(torch.nn.Module(), self.graph)
        one = torch.ones((), dtype=torch.float64)
        inputs = (torch.ones(SHAPE, dtype=torch.float64), *[one] * len(self.weights))
        FakeTensorProp(gm, FakeTensorMode()).propagate(*inputs)
        return gm


def build(mesh: Any, program: list[tuple[str, int, Any]]) -> GraphModule:
    builder = Builder(mesh)
    for instruction in program:
        builder.add(*instruction)
    return builder.finish()


def _with(layout: Layout, m: int, placement: Any) -> Layout:
    return (*layout[:m], placement, *layout[m + 1 :])


def _is_partial(layout: Layout) -> bool:
    return any(placement.is_partial() for placement in layout)


def run(gm: GraphModule, mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of ``x``; weights differ along their mesh dimension."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64, requires_grad=True)
    at = mesh.get_coordinate()
    weights = [torch.tensor(1.0 + at[m], dtype=torch.float64) for m in range(mesh.ndim)]
    y = gm(x, *weights)
    (y * torch.randn(SHAPE, generator=generator, dtype=torch.float64)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad
