"""A port of a graph as a drawing shows it: its kind of collective, its layouts, its bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxboundary.draw.picture import Mark, Way
from fxboundary.graph.find import Port
from fxboundary.graph.render import describe_shapes
from fxboundary.placements import Layout, global_shape
from fxboundary.transition.cost import traffic
from fxboundary.transition.steps import COLLECTIVES, Step
from fxboundary.transition.transition import Transition


def mark_of(port: Port, module: str, gradient: bool, symbols: dict[str, str]) -> Mark:
    """``module`` is the one at whose box it stands; ``gradient``: whether one gets there."""
    owner, _, label = re.sub(r"#[0-9]+", "", port.name).rpartition(":")
    if owner != module:
        within = owner.removeprefix(f"{module}.") if module else owner
        label = f"{within}:{label}"
    shapes = describe_shapes(port, symbols)
    move = port.transition
    if move is None:
        src, dst, _ = (str(text) for text in port.node.args[2:5])
        unknown = Way("none", "unknown rank", f"{src}→{dst}", "depends on the tensor's rank")
        return Mark(port.name, label, shapes, unknown, unknown)
    differentiable = port.dtype is None or port.dtype.is_floating_point or port.dtype.is_complex
    backward = None
    if gradient and differentiable and move.differentiable:
        reverse = move.reversed()
        backward = _way(reverse, reverse.src, port.shape_out, port)
    return Mark(port.name, label, shapes, _way(move, move.src, port.shape_in, port), backward)


def _way(move: Transition, start: Layout, local: tuple[object, ...] | None, port: Port) -> Way:
    steps = move.forward
    sent = _sent(steps, start, local, port)
    parts = tuple(
        (_kind(step), size) for step, size in zip(steps, sent, strict=True) if step.is_collective
    )
    heaviest = max(parts, key=lambda part: part[1] or 0, default=("local" if steps else "none", 0))
    label = " + ".join(dict.fromkeys(step.kind for step in steps)) or "none"
    text = move.steps_text(steps) if steps else ""
    return Way(heaviest[0], label, move.arrow().replace("->", "→"), text, parts)


def _kind(step: Step) -> str:
    return "all_to_all" if step.kind == "all_to_all_v" else step.kind


def _sent(
    steps: Sequence[Step], start: Layout, local: tuple[object, ...] | None, port: Port
) -> list[int | None]:
    """Bytes that rank 0 sends, per step; ``None`` where sizes are unknown or symbolic."""
    assert port.transition is not None
    sizes = port.transition.mesh.sizes
    known = [size for size in local or () if isinstance(size, int)]
    if local is None or port.dtype is None or len(known) != len(local):
        return [None if step.kind in COLLECTIVES else 0 for step in steps]
    whole = global_shape(tuple(known), start, sizes)
    first = (0,) * len(sizes)
    return list(traffic(steps, start, whole, port.dtype.itemsize, sizes, first))
