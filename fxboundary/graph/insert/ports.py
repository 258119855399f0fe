"""Which ports a plan puts into a graph: each at its value, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fxboundary.binding import bind_inputs, output_indices
from fxboundary.contract import OUTPUT, Contract
from fxboundary.errors import ContractError
from fxboundary.graph.insert.names import bind_names, bind_output
from fxboundary.graph.insert.regions import Region
from fxboundary.mesh import LiveMesh
from fxboundary.ops import OP, PortOp, port_label
from fxboundary.placements import Layout, parse_layout

Layouts = tuple[Layout, Layout, Layout]


@dataclass(frozen=True, eq=False)
class NewPort:
    """A port to be put at ``value``, for its uses inside the region or outside of it.

    ``argument`` is the one argument of a leaf module's call that it is for.
    """

    region: Region
    value: Node
    is_input: bool
    op: PortOp
    argument: int | str | None = None


def plan_ports(
    calls: Sequence[Region],
    contract: Contract,
    module: Any,
    parameters: Mapping[Node, str],
    mesh: LiveMesh,
) -> tuple[list[NewPort], list[str]]:
    """The ports of a module's calls, and what stands against them.

    ``module`` is the module itself, where a call of it is one node.
    """
    found: list[NewPort] = []
    problems: list[str] = []
    for region in calls:
        for names, plan in ((contract.input_names(), _inputs), (contract.output_names(), _outputs)):
            if not names:
                continue
            try:
                found += plan(region, contract, module, parameters, mesh)
            except ContractError as error:
                problems += error.problems
    return found, problems


def _inputs(
    region: Region,
    contract: Contract,
    module: Any,
    parameters: Mapping[Node, str],
    mesh: LiveMesh,
) -> Iterator[NewPort]:
    changing = {}
    for name in contract.input_names():
        layouts = contract.input_layouts(name, mesh.spec.names)
        if _counts(layouts):
            sizes = (contract.in_sizes or {}).get(name)
            backward = (contract.in_backward or {}).get(name, "")
            changing[name] = _op(region, contract, f"in.{name}", layouts, sizes, mesh, backward)
    if region.leaf is not None:
        for name, value, argument in _leaf_arguments(region, contract, module, changing):
            yield NewPort(region, value, True, changing[name], argument)
        return
    values = bind_names(region, contract, parameters, list(changing))
    seen: dict[Node, str] = {}
    for name, value in values.items():
        first = seen.setdefault(value, name)
        if first == name:
            yield NewPort(region, value, True, changing[name])
        elif changing[name].args[1:4] != changing[first].args[1:4]:
            raise ContractError(
                f"{region.name}:in.{name}: is the same value as in.{first}, with another layout"
            )


def _leaf_arguments(
    region: Region, contract: Contract, module: Any, changing: Mapping[str, PortOp]
) -> Iterator[tuple[str, Node, int | str]]:
    """Name, value and place of the arguments of a call of a module that was not traced into."""
    node = region.leaf
    assert node is not None
    signature = inspect.signature(module.forward)
    bound = bind_inputs(contract.input_names(), signature)
    for name in changing:
        place = bound.get(name)
        if place is None or place.path:
            what = "no tensor argument" if place is not None else "no parameter"
            raise ContractError(
                f"{region.name}:in.{name}: {what} of that name; forward has "
                f"{', '.join(signature.parameters)}"
            )
        argument: int | str = place.keyword
        if place.keyword not in node.kwargs:
            if place.index is None or place.index >= len(node.args):
                continue
            argument = place.index
        value = node.kwargs[argument] if isinstance(argument, str) else node.args[argument]
        if isinstance(value, Node):
            yield name, value, argument


def _outputs(
    region: Region,
    contract: Contract,
    module: Any,
    parameters: Mapping[Node, str],
    mesh: LiveMesh,
) -> Iterator[NewPort]:
    for name, index in output_indices(contract).items():
        layouts = contract.output_layouts(name, mesh.spec.names)
        label = "out" if name == OUTPUT else f"out.{name}"
        sizes = (contract.out_sizes or {}).get(name)
        op = _op(region, contract, label, layouts, sizes, mesh)
        try:
            if region.leaf is None:
                value = bind_output(region, contract, name)
            else:
                value = _leaf_output(region.leaf, name, index)
        except ContractError:
            if _counts(layouts):
                raise
            continue  # an output of no name here, said to be whole on both sides
        yield NewPort(region, value, False, op)


def _leaf_output(node: Node, name: str, index: int) -> Node:
    """The tensor itself, or the entry that is taken out of a tuple or a mapping."""
    import operator

    entries = [user for user in node.users if user.target is operator.getitem]
    if len(entries) < len(node.users) or not entries:
        return node
    for key in (index, name):
        taken = [entry for entry in entries if entry.args[1] == key]
        if len(taken) == 1:
            return taken[0]
    raise ContractError(f"{node.target}:out.{name}: the graph uses no such output")


def _counts(layouts: Layouts) -> bool:
    """Whether a port changes something, or says of a value that it is not whole."""
    src, dst, grad = layouts
    return any(not p.is_replicate() for p in (*src, *dst, *grad))


def remove_idle(gm: GraphModule) -> None:
    """Drop the ports that change nothing, forward and backward: they were there to be checked."""
    for node in list(gm.graph.nodes):
        if node.target is OP.default and node.args[2] == node.args[3]:
            grad = parse_layout(str(node.args[4]))
            if not any(p.is_partial() for p in grad):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)


def _op(
    region: Region,
    contract: Contract,
    port: str,
    layouts: Layouts,
    sizes: Mapping[int, int] | None,
    mesh: LiveMesh,
    backward: str = "",
) -> PortOp:
    label = f"{port_label(region.path)}:{port}"
    return PortOp(mesh, *layouts, label, sizes, contract.reduce_dtype or "", backward)


def insert(ports: Sequence[NewPort], regions: Sequence[Region]) -> None:
    """Put ports into their graph: inputs from the outermost module to the innermost, then
    outputs from the innermost to the outermost. ``regions`` are all of the graph's."""
    outer_first = sorted(ports, key=lambda port: len(port.region.stack))
    read: dict[Node, list[tuple[Region, Node]]] = {}
    for port in (p for p in outer_first if p.is_input):
        around = [node for region, node in read.get(port.value, ()) if region.encloses(port.region)]
        node = _insert_input(port, around[-1] if around else port.value)
        read.setdefault(port.value, []).append((port.region, node))
        _join(node, port.region, regions)
    moved: dict[Node, Node] = {}
    for port in (p for p in reversed(outer_first) if not p.is_input):
        moved[port.value] = node = _insert_output(port, moved.get(port.value, port.value))
        _join(node, port.region, regions)


def _join(node: Node, inner: Region, regions: Sequence[Region]) -> None:
    """A port is part of every module around its own."""
    for region in regions:
        if region.encloses(inner):
            region.nodes[node] = None


def _insert_input(port: NewPort, value: Node) -> Node:
    users = [node for node in port.region.nodes if value in node.all_input_nodes]
    with value.graph.inserting_before(users[0]):
        node = _node(value.graph, value, port)
    if port.argument is not None:
        _replace_argument(users[0], port.argument, node)
    else:
        for user in users:
            user.replace_input_with(value, node)
    return node


def _insert_output(port: NewPort, value: Node) -> Node:
    users = [user for user in value.users if user not in port.region.nodes]
    with value.graph.inserting_after(value):
        node = _node(value.graph, value, port)
    for user in users:
        user.replace_input_with(value, node)
    return node


def _node(graph: Graph, value: Node, port: NewPort) -> Node:
    """The redistribute node, with its place in the module stack."""
    node = graph.create_node("call_function", OP.default, (value, *port.op.args))
    node.meta["nn_module_stack"] = dict(port.region.stack)
    if (trace := value.meta.get("stack_trace")) is not None:
        node.meta["stack_trace"] = trace
    return node


def _replace_argument(node: Node, argument: int | str, value: Node) -> None:
    if isinstance(argument, str):
        node.kwargs = {**node.kwargs, argument: value}
    else:
        node.args = (*node.args[:argument], value, *node.args[argument + 1 :])
