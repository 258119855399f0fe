"""What a drawing shows, free of graphs and of geometry: boxes, ports, the data between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "local", "none")
Direction = Literal["forward", "backward"]
BODY = -1  # the slot of a card's own box; its ports are 0, 1, …


@dataclass(frozen=True)
class Way:
    """One direction of a port.

    ``kind`` gives the colour, ``label`` names all the kinds of its steps. ``parts`` are its
    collectives, each with the bytes that rank 0 sends (``None`` where sizes are unknown).
    """

    kind: str
    label: str
    layouts: str
    steps: str
    parts: tuple[tuple[str, int | None], ...] = ()

    @property
    def text(self) -> str:
        """Layouts and steps."""
        return f"{self.layouts}  {self.steps}".rstrip()

    @property
    def sent(self) -> int | None:
        known = [sent for _, sent in self.parts if sent is not None]
        return sum(known) if len(known) == len(self.parts) else None


@dataclass(frozen=True)
class Mark:
    """A port: ``label`` is what is written at its box, ``name`` its full name.

    ``backward`` is ``None`` where no gradient passes.
    """

    name: str
    label: str
    shapes: str
    forward: Way
    backward: Way | None

    def way(self, direction: Direction) -> Way | None:
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True)
class Card:
    """One box: a module without ports inside, operations of a container's own, or one port.

    ``path`` is the module's full name. Ports stand above (``ins``), in (``params``) and below
    (``outs``) the box.
    """

    id: int
    kind: Literal["module", "operations", "port", "values"]
    path: str
    title: str
    type: str
    ins: tuple[Mark, ...] = ()
    params: tuple[Mark, ...] = ()
    outs: tuple[Mark, ...] = ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The ports in the order of their slots."""
        return (*self.ins, *self.params, *self.outs)


@dataclass(frozen=True)
class Group:
    """A module with ports inside: a container."""

    path: str
    title: str
    type: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Repeat:
    """Equal items, the first of them drawn. Ids of the next one's cards are ``stride`` higher."""

    first: Card | Group
    paths: tuple[str, ...]
    titles: tuple[str, ...]
    title: str
    start: int
    stride: int

    @property
    def count(self) -> int:
        return len(self.paths)


Item: TypeAlias = "Card | Group | Repeat"
Anchor: TypeAlias = "tuple[int, int]"  # a card and a slot


@dataclass(frozen=True)
class Edge:
    """Data from one card to another; ``gradient``: and its gradient the other way."""

    source: Anchor
    target: Anchor
    gradient: bool


@dataclass(frozen=True)
class Part:
    """One captured graph. Edges are those of all repeated items, not of the first alone."""

    items: tuple[Item, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class Total:
    """Steps of one kind in one direction; ``sent`` is ``None`` where some size is unknown."""

    count: int
    sent: int | None


@dataclass(frozen=True)
class Picture:
    """All graphs of a model."""

    title: str
    parts: tuple[Part, ...]
    ports: int
    totals: tuple[tuple[str, Total, Total], ...]  # kind, forward, backward


def cards(items: Sequence[Item]) -> Iterator[Card]:
    """The cards that are drawn, from top to bottom."""
    for item in items:
        if isinstance(item, Card):
            yield item
        else:
            yield from cards((item.first,) if isinstance(item, Repeat) else item.items)


def totals(marks: Sequence[Mark]) -> tuple[tuple[str, Total, Total], ...]:
    """Collectives and bytes per kind, of kinds that occur."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    counts: list[Counter[str]] = []
    sents: list[dict[str, int | None]] = []
    for direction in directions:
        count: Counter[str] = Counter()
        sent: dict[str, int | None] = {}
        for mark in marks:
            way = mark.way(direction)
            for kind, size in way.parts if way else ():
                count[kind] += 1
                before = sent.get(kind, 0)
                sent[kind] = None if before is None or size is None else before + size
        counts.append(count)
        sents.append(sent)
    forward, backward = (
        {kind: Total(count[kind], sent.get(kind, 0)) for kind in KINDS}
        for count, sent in zip(counts, sents, strict=True)
    )
    return tuple(
        (kind, forward[kind], backward[kind])
        for kind in KINDS
        if forward[kind].count or backward[kind].count
    )


def folded(items: Sequence[Item], edges: Sequence[Edge]) -> list[Edge]:
    """Edges between the cards that are drawn: each once; none between copies of one item."""
    shown: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
    for item in items:
        shown |= _shown(item)
    found: dict[tuple[Anchor, Anchor], bool] = {}
    for edge in edges:
        (source, copies), (target, others) = shown[edge.source[0]], shown[edge.target[0]]
        here = dict(copies)
        if source == target or any(here.get(start, k) != k for start, k in others):
            continue
        key = ((source, edge.source[1]), (target, edge.target[1]))
        found[key] = found.get(key, False) or edge.gradient
    return [Edge(source, target, gradient) for (source, target), gradient in found.items()]


def _shown(item: Item) -> dict[int, tuple[int, tuple[tuple[int, int], ...]]]:
    """For each card: the card that is drawn for it, and which copy of which repeats it is in."""
    if isinstance(item, Card):
        return {item.id: (item.id, ())}
    if isinstance(item, Group):
        return {k: v for child in item.items for k, v in _shown(child).items()}
    first = _shown(item.first)
    return {
        card + copy * item.stride: (drawn, ((item.start, copy), *within))
        for copy in range(item.count)
        for card, (drawn, within) in first.items()
    }
