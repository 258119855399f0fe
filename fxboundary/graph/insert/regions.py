"""The regions of a graph: the nodes that one call of a module made, what enters and what leaves.

They are read from ``nn_module_stack``, which ``torch.fx`` tracers, Dynamo and ``torch.export`` all
keep, and a leaf module's ``call_module`` node is the region of its call.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxboundary.graph.find import call_index, call_name, clean_path

CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True, eq=False)
class Region:
    """The nodes of one call of the module ``path``; ``call`` counts its calls from 0.

    ``stack`` is the module stack down to this call: what a port's node carries.
    """

    path: str
    call: int
    cls: type | None
    stack: Mapping[str, Any]
    nodes: dict[Node, None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return call_name(self.path, self.call)

    @property
    def leaf(self) -> Node | None:
        """The node of a module that was not traced into."""
        (node, *others) = self.nodes
        return node if not others and node.op == "call_module" else None

    def encloses(self, other: Region) -> bool:
        """Whether ``other`` is a call inside of this one."""
        return other is not self and list(other.stack)[: len(self.stack)] == list(self.stack)

    def inputs(self, parameters: Mapping[Node, str]) -> list[Node]:
        """Tensors from outside, in order of first use; parameters and buffers are none."""
        found: dict[Node, None] = {}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source not in self.nodes and source not in parameters and _is_tensor(source):
                    found[source] = None
        return list(found)

    def outputs(self) -> list[Node]:
        """Tensors that are used outside, in the order in which they are made."""
        return [
            node
            for node in self.nodes
            if _is_tensor(node) and any(user not in self.nodes for user in node.users)
        ]


def find_regions(graph: Graph, root: str | None = None) -> dict[str, list[Region]]:
    """Regions by module path, each module's calls in order.

    ``root`` names the whole graph's module, whose stack entry some captures leave out.
    """
    found: dict[tuple[str, int], Region] = {}
    if root is not None:
        found[root, 0] = Region(root, 0, None, {})
    for node in graph.nodes:
        if node.op not in CALLS or is_guard(node):
            continue
        if root is not None:
            found[root, 0].nodes[node] = None
        stack = node.meta.get("nn_module_stack") or {}
        for key, region in _stacked(stack):
            if key not in found:
                found[key] = region
            found[key].nodes[node] = None
    by_path: dict[str, list[Region]] = {}
    for (path, _), region in found.items():
        if region.nodes:
            by_path.setdefault(path, []).append(region)
    return by_path


def _stacked(stack: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Region]]:
    """The calls that a node belongs to, outermost first."""
    entries = list(stack.items())
    for i, (key, (raw, kind)) in enumerate(entries):
        path, call = clean_path(raw), call_index(key)
        yield (path, call), Region(path, call, resolve_class(kind), dict(entries[: i + 1]))


def resolve_class(kind: Any) -> type | None:
    """A class, from itself or from the name that ``torch.export`` keeps; nothing is imported."""
    if isinstance(kind, type):
        return kind
    parts = str(kind).split(".")
    for i in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:i]))
        for part in parts[i:]:
            found = getattr(found, part, None)
        if isinstance(found, type):
            return found
    return None


def is_guard(node: Node) -> bool:
    """torch.export's check of the inputs: a node of no module, whatever its stack says."""
    return node.op == "call_module" and node.target == "_guards_fn"


def node_value(node: Node) -> Any:
    """What a capture knows of a node's value; ``None`` where it recorded nothing."""
    return node.meta.get("val", node.meta.get("example_value"))


def _is_tensor(node: Node) -> bool:
    value = node_value(node)
    return value is None or _holds_tensor(value)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)


def tensor_names(gm: GraphModule) -> dict[Node, str]:
    """Full names of the parameters and buffers that nodes of the graph stand for."""
    found = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(attribute(gm, str(node.target)), torch.Tensor):
            found[node] = str(node.target)
        elif node.op == "placeholder" and (name := _lifted(node)) is not None:
            found[node] = name
    return found


def _lifted(node: Node) -> str | None:
    """Name of the parameter that Dynamo made an input."""
    # Private to torch; read on torch 2.13.0 and 2.14.1.
    source = getattr(getattr(node, "_dynamo_source", None), "name", None)
    source = source() if callable(source) else source
    if source is None or not ("._parameters[" in source or "._buffers[" in source):
        return None
    return clean_path(source.replace("._parameters", "").replace("._buffers", ""))


def input_name(node: Node) -> str:
    """What the caller calls an input of a graph."""
    source = getattr(getattr(node, "_dynamo_source", None), "name", None)
    source = source() if callable(source) else source
    named = None if source is None else re.search(r"\['(\w+)'\]$", source)
    return str(node.target) if named is None else named[1]


def attribute(gm: torch.nn.Module, name: str) -> Any:
    found: Any = gm
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def calls_graph(node: Node) -> bool:
    """Whether a node hands its inputs to a nested graph, as a checkpoint does."""
    owner = node.graph.owning_module
    return owner is not None and any(
        source.op == "get_attr" and isinstance(attribute(owner, str(source.target)), GraphModule)
        for source in node.all_input_nodes
    )
