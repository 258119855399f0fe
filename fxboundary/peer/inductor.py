"""Lowerings of the peer operators for Inductor. Importing this module registers them.

Code that Inductor has compiled needs ``fxboundary.peer.ops`` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from fxboundary.peer.ops import OPS

# The last publish or release that a graph has so far.
_LAST: WeakKeyDictionary[GraphLowering, str] = WeakKeyDictionary()


def _lower(op: Any, ordered: bool) -> Callable[..., Any]:
    fallback = fallback_handler(op, add_to_fallback_set=False)

    def lowering(*args: Any) -> Any:
        # What is read has to be computed here and only here: Inductor would compute it again
        # from the peers, wherever it is used, when they have been written over.
        for value in tree_leaves(args):
            if isinstance(value, ir.IRNode):
                value.realize()
        first = len(V.graph.operations)
        result = fallback(*args)
        for value in tree_leaves(result):
            if isinstance(value, ir.IRNode):
                value.realize()
                # This memory is the group's, not the graph's to use again for something else.
                V.graph.never_reuse_buffers.add(value.get_name())
        if ordered:
            _keep_order(V.graph.operations[first:])
        return result

    return lowering


def _keep_order(operations: list[ir.Operation]) -> None:
    """Run after the publish or release before, which the scheduler takes to be unrelated.

    A publish moved before the release of another frees memory that is still read, and ranks
    that publish in different orders read each other's wrong values.
    """
    for operation in operations:
        if isinstance(operation, ir.FallbackKernel):
            if last := _LAST.get(V.graph):
                V.graph.additional_star_deps[operation.get_operation_name()].add(last)
            _LAST[V.graph] = operation.get_name()


for _op, _ordered in (
    (OPS.publish.default, True),
    (OPS.peers.default, False),
    (OPS.parts.default, False),
    (OPS.release.default, True),
):
    register_lowering(_op, type_promotion_kind=None)(_lower(_op, _ordered))
