"""A picture as one HTML page that needs no network: boxes are elements, arrows a script's.

Elements, not the SVG: text wraps on a narrow screen, keyboards reach ports and buttons, and a
repeated layer unfolds without a second drawing. ``page.js`` draws the arrows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from fxboundary.draw.picture import BODY, Card, Direction, Group, Item, Mark, Picture, Repeat, Total
from fxboundary.draw.text import NO_GRADIENT, clean, sent_text, tooltip, total_text

_EXPLANATION = (
    "From top to bottom the forward runs; gradients go up. A coloured bar is a port: a tensor "
    "that crosses a module's boundary and changes its layout there. Bytes are those that rank 0 "
    "sends, with ring algorithms. A module without ports inside is one box."
)


def page_text(picture: Picture) -> str:
    """The file's text."""
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    lines = "\n".join(_body(picture))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(picture.title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{lines}
</main>
<script type="application/json" id="edges">{_edges(picture)}</script>
<script>
{script}</script>
</body>
</html>
"""


def _escape(text: str) -> str:
    return escape(clean(text), quote=True)


def _edges(picture: Picture) -> str:
    """Numbers only: no name of a user's gets into the script."""
    parts = [
        [[*edge.source, *edge.target, int(edge.gradient)] for edge in part.edges]
        for part in picture.parts
    ]
    return json.dumps(parts, separators=(",", ":"))


def _body(picture: Picture) -> Iterator[str]:
    yield f"<h1>{_escape(picture.title)}</h1>"
    yield f"<p>{_EXPLANATION}</p>"
    yield from _totals(picture)
    for number, part in enumerate(picture.parts):
        if len(picture.parts) > 1:
            yield f"<h2>Graph {number + 1} of {len(picture.parts)}</h2>"
        yield '<div class="panels">'
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            heading = "↓ Forward" if direction == "forward" else "↑ Backward (gradients)"
            label = f"{direction}-{number}"
            yield f'<section class="panel" aria-labelledby="{label}">'
            yield f'<h3 id="{label}">{heading}</h3>'
            yield f'<div class="root" data-part="{number}" data-way="{direction}">'
            yield '<svg class="wires" aria-hidden="true"></svg><div class="items">'
            yield from _items(part.items, direction)
            yield "</div></div></section>"
        yield "</div>"


def _totals(picture: Picture) -> Iterator[str]:
    if not picture.totals:
        yield f"<p>{'No collectives.' if picture.ports else 'No ports.'}</p>"
        return
    yield "<table><caption>Collectives and bytes sent by rank 0</caption><thead><tr>"
    yield '<th scope="col">kind</th><th scope="col">forward</th><th scope="col">backward</th>'
    yield "</tr></thead><tbody>"
    for kind, forward, backward in picture.totals:
        yield f'<tr><th scope="row" style="--kind:var(--{kind})">{kind}</th>'
        yield f"<td>{total_text(forward)}</td><td>{total_text(backward)}</td></tr>"
    yield '</tbody><tfoot><tr><th scope="row">all</th>'
    yield f"<td>{total_text(_sum([forward for _, forward, _ in picture.totals]))}</td>"
    yield f"<td>{total_text(_sum([backward for _, _, backward in picture.totals]))}</td>"
    yield "</tr></tfoot></table>"


def _sum(totals: Sequence[Total]) -> Total:
    known = [total.sent for total in totals if total.sent is not None]
    complete = len(known) == len(totals)
    return Total(sum(total.count for total in totals), sum(known) if complete else None)


def _items(items: Sequence[Item], direction: Direction) -> Iterator[str]:
    for item in items:
        if isinstance(item, Card):
            yield from _card(item, direction)
        elif isinstance(item, Group):
            yield from _group(item, direction)
        else:
            yield from _repeat(item, direction)


def _repeat(repeat: Repeat, direction: Direction) -> Iterator[str]:
    paths, titles = (_escape(json.dumps(names)) for names in (repeat.paths, repeat.titles))
    yield (
        f'<div class="repeat" data-start="{repeat.start}" data-stride="{repeat.stride}" '
        f'data-count="{repeat.count}" data-paths="{paths}" data-titles="{titles}">'
    )
    yield (
        f'<div class="bar"><span class="name">{_escape(repeat.title)}</span>'
        f'<button type="button" aria-expanded="false" hidden>×{repeat.count}'
        f'<span class="more"> unfold</span></button></div><div class="copies">'
    )
    yield from _items((repeat.first,), direction)
    yield "</div></div>"


def _group(group: Group, direction: Direction) -> Iterator[str]:
    yield f'<div class="group"><div class="head">{_named(group.title, group.type)}</div>'
    yield '<div class="items">'
    yield from _items(group.items, direction)
    yield "</div></div>"


def _named(title: str, kind: str) -> str:
    return f'<span class="name">{_escape(title)}</span> <span class="type">{_escape(kind)}</span>'


def _card(card: Card, direction: Direction) -> Iterator[str]:
    yield f'<div class="card of-{card.kind}" data-id="{card.id}">'
    for slot, mark in enumerate(card.ins):
        yield _port(mark, slot, direction)
    if card.kind == "module":
        yield f'<div class="body" data-slot="{BODY}">{_named(card.title, card.type)}</div>'
    elif card.kind != "port":
        label = f"{card.type}: {card.title}" if card.kind == "values" else card.title
        text = _escape(label.rstrip(": "))
        yield f'<div class="body" data-slot="{BODY}"><span>{text}</span></div>'
    for slot, mark in enumerate((*card.params, *card.outs), len(card.ins)):
        yield _port(mark, slot, direction)
    yield "</div>"


def _port(mark: Mark, slot: int, direction: Direction) -> str:
    way = mark.way(direction)
    kind = way.kind if way else "none"
    label = way.label if way else NO_GRADIENT
    sent = sent_text(way) if way else ""
    steps = way.text if way else ""
    tip = "\n".join(_escape(line) for line in tooltip(mark, direction))
    spoken = _escape(", ".join(filter(None, (f"{mark.name}: {label}", steps, sent))))
    return (
        f'<div class="port" tabindex="0" role="group" aria-label="{spoken}" '
        f'data-slot="{slot}" style="--kind:var(--{kind})">'
        f'<div class="first"><span class="label">{_escape(mark.label)}</span>'
        f'<span class="kind">{_escape(label)}</span><span class="sent">{sent}</span></div>'
        f'<div class="steps">{_escape(steps)}</div><span class="tip">{tip}</span></div>'
    )
