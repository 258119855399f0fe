"""Drawings of a split model: its modules, its ports, forward and backward, as SVG or HTML."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.fx import GraphModule

from fxboundary.draw.flow import read_flow
from fxboundary.draw.page import page_text
from fxboundary.draw.picture import Picture, totals
from fxboundary.draw.svg import svg_text
from fxboundary.draw.tree import build_part
from fxboundary.errors import FxBoundaryError
from fxboundary.mesh import parse_mesh
from fxboundary.plan import Plan

_WRITERS: dict[str, Callable[[Picture], str]] = {".svg": svg_text, ".html": page_text}


def draw(
    graphs: GraphModule | Iterable[GraphModule],
    path: str | os.PathLike[str],
    title: str = "boundaries",
) -> None:
    """Write a drawing of graphs with redistribute nodes; the path's suffix says which kind.

    Graphs are those of Dynamo, of ``torch.export`` (``program.module()``) or of a symbolic
    trace, in the order in which they run. Equal graphs give equal files.

    Raises:
        FxBoundaryError: a suffix other than ``.svg`` and ``.html``, a file that cannot be written.
    """
    writer = _writer(path)
    found = [graphs] if isinstance(graphs, GraphModule) else list(graphs)
    _write(path, writer(picture_of(found, title)))


def draw_plan(path: str, mesh: str | None, model: str, output: str) -> str:
    """Draw a plan file on the model that ``module:factory`` makes; returns what was drawn.

    ``mesh`` is ``dp=2,tp=4``; without it, the plan's own.

    Raises:
        FxBoundaryError: a file, a factory or a contract that does not fit, a bad suffix.
    """
    from fxboundary.static import capture, make_model

    writer = _writer(output)
    try:
        plan = Plan.from_yaml(Path(path), parse_mesh(mesh) if mesh else None)
    except OSError as error:
        raise FxBoundaryError(f"{path}: {error.strerror}") from None
    made, inputs = make_model(model)
    if inputs is None:
        raise FxBoundaryError(
            f"--model {model}: returned no example inputs; return (module, example_inputs)"
        )
    graphs = capture(made, plan, inputs)
    picture = picture_of(graphs, f"{Path(path).name} on {plan.spec}, {model}")
    _write(output, writer(picture))
    count = len(picture.parts)
    return f"{output}: {picture.ports} ports in {count} graph{'' if count == 1 else 's'}"


def picture_of(graphs: Iterable[GraphModule], title: str) -> Picture:
    """What a drawing of graphs shows."""
    symbols: dict[str, str] = {}
    parts, marks = [], []
    for gm in graphs:
        part, found = build_part(read_flow(gm), symbols)
        parts.append(part)
        marks += found
    return Picture(title, tuple(parts), len(marks), totals(marks))


def _writer(path: str | os.PathLike[str]) -> Callable[[Picture], str]:
    suffix = Path(path).suffix.lower()
    if suffix not in _WRITERS:
        raise FxBoundaryError(
            f"{os.fspath(path)}: cannot draw {suffix or 'a file without a suffix'}; "
            f"write {' or '.join(_WRITERS)}"
        )
    return _WRITERS[suffix]


def _write(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise FxBoundaryError(f"{os.fspath(path)}: {error.strerror}") from None
