"""What is wrong with a snapshot's text or a budget, and a budget that is exceeded."""

from fxboundary.errors import FxBoundaryError


class SnapshotError(FxBoundaryError, ValueError):
    """A text that is not a snapshot, a budget that cannot be read, a graph that has none."""


class BudgetError(FxBoundaryError, AssertionError):
    """More collectives or bytes than a test allows."""
