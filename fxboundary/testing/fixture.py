"""What the pytest fixture ``boundary_snapshot`` calls: compare, fail readably, or update."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fxboundary.plan import Plan
from fxboundary.testing.capture import snapshot
from fxboundary.testing.commands import read_snapshot, write_snapshot
from fxboundary.testing.difference import diff
from fxboundary.testing.errors import SnapshotError
from fxboundary.testing.literal import Place, rewrite_literal
from fxboundary.testing.snapshot import Snapshot

_written: dict[Path, Snapshot] = {}


class BoundarySnapshot:
    """Takes snapshots in the tests of one file, ``path``; ``update`` writes what is there now."""

    def __init__(self, path: Path, update: bool) -> None:
        self._path = path
        self._update = update or bool(os.environ.get("EXPECTTEST_ACCEPT"))

    def __call__(
        self,
        model_or_graph: Any,
        plan: Plan | None = None,
        *inputs: Any,
        expected: Any = None,
        file: str | Path | None = None,
    ) -> Snapshot:
        """The snapshot of a model under a plan, or of a graph, after it was compared.

        ``expected`` is a literal (or an ``expecttest.Expect``, for tests with parameters);
        ``file`` is relative to the test's folder. With neither, nothing is compared.

        Raises:
            AssertionError: it differs; or the file does not exist.
            SnapshotError: as :func:`fxboundary.testing.snapshot`; both were given.
        """
        __tracebackhide__ = True
        if expected is not None and file is not None:
            raise SnapshotError("give expected=... or file=..., not both")
        frame = sys._getframe(1)
        place = Place(frame.f_code.co_filename, frame.f_lineno)
        with _quiet_trace():
            found = snapshot(model_or_graph, plan, *inputs)
        if file is not None:
            self._compare_file(self._path.parent / file, found)
        elif expected is not None:
            self._compare_literal(expected, place, found)
        return found

    def _compare_literal(self, expected: Any, place: Place, found: Snapshot) -> None:
        __tracebackhide__ = True
        if not isinstance(expected, str):  # an expecttest.Expect knows its own place
            place = Place(expected.pos.filename, expected.pos.lineno)
            expected = expected.expected
        fault = _fault(expected, found)
        if fault and self._update:
            rewrite_literal(place, str(found))
        elif fault:
            raise AssertionError(
                f"the boundaries are not those expected at {_short(place.filename)}:"
                f"{place.lineno}\n\n{fault}\n\n{self._how()}\n\n"
                f"expected:\n{expected}\n\nfound:\n{found}"
            )

    def _compare_file(self, path: Path, found: Snapshot) -> None:
        __tracebackhide__ = True
        if self._update:
            if _written.setdefault(path, found) != found:
                raise SnapshotError(
                    f"{_short(path)}: one file cannot hold two snapshots; give each parameter of "
                    f"the test its own file=..."
                )
            if not path.exists() or _fault(path.read_text("utf-8"), found):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_snapshot(path, found)
            return
        if not path.exists():
            raise AssertionError(
                f"{_short(path)}: no such file\n\n{self._how('create it')}\n\nfound:\n{found}"
            )
        text = str(read_snapshot(path))
        if fault := _fault(text, found):
            raise AssertionError(
                f"the boundaries are not those in {_short(path)}\n\n{fault}\n\n"
                f"{self._how()}\n\nexpected:\n{text}\n\nfound:\n{found}"
            )

    def _how(self, what: str = "accept them") -> str:
        return f"to {what}: pytest {_short(self._path)} --boundary-update"


def _fault(expected: str, found: Snapshot) -> str:
    """What is wrong with the expected text: its form, or what changed since. Empty: nothing."""
    if not expected.strip():
        return "nothing is expected yet"
    try:
        return diff(Snapshot.from_text(expected), found)
    except SnapshotError as error:
        return str(error)


def _short(path: str | Path) -> str:
    return os.path.relpath(path)


@contextmanager
def _quiet_trace() -> Iterator[None]:
    """Without the records of torch's structured trace, which pytest would show under a failure."""
    trace = logging.getLogger("torch.__trace")
    before = trace.handlers
    # pytest hangs its own handlers onto loggers that do not propagate, as this one.
    trace.handlers = [h for h in before if type(h).__module__.startswith("torch.")]
    try:
        yield
    finally:
        trace.handlers = before
