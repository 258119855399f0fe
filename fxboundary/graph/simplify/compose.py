"""Compose: a port that follows a port becomes one transition; a round trip disappears."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxboundary.errors import UnsupportedTransitionError
from fxboundary.graph.find import Port, graph_modules, is_port, read_port
from fxboundary.graph.simplify.change import Change, join_names
from fxboundary.graph.simplify.ports import (
    Spent,
    identity_of,
    label_of,
    new_port,
    rank_of,
    reduces,
    spent,
)
from fxboundary.graph.simplify.scope import Scope
from fxboundary.transition.gradient import adjoint_layout
from fxboundary.transition.transition import Request, Transition, plan


def compose(gm: GraphModule) -> list[Change]:
    """Replace ports of ports where that sends no more, in place; the first ones may be dead then.

    Where other nodes use the first port too, it stays, and the second must cost less from its
    source than from its result.
    """
    return [change for module in graph_modules(gm) for change in _compose(module)]


@dataclass(frozen=True)
class _Pair:
    """Two ports, one after the other, and the transition that does both."""

    first: Port
    second: Port
    both: Transition
    sizes: str

    @property
    def vanishes(self) -> bool:
        both = self.both
        idle = both.src == both.dst and both.grad == adjoint_layout(both.dst)
        return idle and both.differentiable


def _compose(gm: GraphModule) -> list[Change]:
    scope = Scope.of(gm)
    changes = []
    for node in list(gm.graph.nodes):
        if not is_port(node) or not any(is_port(user) for user in node.users):
            continue
        first = read_port(node, gm)
        pairs = [
            pair
            for user in list(node.users)
            if is_port(user) and _in_scope(scope, node, user)
            if (pair := _pair(first, read_port(user, gm))) is not None
        ]
        if pairs and _pays(pairs, alone=len(pairs) == len(node.users)):
            changes += [_replace(gm, scope, pair) for pair in pairs]
            if not node.users:
                gm.graph.erase_node(node)
    return changes


def _in_scope(scope: Scope, first: Node, second: Node) -> bool:
    source = first.args[0]
    return isinstance(source, Node) and scope.movable(first, second) and source not in scope.written


def _pair(first: Port, second: Port) -> _Pair | None:
    """Both ports as one, where the one begins in the layout in which the other ends.

    A gradient that arrives at the first otherwise than the second lets it leave means something
    else to the one than to the other: such ports stay as they are.
    """
    a, b = first.transition, second.transition
    if a is None or b is None or first.mesh != second.mesh or a.dst != b.src:
        return None
    if a.differentiable and a.grad != adjoint_layout(a.dst):
        return None
    sizes, dtype = _sizes(first, second), _reduce_dtype(a, b)
    if sizes is None or dtype is None or first.backward != second.backward:
        return None
    try:
        both = plan(a.src, b.dst, b.grad, a.mesh, Request(reduce_dtype=dtype))
    except UnsupportedTransitionError:
        return None
    return _Pair(first, second, both, sizes)


def _sizes(first: Port, second: Port) -> str | None:
    """The declared sizes of both; ``None`` where they contradict each other."""
    texts = [str(port.node.args[7]).split(",") for port in (first, second)]
    declared = [dict(part.split(":") for part in parts if part) for parts in texts]
    together = {**declared[0], **declared[1]}
    return (
        None
        if any(together[dim] != size for dim, size in declared[0].items())
        else ",".join(f"{dim}:{size}" for dim, size in together.items())
    )


def _reduce_dtype(a: Transition, b: Transition) -> str | None:
    """The dtype in which both reduce; ``None`` where they differ in it."""
    dtypes = {t.request.reduce_dtype for t in (a, b) if reduces(t.forward) or reduces(t.backward)}
    return None if len(dtypes) > 1 else next(iter(dtypes), "")


def _pays(pairs: list[_Pair], alone: bool) -> bool:
    """Whether the ports together launch and send no more than before, in neither direction."""
    first = pairs[0].first.transition
    assert first is not None
    distinct = {identity_of(pair.second): pair for pair in pairs}.values()
    seconds = [pair.second.transition for pair in distinct]
    ndim = rank_of(first, *(t for t in seconds if t is not None))
    before = spent(first, ndim) if alone else Spent()
    after = Spent()
    for pair, second in zip(distinct, seconds, strict=True):
        assert second is not None
        before += spent(second, ndim)
        after += spent(pair.both, ndim)
    return after.at_most(before)


def _replace(gm: GraphModule, scope: Scope, pair: _Pair) -> Change:
    second, source = pair.second.node, pair.first.node.args[0]
    assert isinstance(source, Node)
    ports = (pair.first.name, pair.second.name)
    name = "" if pair.vanishes else join_names(">", *ports)
    replacement = source
    if not pair.vanishes:
        label = join_names(">", label_of(pair.first), label_of(pair.second))
        with gm.graph.inserting_before(second):
            replacement = new_port(gm, source, pair.second, pair.both, label, name, pair.sizes)
        scope.add(replacement, beside=second)
    second.replace_all_uses_with(replacement)
    gm.graph.erase_node(second)
    return Change("compose", ports, name)
