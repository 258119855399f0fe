"""Boundaries as plain records: what crosses each port, in which steps, sending how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# An all_to_all_v is an all_to_all of unequal parts.
COLLECTIVES = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_v": "all_to_all",
}
KINDS = tuple(dict.fromkeys(COLLECTIVES.values()))

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class StepRecord:
    """One step as text, ``all_gather(dim=1, tp=4)``.

    ``bytes`` are those that one rank sends; ``None`` for a local step, and where the shape is
    not known or holds symbols.
    """

    text: str
    bytes: int | None = None

    @property
    def kind(self) -> str | None:
        """One of ``KINDS``; ``None`` for a local step."""
        return COLLECTIVES.get(self.text.partition("(")[0])


@dataclass(frozen=True)
class PortRecord:
    """One port. ``shapes``, ``layouts`` and ``gradient`` are text, as ``fb.render`` writes it.

    ``forward`` is ``None`` where the steps depend on a shape that the graph does not have;
    ``backward`` is so too, and where there is no gradient.
    """

    name: str
    shapes: str
    layouts: str
    gradient: str
    forward: tuple[StepRecord, ...] | None
    backward: tuple[StepRecord, ...] | None

    def collectives(self, direction: Direction) -> tuple[StepRecord, ...]:
        """The steps of a direction that communicate."""
        steps = self.forward if direction == "forward" else self.backward
        return tuple(step for step in steps or () if step.kind is not None)


@dataclass(frozen=True)
class Total:
    """How many collectives, and the bytes that one rank sends in them.

    ``bytes`` is ``None`` where those of one are not known.
    """

    count: int
    bytes: int | None

    @classmethod
    def of(cls, steps: Iterable[StepRecord]) -> Total:
        found = [step.bytes for step in steps]
        known = [size for size in found if size is not None]
        return cls(len(found), sum(known) if len(known) == len(found) else None)


def totals(ports: Iterable[PortRecord], direction: Direction) -> dict[str, Total]:
    """Totals by kind, of the kinds that occur, in the order of ``KINDS``."""
    steps = [step for port in ports for step in port.collectives(direction)]
    by_kind = {kind: [step for step in steps if step.kind == kind] for kind in KINDS}
    return {kind: Total.of(found) for kind, found in by_kind.items() if found}
