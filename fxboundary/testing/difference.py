"""What changed between two snapshots, port by port, equal changes of layers said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from fxboundary.testing.record import DIRECTIONS, KINDS, Direction, PortRecord, Total, totals
from fxboundary.testing.sizes import size_text
from fxboundary.testing.snapshot import Snapshot
from fxboundary.testing.text import names_text, steps_text

Key = tuple[str, int]  # a port's name, and which of that name it is
Change = tuple[str, str]  # what comes before the names of the ports, and what after


def diff(old: Snapshot, new: Snapshot) -> str:
    """The changes as lines of text; empty where the snapshots are equal.

    Collectives come first, then what else changed at the ports, then the totals::

        -1 all_reduce 8 MiB at layers.{0..31}.mlp:out (forward), 32 ports
        +1 reduce_scatter 4 MiB at layers.{0..31}.mlp:out (forward), 32 ports
        layouts tp: P->R, now tp: P->S(1) at layers.{0..31}.mlp:out, 32 ports
        total forward: all_reduce 32 -> 0, reduce_scatter 0 -> 32, 256 MiB -> 128 MiB
        total backward: unchanged
    """
    if old == new:
        return ""
    before, after = _by_key(old), _by_key(new)
    found: dict[Change, list[str]] = {}
    for key in _merged(list(before), list(after)):
        for change in _changes(before.get(key), after.get(key)):
            found.setdefault(change, []).append(key[0])
    by_rank = sorted(found.items(), key=lambda item: _rank(item[0]))
    return "\n".join(
        [
            *(_line(change, names) for change, names in by_rank),
            *_order(old, new, before, after),
            *(_total(old, new, direction) for direction in DIRECTIONS),
        ]
    )


def _by_key(snapshot: Snapshot) -> dict[Key, PortRecord]:
    seen: Counter[str] = Counter()
    ports: dict[Key, PortRecord] = {}
    for port in snapshot.ports:
        ports[port.name, seen[port.name]] = port
        seen[port.name] += 1
    return ports


def _merged(old: Sequence[Key], new: Sequence[Key]) -> Iterator[Key]:
    """All keys once: the new ones in their order, lost ones where they were."""
    placed: set[Key] = set()
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        for key in (*old[a:b], *new[c:d]):
            if key not in placed:
                placed.add(key)
                yield key


def _changes(old: PortRecord | None, new: PortRecord | None) -> Iterator[Change]:
    if old == new:
        return
    for word, port, other in (("lost", old, new), ("new", new, old)):
        if port is not None and other is None:
            yield f"{word} port", f": {port.shapes}  {port.layouts}"
    counted = {way: list(_collectives(old, new, way)) for way in DIRECTIONS}
    for changes in counted.values():
        yield from changes
    if old is None or new is None:
        return
    for what in ("shapes", "layouts", "gradient"):
        if (a := getattr(old, what)) != (b := getattr(new, what)):
            yield f"{what} {a}, now {b}", ""
    for way in DIRECTIONS:
        a, b = _steps(old, way), _steps(new, way)
        if a != b and not counted[way]:
            yield f"steps {a}, now {b}", f" ({way})"


def _collectives(
    old: PortRecord | None, new: PortRecord | None, direction: Direction
) -> Iterator[Change]:
    """``+1 all_gather 8 MiB``, for each kind of which there are more or fewer."""
    for kind in KINDS:
        lost, added = (
            [step for step in port.collectives(direction) if step.kind == kind] if port else []
            for port in (old, new)
        )
        if count := len(added) - len(lost):
            sizes = [Total.of(steps).bytes for steps in (lost, added)]
            size = None if None in sizes else abs((sizes[1] or 0) - (sizes[0] or 0))
            yield f"{count:+} {kind} {size_text(size)}", f" ({direction})"


def _steps(port: PortRecord, direction: Direction) -> str:
    steps = port.forward if direction == "forward" else port.backward
    if port.forward is None:
        return "unknown"
    return "no gradient" if steps is None else steps_text(steps)


def _rank(change: Change) -> int:
    """Collectives first, then ports, then the rest."""
    head = change[0]
    return 0 if head[0] in "+-" else 1 if head.endswith(" port") else 2


def _line(change: Change, names: Sequence[str]) -> str:
    head, tail = change
    count = f", {len(names)} ports" if len(names) > 1 else ""
    return f"{head} at {names_text(names)}{tail}{count}"


def _order(
    old: Snapshot, new: Snapshot, before: Mapping[Key, PortRecord], after: Mapping[Key, PortRecord]
) -> Iterator[str]:
    """What no port shows: another order of the same ports, another split into graphs."""
    a, b = [key for key in before if key in after], [key for key in after if key in before]
    moved = next((now[0] for was, now in zip(a, b, strict=True) if was != now), None)
    if moved is not None:
        yield f"the ports run in another order, from {names_text([moved])} on"
    sizes = [[len(graph) for graph in snapshot.graphs] for snapshot in (old, new)]
    if len(sizes[0]) != len(sizes[1]):
        yield f"graphs with ports: {len(sizes[0])}, now {len(sizes[1])}"
    elif before.keys() == after.keys() and sizes[0] != sizes[1]:
        yield f"ports of each graph: {sizes[0]}, now {sizes[1]}"


def _total(old: Snapshot, new: Snapshot, direction: Direction) -> str:
    """``total forward: all_reduce 32 -> 0, reduce_scatter 0 -> 32, 256 MiB -> 128 MiB``."""
    before, after = (totals(snapshot.ports, direction) for snapshot in (old, new))
    parts = [
        f"{kind} {a} -> {b}"
        for kind in KINDS
        if (a := _count(before, kind)) != (b := _count(after, kind))
    ]
    sizes = [
        Total.of(step for port in snapshot.ports for step in port.collectives(direction)).bytes
        for snapshot in (old, new)
    ]
    if sizes[0] != sizes[1]:
        parts.append(" -> ".join(map(size_text, sizes)))
    return f"total {direction}: {', '.join(parts) or 'unchanged'}"


def _count(found: Mapping[str, Total], kind: str) -> int:
    return found[kind].count if kind in found else 0
