"""Merge: a sum of values that move in the same way adds first, then moves once.

Two partial outputs that are added, as those of attention and MLP in a parallel block, need one
all_reduce. Transitions are linear, so factors and signs go along.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxboundary.graph.find import Port, graph_modules, is_port, node_tensor, read_port
from fxboundary.graph.simplify.change import Change, join_names
from fxboundary.graph.simplify.ports import copied_port, identity_of, label_of
from fxboundary.graph.simplify.scope import Scope
from fxboundary.transition.transition import Transition

_ATEN = torch.ops.aten
_ADD = (operator.add, torch.add, "add", _ATEN.add.Tensor)
_NEGATE = (operator.neg, torch.neg, "neg", _ATEN.neg.default)
_SCALE = (
    *(operator.mul, torch.mul, "mul", _ATEN.mul.Tensor, _ATEN.mul.Scalar),
    *(operator.truediv, torch.div, "div", _ATEN.div.Tensor, _ATEN.div.Scalar),
)


def merge(gm: GraphModule) -> list[Change]:
    """Add before moving, in place; sums are taken in another order, so to rounding."""
    return [change for module in graph_modules(gm) for change in _merge(module)]


@dataclass(frozen=True)
class _Term:
    """A term of a sum that is a port, and the linear nodes from it to the sum."""

    port: Port
    chain: tuple[Node, ...]


@dataclass(frozen=True)
class _Sum:
    """A tree of additions: its root, the other additions, what they add in order."""

    root: Node
    inner: tuple[Node, ...]
    leaves: tuple[Node, ...]


def _merge(gm: GraphModule) -> list[Change]:
    scope = Scope.of(gm)
    roots = [n for n in gm.graph.nodes if _is_sum(n, scope) and not _is_inner(n, scope)]
    return [change for root in roots for change in _merge_terms(gm, scope, _tree(root, scope))]


def _is_sum(node: Node, scope: Scope) -> bool:
    """An addition of two tensors of one shape and dtype, without a factor."""
    if not _calls(node, _ADD) or len(node.args) != 2 or node.kwargs or not scope.movable(node):
        return False
    return all(isinstance(arg, Node) and _alike(arg, node) for arg in node.args)


def _is_inner(node: Node, scope: Scope) -> bool:
    """Whether a sum is but a term of another."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1 or not _is_sum(user, scope):
        return False
    return scope.movable(node, user) and user.args[0] is not user.args[1]


def _calls(node: Node, targets: tuple[Any, ...]) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets


def _alike(a: Node, b: Node) -> bool:
    x, y = node_tensor(a), node_tensor(b)
    return x is not None and y is not None and x.shape == y.shape and x.dtype == y.dtype


def _tree(root: Node, scope: Scope) -> _Sum:
    inner: list[Node] = []
    leaves: list[Node] = []
    pending = list(reversed(_operands(root)))
    while pending:
        node = pending.pop()
        if _is_sum(node, scope) and _is_inner(node, scope):
            inner.append(node)
            pending += reversed(_operands(node))
        else:
            leaves.append(node)
    return _Sum(root, tuple(inner), tuple(leaves))


def _operands(node: Node) -> list[Node]:
    return [arg for arg in node.args if isinstance(arg, Node)]


def _term(gm: GraphModule, scope: Scope, root: Node, leaf: Node) -> _Term | None:
    """A leaf of a sum as a port and linear nodes, none of which anything else uses."""
    chain: list[Node] = []
    at = leaf
    while not is_port(at):
        operand = _scaled(at)
        if operand is None or len(at.users) > 1:
            return None
        chain.append(at)
        at = operand
    source = at.args[0]
    if len(at.users) > 1 or not isinstance(source, Node) or source in scope.written:
        return None
    port = read_port(at, gm)
    moves = port.transition
    if moves is None or not moves.differentiable or not _gains(moves):
        return None
    return _Term(port, tuple(reversed(chain))) if scope.movable(at, *chain, root) else None


def _gains(moves: Transition) -> bool:
    """Local steps stay: a sum of slices is less work than a slice of a sum."""
    if moves.forward:
        return any(step.is_collective for step in moves.forward)
    return bool(moves.backward)


def _scaled(node: Node) -> Node | None:
    """What a node negates, or multiplies or divides by a number; ``None`` for other nodes."""
    operands = _operands(node)
    if node.kwargs or len(operands) != 1 or not _alike(operands[0], node):
        return None
    if _calls(node, _NEGATE):
        return operands[0]
    others = [arg for arg in node.args if not isinstance(arg, Node)]
    linear = node.args[0] is operands[0] or node.target is operator.mul
    numbers = len(others) == 1 and isinstance(others[0], (int, float))
    return operands[0] if numbers and linear and _calls(node, _SCALE) else None


def _merge_terms(gm: GraphModule, scope: Scope, tree: _Sum) -> list[Change]:
    terms = {leaf: _term(gm, scope, tree.root, leaf) for leaf in dict.fromkeys(tree.leaves)}
    groups: dict[Hashable, list[Node]] = {}
    for leaf in tree.leaves:
        term = terms[leaf]
        groups.setdefault(leaf if term is None else identity_of(term.port), []).append(leaf)
    changes: list[Change] = []
    found: list[Node] = []
    with gm.graph.inserting_before(tree.root):
        for leaves in groups.values():
            members = [term for leaf in leaves if (term := terms[leaf]) is not None]
            if len(members) < 2:
                found += leaves
                continue
            changes.append(_change(members))
            found.append(_moved_sum(gm, scope, tree.root, members, changes[-1].port))
        if not changes:
            return []
        total = _added(gm, scope, tree.root, found)
    tree.root.replace_all_uses_with(total)
    moved = [node for term in terms.values() if term for node in (*term.chain, term.port.node)]
    _erase_unused(gm, tree.root, {*tree.inner, *moved})
    return changes


def _change(terms: list[_Term]) -> Change:
    names = tuple(term.port.name for term in terms)
    return Change("merge", names, join_names("+", *names))


def _moved_sum(gm: GraphModule, scope: Scope, root: Node, terms: list[_Term], name: str) -> Node:
    label = join_names("+", *(label_of(term.port) for term in terms))
    total = _added(gm, scope, root, [_unmoved(gm, scope, term) for term in terms])
    return scope.add(copied_port(gm, total, terms[0].port, label, name), beside=root)


def _unmoved(gm: GraphModule, scope: Scope, term: _Term) -> Node:
    """The term without its port, on the side where it has not been moved."""
    before, value = term.port.node, term.port.node.args[0]
    assert isinstance(value, Node)
    for node in term.chain:
        known = {before: value}
        copied = scope.add(gm.graph.node_copy(node, known.__getitem__), beside=node)
        _take_value(copied, value)
        before, value = node, copied
    return value


def _added(gm: GraphModule, scope: Scope, root: Node, nodes: list[Node]) -> Node:
    total = nodes[0]
    for node in nodes[1:]:
        before, total = total, gm.graph.create_node(root.op, root.target, (total, node))
        total.meta = {key: value for key, value in root.meta.items() if key != "custom"}
        _take_value(scope.add(total, beside=root), before)
    return total


def _take_value(node: Node, like: Node) -> None:
    """A value of the same shape, in memory of its own."""
    for key in ("val", "example_value"):
        if isinstance(value := like.meta.get(key), torch.Tensor):
            node.meta[key] = torch.empty_like(value)


def _erase_unused(gm: GraphModule, root: Node, removable: set[Node]) -> None:
    pending = [root]
    while pending:
        node = pending.pop()
        if not node.users and (node is root or node in removable):
            sources = node.all_input_nodes
            removable.discard(node)
            gm.graph.erase_node(node)
            pending += sources
