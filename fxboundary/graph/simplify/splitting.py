"""The ports of a region whose tokens are split, and a region with these in place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxboundary.graph.find import PORT, Port, module_path, node_tensor
from fxboundary.graph.insert.regions import node_value
from fxboundary.graph.simplify.ports import label_of, port_args
from fxboundary.graph.simplify.regions import Ordered, Over, Region, ends
from fxboundary.graph.simplify.tokenwise import tokens_of
from fxboundary.ops import OP, port_label
from fxboundary.placements import partial, replicate, shard
from fxboundary.transition.transition import Request, Transition, plan


class NotSplit(Exception):
    """Why a region stays as it is."""


@dataclass(frozen=True, eq=False)
class NewPort:
    """A port on ``x``, for ``users`` of it, or in place of ``old``.

    ``for_gradient``: it does nothing forward, and sums the gradient of what is no token.
    """

    x: Node
    transition: Transition
    args: tuple[Any, ...]
    name: str
    old: Port | None = None
    users: tuple[Node, ...] = ()
    for_gradient: bool = False


@dataclass(frozen=True)
class Split:
    """A region's ports when its tokens are split: at its ``entries``, for values that are
    ``leaving`` it, and for ``arriving`` ones that come from elsewhere.
    """

    entries: tuple[NewPort, ...]
    leaving: tuple[NewPort, ...]
    arriving: tuple[NewPort, ...]

    @property
    def ports(self) -> tuple[NewPort, ...]:
        return (*self.entries, *self.leaving, *self.arriving)


def split_ports(graph: Ordered, region: Region) -> Split:
    """All that a region needs when its tokens are split.

    Raises:
        UnsupportedTransitionError: a port cannot move split tokens.
    """
    inside = {*region.work, *(port.node for port in region.entries)}
    return Split(
        tuple(_entry(port, region.over) for port in region.entries),
        tuple(_leaving(graph, region, inside)),
        tuple(_arriving(graph, region, inside)),
    )


def _entry(port: Port, over: Over) -> NewPort:
    t, tokens = _transition(port), _tokens(port.node)
    dst, grad = over.put(tokens, t.dst), over.put(tokens, t.grad)
    return _instead(port, plan(t.src, dst, grad, t.mesh, t.request))


def _leaving(graph: Ordered, region: Region, inside: set[Node]) -> Iterator[NewPort]:
    """Ports that take a value of the region gather it; for others who do it is gathered."""
    over, found = region.over, _Uses(graph)
    for node in graph.sorted(inside):
        value = node_tensor(node)
        assert value is not None
        for user in graph.sorted(set(node.users) - inside):
            port = graph.port(user)
            if port is not None and ends(port, over, value):
                t = _transition(port)
                src = over.put(_tokens(node), t.src)
                yield _instead(port, plan(src, t.dst, t.grad, t.mesh, t.request))
            else:
                found.add(node, user)
    for x, users in found:
        yield _besides(x, users, over, (_tokens(x), replicate(), replicate()), "gather", x)


def _arriving(graph: Ordered, region: Region, inside: set[Node]) -> Iterator[NewPort]:
    """Tokens of which each rank takes its part, and what it needs for each token."""
    over, tokens, others = region.over, _Uses(graph), _Uses(graph)
    for node in region.work:
        split = tokens_of(node)
        for operand in set(node.all_input_nodes) - inside:
            value = node_tensor(operand)
            if operand in split:
                tokens.add(operand, node)
            elif value is not None and value.is_floating_point():
                others.add(operand, node)
    for x, users in tokens:
        yield _besides(x, users, over, (replicate(), _tokens(x), _tokens(x)), "slice", x)
    for x, users in others:
        layouts = (replicate(), replicate(), partial())
        yield _besides(x, users, over, layouts, "grad", users[0], for_gradient=True)


class _Uses:
    """Who uses a value, apart where gradients or autocast are switched in between."""

    def __init__(self, graph: Ordered) -> None:
        self._graph = graph
        self._found: dict[tuple[Node, int], list[Node]] = {}

    def add(self, x: Node, user: Node) -> None:
        self._found.setdefault((x, self._graph.scope.segment[user]), []).append(user)

    def __iter__(self) -> Iterator[tuple[Node, tuple[Node, ...]]]:
        """In the order of first use, then of definition."""
        order = self._graph.order
        found = [(x, tuple(self._graph.sorted(users))) for (x, _), users in self._found.items()]
        return iter(sorted(found, key=lambda use: (order[use[1][0]], order[use[0]])))


def _instead(port: Port, transition: Transition) -> NewPort:
    label, sizes = label_of(port), str(port.node.args[7])
    args = port_args(port.mesh, transition, label, sizes, port.backward)
    x = port.node.args[0]
    assert isinstance(x, Node)
    return NewPort(x, transition, args, port.name, old=port)


def _besides(
    x: Node,
    users: tuple[Node, ...],
    over: Over,
    placements: tuple[Any, Any, Any],
    what: str,
    named_after: Node,
    for_gradient: bool = False,
) -> NewPort:
    """A port on one mesh dimension; what lies on the others is of no concern to it."""
    src, dst, grad = map(over.put, placements)
    transition = plan(src, dst, grad, over.spec, Request())
    path = module_path(named_after)
    args = port_args(over.mesh, transition, f"{port_label(path)}:sink.{what}")
    name = f"{path}:sink.{what}"
    return NewPort(x, transition, args, name, users=users, for_gradient=for_gradient)


def _transition(port: Port) -> Transition:
    assert port.transition is not None
    return port.transition


def _tokens(node: Node) -> Any:
    value = node_tensor(node)
    assert value is not None
    return shard(value.dim() - 2)


def split_values(region: Region, split: Split) -> dict[Node | NewPort, torch.Tensor]:
    """The fake values that this rank has once a region is split: of its work and of new ports.

    Raises:
        NotSplit: the graph has no fake values, or an operator does not take its part of the tokens.
    """
    values: dict[Node | NewPort, Any] = {}
    first = node_value(region.entries[0].node)
    if not isinstance(first, FakeTensor):
        raise NotSplit("the graph has no fake tensors")
    with first.fake_mode:
        arriving = {}
        for port in (*split.entries, *split.arriving):
            values[port] = OP.default(node_value(port.x), *port.args)
            arriving.update({(port.x, user): values[port] for user in port.users})
            if port.old is not None:
                values[port.old.node] = values[port]
        for node in region.work:

            def value_of(operand: Node, node: Node = node) -> Any:
                if operand in values:
                    return values[operand]
                return arriving.get((operand, node), node_value(operand))

            values[node] = _call(node, *map_arg((node.args, node.kwargs), value_of))
    return values


def apply_split(
    graph: Ordered, region: Region, split: Split, values: Mapping[Node | NewPort, torch.Tensor]
) -> None:
    """Put a region's new ports in place, and the values that it has then."""
    key = "example_value" if "example_value" in region.entries[0].node.meta else "val"
    replaced: dict[Node, Node] = {}
    for node in region.work:
        node.meta[key] = values[node]
        node.meta.pop("tensor_meta", None)
    for port in split.ports:
        users = [replaced.get(user, user) for user in port.users]
        before = users[0] if port.old is None else port.old.node
        x = replaced.get(port.x, port.x)
        with graph.gm.graph.inserting_before(before):
            new = graph.gm.graph.call_function(OP.default, (x, *port.args))
        graph.add(new, beside=before)
        source = before if port.old is not None else x
        value = values.get(port, node_value(port.x if port.old is None else port.old.node))
        new.meta = {name: source.meta[name] for name in _KEPT if name in source.meta}
        new.meta |= {key: value, "custom": {**source.meta.get("custom", {}), PORT: port.name}}
        if port.old is None:
            for user in users:
                user.replace_input_with(x, new)
        else:
            replaced[before] = new
            before.replace_all_uses_with(new)
            graph.gm.graph.erase_node(before)
            graph.order.pop(before)


_KEPT = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "source_fn_stack")


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    target: Any = node.target
    if node.op == "call_method":
        target = getattr(type(args[0]), target)
    try:
        return target(*args, **kwargs)
    except Exception as error:  # operators raise as they like
        raise NotSplit(f"{node.name}: {type(error).__name__}: {error}") from error
