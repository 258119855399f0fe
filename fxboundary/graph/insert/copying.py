"""A graph module that can be edited without touching the one it was made from."""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule, Node

from fxboundary.graph.insert.regions import node_value


def copied(gm: GraphModule) -> GraphModule:
    """Graphs, nested ones too, and their metadata are new; tensors are shared."""
    found = GraphModule(gm, copy.deepcopy(gm.graph), type(gm).__name__)
    found.meta = dict(gm.meta)
    found.train(gm.training)
    for name, child in gm.named_children():
        if isinstance(child, GraphModule) and hasattr(found, name):
            setattr(found, name, copied(child))
    return found


def remove_aliases(gm: GraphModule) -> None:
    """Drop ``alias`` and ``to`` nodes that give their input back.

    Captures hand such an alias of a module's input on to code outside of the module, which makes an
    output of it.
    """
    for node in list(gm.graph.nodes):
        if _is_alias(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


_CASTS = tuple(
    getattr(torch.ops.aten.to, name) for name in ("dtype", "device", "dtype_layout", "other")
)


def _is_alias(node: Node) -> bool:
    cast = node.target in _CASTS or (node.op == "call_method" and node.target == "to")
    if not cast and node.target is not torch.ops.aten.alias.default:
        return False
    source = node.args[0]
    before, after = node_value(source) if isinstance(source, Node) else None, node_value(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if node.kwargs.get("copy") or True in node.args or node.kwargs.get("memory_format") is not None:
        return False
    same = before.dtype == after.dtype and before.device == after.device
    return same and before.stride() == after.stride() and before.shape == after.shape
