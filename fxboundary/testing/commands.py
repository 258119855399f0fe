"""The commands ``fxboundary snapshot`` and ``fxboundary diff``: 0 same, 1 different."""

from __future__ import annotations

from pathlib import Path

from fxboundary.errors import FxBoundaryError
from fxboundary.mesh import parse_mesh
from fxboundary.plan import Plan
from fxboundary.static import make_model
from fxboundary.testing.capture import snapshot_of_call
from fxboundary.testing.difference import diff
from fxboundary.testing.errors import SnapshotError
from fxboundary.testing.snapshot import Snapshot


def run_snapshot(
    plan_path: str, model: str, mesh: str | None, output: str | None, check: str | None
) -> int:
    """Print, write or check the snapshot of the model that ``module:factory`` makes.

    Raises:
        FxBoundaryError: a file, the factory, the model's forward or the plan on it fails.
    """
    # A file that is not there is said before the model is captured, which may take a while.
    expected = None if check is None else read_snapshot(check)
    try:
        plan = Plan.from_yaml(Path(plan_path), parse_mesh(mesh) if mesh else None)
    except OSError as error:
        raise FxBoundaryError(f"{plan_path}: {error.strerror}") from None
    made, inputs = make_model(model)
    if inputs is None:
        raise FxBoundaryError(
            f"--model {model}: a snapshot needs inputs; return (module, example_inputs)"
        )
    found = snapshot_of_call(made, plan, inputs)
    if expected is not None:
        return _compare(expected, found, f"{check}: the same")
    if output is None:
        print(found)
    else:
        write_snapshot(output, found)
        print(f"{output}: {len(found.ports)} ports")
    return 0


def run_diff(old: str, new: str) -> int:
    """Print what changed between two files.

    Raises:
        SnapshotError: a file that cannot be read.
    """
    return _compare(read_snapshot(old), read_snapshot(new), "the same")


def _compare(old: Snapshot, new: Snapshot, same: str) -> int:
    changes = diff(old, new)
    print(changes or same)
    return 1 if changes else 0


def read_snapshot(path: str | Path) -> Snapshot:
    """The snapshot in a file.

    Raises:
        SnapshotError: there is no such file, or it holds something else.
    """
    try:
        return Snapshot.from_text(Path(path).read_text("utf-8"))
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SnapshotError(f"{path}: not a snapshot: it is no text") from None
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None


def write_snapshot(path: str | Path, snapshot: Snapshot) -> None:
    """Write a snapshot's text and a newline.

    Raises:
        SnapshotError: the file cannot be written.
    """
    try:
        Path(path).write_text(f"{snapshot}\n", "utf-8")
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from None
