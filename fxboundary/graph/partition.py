"""What a compiled graph keeps for backward: the ports whose contract decides it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxboundary.graph.collectives import port_of
from fxboundary.graph.find import Port
from fxboundary.graph.verify import ChainedPass


def declared_backward(ports: Iterable[Port]) -> dict[str, str]:
    """``save`` or ``recompute`` by full name, of the ports that declare it."""
    return {port.name: port.backward for port in ports if port.backward}


class MarkForBackward(ChainedPass):
    """Joint pass: tell the partitioner which values to keep and which to move anew."""

    def __init__(self, declared: Mapping[str, str], users: Any = None) -> None:
        super().__init__(users)
        self._declared = declared

    def look(self, graph: Graph, gm: GraphModule) -> None:
        after = _backward(graph)
        for node in graph.nodes:
            decision = self._declared.get(port_of(node))
            if node.op != "call_function" or decision is None or node in after:
                continue
            if decision == "recompute":
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            elif any(port_of(user) != port_of(node) for user in node.users):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _backward(graph: Graph) -> set[Node]:
    """All that depends on an incoming gradient."""
    found: set[Node] = set()
    for node in graph.nodes:
        # AOTAutograd's name for incoming gradients, read on 2.13.0 and 2.14.1.
        incoming = node.op == "placeholder" and node.name.startswith("tangents")
        if incoming or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
