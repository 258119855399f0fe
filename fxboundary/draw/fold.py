"""Folding: equal neighbours whose names differ in one number become one item, drawn once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fxboundary.draw.picture import Card, Edge, Group, Item, Mark, Repeat


def fold(items: Sequence[Item], edges: Sequence[Edge]) -> tuple[Item, ...]:
    """Fold items and what is in them; ``edges`` are those between all cards."""
    inner: dict[int, list[Edge]] = {}
    for edge in edges:
        inner.setdefault(edge.source[0], []).append(edge)
    return _fold(items, inner)


def _fold(items: Sequence[Item], edges: dict[int, list[Edge]]) -> tuple[Item, ...]:
    found: list[Item] = []
    run: list[Card | Group] = []
    shape: Any = None
    for item in items:
        assert not isinstance(item, Repeat)
        one = _shape(item, edges)
        if run and not (one == shape and _follows(run[-1].path, item.path)):
            found.append(_repeat(run, edges))
            run = []
        run.append(item)
        shape = one
    return (*found, _repeat(run, edges)) if run else ()


def _repeat(run: Sequence[Card | Group], edges: dict[int, list[Edge]]) -> Item:
    first = run[0]
    inside = first if isinstance(first, Card) else replace(first, items=_fold(first.items, edges))
    if len(run) == 1:
        return inside
    start = next(_ids(first))
    return Repeat(
        inside,
        tuple(item.path for item in run),
        tuple(item.title for item in run),
        _title(first.title, run[-1].title),
        start,
        next(_ids(run[1])) - start,
    )


def _ids(item: Card | Group) -> Iterator[int]:
    if isinstance(item, Card):
        yield item.id
    else:
        for child in item.items:
            assert not isinstance(child, Repeat)
            yield from _ids(child)


def _follows(before: str, after: str) -> bool:
    """Whether two names differ in one number, by one."""
    one, two = _parts(before), _parts(after)
    if len(one) != len(two):
        return False
    different = [(a, b) for a, b in zip(one, two, strict=True) if a != b]
    return len(different) == 1 and all(
        a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1 for a, b in different
    )


def _parts(name: str) -> list[str]:
    return re.split(r"([0-9]+)", name)


def _title(first: str, last: str) -> str:
    """``layers.0``, ``layers.31`` → ``layers.{0..31}``.

    >>> _title("layers.0", "layers.31")
    'layers.{0..31}'
    """
    pairs = zip(_parts(first), _parts(last), strict=True)
    return "".join(a if a == b else f"{{{a}..{b}}}" for a, b in pairs)


def _shape(item: Item, edges: dict[int, list[Edge]]) -> Any:
    """What must be equal for two items to be copies of each other: all but their own names."""
    assert not isinstance(item, Repeat)
    ids = list(_ids(item))
    start, within = ids[0], set(ids)
    flow = frozenset(
        (e.source[0] - start, e.source[1], e.target[0] - start, e.target[1], e.gradient)
        for card in ids
        for e in edges.get(card, ())
        if e.target[0] in within
    )
    return _look(item, _Names(item.path)), flow


class _Names:
    """Names below an item without the item's own."""

    def __init__(self, path: str) -> None:
        self._path = path.partition("#")[0]

    def __call__(self, name: str) -> str:
        return name.removeprefix(self._path)


def _look(item: Item, names: _Names) -> Any:
    assert not isinstance(item, Repeat)
    own = names(item.path.partition("#")[0])
    if isinstance(item, Group):
        return (own, item.type, tuple(_look(child, names) for child in item.items))
    title = item.title if item.kind != "module" else ""
    sides = (item.ins, item.params, item.outs)
    return (own, item.kind, title, item.type, tuple(_marks(side) for side in sides))


def _marks(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    return tuple(replace(mark, name="") for mark in marks)
