"""Collectives in a graph after AOTAutograd: which there are, and whose port they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxboundary.graph.find import PORT, graph_modules

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Collective:
    """One collective of a lowered graph; ``port`` is empty where it is not ours."""

    kind: str
    port: str
    bytes: int


def find_collectives(gm: GraphModule) -> list[Collective]:
    """The functional collectives of a graph and its subgraphs, in graph order."""
    return [
        _collective(node)
        for module in graph_modules(gm)
        for node in module.graph.nodes
        if is_collective(node)
    ]


def is_collective(node: Node) -> bool:
    return node.op == "call_function" and _kind(node) is not None


def port_of(node: Node) -> str:
    """Full name of the port that a lowered node belongs to; empty where it is none of ours."""
    return str(node.meta.get("custom", {}).get(PORT, ""))


def _kind(node: Node) -> str | None:
    namespace, _, rest = str(node.target).partition(".")
    return KINDS.get(rest.split(".")[0]) if namespace == "_c10d_functional" else None


def _collective(node: Node) -> Collective:
    """``bytes`` are those of the larger side, input or output: -1 where sizes are symbolic."""
    operand = node.args[0]
    values = [n.meta.get("val") for n in (operand, node) if isinstance(n, Node)]
    sizes = [v.numel() * v.element_size() for v in values if v is not None]
    known = [size for size in sizes if isinstance(size, int)]
    return Collective(
        _kind(node) or "", port_of(node), max(known) if len(known) == len(sizes) else -1
    )
