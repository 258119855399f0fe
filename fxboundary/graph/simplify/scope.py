"""Where a node of a graph may be replaced by an equal one: what is written to, and grad modes.

A captured graph is not functional: an operator may write into a tensor, and a call may switch
gradients off for what follows. Two nodes are interchangeable only where neither lies between.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxboundary.graph.find import is_port, node_tensor, subgraphs

_MODES = ("grad_enabled", "autocast", "inference_mode", "saved_tensors_hooks")
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "setitem", "delitem"),
    )
)


@dataclass(frozen=True)
class Scope:
    """``segment`` numbers the stretches of a graph between changes of mode; ``written`` are the
    nodes whose tensors, or ones that share their memory, are written to somewhere.
    """

    segment: dict[Node, int]
    written: frozenset[Node]

    @classmethod
    def of(cls, gm: GraphModule) -> Scope:
        segment, number = {}, 0
        for node in gm.graph.nodes:
            number += _switches_mode(node)
            segment[node] = number
        return cls(segment, frozenset(_written(gm)))

    def movable(self, *nodes: Node) -> bool:
        """Whether all of them run in one mode and on tensors that nothing writes to."""
        one = len({self.segment[node] for node in nodes}) == 1
        return one and self.written.isdisjoint(nodes)

    def add(self, node: Node, beside: Node) -> Node:
        """Know a node that a pass has made, in the mode of another; gives it back."""
        self.segment[node] = self.segment[beside]
        return node


def _switches_mode(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and any(mode in name for mode in _MODES)


def _written(gm: GraphModule) -> set[Node]:
    """Nodes that are written to, and those that may share memory with them."""
    memory: dict[Hashable, list[Node]] = {}
    for node in gm.graph.nodes:
        for place in _places(node):
            memory.setdefault(place, []).append(node)
    pending = [target for node in gm.graph.nodes for target in _targets(gm, node)]
    found: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        pending += [other for place in _places(node) for other in memory.pop(place, ())]
        neighbours = (*node.all_input_nodes, *node.users)
        known = node_tensor(node) is not None
        pending += [n for n in neighbours if not known or node_tensor(n) is None]
    return found


def _places(node: Node) -> Iterator[Hashable]:
    """What tells the memory of a node's tensor, as far as the capture recorded it."""
    value = node_tensor(node)
    if value is not None:
        yield value.untyped_storage()._cdata
    if node.op == "get_attr":
        yield str(node.target)


def _targets(gm: GraphModule, node: Node) -> Iterator[Node]:
    """The inputs that a node writes to."""
    if node.op not in ("call_function", "call_method", "call_module") or is_port(node):
        return
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                yield from _nodes(given)
        return
    yield from _nodes(node.kwargs.get("out"))
    name = _name(node)
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if in_place or node.target in _IN_PLACE or _says_in_place(gm, node):
        yield from node.all_input_nodes[:1]
    bodies = [body for other in node.all_input_nodes for body in subgraphs(gm, other)]
    if "mutation" in name or any(_writes_inputs(body) for body in bodies):
        yield from node.all_input_nodes


def _name(node: Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def _says_in_place(gm: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(gm.get_submodule(str(node.target)), "inplace", False))
    return bool(node.kwargs.get("inplace"))


def _writes_inputs(gm: GraphModule) -> bool:
    return any(node.op == "placeholder" for node in _written(gm))


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(value, lambda node: found.append(node))
    return found
