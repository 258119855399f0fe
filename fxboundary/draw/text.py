"""Words of a drawing that both files share: what stands at a port, in tooltips, in totals."""

from __future__ import annotations

import re

from fxboundary.draw.picture import Direction, Mark, Total, Way
from fxboundary.transition.program import bytes_text

NO_GRADIENT = "no gradient"
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """Text without characters that XML cannot hold.

    >>> clean("a\\x00b")
    'a�b'
    """
    return _UNPRINTABLE.sub("�", text)


def sent_text(way: Way) -> str:
    """``448.0 KiB``; empty where no collective is launched."""
    if not way.parts:
        return ""
    return "size unknown" if way.sent is None else bytes_text(way.sent)


def total_text(total: Total) -> str:
    """``9, 3.9 MiB``: how many, and the bytes of them all."""
    if not total.count:
        return "–"
    return f"{total.count}, {'size unknown' if total.sent is None else bytes_text(total.sent)}"


def tooltip(mark: Mark, direction: Direction) -> list[str]:
    """The lines about one direction of a port."""
    lines = [mark.name, f"this rank's shapes: {mark.shapes.replace('->', '→')}"]
    way = mark.way(direction)
    if way is None:
        return [*lines, NO_GRADIENT]
    what = "layouts" if direction == "forward" else "gradient's layouts"
    lines += [f"{what}: {way.layouts}", f"steps: {way.steps or 'none'}"]
    if way.parts:
        exact = "unknown" if way.sent is None else f"{way.sent:,} bytes"
        lines.append(f"sent by rank 0: {exact}")
    return lines
