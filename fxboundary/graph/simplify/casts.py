"""Casts: a value crosses in the narrower of two dtypes.

A cast to a narrower dtype behind a port goes before it, one to a wider dtype before a port goes
behind it: wherever that leaves the dtype in which sums are taken as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from fxboundary.graph.find import Port, graph_modules, is_port, node_tensor, read_port
from fxboundary.graph.simplify.change import Change
from fxboundary.graph.simplify.ports import label_of, new_port, reduces
from fxboundary.graph.simplify.scope import Scope
from fxboundary.transition.transition import plan

_NAMES = {"to", "_to_copy", "float", "half", "bfloat16", "double"}


def move_casts(gm: GraphModule) -> list[Change]:
    """Move casts to the side of a port that makes it send less, in place."""
    return [change for module in graph_modules(gm) for change in _move_casts(module)]


def _move_casts(gm: GraphModule) -> list[Change]:
    scope = Scope.of(gm)
    changes = []
    for cast in list(gm.graph.nodes):
        source = cast.args[0] if cast.args else None
        if not isinstance(source, Node) or not is_cast(cast, source):
            continue
        before, after = _itemsize(source), _itemsize(cast)
        if after < before and is_port(source) and len(source.users) == 1:
            changes += _narrow_first(gm, scope, read_port(source, gm), cast)
        elif after > before and len(cast.users) == 1 and is_port(user := next(iter(cast.users))):
            changes += _widen_last(gm, scope, cast, read_port(user, gm))
    return changes


def is_cast(node: Node, source: Node) -> bool:
    """A change between floating-point dtypes, and of nothing else."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    x, y = node_tensor(source), node_tensor(node)
    if name.partition(".")[0] not in _NAMES or len(node.all_input_nodes) > 1:
        return False
    if x is None or y is None or x.dtype == y.dtype or x.device != y.device:
        return False
    return x.is_floating_point() and y.is_floating_point() and x.stride() == y.stride()


def _itemsize(node: Node) -> int:
    value = node_tensor(node)
    assert value is not None
    return value.dtype.itemsize


def _narrow_first(gm: GraphModule, scope: Scope, port: Port, cast: Node) -> list[Change]:
    """``cast(port(x))`` → ``port(cast(x))``; gradients are still summed in the wider dtype."""
    x, t, wide = port.node.args[0], port.transition, port.dtype
    if not isinstance(x, Node) or t is None or wide is None or not t.forward:
        return []
    if reduces(t.forward) or x in scope.written or not scope.movable(port.node, cast):
        return []
    if reduces(t.backward) and not t.request.reduce_dtype:
        request = replace(t.request, reduce_dtype=str(wide).removeprefix("torch."))
        t = plan(t.src, t.dst, t.grad, t.mesh, request)
    with gm.graph.inserting_before(port.node):
        first = gm.graph.node_copy(cast, lambda _: x)
        _take_value(first, like=x, dtype_of=cast)
        moved = new_port(gm, first, port, t, label_of(port), port.name, str(port.node.args[7]))
        _take_value(moved, like=port.node, dtype_of=cast)
    for node in (first, moved):
        scope.add(node, beside=cast)
    cast.replace_all_uses_with(moved)
    gm.graph.erase_node(cast)
    gm.graph.erase_node(port.node)
    return [Change("cast", (port.name,), port.name)]


def _widen_last(gm: GraphModule, scope: Scope, cast: Node, port: Port) -> list[Change]:
    """``port(cast(x))`` → ``cast(port(x))``, where nothing is summed in either direction."""
    x, t = cast.args[0], port.transition
    if not isinstance(x, Node) or t is None or not t.forward:
        return []
    if reduces(t.forward) or reduces(t.backward):
        return []
    if x in scope.written or not scope.movable(cast, port.node):
        return []
    with gm.graph.inserting_before(port.node):
        moved = gm.graph.node_copy(port.node, {cast: x}.__getitem__)
        moved.meta = {**port.node.meta}
        _take_value(moved, like=port.node, dtype_of=x)
        last = gm.graph.node_copy(cast, {x: moved}.__getitem__)
        last.meta = {key: value for key, value in cast.meta.items() if key != "custom"}
        _take_value(last, like=port.node, dtype_of=port.node)
    for node in (moved, last):
        scope.add(node, beside=cast)
    port.node.replace_all_uses_with(last)
    gm.graph.erase_node(port.node)
    gm.graph.erase_node(cast)
    return [Change("cast", (port.name,), port.name)]


def _take_value(node: Node, like: Node, dtype_of: Node) -> None:
    dtype = node_tensor(dtype_of)
    for key in ("val", "example_value"):
        node.meta.pop(key, None)
        if dtype is not None and isinstance(value := like.meta.get(key), torch.Tensor):
            node.meta[key] = torch.empty_like(value, dtype=dtype.dtype)
