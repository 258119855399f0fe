"""What the backend tells: the logger ``fxboundary``, and artifacts in torch's structured trace.

``TORCH_LOGS="+fxboundary"`` shows the former, ``TORCH_TRACE=folder`` writes the latter, for
``tlparse`` to show beside torch's own graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.fx import GraphModule

from fxboundary._torch_internals import trace_artifact

LOG = logging.getLogger("fxboundary")


def log_captured(gm: GraphModule) -> None:
    """A graph as Dynamo captured it: artifact ``fxboundary_captured``."""
    _trace_graph("fxboundary_captured", gm)


def log_prepared(gm: GraphModule, boundaries: str, changes: Sequence[object]) -> None:
    """A graph after our passes, ``fxboundary_prepared``, and its ``fxboundary_boundaries``;
    ``fxboundary_simplified`` tells what was done to them.
    """
    _trace_graph("fxboundary_prepared", gm)
    trace_artifact("fxboundary_boundaries", lambda: boundaries)
    if changes:
        simplified = "\n".join(map(str, changes))
        trace_artifact("fxboundary_simplified", lambda: simplified)
        LOG.debug("simplified:\n%s", simplified)
    if boundaries:
        LOG.debug("boundaries of a captured graph:\n%s", boundaries)


def _trace_graph(name: str, gm: GraphModule) -> None:
    trace_artifact(name, lambda: gm.print_readable(print_output=False))
