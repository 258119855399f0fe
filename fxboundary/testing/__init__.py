"""Tests of what a model communicates: snapshots, differences, budgets; the pytest fixture's parts.

See docs/testing.md.
"""

from fxboundary.testing.capture import assert_collectives, snapshot
from fxboundary.testing.difference import diff
from fxboundary.testing.errors import BudgetError, SnapshotError
from fxboundary.testing.record import PortRecord, StepRecord, Total
from fxboundary.testing.snapshot import Snapshot

__all__ = [
    "BudgetError",
    "PortRecord",
    "Snapshot",
    "SnapshotError",
    "StepRecord",
    "Total",
    "assert_collectives",
    "diff",
    "snapshot",
]
