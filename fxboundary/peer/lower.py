"""Lowering to peer memory: collectives of ports become reads of what the peers have published.

Run on a graph after AOTAutograd. Where a collective started it is replaced by ordinary tensor code
over the peers' tensors, so that Inductor fuses it with what follows::

    P→R        sum of peers                  S(d)→R     cat of peers along d
    P→S(d)     sum of this rank's parts      S(a)→S(b)  cat of this rank's parts along a

What is read is read before this rank publishes again: it is then that a peer may write anew.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from fxboundary._torch_internals import named_group
from fxboundary.graph.collectives import port_of
from fxboundary.peer.ops import OPS

_ATEN = torch.ops.aten
_C10D = torch.ops._c10d_functional
_REDUCE: dict[str, Any] = {
    "sum": _ATEN.add.Tensor,
    "avg": _ATEN.add.Tensor,
    "max": _ATEN.maximum.default,
    "min": _ATEN.minimum.default,
}
_STARTS = frozenset(
    (
        _C10D.all_reduce.default,
        _C10D.all_gather_into_tensor.default,
        _C10D.reduce_scatter_tensor.default,
        _C10D.all_to_all_single.default,
    )
)
_FUSED = frozenset(
    getattr(_ATEN, name)
    for name in (
        *("mean", "sum", "amax", "amin", "var", "any", "all", "prod"),
        *("view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "alias"),
        *("squeeze", "unsqueeze", "slice", "select"),
    )
)
_SPLITS = frozenset((_ATEN.split.Tensor, _ATEN.split_with_sizes.default))
_AROUND = _STARTS | _SPLITS | {_C10D.wait_tensor.default, _ATEN.cat.default, operator.getitem}


@dataclass(frozen=True)
class Collective:
    """A collective, from the tensor that is sent to the one that its users take.

    ``cut`` is the dimension along which each rank takes its part of what was published, ``join``
    that along which what was read is put together, ``op`` what adds it up.
    """

    start: Node
    x: Node
    result: Node
    group: str
    size: int
    cut: int | None = None
    join: int | None = None
    op: str = ""


class NotLowered(Exception):
    """Why a collective is not read from peers."""


def lower_to_peers(graph: Graph) -> list[str]:
    """Replace the collectives of ports by reads of peer memory, in place.

    Returns why others stay, a line for each: ``layers.0.mlp:out: product has no kernel``.
    """
    import fxboundary.peer.inductor  # noqa: F401  (registers the lowerings)

    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    starts = [node for node in nodes if node.target in _STARTS and port_of(node)]
    ends = [order[start] for start in starts[1:]] + [len(order)]
    stay = []
    for start, end in zip(starts, ends, strict=False):
        try:
            collective = read_collective(start)
        except NotLowered as reason:
            stay.append(f"{port_of(start)}: {reason}")
        else:
            _replace(graph, collective, nodes, order, end)
    return stay


def read_collective(start: Node) -> Collective:
    """What a collective does, with the splitting and joining around it.

    Raises:
        NotLowered: peers cannot be read so.
    """
    wait = next(iter(start.users), None)
    if wait is None or len(start.users) > 1 or wait.target is not _C10D.wait_tensor.default:
        raise NotLowered("its result is not waited for at once")
    x: Any = start.args[0]
    given: Any = start.args[1:]
    group = str(given[-1])
    if start.target is _C10D.all_reduce.default:
        return Collective(start, x, wait, group, named_group(group).size(), op=_op(given[0]))
    if start.target is _C10D.all_gather_into_tensor.default:
        result, join = _joined(wait, given[0])
        return Collective(start, x, result, group, given[0], join=join)
    if start.target is _C10D.reduce_scatter_tensor.default:
        source, cut = _cut(x, given[1])
        return Collective(start, source, wait, group, given[1], cut=cut, op=_op(given[0]))
    received, sent = given[:2]
    if len({str(n) for n in (*received, *sent)}) > 1:
        raise NotLowered("its parts are unequal")
    result, join = _joined(wait, len(sent))
    source, cut = _cut(x, len(sent))
    return Collective(start, source, result, group, len(sent), cut=cut, join=join)


def _op(op: Any) -> str:
    if op not in _REDUCE:
        raise NotLowered(f"{op} has no kernel")
    return str(op)


def _joined(wait: Node, n: int) -> tuple[Node, int]:
    """The ``cat`` that puts chunks along dimension 0 side by side, and its dimension."""
    split = next(iter(wait.users), None)
    if split is None or len(wait.users) > 1 or not _splits(split, 0, n):
        return wait, 0
    users = {user for part in split.users for user in part.users}
    cat = next(iter(users), None)
    if cat is None or len(users) > 1 or not _puts_together(cat, split, n):
        return wait, 0
    return cat, _dim_of(cat, 1)


def _cut(x: Node, n: int) -> tuple[Node, int]:
    """What is cut along a dimension to lie in chunks along dimension 0, and the dimension."""
    parts = x.args[0] if x.target is _ATEN.cat.default else None
    first = parts[0] if isinstance(parts, (list, tuple)) and parts else None
    split = first.args[0] if isinstance(first, Node) and first.args else None
    if not isinstance(split, Node) or _dim_of(x, 1) != 0 or len(x.users) > 1:
        return x, 0
    dim = _dim_of(split, 2) if split.target in _SPLITS else 0
    if not _splits(split, dim, n) or not _puts_together(x, split, n):
        return x, 0
    source = split.args[0]
    assert isinstance(source, Node)
    return source, dim


def _splits(node: Node, dim: int, n: int) -> bool:
    """Whether it splits its input along ``dim`` into ``n`` equal parts."""
    if node.target not in _SPLITS or _dim_of(node, 2) != dim:
        return False
    parts = node.meta["val"]
    return len(parts) == n and all(
        statically_known_true(part.shape[dim] == parts[0].shape[dim]) for part in parts
    )


def _puts_together(cat: Node, split: Node, n: int) -> bool:
    """Whether it takes all parts of a split, in order, and nothing else."""
    parts = cat.args[0] if cat.target is _ATEN.cat.default else ()
    return isinstance(parts, (list, tuple)) and [
        (part.target, *part.args) if isinstance(part, Node) else () for part in parts
    ] == [(operator.getitem, split, i) for i in range(n)]


def _dim_of(node: Node, at: int) -> int:
    """The ``dim`` argument of a split or cat, counted from the left."""
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    first = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
    assert isinstance(dim, int)
    assert isinstance(first, Node)
    return int(dim % first.meta["val"].dim())


def _replace(
    graph: Graph, c: Collective, nodes: list[Node], order: dict[Node, int], end: int
) -> None:
    """Publish, read and release where a collective started; ``end`` is where the next one does."""
    new = _Emitter(graph, c.start)
    mine = new(OPS.publish.default, c.x, c.group, 0)
    if c.cut is None:
        parts = new(OPS.peers.default, mine, c.group, c.size, [])
    else:
        parts = new(OPS.parts.default, mine, c.group, c.size, c.cut)
    theirs = [new(operator.getitem, parts, i) for i in range(c.size)]
    if c.join is not None:
        read = new(_ATEN.cat.default, theirs, c.join)
    else:
        read = _reduced(new, theirs, c.op)
    c.result.replace_all_uses_with(read)
    written = _readers(read, nodes, order, end)
    with graph.inserting_after(written[-1]):
        release = graph.call_function(OPS.release.default, (written, theirs, c.group))
    release.meta = {**_kept(c.start), "val": None}
    _erase(graph, c.result)


def _reduced(new: _Emitter, parts: Sequence[Node], op: str) -> Node:
    """Half precision is added up in float32, and rounded once."""
    dtype = parts[0].meta["val"].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    if wide != dtype:
        parts = [new(torch.ops.prims.convert_element_type.default, p, wide) for p in parts]
    total = parts[0]
    for part in parts[1:]:
        total = new(_REDUCE[op], total, part)
    if op == "avg":
        total = new(_ATEN.div.Tensor, total, len(parts))
    if wide != dtype:
        total = new(torch.ops.prims.convert_element_type.default, total, dtype)
    return total


def _readers(read: Node, nodes: list[Node], order: dict[Node, int], end: int) -> list[Node]:
    """The values that stand for what was read, in order: all else is computed from these.

    Inductor may compute what follows from ``read`` in the kernels that read the peers. So that is
    written out which is used after the first operator that it does not fuse, or after this rank
    publishes again.
    """
    inside = {read}
    ahead = [order[user] for user in read.users]
    heapify(ahead)
    while ahead and ahead[0] < end and _is_fused(nodes[ahead[0]]):
        node = nodes[heappop(ahead)]
        if node not in inside:
            inside.add(node)
            for user in node.users:
                heappush(ahead, order[user])
    written = [node for node in inside if not node.users or not inside.issuperset(node.users)]
    return sorted(written, key=lambda node: order.get(node, -1))


def _is_fused(node: Node) -> bool:
    """Whether Inductor may compute an operator in the kernel that makes its input."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    return getattr(node.target, "overloadpacket", None) in _FUSED


class _Emitter:
    """Makes nodes before another, with its metadata and values of their own."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before
        self._mode = before.meta["val"].fake_mode

    def __call__(self, target: Any, *args: Any) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args)
        with self._mode:
            value = target(*map_arg(args, lambda n: n.meta["val"]))
        node.meta = {**_kept(self._before), "val": value}
        return node


def _kept(node: Node) -> dict[str, Any]:
    return {
        k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")
    }


def _erase(graph: Graph, node: Node) -> None:
    """Erase a node that nothing uses, and what was there for it alone."""
    pending = {node: None}
    while pending:
        node, _ = pending.popitem()
        if not node.users and node.target in _AROUND:
            pending.update(dict.fromkeys(node.all_input_nodes))
            graph.erase_node(node)
