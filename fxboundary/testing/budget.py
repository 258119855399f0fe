"""Budgets: at most so many collectives, at most so many bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxboundary.placements import near
from fxboundary.testing.errors import BudgetError, SnapshotError
from fxboundary.testing.record import DIRECTIONS, KINDS, Direction, PortRecord, StepRecord, Total
from fxboundary.testing.sizes import parse_size, size_text
from fxboundary.testing.text import names_text


@dataclass(frozen=True)
class _Sent:
    """A collective, where it is and in which direction."""

    port: str
    direction: Direction
    step: StepRecord


def check_budget(
    ports: Sequence[PortRecord],
    at_most: Mapping[str, int],
    bytes_at_most: str | int | None,
    direction: Direction | None,
) -> None:
    """Raise BudgetError where there are more collectives or bytes; see the Snapshot's method."""
    _check_form(at_most, direction)
    limit = None if bytes_at_most is None else parse_size(bytes_at_most)
    unknown = [port.name for port in ports if port.forward is None]
    if unknown and (at_most or limit is not None):
        raise BudgetError(
            f"no budget can be checked: of {names_text(unknown)} the shapes, and so the "
            f"collectives, are not known"
        )
    sent = [
        _Sent(port.name, way, step)
        for way in (DIRECTIONS if direction is None else (direction,))
        for port in ports
        for step in port.collectives(way)
    ]
    where = "" if direction is None else f" {direction}"
    faults = [
        fault
        for kind, most in at_most.items()
        if len(found := [s for s in sent if s.step.kind == kind]) > most
        for fault in (f"{len(found)} {kind}{where}, at most {most} allowed:", *_ports(found))
    ]
    if limit is not None:
        faults += _too_many_bytes(sent, limit, where)
    if faults:
        raise BudgetError("\n".join(faults))


def _check_form(at_most: Mapping[str, int], direction: str | None) -> None:
    if direction is not None and direction not in DIRECTIONS:
        hint = near(str(direction), DIRECTIONS)
        raise SnapshotError(f"direction={direction!r}{hint}: write 'forward', 'backward' or None")
    for kind, most in at_most.items():
        if kind not in KINDS:
            hint = near(str(kind), KINDS)
            raise SnapshotError(f"no collective {kind!r}{hint}; there are {', '.join(KINDS)}")
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise SnapshotError(f"at_most[{kind!r}] = {most!r}: write a number, 0 or more")


def _too_many_bytes(sent: Sequence[_Sent], limit: int, where: str) -> list[str]:
    if unknown := [s.port for s in sent if s.step.bytes is None]:
        return [f"bytes{where} cannot be counted: sizes of {names_text(unknown)} are not known"]
    total = Total.of(s.step for s in sent).bytes or 0
    if total <= limit:
        return []
    return [f"{size_text(total)}{where}, at most {size_text(limit)} allowed:", *_ports(sent)]


def _ports(sent: Sequence[_Sent]) -> list[str]:
    """A line for each collective that ports have in common, the most bytes first."""
    groups: dict[tuple[str, int, Direction], list[str]] = {}
    for s in sent:
        key = (s.step.kind or "", s.step.bytes or 0, s.direction)
        groups.setdefault(key, []).append(s.port)
    ordered = sorted(groups.items(), key=lambda item: -item[0][1] * len(item[1]))
    return [
        f"  {len(names)} {kind} of {size_text(size)} at {names_text(names)} ({direction})"
        for (kind, size, direction), names in ordered
    ]
