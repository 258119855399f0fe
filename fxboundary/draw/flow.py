"""The operations of a captured graph in program order, with the data between them.

Subgraphs of higher-order operators (a checkpointed block, a branch) are read where they are
called. Parameters and buffers are no operations: they belong to the module that uses them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxboundary.graph.find import Port, call_index, call_name, clean_path, find_ports


@dataclass(frozen=True)
class Frame:
    """A call of a module: its full name, ``layers.0.mlp#2`` for the second, and its class."""

    name: str
    type: str


@dataclass(frozen=True)
class Operation:
    """``chain`` are the calls of modules it is in, outermost first; ``inputs`` are operations.

    ``gradient``: whether the gradient of its result is wanted, and there: taken as if all
    parameters and all inputs of the graph wanted theirs.
    """

    node: Node
    chain: tuple[Frame, ...]
    inputs: tuple[int, ...]
    gradient: bool
    port: Port | None


@dataclass(frozen=True)
class _Value:
    sources: tuple[int, ...] = ()
    gradient: bool = False


def read_flow(gm: GraphModule) -> list[Operation]:
    """All operations; inputs of the graph and its results are the first and the last ones."""
    reader = _Reader({id(port.node): port for port in find_ports(gm)})
    reader.read(gm, None)
    return _reached(reader.operations)


def _reached(operations: Sequence[Operation]) -> list[Operation]:
    """The operations, with gradients only where one comes from a result of the graph.

    What nobody uses may have written into another tensor: it counts as a result.
    """
    used = {source for operation in operations for source in operation.inputs}
    reached: set[int] = set()
    found: list[Operation] = []
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        gradient = operation.gradient and (index not in used or index in reached)
        if gradient:
            reached.update(operation.inputs)
        found.append(replace(operation, gradient=gradient))
    return found[::-1]


@dataclass
class _Reader:
    ports: dict[int, Port]
    operations: list[Operation] = field(default_factory=list)
    grad_mode: bool = True
    paths: dict[tuple[str, str], str] = field(default_factory=dict)

    def read(self, gm: GraphModule, arguments: list[_Value] | None) -> _Value:
        """Read a graph; ``arguments`` of a subgraph stand for its placeholders."""
        values: dict[Node, _Value] = {}
        results = _Value()
        given = list(arguments or ())
        for node in gm.graph.nodes:
            inputs = [values[used] for used in node.all_input_nodes]
            if node.op == "placeholder":
                values[node] = given.pop(0) if given else self._input(node, arguments is None)
            elif node.op == "get_attr":
                values[node] = _Value(gradient=isinstance(_attribute(gm, node), torch.nn.Parameter))
            elif node.op == "output":
                results = _union(inputs)
                if arguments is None:
                    self._add(node, (), results.sources, results.gradient)
            elif node.target is operator.getitem and isinstance(node.args[0], Node):
                values[node] = self._narrowed(values[node.args[0]], node)
            else:
                values[node] = self._operation(gm, node, inputs, values)
        return results

    def _input(self, node: Node, outermost: bool) -> _Value:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.nn.Parameter) or "_parameters_" in node.name:
            return _Value(gradient=True)
        is_number = value is not None and not isinstance(value, torch.Tensor)
        if not outermost or is_number or "_buffers_" in node.name:
            return _Value()
        return self._add(node, (), (), _is_floating(node))

    def _narrowed(self, value: _Value, node: Node) -> _Value:
        return _Value(value.sources, value.gradient and _is_floating(node))

    def _operation(
        self, gm: GraphModule, node: Node, inputs: Sequence[_Value], values: dict[Node, _Value]
    ) -> _Value:
        bodies = [
            body
            for used in node.all_input_nodes
            if isinstance(body := _attribute(gm, used), GraphModule)
        ]
        if bodies:
            return self._call(bodies, gm, node, values)
        if node.target is torch._C._set_grad_enabled:
            self.grad_mode = bool(node.args[0])
            return _Value()
        if not node.users and not node.all_input_nodes:
            return _Value()  # what a library does beside the model, as logging its use
        found = _union(inputs)
        has_parameters = node.op == "call_module"
        gradient = (found.gradient or has_parameters) and self.grad_mode and _is_floating(node)
        gradient = gradient and "detach" not in str(node.target)
        port = self.ports.get(id(node))
        if port is not None and port.transition is not None:
            gradient = gradient and port.transition.differentiable
        return self._add(node, self._chain(node), found.sources, gradient)

    def _call(
        self,
        bodies: Sequence[GraphModule],
        gm: GraphModule,
        node: Node,
        values: dict[Node, _Value],
    ) -> _Value:
        flat, _ = pytree.tree_flatten((node.args, node.kwargs))
        operands = [
            values[used]
            for used in flat
            if isinstance(used, Node) and not isinstance(_attribute(gm, used), GraphModule)
        ]
        results = []
        for body in bodies:
            wanted = sum(n.op == "placeholder" for n in body.graph.nodes)
            # Where the operator's own arguments are not the body's, any may reach any.
            fits = wanted == len(operands)
            given = operands if fits else [_union(operands)] * wanted
            results.append(self.read(body, given))
        return _union(results)

    def _add(
        self, node: Node, chain: tuple[Frame, ...], sources: Iterable[int], gradient: bool
    ) -> _Value:
        self.operations.append(
            Operation(node, chain, tuple(sources), gradient, self.ports.get(id(node)))
        )
        return _Value((len(self.operations) - 1,), gradient)

    def _chain(self, node: Node) -> tuple[Frame, ...]:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        frames = [
            Frame(self._path(str(key), path), _type(cls)) for key, (path, cls) in stack.items()
        ]
        if node.op == "call_module" and (not frames or frames[-1].name != node.target):
            frames.append(Frame(str(node.target), ""))
        return tuple(frame for frame in dict.fromkeys(frames) if frame.name.partition("#")[0])

    def _path(self, key: str, path: str) -> str:
        known = self.paths.get((key, path))
        if known is None:
            known = self.paths[key, path] = call_name(clean_path(path), call_index(key))
        return known


def _union(values: Iterable[_Value]) -> _Value:
    found = list(values)
    sources = dict.fromkeys(source for value in found for source in value.sources)
    return _Value(tuple(sources), any(value.gradient for value in found))


def _attribute(gm: GraphModule, node: Node) -> Any:
    if node.op != "get_attr":
        return None
    attribute: Any = gm
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part, None)
    return attribute


def _is_floating(node: Node) -> bool:
    """Whether some tensor of the node's value is; so where it is not known."""
    value = node.meta.get("val", node.meta.get("example_value"))
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return not tensors or any(t.is_floating_point() or t.is_complex() for t in tensors)


def _type(cls: Any) -> str:
    return str(getattr(cls, "__name__", cls)).rpartition(".")[2]
