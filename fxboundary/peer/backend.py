"""The peer lowering as a pass of Inductor's."""

from __future__ import annotations

from torch.fx import Graph, GraphModule

from fxboundary.errors import FxBoundaryError
from fxboundary.graph.find import graph_modules
from fxboundary.graph.verify import ChainedPass
from fxboundary.peer.lower import lower_to_peers


class LowerToPeers(ChainedPass):
    """Last post-grad pass: all collectives of ports are read from peers.

    Raises:
        FxBoundaryError: one cannot be.
    """

    def look(self, graph: Graph, gm: GraphModule) -> None:
        stay = [reason for module in graph_modules(gm) for reason in lower_to_peers(module.graph)]
        if stay:
            raise FxBoundaryError(
                "lowering='peer': " + "; ".join(stay) + "; write lowering='functional'"
            )
