"""Hoist: what every iteration of a loop moves alike is moved once, before the loop.

Layers run by ``scan`` that share a parameter gather it in each iteration; it is one all_gather
before the loop, and one reduce_scatter of the gradients that the loop has summed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxboundary.graph.find import graph_modules, is_port, node_tensor, port_name, subgraphs
from fxboundary.graph.simplify.casts import is_cast
from fxboundary.graph.simplify.change import Change
from fxboundary.graph.simplify.scope import Scope

# What they iterate over, and what every iteration gets whole; after the body, read on torch
# 2.13.0 and 2.14.1: scan(body, init, xs, additional), map_impl(body, xs, additional).
_ARGUMENTS = {"scan": (2, 3), "map_impl": (1, 2)}


def hoist(gm: GraphModule) -> list[Change]:
    """Move ports of a loop's invariant inputs, and their casts, before the loop, in place.

    A port is linear, so that the gradient of its result may be summed over the iterations first
    and moved once. ``scan`` and ``map`` that run at least once, whatever the sizes, so that
    nothing is moved that was not; a ``while_loop`` may not run at all and is left alone. So are
    other subgraphs: a port in a checkpoint moves its value anew instead of keeping it.
    """
    uses = Counter(
        id(body) for m in graph_modules(gm) for n in m.graph.nodes for body in _bodies(m, n)
    )
    changes = []
    for module in graph_modules(gm):
        scope = Scope.of(module)
        for node in list(module.graph.nodes):
            loop = _read_loop(module, node)
            if loop is not None and uses[id(loop.body)] == 1:
                changes += _hoist(module, scope, loop)
    return changes


def _bodies(gm: GraphModule, node: Node) -> list[GraphModule]:
    """The subgraphs that a node calls."""
    return [body for given in node.all_input_nodes for body in subgraphs(gm, given)]


@dataclass(frozen=True)
class _Loop:
    """``at`` is the position of the invariant inputs among the node's arguments."""

    node: Node
    body: GraphModule
    at: int

    @property
    def invariant(self) -> list[Any]:
        return _listed(self.node.args[self.at])

    @property
    def placeholders(self) -> list[Node]:
        """The body's names for them: its last inputs."""
        found = [node for node in self.body.graph.nodes if node.op == "placeholder"]
        return found[len(found) - len(self.invariant) :]

    def set(self, invariant: list[Any]) -> None:
        kind = tuple if isinstance(self.node.args[self.at], tuple) else list
        self.node.update_arg(self.at, kind(invariant))


def _listed(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, (list, tuple)) else []


def _read_loop(gm: GraphModule, node: Node) -> _Loop | None:
    """A call of a loop that runs at least once and has no inputs that it writes to."""
    over, at = _ARGUMENTS.get(getattr(node.target, "__name__", ""), (0, 0))
    is_loop = isinstance(node.target, HigherOrderOperator) and over
    if not is_loop or len(node.args) != at + 1 or node.kwargs:
        return None
    body, *others = _bodies(gm, node)
    values = [node_tensor(x) for x in _listed(node.args[over])]
    # The loop runs along the first dimension of each of them.
    runs = [v is not None and v.dim() and statically_known_true(v.shape[0] >= 1) for v in values]
    return _Loop(node, body, at) if runs and all(runs) and not others else None


def _hoist(gm: GraphModule, scope: Scope, loop: _Loop) -> list[Change]:
    inner = Scope.of(loop.body)
    placeholders = set(loop.placeholders)
    changes = []
    for port in list(loop.body.graph.nodes):
        if not is_port(port):
            continue
        *casts, source = _path(port)
        path = [port, *casts]
        # In the mode of the loop itself, which is the body's up to its first switch.
        first = inner.segment[source] == inner.segment[port]
        if source not in placeholders or not first or not inner.movable(source, *path):
            continue
        given = loop.invariant[loop.placeholders.index(source)]
        if isinstance(given, Node) and given not in scope.written:
            moved = _move_out(gm, loop, source, given, path)
            for node in moved:
                scope.add(node, beside=loop.node)
            changes.append(Change("hoist", (port_name(port),), port_name(port)))
    return changes


def _path(port: Node) -> list[Node]:
    """The casts before a port, from the last, and the value that they start from."""
    found = [port.args[0]]
    while isinstance(node := found[-1], Node) and node.args:
        source = node.args[0]
        if not isinstance(source, Node) or not is_cast(node, source):
            break
        found.append(source)
    return found  # type: ignore[return-value]


def _move_out(
    gm: GraphModule, loop: _Loop, source: Node, given: Node, path: list[Node]
) -> list[Node]:
    """Run ``path``, a port and the casts before it, on ``given`` before the loop."""
    port, moved = path[0], []
    value = given
    with gm.graph.inserting_before(loop.node):
        for node in reversed(path):
            value = _copy(gm.graph, node, value)
            moved.append(value)
    arrives = _last_placeholder(loop.body.graph, port)
    port.replace_all_uses_with(arrives)
    loop.set([*loop.invariant, value])
    for node in path:
        if not node.users:
            loop.body.graph.erase_node(node)
    if not source.users:
        at = loop.placeholders.index(source)
        loop.body.graph.erase_node(source)
        invariant = loop.invariant
        loop.set([*invariant[:at], *invariant[at + 1 :]])
    return moved


def _copy(graph: Graph, node: Node, x: Node) -> Node:
    """A node on another value, in another graph."""
    copy = graph.create_node(
        node.op, node.target, (x, *node.args[1:]), dict(node.kwargs), node.name
    )
    copy.meta = dict(node.meta)
    return copy


def _last_placeholder(graph: Graph, like: Node) -> Node:
    """A new last input of a graph, with the value of a node."""
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(last):
        node = graph.placeholder(like.name)
    known = ("val", "example_value", "tensor_meta")
    node.meta = {key: like.meta[key] for key in known if key in like.meta}
    return node
