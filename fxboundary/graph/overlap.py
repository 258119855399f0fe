"""Overlap: collectives are issued as early, and waited for as late, as the data allows.

A functional collective is two nodes, a start and a wait; what runs between them hides it. After
AOTAutograd they stand beside each other. Inductor's own scheduler (torch 2.14) parts them only
where that costs no memory, and the one of torch 2.13 not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from fxboundary._torch_internals import keep_order
from fxboundary.graph.collectives import port_of
from fxboundary.graph.verify import ChainedPass

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
# Kernels long enough to hide a collective. Attention kernels too, by their names.
_HEAVY = {
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("convolution", "convolution_backward", "_linear_pointwise"),
}


class OverlapCollectives(ChainedPass):
    """Post-grad pass, the last one before Inductor's scheduler."""

    def look(self, graph: Graph, gm: GraphModule) -> None:
        overlap(graph)
        pin(graph)


def overlap(graph: Graph) -> bool:
    """Reorder a functional graph in place; whether anything moved. Linear in its size.

    Waits sink to their first use, starts rise to their last input, each with what prepares or
    takes apart its value. Collectives keep their order, which is the same on all ranks. A start
    rises no further than to the wait of the last collective whose result something computes
    with: of the parameters that are gathered, the next one is under way while one is in use.
    Results that only leave the graph (gradients of parameters) are waited for at the next such
    start, so that the inputs of one are kept. Nothing moves past a node with a side effect.
    """
    nodes = list(graph.nodes)
    if not any(map(_is_start, nodes)):
        return False
    order = _Order(nodes).run()
    if order == nodes:
        return False
    last = order[0]
    for node in order[1:]:
        if last.next is not node:
            last.append(node)
        last = node
    graph.lint()
    return True


def pin(graph: Graph) -> int:
    """Make Inductor's scheduler keep what hides a collective between its start and its wait.

    It would choose another order to save memory. Returns how many nodes were tied to others.
    """
    keep: defaultdict[Node, list[Node]] = defaultdict(list)
    heavy: list[Node] = []
    seen: dict[Node, int] = {}
    known: dict[Node, int] = {}  # how many of the heavy nodes certainly run before a node
    for node in graph.nodes:
        known[node] = max((known[n] for n in node.all_input_nodes), default=0)
        start = node.args[0] if node.target is _WAIT else None
        if isinstance(start, Node) and start in seen and seen[start] < len(heavy):
            keep[heavy[seen[start]]].append(start)
            keep[node].append(heavy[-1])
        if _is_start(node):
            seen[node] = len(heavy)
            # Inductor would gather all parameters first.
            if node.target is _GATHER and known[node] < len(heavy):
                keep[node].append(heavy[-1])
        elif _is_heavy(node):
            heavy.append(node)
            known[node] = len(heavy)
    # A node can be tied only to what stands before it by then.
    keep_order(graph, {node: keep[node] for node in graph.nodes if node in keep})
    return len(keep)


class _Order:
    """One pass over the nodes: each is put at the end of a new order, or is pending."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._leads = _leading(nodes)
        self._stretch = _stretches(nodes)
        self._order: list[Node] = []
        self._done: set[Node] = set()
        self._pending: dict[Node, None] = {}
        self._waits = {n.args[0]: n for n in nodes if n.target is _WAIT}
        # The starts that are still to come, from the last, and what each is prepared by.
        self._coming = [node for node in reversed(nodes) if _is_start(node)]
        self._prepared: dict[Node, list[Node]] = {}
        self._missing: dict[Node, int] = {}
        self._needed: defaultdict[Node, list[Node]] = defaultdict(list)
        self._taken: set[Node] = set()
        # Collectives of the graph's own inputs could all be issued first.
        self._early: set[Node] = set()
        for start in reversed(self._coming):
            self._prepare(start)
        self._last_used: Node | None = None
        self._unwaited: Node | None = None
        self._opened: set[Node] = set()

    def run(self) -> list[Node]:
        for node in self._nodes:
            if _is_barrier(node):
                while self._coming and self._coming[-1] < node:
                    self._start()
                self._put_all(self._pending)
            if self._may_wait(node):
                self._pending[node] = None
            elif _is_start(node):
                if node not in self._early or self._is_open(node):
                    self._issue(node)
            elif node not in self._taken:
                self._put_all(self._inputs(node))
                self._put(node)
            self._rise()
        return self._order

    def _prepare(self, start: Node) -> None:
        """Find the nodes that nothing but a start uses, and the values that they need."""
        found, inputs = {start}, set()
        todo = list(start.all_input_nodes)
        while todo:
            node = todo.pop()
            if node in found:
                continue
            if self._only_for(node, found, start):
                found.add(node)
                inputs.discard(node)
                todo += node.all_input_nodes
            else:
                inputs.add(node)
        inputs -= found
        self._taken |= found
        self._prepared[start] = sorted(found)  # nodes compare by their place
        self._missing[start] = len(inputs)
        if all(node.op in ("placeholder", "get_attr") for node in inputs):
            self._early.add(start)
        for node in inputs:
            self._needed[node].append(start)

    def _only_for(self, node: Node, found: set[Node], start: Node) -> bool:
        if not _is_light(node) or self._stretch[node] != self._stretch[start]:
            return False
        return found.issuperset(node.users) and node.target is not _WAIT

    def _may_wait(self, node: Node) -> bool:
        if node.target is _WAIT:
            return node.args[0] in self._missing
        pending = [n for n in node.all_input_nodes if n in self._pending]
        if not pending or not _is_light(node):
            return False
        port = port_of(node)
        ours = port and any(port == port_of(n) for n in pending)
        return bool(_is_view(node) or ours or not self._leads[node])

    def _inputs(self, *nodes: Node) -> list[Node]:
        """All pending nodes that some nodes need."""
        found: set[Node] = set()
        todo = [n for node in nodes for n in node.all_input_nodes]
        while todo:
            node = todo.pop()
            if node in self._pending and node not in found:
                found.add(node)
                todo += node.all_input_nodes
        return sorted(found)

    def _put_all(self, nodes: Iterable[Node]) -> None:
        for node in list(nodes):
            if node in self._done:
                continue
            self._pending.pop(node, None)
            if node.target is _WAIT:
                self._issue(start := node.all_input_nodes[0])
                self._opened.add(start)
                self._rise()
            self._put(node)

    def _put(self, node: Node) -> None:
        if node in self._done:
            return
        self._done.add(node)
        self._order.append(node)
        for start in self._needed[node]:
            self._missing[start] -= 1

    def _rise(self) -> None:
        """Put the next starts, as long as they may be issued here."""
        while self._coming and self._is_ready(self._coming[-1]):
            self._start()

    def _is_ready(self, start: Node) -> bool:
        return not self._missing[start] and self._in_stretch(start) and self._is_open(start)

    def _is_open(self, start: Node) -> bool:
        last = self._last_used
        return last is None or last in self._opened or not self._is_used(start)

    def _in_stretch(self, start: Node) -> bool:
        return bool(self._order) and self._stretch[self._order[-1]] >= self._stretch[start]

    def _is_used(self, start: Node) -> bool:
        """Whether something is computed from the result."""
        wait = self._waits.get(start)
        return wait is None or self._leads[wait]

    def _issue(self, start: Node) -> None:
        """Put a start, after those that come before it."""
        while start not in self._done:
            self._start()

    def _start(self) -> None:
        start = self._coming.pop()
        group = self._prepared[start]
        if not self._is_used(start):
            if self._unwaited is not None:
                self._finish(self._waits[self._unwaited])
            self._unwaited = start
        else:
            self._last_used = start
        self._put_all(self._inputs(*group))
        for node in group:
            self._put(node)

    def _finish(self, wait: Node) -> None:
        """Put a pending wait, and what has been pending for it alone."""
        todo = [wait]
        while todo:
            node = todo.pop()
            ready = node in self._pending and not self._inputs(node)
            if ready:
                self._pending.pop(node)
                self._put(node)
                todo += reversed(list(node.users))


def _leading(nodes: list[Node]) -> dict[Node, bool]:
    """Whether a long kernel or a collective needs a node's value."""
    found: dict[Node, bool] = {}
    for node in reversed(nodes):
        found[node] = any(_is_heavy(u) or _is_start(u) or found[u] for u in node.users)
    return found


def _stretches(nodes: list[Node]) -> dict[Node, int]:
    """The number of nodes with a side effect before and at each."""
    found, number = {}, 0
    for node in nodes:
        number += _is_barrier(node)
        found[node] = number
    return found


def _namespace(node: Node) -> str:
    return str(node.target).partition(".")[0] if node.op == "call_function" else ""


def _is_start(node: Node) -> bool:
    return _namespace(node) == "_c10d_functional" and node.target is not _WAIT and not _writes(node)


def _is_heavy(node: Node) -> bool:
    name = str(node.target).split(".")[1] if _namespace(node) in ("aten", "mkldnn") else ""
    return name in _HEAVY or "attention" in name


def _is_barrier(node: Node) -> bool:
    """A node that nothing moves past: it writes somewhere, or what it does is not known."""
    if node.op != "call_function" or node.target is _WAIT or _is_start(node):
        return node.op in ("output", "call_method", "call_module")
    known = isinstance(node.target, torch._ops.OpOverload) or _is_python(node)
    return not known or _writes(node) or node.is_impure()


def _is_python(node: Node) -> bool:
    return getattr(node.target, "__module__", "") in ("_operator", "math", "torch")


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_light(node: Node) -> bool:
    """A node that may be moved: short, and alike wherever it runs."""
    if node.op != "call_function" or _is_start(node) or _is_heavy(node) or _is_barrier(node):
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", "") == "getitem"
    return any(result.alias_info is not None for result in schema.returns) or (
        node.target is torch.ops.aten._unsafe_view.default
    )
