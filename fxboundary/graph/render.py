"""The boundaries of a graph as text that CI can compare."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from fxboundary.graph.find import Port, find_ports
from fxboundary.placements import named_layout_text

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def render(graph_module: GraphModule) -> str:
    """One paragraph per port: name, shapes, layouts, gradient, steps forward and backward.

    The text is the same on every rank, in every run and torch version: coordinates are left
    out, symbolic sizes are numbered in order of appearance, names are the modules' own.

    It is plain ASCII, for snapshot tools. Shapes are this rank's. An empty text means that the
    graph has no ports.
    """
    symbols: dict[str, str] = {}
    return "\n".join(_paragraph(port, symbols) for port in find_ports(graph_module))


def _paragraph(port: Port, symbols: dict[str, str]) -> str:
    move = port.transition
    if move is None:
        src, dst, grad = port.node.args[2:5]
        return f"{port.name}  [?]  {src}->{dst}\n    shape unknown  |  grad {grad}"
    names = move.mesh.names
    head = f"{port.name}  {describe_shapes(port, symbols)}  {move.arrow()}"
    grad = f"grad {named_layout_text(move.grad, names)}"
    steps = (*move.forward, *move.backward) if port.recomputes else move.backward
    backward = move.steps_text(steps) if move.differentiable else "no gradient"
    return f"{head}\n    {move.steps_text(move.forward)}  |  {grad}: {backward}"


def describe_shapes(port: Port, symbols: dict[str, str]) -> str:
    """``f32[2, 4] -> [2, 16]``; ``symbols`` numbers the symbolic sizes seen so far."""
    return f"{_dtype(port)}{_shape(port.shape_in, symbols)} -> {_shape(port.shape_out, symbols)}"


def _dtype(port: Port) -> str:
    if port.dtype is None:
        return ""
    text = str(port.dtype).removeprefix("torch.")
    stem = text.rstrip("0123456789")
    return _DTYPES.get(stem, stem) + text[len(stem) :]


def _shape(shape: tuple[Any, ...] | None, symbols: dict[str, str]) -> str:
    if shape is None:
        return "[?]"
    return f"[{', '.join(_size(size, symbols) for size in shape)}]"


def _size(size: Any, symbols: dict[str, str]) -> str:
    if isinstance(size, int):
        return str(size)
    expression = getattr(getattr(size, "node", None), "expr", None)
    if expression is None:
        return "?"
    known = {
        s: symbols.setdefault(str(s), f"s{len(symbols)}")
        for s in sorted(expression.free_symbols, key=str)
    }
    return str(expression.xreplace({s: type(s)(name) for s, name in known.items()}))
