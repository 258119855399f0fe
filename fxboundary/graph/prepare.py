"""Making a captured graph ready for AOTAutograd: dead ports out, names fixed, targets exact."""

from __future__ import annotations

from torch.fx import GraphModule

from fxboundary.graph.find import PORT, Port, find_ports, graph_modules, is_port, port_name
from fxboundary.ops import OP


def remove_dead_ports(gm: GraphModule) -> int:
    """Erase ports whose value nothing uses; their collectives would run all the same.

    Such are parameters of which only the shape or the dtype was read. Returns how many.
    """
    removed = 0
    for module in graph_modules(gm):
        for node in reversed(module.graph.nodes):
            if is_port(node) and not node.users:
                module.graph.erase_node(node)
                removed += 1
    return removed


def name_ports(gm: GraphModule) -> list[Port]:
    """Give each port's node its exact overload, and its full name as custom metadata.

    The name stays with what the node becomes: AOTAutograd copies custom metadata, forward and
    backward, where the module stack is lost. Only overloads can be cached by torch.
    """
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            if is_port(node):
                node.target = OP.default
                node.meta["custom"] = {**node.meta.get("custom", {}), PORT: port_name(node)}
    return find_ports(gm)
