"""Rewriting the expected text in a test's own source, beside what expecttest rewrites there."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxboundary.testing.errors import SnapshotError


@dataclass(frozen=True)
class Place:
    """A line of a source file as it was when the tests were imported."""

    filename: str
    lineno: int

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno}"


def rewrite_literal(place: Place, text: str) -> None:
    """Put a text into the literal ``expected`` of the call at a place.

    ``expected="..."`` and ``Expect("...")`` are found. Line numbers are followed through other
    edits of the file, ours and expecttest's.

    Raises:
        SnapshotError: there is no such literal, or it was given another text before; expecttest
            is not installed.
    """
    history = _edit_history()
    lineno = history.adjust_lineno(place.filename, place.lineno)
    before = history.seen_edit(place.filename, lineno)
    if before is not None:
        if before != text:
            raise SnapshotError(
                f"{place}: one literal cannot hold two texts; give each parameter of the test "
                f"its own file=..., or parametrize it by expecttest.Expect"
            )
        return
    path = Path(place.filename)
    source = path.read_text("utf-8")
    literal = _find_literal(ast.parse(source), lineno)
    if literal is None:
        raise SnapshotError(
            f'{place}: no literal to write to; write expected="""...""" in the call itself'
        )
    written = f'"""\\\n{text}"""'
    path.write_text(_replaced(source, literal, written), "utf-8")
    delta = written.count("\n") - ((literal.end_lineno or literal.lineno) - literal.lineno)
    history.record_edit(place.filename, lineno, delta, text)


def _edit_history() -> Any:
    try:
        from expecttest import EDIT_HISTORY
    except ImportError:
        raise SnapshotError(
            "rewriting tests needs expecttest: pip install 'fxboundary[testing]'"
        ) from None
    return EDIT_HISTORY


def _find_literal(tree: ast.Module, lineno: int) -> ast.Constant | None:
    """The string given as ``expected``, or to ``Expect``, by the smallest call on a line."""
    calls = [
        (node.end_lineno - node.lineno, literal)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.end_lineno is not None
        if node.lineno <= lineno <= node.end_lineno
        for literal in _given(node)
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str)
    ]
    return min(calls, key=lambda call: call[0])[1] if calls else None


def _given(call: ast.Call) -> list[ast.expr]:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "Expect":
        return call.args[:1]
    return [keyword.value for keyword in call.keywords if keyword.arg == "expected"]


def _replaced(source: str, literal: ast.Constant, written: str) -> str:
    """Columns of a syntax tree count bytes, and lines end at newlines only."""
    lines = source.encode().split(b"\n")
    assert literal.end_lineno is not None
    assert literal.end_col_offset is not None
    head = b"\n".join(
        [*lines[: literal.lineno - 1], lines[literal.lineno - 1][: literal.col_offset]]
    )
    last = literal.end_lineno - 1
    tail = b"\n".join([lines[last][literal.end_col_offset :], *lines[last + 1 :]])
    return (head + written.encode() + tail).decode()
