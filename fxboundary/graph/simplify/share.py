"""Share: consumers that move one value in the same way take it from one port.

Three projections that each gather the same activation become one all_gather and, since their
gradients add before they move, one reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch.fx import GraphModule, Node

from fxboundary.graph.find import Port, graph_modules, is_port, read_port
from fxboundary.graph.simplify.casts import is_cast
from fxboundary.graph.simplify.change import Change, join_names
from fxboundary.graph.simplify.ports import identity_of, label_of, rename
from fxboundary.graph.simplify.scope import Scope


def share(gm: GraphModule) -> list[Change]:
    """Replace equal ports of one value by the first of them, in place."""
    return [change for module in graph_modules(gm) for change in _share(module)]


def _share(gm: GraphModule) -> list[Change]:
    scope = Scope.of(gm)
    groups: dict[Hashable, list[Port]] = {}
    for node in gm.graph.nodes:
        source = node.args[0] if is_port(node) else None
        if isinstance(source, Node) and source not in scope.written and scope.movable(node):
            port = read_port(node, gm)
            key = (_value(source, scope), scope.segment[node], identity_of(port))
            groups.setdefault(key, []).append(port)
    return [_merge(gm, ports) for ports in groups.values() if len(ports) > 1]


def _value(node: Node, scope: Scope) -> Hashable:
    """Equal for nodes that read one attribute of the graph module, or cast one value alike."""
    if node.op == "get_attr":
        return ("attribute", node.target)
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and is_cast(node, source) and scope.movable(node, source):
        options = (node.op, node.target, node.args[1:], tuple(node.kwargs.items()))
        return ("cast", *options, _value(source, scope))
    return node


def _merge(gm: GraphModule, ports: list[Port]) -> Change:
    first, *others = ports
    for port in others:
        port.node.replace_all_uses_with(first.node)
        _erase_with_casts(gm, port.node)
    names = tuple(port.name for port in ports)
    name = join_names(",", *names)
    rename(first, join_names(",", *map(label_of, ports)), name)
    return Change("share", names, name)


def _erase_with_casts(gm: GraphModule, node: Node) -> None:
    """Erase a port, and the casts before it that nothing else uses."""
    while True:
        source = node.args[0]
        gm.graph.erase_node(node)
        if not isinstance(source, Node) or source.users or not source.args:
            return
        before = source.args[0]
        if not isinstance(before, Node) or not is_cast(source, before):
            return
        node = source
