"""A picture as one SVG file: two panels, forward and backward, with the same boxes."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from fxboundary.draw.layout import COPIES, HEAD_HEIGHT, PAD, SPINE, Frame, Panel, Row, Wire, place
from fxboundary.draw.picture import Direction, Picture
from fxboundary.draw.text import NO_GRADIENT, clean, sent_text, tooltip, total_text

# Okabe and Ito's colours: told apart by colour-blind readers, on white and on black.
STYLE = """
svg{--paper:#fff;--ink:#1b1f24;--soft:#59636e;--line:#8c959f;--box:#fff;--group:#f3f5f7;
--all_gather:#0072b2;--reduce_scatter:#d55e00;--all_reduce:#a8447f;--all_to_all:#00805c;
--local:#8a6d00;--none:#6e7781}
@media(prefers-color-scheme:dark){svg{--paper:#0d1117;--ink:#e6edf3;--soft:#9da7b1;
--line:#6e7681;--box:#161b22;--group:#10151c;--all_gather:#56b4e9;--reduce_scatter:#ff9447;
--all_reduce:#e69ac5;--all_to_all:#3fc79a;--local:#e0b83a;--none:#9da7b1}}
text{font:11px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink)}
tspan.s{font-weight:normal}.h{font-size:16px;font-weight:bold}.p{font-size:13px;font-weight:bold}.b{font-weight:bold}
.s{fill:var(--soft)}.box{fill:var(--box);stroke:var(--line)}.ops{stroke-dasharray:3 2}
.frame{fill:var(--group);stroke:var(--line)}.e{text-anchor:end}
.w{fill:none;stroke:var(--soft);stroke-width:1.3}.a{fill:var(--soft)}
"""
_CHARACTER = 6.63  # width of a character of the 11 px text
_MARGIN, _BETWEEN = 16, 28
_LINE = 17


def svg_text(picture: Picture) -> str:
    """The file's text."""
    panels = [place(part) for part in picture.parts]
    wide = max((panel.width for panel in panels), default=400)
    width = 2 * wide + _BETWEEN + 2 * _MARGIN
    lines = list(_lines(picture, panels, wide))
    height = _height(picture, panels)
    title = escape(clean(picture.title))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
        f'width="{_n(width)}" height="{_n(height)}" role="img" aria-labelledby="title">'
    )
    paper = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    parts = [head, f'<title id="title">{title}</title>', f"<style>{STYLE}</style>", paper]
    return "\n".join([*parts, *lines, "</svg>", ""])


def _top(picture: Picture) -> float:
    """Where the panels' headings are."""
    return _MARGIN + 30 + _LINE * (max(len(picture.totals), 1) + 1) + 40


def _height(picture: Picture, panels: list[Panel]) -> float:
    headings = 30 if len(panels) > 1 else 0
    return _top(picture) + sum(panel.height + headings + 34 for panel in panels)


def _lines(picture: Picture, panels: list[Panel], wide: float) -> Iterator[str]:
    yield _text(_MARGIN, _MARGIN + 14, picture.title, "h", int(2 * wide / 9.7))
    yield from _legend(picture)
    top = _top(picture)
    directions: tuple[Direction, ...] = ("forward", "backward")
    for number, panel in enumerate(panels, 1):
        if len(panels) > 1:
            yield _text(_MARGIN, top, f"graph {number} of {len(panels)}", "p")
            top += 30
        for index, direction in enumerate(directions):
            x = _MARGIN + index * (wide + _BETWEEN)
            arrow = "↓ forward" if direction == "forward" else "↑ backward (gradients)"
            yield f'<g id="{direction}-{number}" transform="translate({_n(x)} {_n(top + 10)})">'
            yield _text(PAD, -8, arrow, "p")
            yield from _panel(panel, direction)
            yield "</g>"
        top += panel.height + 34


def _legend(picture: Picture) -> Iterator[str]:
    y = _MARGIN + 42
    if not picture.totals:
        yield _text(_MARGIN, y, "no collectives" if picture.ports else "no ports", "s")
        return
    columns = (16, 140, 300)
    for x, word in zip(columns, ("sent by rank 0", "forward", "backward"), strict=True):
        yield _text(_MARGIN + x, y, word, "s")
    for kind, forward, backward in picture.totals:
        y += _LINE
        yield _rect(_MARGIN, y - 9, 10, 10, "", f"fill:var(--{kind})")
        texts = (kind, total_text(forward), total_text(backward))
        for x, word in zip(columns, texts, strict=True):
            yield _text(_MARGIN + x, y, word, "b" if word is kind else "")


def _panel(panel: Panel, direction: Direction) -> Iterator[str]:
    for frame in panel.frames:
        yield from _frame(frame)
    for wire in panel.wires:
        if direction == "forward" or wire.gradient:
            yield _wire(wire, direction)
    for row in panel.rows:
        yield from _row(row, direction)


def _frame(frame: Frame) -> Iterator[str]:
    if frame.copies > 1:
        for offset in (COPIES, COPIES / 2):
            yield _rect(
                frame.x + offset, frame.y + offset, frame.width, frame.height, "frame", rx=6
            )
    name = f"{clean(frame.path) or 'the model'}: {clean(frame.type)}"
    yield f"<g><title>{escape(name)}</title>"
    yield _rect(frame.x, frame.y, frame.width, frame.height, "frame", rx=6)
    badge = f"×{frame.copies}" if frame.copies > 1 else ""
    y = frame.y + HEAD_HEIGHT - 11
    room = int((frame.width - SPINE - 24) / _CHARACTER)
    yield _titled(frame.x + 8, y, f"{frame.title} {badge}".rstrip(), frame.type, room)
    yield "</g>"


def _titled(x: float, y: float, title: str, kind: str, room: int) -> str:
    """A name in bold with its class behind, where there is room for it."""
    title = _cut(title, room)
    left = room - len(title) - 2
    kind = _cut(kind, left) if left > 5 else ""
    return _text(x, y, title, "b", behind=_span(kind, "s"))


def _row(row: Row, direction: Direction) -> Iterator[str]:
    if row.mark is not None:
        yield from _port(row, direction)
        return
    card = row.card
    name = clean(card.path) or "the model's own forward"
    yield f"<g><title>{escape(f'{name}: {clean(card.type or card.title)}')}</title>"
    own = "box" if card.kind == "module" else "box ops"
    yield _rect(row.x, row.y, row.width, row.height, own, rx=4)
    room = int((row.width - 20) / _CHARACTER)
    if card.kind == "module":
        yield _titled(row.x + 10, row.middle + 4, card.title, card.type, room)
    else:
        label = f"{card.type}: {card.title}" if card.kind == "values" else card.title
        yield _text(row.x + 10, row.middle + 4, label.rstrip(": "), "s", room)
    yield "</g>"


def _port(row: Row, direction: Direction) -> Iterator[str]:
    assert row.mark is not None
    way = row.mark.way(direction)
    kind = way.kind if way else "none"
    tip = escape(clean("\n".join(tooltip(row.mark, direction))))
    yield f'<g class="port"><title>{tip}</title>'
    yield _rect(row.x, row.y, row.width, row.height, "box")
    yield _rect(row.x, row.y, 6, row.height, "", f"fill:var(--{kind})")
    room = int((row.width - 20) / _CHARACTER)
    right = row.x + row.width - 8
    sent = sent_text(way) if way else ""
    label = way.label if way else NO_GRADIENT
    words = _cut(label, room - len(sent) - 12)
    name = _cut(row.mark.label, room - len(sent) - len(words) - 3)
    behind = _span(words, "", f"fill:var(--{kind})")
    yield _text(row.x + 14, row.y + 14, name, "b", behind=behind)
    if sent:
        yield _text(right, row.y + 14, sent, "e")
    if way:
        yield _text(row.x + 14, row.y + 28, way.text, "s", room)
    yield "</g>"


def _wire(wire: Wire, direction: Direction) -> str:
    points = wire.points if direction == "forward" else tuple(reversed(wire.points))
    path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    (x0, y0), (x, y) = points[-2:]
    if x0 == x:
        back = -6 if y > y0 else 6
        head = f"M{_n(x)} {_n(y)}l-3.5 {back}h7z"
    else:
        back = -6 if x > x0 else 6
        head = f"M{_n(x)} {_n(y)}l{back} -3.5v7z"
    return f'<path class="w" d="{path}"/><path class="a" d="{head}"/>'


def _rect(
    x: float, y: float, width: float, height: float, kind: str, style: str = "", rx: int = 0
) -> str:
    extra = f" class={quoteattr(kind)}" if kind else ""
    extra += f" style={quoteattr(style)}" if style else ""
    extra += f' rx="{rx}"' if rx else ""
    return f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"{extra}/>'


def _text(
    x: float, y: float, words: str, kind: str = "", room: int | None = None, behind: str = ""
) -> str:
    shown = escape(clean(words if room is None else _cut(words, room)))
    extra = f" class={quoteattr(kind)}" if kind else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{extra}>{shown}{behind}</text>'


def _span(words: str, kind: str, style: str = "") -> str:
    """Words behind others in one text, so that they never overlap, whatever the font."""
    extra = f" class={quoteattr(kind)}" if kind else ""
    extra += f" style={quoteattr(style)}" if style else ""
    return f'<tspan dx="8"{extra}>{escape(clean(words))}</tspan>' if words else ""


def _cut(words: str, room: int) -> str:
    """At most ``room`` characters; the rest is in the tooltip."""
    if len(words) <= room:
        return words
    return f"{words[: max(room - 1, 1)]}…"


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
