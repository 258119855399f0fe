"""Fail closed: the collectives of every port must be in the graph that is compiled."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxboundary.errors import FxBoundaryError
from fxboundary.graph.collectives import find_collectives, is_collective, port_of
from fxboundary.graph.find import Port, graph_modules

# Inductor runs its passes on the body of a loop alone too, where most ports are missing.
_NESTED = "fxboundary_nested"


def expected_collectives(ports: Iterable[Port]) -> dict[str, int]:
    """How many collectives each port launches forward, by full name."""
    expected: Counter[str] = Counter()
    for port in ports:
        if port.transition is not None:
            expected[port.name] += sum(step.is_collective for step in port.transition.forward)
    return {name: count for name, count in expected.items() if count}


class ChainedPass(CustomGraphPass):
    """A pass of ours, after those that the user has installed in its place.

    Its ``uuid`` puts its name and this package's sources into the key of torch's compile caches:
    the body of the composite operator is not part of that key.
    """

    def __init__(self, users: Any = None) -> None:
        listed = isinstance(users, (list, tuple))
        self._users = tuple(users) if listed else () if users is None else (users,)

    def __call__(self, graph: Graph) -> None:
        for user in self._users:
            user(graph)
        if graph.owning_module is not None:
            self.look(graph, graph.owning_module)

    @abstractmethod
    def look(self, graph: Graph, gm: GraphModule) -> None: ...

    def uuid(self) -> Any:
        users = [user.uuid() if hasattr(user, "uuid") else None for user in self._users]
        return None if None in users else (type(self).__name__, source_identity(), *users)


class NoteEqualCollectives(ChainedPass):
    """Last joint pass: how many collectives of each port repeat an equal one of the same value.

    AOTAutograd's common subexpression elimination merges these into the first, as three
    projections that each gather the same activation.
    """

    def __init__(self, users: Any = None) -> None:
        super().__init__(users)
        self.repeated: Counter[str] = Counter()

    def look(self, graph: Graph, gm: GraphModule) -> None:
        for module in graph_modules(gm):
            if module is not gm:
                module.meta[_NESTED] = True
            values, seen = number_values(module.graph), set()
            for node in module.graph.nodes:
                if is_collective(node):
                    self.repeated[port_of(node)] += values[node] in seen
                    seen.add(values[node])


class VerifyPorts(ChainedPass):
    """Post-grad pass: no port's forward collectives were lost on the way from capture."""

    def __init__(
        self, expected: Mapping[str, int], noted: NoteEqualCollectives, users: Any = None
    ) -> None:
        super().__init__(users)
        self._expected, self._noted = expected, noted

    def look(self, graph: Graph, gm: GraphModule) -> None:
        if _is_backward(graph) or _NESTED in gm.meta:
            return
        found = Counter(c.port for c in find_collectives(gm))
        found.update(self._noted.repeated)
        lost = {name: count - found[name] for name, count in self._expected.items()}
        lost = {name: count for name, count in lost.items() if count > 0}
        # scan traces its body anew, to differentiate it, and drops the names there.
        if sum(lost.values()) > _unnamed_in_bodies(gm):
            raise FxBoundaryError(
                f"the collectives of {', '.join(lost)} are not in the compiled graph: a pass "
                f"that ran before lost them (a custom joint or pre-grad pass?)"
            )


def _unnamed_in_bodies(gm: GraphModule) -> int:
    nodes = (n for module in graph_modules(gm) if module is not gm for n in module.graph.nodes)
    return sum(is_collective(node) and not port_of(node) for node in nodes)


def number_values(graph: Graph) -> dict[Node, int]:
    """The same number for nodes that compute the same value from the same values."""
    numbers: dict[str, int] = {}
    values: dict[Node, int] = {}
    for node in graph.nodes:
        key = node.name
        if node.op == "call_function" and not _is_random(node):
            arguments = map_arg((node.args, node.kwargs), lambda n: f"%{values[n]}")
            key = f"{node.target} {arguments}"
        values[node] = numbers.setdefault(key, len(numbers))
    return values


def _is_random(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


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
