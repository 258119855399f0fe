"""The text of a snapshot, for people and for files, and reading it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from fxboundary.testing.errors import SnapshotError
from fxboundary.testing.fold import Line, fold, line_name, line_text, name_line, parse_line, unfold
from fxboundary.testing.record import DIRECTIONS, Direction, PortRecord, StepRecord, Total, totals
from fxboundary.testing.sizes import parse_size, size_text

Graphs = tuple[tuple[PortRecord, ...], ...]

# More ports than any model has: a range in a damaged file must not fill the memory.
MOST_PORTS = 100_000
_GRAPH = re.compile(r"graph ([0-9]+) of ([0-9]+)")
_STEP = re.compile(r"(\w+\(.*\))(?: (\S+ \w+))?")


def format_graphs(graphs: Graphs) -> str:
    """The text of the ports of graphs; equal numbered modules are one line.

    A blank line parts blocks that would be read as one.
    """
    lines: list[str] = []
    for number, ports in enumerate(graphs, 1):
        lines += [f"graph {number} of {len(graphs)}"] if len(graphs) > 1 else []
        for i, paragraph in enumerate(fold_ports(ports)):
            lines += [""] if i else []
            lines += [text for line in paragraph for text in _port_text(line)]
    every = [port for graph in graphs for port in graph]
    return "\n".join([*lines, *(total_text(every, direction) for direction in DIRECTIONS)])


def fold_ports(ports: Sequence[PortRecord]) -> list[list[Line[PortRecord]]]:
    """Ports folded over equal numbered modules; their records lose their names to the lines."""
    return fold([name_line(port.name, replace(port, name="")) for port in ports])


def names_text(names: Sequence[str]) -> str:
    """``layers.{0..31}.mlp:in.x, head:out``."""
    folded = fold([name_line(name, None) for name in names])
    return ", ".join(line_text(line) for paragraph in folded for line in paragraph)


def _port_text(line: Line[PortRecord]) -> tuple[str, str]:
    port = line.value
    head = f"{line_text(line)}  {port.shapes}  {port.layouts}"
    if port.forward is None:
        return head, f"    shape unknown  |  grad {port.gradient}"
    backward = "no gradient" if port.backward is None else steps_text(port.backward)
    return head, f"    {steps_text(port.forward)}  |  grad {port.gradient}: {backward}"


def steps_text(steps: Sequence[StepRecord]) -> str:
    """``all_gather(dim=1, tp=4) 192 B, scale(0.5)``, or ``nothing``."""
    return ", ".join(map(step_text, steps)) or "nothing"


def step_text(step: StepRecord) -> str:
    return step.text if step.kind is None else f"{step.text} {size_text(step.bytes)}"


def total_text(ports: Sequence[PortRecord], direction: Direction) -> str:
    """``total forward: 2 all_gather 8 MiB, 1 all_reduce 4 MiB, together 12 MiB``."""
    found = totals(ports, direction)
    parts = [f"{total.count} {kind} {size_text(total.bytes)}" for kind, total in found.items()]
    if len(found) > 1:
        every = Total.of(step for port in ports for step in port.collectives(direction))
        parts.append(f"together {size_text(every.bytes)}")
    if unknown := sum(port.forward is None for port in ports):
        parts.append(f"{unknown} of unknown shape")
    return f"total {direction}: {', '.join(parts) or 'nothing'}"


def parse_graphs(text: str) -> Graphs:
    """Read what :func:`format_graphs` wrote, or what was unfolded of it by hand.

    Raises:
        SnapshotError: what is wrong, with the number of the line; totals that do not fit.
    """
    lines = [(number, line.rstrip()) for number, line in enumerate(text.splitlines(), 1)]
    while lines and not lines[-1][1]:
        lines.pop()
    body, ends = lines[:-2], [line for _, line in lines[-2:]]
    starts = [f"total {direction}: " for direction in DIRECTIONS]
    if len(ends) != 2 or not all(map(str.startswith, ends, starts)):
        raise SnapshotError(
            "not a snapshot of boundaries: the last two lines are to be 'total forward: ...' "
            "and 'total backward: ...'"
        )
    graphs = tuple(_parse_graph(part) for part in _parts(body))
    ports = [port for graph in graphs for port in graph]
    for end, direction in zip(ends, DIRECTIONS, strict=True):
        if end != (expected := total_text(ports, direction)):
            raise SnapshotError(f"{end!r} does not fit the ports above it, {expected!r} would")
    return tuple(graph for graph in graphs if graph)


Numbered = list[tuple[int, str]]


def _parts(lines: Numbered) -> list[Numbered]:
    """The lines of each graph; without a heading there is one graph."""
    headings = [i for i, (_, line) in enumerate(lines) if _GRAPH.fullmatch(line)]
    for k, i in enumerate(headings, 1):
        number, line = lines[i]
        if line != f"graph {k} of {len(headings)}":
            raise SnapshotError(
                f"line {number}: {line!r} is out of place among {len(headings)} graphs"
            )
    starts = [0, *headings]
    parts = [lines[a:b] for a, b in zip(starts, [*headings, len(lines)], strict=True)]
    return [[pair for pair in part if not _GRAPH.fullmatch(pair[1])] for part in parts]


def _parse_graph(lines: Numbered) -> tuple[PortRecord, ...]:
    paragraph: list[Line[PortRecord]] = []
    ports: list[PortRecord] = []

    def close() -> None:
        found = islice(unfold(paragraph), MOST_PORTS + 1 - len(ports))
        ports.extend(replace(line.value, name=line_name(line)) for line in found)
        if len(ports) > MOST_PORTS:
            raise SnapshotError(f"more than {MOST_PORTS} ports")
        paragraph.clear()

    numbered = iter(lines)
    for number, head in numbered:
        if not head:
            close()
            continue
        _, detail = next(numbered, (0, ""))
        try:
            paragraph.append(_parse_port(head, detail))
        except SnapshotError as error:
            raise SnapshotError(f"line {number}: {error}") from None
    close()
    return tuple(ports)


def _parse_port(head: str, detail: str) -> Line[PortRecord]:
    fields = head.split("  ")
    forward, bar, grad = detail.strip().partition("  |  grad ")
    if len(fields) != 3 or not bar or not detail.startswith("    "):
        raise SnapshotError(
            f"{head!r} does not begin a port: 'NAME  SHAPES  LAYOUTS', and below it, indented, "
            f"'STEPS  |  grad LAYOUT: STEPS'"
        )
    name, shapes, layouts = fields
    if forward == "shape unknown":
        return parse_line(name, PortRecord("", shapes, layouts, grad, None, None))
    gradient, colon, backward = grad.rpartition(": ")
    if not colon:
        raise SnapshotError(f"{detail.strip()!r}: no ': STEPS' after the gradient's layout")
    ways = (_parse_steps(forward), None if backward == "no gradient" else _parse_steps(backward))
    return parse_line(name, PortRecord("", shapes, layouts, gradient, *ways))


def _parse_steps(text: str) -> tuple[StepRecord, ...]:
    return () if text == "nothing" else tuple(map(_parse_step, _split(text)))


def _split(text: str) -> Iterator[str]:
    """Parts between commas that are in no parentheses."""
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()


def _parse_step(text: str) -> StepRecord:
    found = _STEP.fullmatch(text)
    if found is None:
        raise SnapshotError(f"{text!r} is no step, as 'all_gather(dim=1, tp=4) 192 B'")
    step = StepRecord(found[1])
    if (step.kind is None) != (found[2] is None):
        needs = "sends nothing" if step.kind is None else "needs its bytes, as in '192 B'"
        raise SnapshotError(f"{text!r}: {step.text.partition('(')[0]} {needs}")
    return step if found[2] in (None, "? B") else StepRecord(found[1], parse_size(found[2]))
