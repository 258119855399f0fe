"""Parameters of a captured graph: cut to this rank's shards, redistributed where they are used."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.fx import GraphModule, Node

from fxboundary.graph.insert.dims import Dim, Place, dims_of, stacked
from fxboundary.graph.insert.regions import Region, attribute, calls_graph, node_value
from fxboundary.graph.insert.values import Value
from fxboundary.mesh import LiveMesh
from fxboundary.ops import OP, PortOp, port_label
from fxboundary.params import ParamPort
from fxboundary.placements import replicate
from fxboundary.state import shard_tensor
from fxboundary.used_params import BoundModule, param_op, used_params

Ports = Mapping[tuple[str, str], ParamPort]


def full(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def param_dims(port: ParamPort, mesh: LiveMesh) -> tuple[Dim, ...]:
    """What the dimensions of a stored parameter are made of."""
    dims = dims_of(port.shape, port.stored, mesh.spec.sizes)
    return dims if port.parts is None else stacked(dims, port.shard_dim, port.parts)


def shard_parameters(gm: GraphModule, ports: Ports, mesh: LiveMesh) -> None:
    """Replace the parameters of a graph module by this rank's shards; ties stay ties."""
    made: dict[int, nn.Parameter] = {}
    for (owner, name), port in ports.items():
        module = attribute(gm, owner) if owner else gm
        param = None if module is None else module._parameters.get(name)
        if param is None or not port.is_sharded:
            continue
        if id(param) not in made:
            local = shard_tensor(param.detach(), port, mesh)
            made[id(param)] = nn.Parameter(local, requires_grad=param.requires_grad)
        module._parameters[name] = made[id(param)]


def bind_leaves(
    gm: GraphModule, ports: Ports, mesh: LiveMesh
) -> dict[str, list[tuple[str, ParamPort]]]:
    """Give modules that were not traced into copies whose parameters are used as contracts say.

    Returns the ports of each such module.
    """
    found: dict[str, list[tuple[str, ParamPort]]] = {}
    for target in dict.fromkeys(str(n.target) for n in gm.graph.nodes if n.op == "call_module"):
        inside = [(key, port) for key, port in ports.items() if _within(key[0], target)]
        if inside:
            owner, _, leaf = target.rpartition(".")
            bound = _bound_copy(attribute(gm, target), target, dict(inside), mesh)
            setattr(attribute(gm, owner) if owner else gm, leaf, bound)
            found[target] = [(full(*key), port) for key, port in inside]
    return found


def _within(owner: str, target: str) -> bool:
    return owner == target or owner.startswith(f"{target}.")


def _bound_copy(module: nn.Module, name: str, ports: Ports, mesh: LiveMesh) -> nn.Module:
    """A copy that shares nothing but tensors; its class reads parameters through their ports."""
    found = copy.copy(module)
    found._parameters, found._buffers = dict(module._parameters), dict(module._buffers)
    found._modules = {
        key: None if child is None else _bound_copy(child, full(name, key), ports, mesh)
        for key, child in module._modules.items()
    }
    own = tuple(port for (owner, _), port in ports.items() if owner == name)
    record = BoundModule(port_label(name), mesh, None, own)
    namespace = used_params(type(module), record)
    if namespace:
        cls = type(module)
        kept = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        found.__class__ = type(cls.__name__, (cls,), {**kept, **namespace})
    return found


@dataclass(frozen=True, eq=False)
class _Use:
    """The nodes of one module that read a parameter."""

    owner: str
    port: ParamPort
    users: tuple[Node, ...]
    stack: Mapping[str, Any]


def insert_uses(
    gm: GraphModule,
    ports: Ports,
    names: Mapping[Node, str],
    regions: Mapping[str, Sequence[Region]],
    mesh: LiveMesh,
    *,
    stored_whole: bool,
) -> None:
    """Put a port between each parameter and the module that uses it, where a use needs one.

    ``stored_whole``: the graph is handed whole parameters, each use of a sharded one is cut.
    """
    for node, name in names.items():
        for use in list(_uses(gm, node, name, ports, regions)):
            if stored_whole:
                _cut_whole(node, use, mesh)
            elif use.port.changes_at_use:
                op = param_op(use.port, mesh, port_label(use.owner))
                _replace(use, node, _before(use, op, node))


def _uses(
    gm: GraphModule,
    node: Node,
    name: str,
    ports: Ports,
    regions: Mapping[str, Sequence[Region]],
) -> Iterator[_Use]:
    """By owner: a tied parameter has several, and one node for all of them."""
    tensor = attribute(gm, name) if node.op == "get_attr" else None
    aliases = {
        (owner, leaf): port
        for (owner, leaf), port in ports.items()
        if full(owner, leaf) == name
        or (tensor is not None and attribute(gm, full(owner, leaf)) is tensor)
    }
    # A nested graph that is handed the parameter has the uses of it.
    left = dict.fromkeys(user for user in node.users if not calls_graph(user))
    order = sorted(aliases.items(), key=lambda item: full(*item[0]) == name)
    for (owner, leaf), port in order:
        calls = regions.get(owner, ())
        inside = [user for user in left if any(user in call.nodes for call in calls)]
        if full(owner, leaf) == name:
            inside = list(left)  # a parent may read it
        for user in inside:
            del left[user]
        if inside:
            stack = next((call.stack for call in calls if inside[0] in call.nodes), {})
            yield _Use(owner, port, tuple(inside), stack)


def _cut_whole(node: Node, use: _Use, mesh: LiveMesh) -> None:
    """This rank's part of a whole parameter, whose gradient comes back whole."""
    port, whole = use.port, (replicate(),) * len(mesh.spec.names)
    if port.used == whole and not any(g.is_partial() for g in port.grad):
        return
    if port.parts is None:
        op = param_op(replace(port, stored=whole), mesh, port_label(use.owner))
        _replace(use, node, _before(use, op, node))
        return
    at, value = port.shard_dim, node_value(node)
    with node.graph.inserting_before(use.users[0]):
        parts = list(torch.split(value, list(port.parts), at))
        split = _call(use, torch.split, (node, list(port.parts), at), tuple(parts))
        pieces = []
        for i, part in enumerate(parts):
            own = replace(port, stored=whole, shape=tuple(part.shape), parts=None)
            op = param_op(own, mesh, port_label(use.owner))
            pieces.append(_node(use, op, _call(use, operator.getitem, (split, i), part)))
        _replace(use, node, _call(use, torch.cat, (pieces, at), value))


def _call(use: _Use, function: Any, args: tuple[Any, ...], captured: Any) -> Node:
    found = use.users[0].graph.call_function(function, args)
    found.meta.update(nn_module_stack=dict(use.stack), example_value=captured)
    return found


def _before(use: _Use, op: PortOp, node: Node) -> Node:
    with node.graph.inserting_before(use.users[0]):
        return _node(use, op, node)


def _node(use: _Use, op: PortOp, value: Node) -> Node:
    found = value.graph.create_node("call_function", OP.default, (value, *op.args))
    found.meta["nn_module_stack"] = dict(use.stack)
    return found


def _replace(use: _Use, node: Node, by: Node) -> None:
    for user in use.users:
        user.replace_input_with(node, by)


def stored_value(port: ParamPort, mesh: LiveMesh, like: torch.Tensor) -> Value:
    """A fake shard of a parameter, and what it is made of."""
    dims = param_dims(port, mesh)
    shape = Place(mesh.spec, mesh.coordinate).shape(dims)
    return Value(like.new_empty(shape), dims, free=False)
