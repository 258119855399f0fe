"""Operations of a graph as boxes within boxes, in program order.

A module that has ports inside is a container; any other one is a single box, whatever it calls:
inside it tensors are local, and a drawing of boundaries has nothing to say there.
Operations of a container's own that follow each other share a box. Equal neighbours are folded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

from fxboundary.draw.flow import Frame, Operation
from fxboundary.draw.fold import fold
from fxboundary.draw.marks import mark_of
from fxboundary.draw.picture import BODY, Anchor, Card, Edge, Group, Item, Mark, Part

Chain = tuple[Frame, ...]
_ROOT = Frame("", "")
_SHOWN_NAMES = 3  # of a box of operations


@dataclass
class _Box:
    """A card while operations are still added to it; ``marks`` are its ports, by operation."""

    kind: Literal["module", "operations", "port", "values"]
    path: str
    frame: Frame
    names: list[str] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    id: int = 0


@dataclass
class _Container:
    frame: Frame
    parent: _Container | None = None
    items: list[_Box | _Container] = field(default_factory=list)
    inside: dict[Frame, _Box | _Container] = field(default_factory=dict)


def build_part(operations: Sequence[Operation], symbols: dict[str, str]) -> tuple[Part, list[Mark]]:
    """The boxes of a graph and the data between them, and all its ports.

    ``symbols`` are those of ``describe_shapes``.
    """
    root = _Container(_ROOT)
    boxes: list[_Box] = []
    marks: list[Mark] = []
    containers = _containers(operations)
    for index, operation in enumerate(operations):
        box = _box(root, operation, containers)
        boxes.append(box)
        if operation.port is not None:
            path = _without_call(box.path)
            mark = mark_of(operation.port, path, operation.gradient, symbols)
            box.marks[index] = mark
            marks.append(mark)
        else:
            box.names.append(_name(operation.node))
    items = _freeze(root, [0])
    edges = _edges(operations, boxes)
    return Part(fold(items, edges), edges), marks


def _containers(operations: Sequence[Operation]) -> set[Chain]:
    """The modules that are opened: those with ports of activations inside.

    Ports of parameters open a module only where it has no ports of activations itself: a bias
    below a contracted MLP is drawn at the MLP.
    """
    ports = [operation for operation in operations if operation.port is not None]
    activations = [operation.chain for operation in ports if _side(operation) != "param"]
    own = set(activations)
    found = {chain[:length] for chain in own for length in range(len(chain))} | {()}
    closed = own - found
    for operation in ports:
        for length in range(len(operation.chain)):
            if operation.chain[:length] in closed:
                break
            found.add(operation.chain[:length])
    return found


def _side(operation: Operation) -> str:
    """``in``, ``param`` or ``out``."""
    assert operation.port is not None
    return operation.port.name.rpartition(":")[2].partition(".")[0]


def _box(root: _Container, operation: Operation, containers: set[Chain]) -> _Box:
    at, chain = root, operation.chain
    for depth, frame in enumerate(chain, 1):
        if chain[:depth] not in containers:
            return _child(at, frame, _Box("module", frame.name, frame))
        inner = at.inside.get(frame)
        if not isinstance(inner, _Container):
            inner = at.inside[frame] = _Container(frame, at)
            at.items.append(inner)
        at = inner
    if operation.node.op in ("placeholder", "output"):
        frame = Frame("inputs" if operation.node.op == "placeholder" else "outputs", "")
        return _child(at, frame, _Box("values", "", frame))
    last = at.items[-1] if at.items else None
    kind: Literal["port", "operations"] = "port" if operation.port else "operations"
    if isinstance(last, _Box) and last.kind == kind == "operations":
        return last
    box = _Box(kind, at.frame.name, _ROOT)
    at.items.append(box)
    return box


def _child(at: _Container, frame: Frame, new: _Box) -> _Box:
    known = at.inside.get(frame)
    if isinstance(known, _Box):
        return known
    at.inside[frame] = new
    at.items.append(new)
    return new


def _name(node: Node) -> str:
    """What an operation is called in its box."""
    if node.op == "placeholder":
        name = re.sub(r"^[lL]_(kwargs_)?", "", node.name).rstrip("_")
        return re.sub(r"^args_0_(?=.)", "", name) or node.name
    if node.op in ("call_method", "call_module"):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _freeze(container: _Container, next_id: list[int]) -> tuple[Item, ...]:
    """The items with ids counted in the order in which they are drawn."""
    return tuple(
        _card(item, container.frame, next_id)
        if isinstance(item, _Box)
        else Group(
            item.frame.name,
            _relative(item.frame.name, container.frame.name),
            item.frame.type,
            _freeze(item, next_id),
        )
        for item in container.items
    )


def _card(box: _Box, parent: Frame, next_id: list[int]) -> Card:
    box.id, next_id[0] = next_id[0], next_id[0] + 1
    sides: dict[str, list[int]] = {"in": [], "param": [], "out": []}
    for index, mark in box.marks.items():
        word = mark.label.rpartition(":")[2].partition(".")[0]
        sides[word if word in sides else "in"].append(index)
    for slot, index in enumerate(index for side in sides.values() for index in side):
        box.slots[index] = slot
    ins, params, outs = (tuple(box.marks[i] for i in side) for side in sides.values())
    title = _relative(box.path, parent.name) if box.kind == "module" else ""
    if box.kind in ("operations", "values"):
        title = _listed(box.names)
    heading = box.frame.type if box.kind == "module" else box.frame.name
    return Card(box.id, box.kind, box.path, title, heading, ins, params, outs)


def _listed(names: Sequence[str]) -> str:
    """``arange, add, … (37 operations)``."""
    different = list(dict.fromkeys(name for name in names if name != "output"))
    text = ", ".join(different[:_SHOWN_NAMES])
    return text if len(different) <= _SHOWN_NAMES else f"{text}, … ({len(names)} in all)"


def _relative(name: str, parent: str) -> str:
    return name.removeprefix(f"{_without_call(parent)}.") if parent else name


def _without_call(name: str) -> str:
    return name.partition("#")[0]


def _edges(operations: Sequence[Operation], boxes: Sequence[_Box]) -> tuple[Edge, ...]:
    found: dict[tuple[Anchor, Anchor], bool] = {}
    for index, operation in enumerate(operations):
        for source in operation.inputs:
            here, there = boxes[source], boxes[index]
            if here is there:
                continue
            key = (
                (here.id, here.slots.get(source, BODY)),
                (there.id, there.slots.get(index, BODY)),
            )
            gradient = operations[source].gradient and operation.gradient
            found[key] = found.get(key, False) or gradient
    return tuple(Edge(source, target, gradient) for (source, target), gradient in found.items())
