"""Finding the ports of a graph, those in the subgraphs of higher-order operators included."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxboundary.mesh import named_spec
from fxboundary.ops import OP
from fxboundary.placements import (
    Layout,
    normalize_dims,
    parse_layout,
    shard_dims,
    smallest_rank,
)
from fxboundary.transition.transition import Request, Transition, plan

_TARGETS = (OP, OP.default)
PORT = "fxboundary_port"  # custom metadata of a node: the full name of its port
# What a frame calls the module it traces; a forward behind a decorator has it in *args.
_ROOT = re.compile(r"^L\['(?:args'\]\[0\]|\w+'\])\.?")


@dataclass(frozen=True)
class Port:
    """One redistribute node: the port it stands for, and what it does there.

    ``name`` is the full name, ``layers.0.mlp:in.x``; shapes are this rank's, and may hold
    symbols; they are ``None`` in a graph without shapes, as is a ``transition`` whose
    dimensions are counted from the right. ``backward`` says what backward needs of its result:
    ``save`` it, or ``recompute`` it; empty where the contract does not decide.
    """

    node: Node
    graph_module: GraphModule
    name: str
    mesh: str
    transition: Transition | None
    shape_in: tuple[Any, ...] | None
    shape_out: tuple[Any, ...] | None
    dtype: torch.dtype | None
    backward: str = ""

    @property
    def recomputes(self) -> bool:
        """Whether backward runs the steps of forward too, before its own."""
        return self.backward == "recompute"


def is_port(node: Node) -> bool:
    return node.op == "call_function" and node.target in _TARGETS


def graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph and its subgraphs, each once, in the order in which they are first used."""
    seen: set[int] = set()

    def visit(module: GraphModule) -> Iterator[GraphModule]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield module
        for node in module.graph.nodes:
            yield from (found for sub in subgraphs(module, node) for found in visit(sub))

    return visit(gm)


def subgraphs(gm: GraphModule, node: Node) -> list[GraphModule]:
    """The graph module that a node reads from another, if it does."""
    if node.op not in ("get_attr", "call_module"):
        return []
    attribute: Any = gm
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part, None)
    return [attribute] if isinstance(attribute, GraphModule) else []


def find_ports(gm: GraphModule) -> list[Port]:
    """All ports, in graph order, subgraph by subgraph."""
    return [
        read_port(node, module)
        for module in graph_modules(gm)
        for node in module.graph.nodes
        if is_port(node)
    ]


def read_port(node: Node, gm: GraphModule) -> Port:
    """The port that a redistribute node of a graph stands for."""
    x, mesh, src, dst, grad = node.args[:5]
    reduce_dtype, backward = (*map(str, node.args[8:]), "", "")[:2]
    value, result = node_tensor(x), node_tensor(node)
    layouts = [parse_layout(str(text)) for text in (src, dst, grad)]
    ndim = value.dim() if value is not None else _rank_without_value(layouts)
    transition = None
    if ndim is not None:
        s, d, g = (normalize_dims(layout, ndim) for layout in layouts)
        request = Request(reduce_dtype=reduce_dtype)
        transition = plan(s, d, g, named_spec(str(mesh)), request)
    return Port(
        node,
        gm,
        port_name(node),
        str(mesh),
        transition,
        None if value is None else tuple(value.shape),
        None if result is None else tuple(result.shape),
        None if value is None else value.dtype,
        backward,
    )


def port_name(node: Node) -> str:
    """Full name of a redistribute node's port: what a pass has called it, else by its module."""
    named = node.meta.get("custom", {}).get(PORT)
    return str(named or full_name(str(node.args[5]), module_path(node)))


def _rank_without_value(layouts: list[Layout]) -> int | None:
    """A rank that the layouts fit, where their dimensions are counted from the left."""
    counted_from_right = any(dim < 0 for dim in shard_dims(*layouts))
    return None if counted_from_right else smallest_rank(*layouts)


def node_tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor that a capture recorded for a node; ``None`` where it recorded none."""
    meta = getattr(node, "meta", {})
    value = meta.get("val", meta.get("example_value"))
    return value if isinstance(value, torch.Tensor) else None


def module_path(node: Node) -> str:
    """Name of the innermost module whose forward made the node, relative to what is traced.

    From a module's second call on it ends with the call's number, ``layers.0.mlp#2``.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    key, (path, _) = next(reversed(list(stack.items())), ("", ("", None)))
    return call_name(clean_path(path), call_index(key))


def call_index(key: str) -> int:
    """Which call of its module an entry of the stack is: its key ends with ``@1`` at the second.

    >>> call_index("L__self___lin"), call_index("140478564686608@1")
    (0, 1)
    """
    _, at, number = str(key).rpartition("@")
    return int(number) if at and number.isdigit() else 0


def call_name(path: str, call: int) -> str:
    """``layers.0.mlp`` for the first call of a module, ``layers.0.mlp#2`` for the second."""
    return f"{path}#{call + 1}" if call else path


def clean_path(path: str) -> str:
    """``L['self']._modules['layers'][0].mlp`` → ``layers.0.mlp``.

    >>> clean_path("L['self']._modules['layers'][0].mlp"), clean_path("L['self']")
    ('layers.0.mlp', '')
    """
    path = _ROOT.sub("", path).replace("._modules", "").removeprefix("_modules")
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).lstrip(".")
    return path.removeprefix("_orig_mod").lstrip(".")


def full_name(label: str, path: str) -> str:
    """A port's label with its module's full name, from the stack of the node.

    The stack ends with the module itself, or with the parent that read its parameter.

    >>> full_name("mlp:in.x", "layers.0.mlp"), full_name("out_proj:param.weight", "attn")
    ('layers.0.mlp:in.x', 'attn.out_proj:param.weight')
    """
    module, _, port = label.partition(":")
    if module == "<root>":
        return f"{path}:{port}"
    own = module.removesuffix(".*")
    parts = path.split(".") if path else []
    last = parts[-1].partition("#")[0] if parts else ""
    if module.endswith(".*"):
        within = [
            i for i, part in enumerate(parts[:-1]) if part == own and _is_number(parts[i + 1])
        ]
        if within:
            return f"{'.'.join(parts[: within[-1] + 2])}:{port}"
        return f"{'.'.join([*parts, module])}:{port}" if parts and last != own else label
    if parts and last == own:
        return f"{path}:{port}"
    return f"{'.'.join([*parts, own])}:{port}"


def _is_number(part: str) -> bool:
    return part.partition("#")[0].isdigit()
