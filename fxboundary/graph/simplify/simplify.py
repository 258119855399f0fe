"""All passes, run until none of them finds anything more to do."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from fxboundary.errors import ContractError
from fxboundary.graph.find import graph_modules
from fxboundary.graph.insert.copying import copied
from fxboundary.graph.prepare import name_ports, remove_dead_ports
from fxboundary.graph.simplify.casts import move_casts
from fxboundary.graph.simplify.change import Change
from fxboundary.graph.simplify.compose import compose
from fxboundary.graph.simplify.hoist import hoist
from fxboundary.graph.simplify.merge import merge
from fxboundary.graph.simplify.share import share
from fxboundary.graph.simplify.sink import sink

# Casts first: they part ports that could be composed. Then out of loops, beside their equals, and
# last what leaves fewer ports to the next.
PASSES = (move_casts, hoist, compose, share, merge)


@dataclass(frozen=True)
class Simplified:
    """A graph with less communication, and how it came about; prints as one line per change."""

    graph_module: GraphModule
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "nothing to simplify"


def simplify(graph_module: GraphModule, aggressive: bool = False) -> Simplified:
    """A graph whose ports do the same with fewer collectives or fewer bytes, never with more.

    ``graph_module`` has ports, and is left as it is. Values and gradients stay the same, to
    rounding where sums are taken in another order. What is done depends on nothing but what all
    ranks have in common. ``aggressive`` splits by tokens what ranks of a mesh dimension do alike,
    where no more bytes are sent then.

    Raises:
        ContractError: it is no graph module.
    """
    if not isinstance(graph_module, GraphModule):
        raise ContractError(
            f"simplify takes a GraphModule, not a {type(graph_module).__name__}; of an "
            f"ExportedProgram give its module()"
        )
    gm = copied(graph_module)
    return Simplified(gm, simplify_ports(gm, aggressive))


def simplify_ports(gm: GraphModule, aggressive: bool = False) -> tuple[Change, ...]:
    """:func:`simplify` in place."""
    remove_dead_ports(gm)
    name_ports(gm)
    changes = _until_nothing_changes(gm)
    if aggressive and (split := sink(gm)):
        changes += [*split, *_until_nothing_changes(gm)]
    if changes:
        for module in graph_modules(gm):
            module.recompile()
    return tuple(changes)


def _until_nothing_changes(gm: GraphModule) -> list[Change]:
    changes: list[Change] = []
    while found := [change for one in PASSES for change in one(gm)]:
        changes += found
        remove_dead_ports(gm)
    return changes
