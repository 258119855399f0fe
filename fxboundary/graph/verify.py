"""Fail closed: the collectives of every port must be in the graph that is compiled."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fxboundary.errors import FxBoundaryError
from fxboundary.graph.collectives import find_collectives
from fxboundary.graph.find import Port


def expected_collectives(ports: Iterable[Port]) -> dict[str, int]:
    """How many collectives each port launches forward, by full name."""
    expected: Counter[str] = Counter()
    for port in ports:
        if port.transition is not None:
            expected[port.name] += sum(step.is_collective for step in port.transition.forward)
    return {name: count for name, count in expected.items() if count}


class VerifyPorts(CustomGraphPass):
    """Post-grad pass: no port's forward collectives were lost on the way from capture.

    It is always installed, also because its ``uuid`` puts this package's sources into the key
    of torch's compile caches: the body of the composite operator is not part of that key.
    """

    def __init__(self, expected: Mapping[str, int], inner: Any = None) -> None:
        self._expected, self._inner = expected, inner

    def __call__(self, graph: Graph) -> None:
        if self._inner is not None:
            self._inner(graph)
        if graph.owning_module is None or _is_backward(graph):
            return
        found = Counter(c.port for c in find_collectives(graph.owning_module))
        lost = [name for name, count in self._expected.items() if found[name] < count]
        if lost:
            raise FxBoundaryError(
                f"the collectives of {', '.join(lost)} are not in the compiled graph: a pass "
                f"that ran before lost or merged them (a custom joint or pre-grad pass?)"
            )

    def uuid(self) -> Any:
        inner = self._inner.uuid() if hasattr(self._inner, "uuid") else None
        if self._inner is not None and inner is None:
            return None
        return source_identity(), inner


def _is_backward(graph: Graph) -> bool:
    # AOTAutograd's name for incoming gradients, read on 2.13.0 and 2.14.1.
    return any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)


@cache
def source_identity() -> str:
    """Version and content of this package: what a compiled graph depends on."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    try:
        name = version("fxboundary")
    except PackageNotFoundError:
        name = "source"
    return f"{name}:{digest.hexdigest()}"
