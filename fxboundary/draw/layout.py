"""Where boxes and arrows of one panel stand: rows in program order, arrows in lanes beside them.

The layout is our own. Graphviz would need its ``dot`` program, which few machines with PyTorch
have, and its layered layout moves boxes when a model changes a little. Here every box is a row:
from top to bottom the forward runs, which is also the order in which collectives start. Data
that goes to the next row is a short arrow; other data takes a lane in the left margin of the
container that holds both ends, one lane for all that leaves one place. Nothing overlaps by
construction, equal models give equal drawings, and the time is linear in boxes and edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxboundary.draw.picture import (
    BODY,
    Anchor,
    Card,
    Edge,
    Group,
    Item,
    Mark,
    Part,
    Repeat,
    cards,
    folded,
)

CARD_WIDTH = 400
PORT_HEIGHT, BODY_HEIGHT, HEAD_HEIGHT, GAP, PAD = 34, 30, 30, 22, 10
LANE = 9  # between two lanes
SPINE = 70  # from the right edge: where arrows between neighbours run
COPIES = 8  # room for the outline of the copies behind a folded item


@dataclass(frozen=True)
class Frame:
    """A rectangle around a container (or, ``copies`` > 1, behind the first of equal items)."""

    x: float
    y: float
    width: float
    height: float
    title: str
    type: str
    path: str
    copies: int = 1


@dataclass(frozen=True)
class Row:
    """A port, or (``mark`` is ``None``) the box of a card."""

    x: float
    y: float
    width: float
    height: float
    card: Card
    mark: Mark | None
    parameter: bool = False

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class Wire:
    """An arrow through these points, data from the first to the last."""

    points: tuple[tuple[float, float], ...]
    gradient: bool


@dataclass(frozen=True)
class Panel:
    """The boxes of one graph, placed; the same for both directions."""

    width: float
    height: float
    frames: tuple[Frame, ...]
    rows: tuple[Row, ...]
    wires: tuple[Wire, ...]


Bus = tuple[Anchor, tuple[int, ...]]  # a source, and the container that holds all its ends


def place(part: Part) -> Panel:
    """Place the boxes of a graph, repeated ones folded."""
    edges = folded(part.items, part.edges)
    order = {card.id: index for index, card in enumerate(cards(part.items))}
    next_to = [e for e in edges if order[e.target[0]] == order[e.source[0]] + 1]
    far = [e for e in edges if order[e.target[0]] != order[e.source[0]] + 1]
    holders = dict(_holders(part.items, ()))
    lanes = _lanes(far, order, holders)
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for (_, holder), lane in lanes.items():
        counts[holder] = max(counts[holder], lane + 1)
    width = CARD_WIDTH + _margins(part.items, (), counts)
    placer = _Placer(counts, [], [], {}, {})
    bottom = placer.place(part.items, (), 0, 0, width)
    wires = [*placer.short(next_to, width - SPINE), *placer.long(far, lanes, holders)]
    return Panel(width, bottom, tuple(placer.frames), tuple(placer.rows), tuple(wires))


def _holders(items: Sequence[Item], at: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each drawn card the container it stands in, as positions from the outside in."""
    for index, item in enumerate(items):
        inner = item.first if isinstance(item, Repeat) else item
        if isinstance(inner, Card):
            yield inner.id, at
        else:
            yield from _holders(inner.items, (*at, index))


def _common(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]


def _lanes(
    edges: Iterable[Edge], order: dict[int, int], holders: dict[int, tuple[int, ...]]
) -> dict[Bus, int]:
    """A lane for each place that data leaves; short ones first, next to the boxes."""
    spans: dict[Bus, tuple[int, int]] = {}
    for edge in edges:
        bus = _bus(edge, holders)
        ends = sorted((order[edge.source[0]], order[edge.target[0]]))
        low, high = spans.get(bus, (ends[0], ends[1]))
        spans[bus] = (min(low, ends[0]), max(high, ends[1]))
    taken: dict[tuple[int, ...], list[list[tuple[int, int]]]] = defaultdict(list)
    found: dict[Bus, int] = {}
    for bus, (low, high) in sorted(spans.items(), key=lambda s: (s[1][1] - s[1][0], s[1], s[0])):
        lanes = taken[bus[1]]
        free = (
            lane
            for lane, spans_there in enumerate(lanes)
            if all(high < other[0] or low > other[1] for other in spans_there)
        )
        lane = next(free, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((low, high))
        found[bus] = lane
    return found


def _bus(edge: Edge, holders: dict[int, tuple[int, ...]]) -> Bus:
    return edge.source, _common(holders[edge.source[0]], holders[edge.target[0]])


def _left(at: tuple[int, ...], counts: dict[tuple[int, ...], int]) -> float:
    return PAD + (LANE * counts[at] + 4 if counts.get(at) else 0)


def _margins(
    items: Sequence[Item], at: tuple[int, ...], counts: dict[tuple[int, ...], int]
) -> float:
    """Width that containers and lanes take around the cards, at most."""
    inner = [0.0]
    for index, item in enumerate(items):
        drawn = item.first if isinstance(item, Repeat) else item
        around = COPIES if isinstance(item, Repeat) else 0
        if isinstance(drawn, Group):
            around += int(_margins(drawn.items, (*at, index), counts))
        inner.append(around)
    return _left(at, counts) + PAD + max(inner)


@dataclass
class _Placer:
    counts: dict[tuple[int, ...], int]
    frames: list[Frame]
    rows: list[Row]
    anchors: dict[Anchor, Row]
    lefts: dict[tuple[int, ...], float]

    def place(
        self, items: Sequence[Item], at: tuple[int, ...], x: float, y: float, width: float
    ) -> float:
        """Place the items of a container below ``y``; returns where they end."""
        left = _left(at, self.counts)
        self.lefts[at] = x + left
        for index, item in enumerate(items):
            y = self._item(item, (*at, index), x + left, y, width - left - PAD) + GAP
        return y - GAP if items else y

    def _item(self, item: Item, at: tuple[int, ...], x: float, y: float, width: float) -> float:
        if isinstance(item, Card):
            return self._card(item, x, y, width)
        copies, drawn = 1, item.first if isinstance(item, Repeat) else item
        if isinstance(item, Repeat):
            copies, width = item.count, width - COPIES
        place = len(self.frames)
        top = y + HEAD_HEIGHT
        if isinstance(drawn, Group):
            bottom = self.place(drawn.items, at, x, top, width) + PAD
        else:
            bottom = self._card(drawn, x + PAD, top, width - 2 * PAD) + PAD
        frame = Frame(x, y, width, bottom - y, item.title, drawn.type, drawn.path, copies)
        self.frames.insert(place, frame)
        return bottom + (COPIES if copies > 1 else 0)

    def _card(self, card: Card, x: float, y: float, width: float) -> float:
        def add(mark: Mark | None, slot: int, parameter: bool = False) -> None:
            nonlocal y
            height = BODY_HEIGHT if mark is None else PORT_HEIGHT
            row = Row(x, y, width, height, card, mark, parameter)
            self.anchors[card.id, slot] = row
            self.rows.append(row)
            y += height

        for slot, mark in enumerate(card.ins):
            add(mark, slot)
        if card.kind != "port":
            add(None, BODY)
        for slot, mark in enumerate((*card.params, *card.outs), len(card.ins)):
            add(mark, slot, parameter=slot < len(card.ins) + len(card.params))
        return y

    def short(self, edges: Sequence[Edge], x: float) -> Iterator[Wire]:
        """Arrows between neighbours: one for all data from one box to the next."""
        gradients: dict[tuple[int, int], bool] = {}
        for edge in edges:
            ends = (edge.source[0], edge.target[0])
            gradients[ends] = gradients.get(ends, False) or edge.gradient
        spans: dict[int, tuple[float, float]] = {}
        for row in self.rows:
            top, bottom = spans.get(row.card.id, (row.y, row.y))
            spans[row.card.id] = (top, max(bottom, row.y + row.height))
        for (source, target), gradient in gradients.items():
            yield Wire(((x, spans[source][1]), (x, spans[target][0])), gradient)

    def long(
        self,
        edges: Sequence[Edge],
        lanes: dict[Bus, int],
        holders: dict[int, tuple[int, ...]],
    ) -> Iterator[Wire]:
        for edge in edges:
            bus = _bus(edge, holders)
            x = self.lefts[bus[1]] - 7 - LANE * lanes[bus]
            start, end = self.anchors[edge.source], self.anchors[edge.target]
            # What arrives at a row stands above what leaves it.
            out, into = start.middle + 6, end.middle - 6
            yield Wire(((start.x, out), (x, out), (x, into), (end.x, into)), edge.gradient)
