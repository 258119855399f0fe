"""Snapshot: the boundaries of one or several graphs as a value that tests compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxboundary.testing.budget import check_budget
from fxboundary.testing.record import Direction, PortRecord, Total, totals
from fxboundary.testing.text import Graphs, format_graphs, parse_graphs


@dataclass(frozen=True)
class Snapshot:
    """The ports of graphs that have any, graph by graph, in the order in which they run.

    ``str(snapshot)`` is its text, :meth:`from_text` reads it back. Shapes and bytes are one
    rank's: rank 0's, where a model was captured for the snapshot.
    """

    graphs: Graphs

    @classmethod
    def from_text(cls, text: str) -> Snapshot:
        """Read a snapshot's text.

        Raises:
            SnapshotError: what is wrong, with the number of the line.

        >>> text = '''\\
        ... layers.{0..1}.mlp:out  f32[1, 8, 8] -> [1, 8, 8]  tp: P->R
        ...     all_reduce(tp=4) 384 B  |  grad R: nothing
        ... total forward: 2 all_reduce 768 B
        ... total backward: nothing'''
        >>> snapshot = Snapshot.from_text(text)
        >>> [port.name for port in snapshot.ports], str(snapshot) == text
        (['layers.0.mlp:out', 'layers.1.mlp:out'], True)
        """
        return cls(parse_graphs(text))

    def __str__(self) -> str:
        return format_graphs(self.graphs)

    @property
    def ports(self) -> tuple[PortRecord, ...]:
        """The ports of all graphs."""
        return tuple(port for graph in self.graphs for port in graph)

    def totals(self, direction: Direction) -> dict[str, Total]:
        """Collectives by kind, of the kinds that occur: how many, and bytes sent by one rank."""
        return totals(self.ports, direction)

    def assert_collectives(
        self,
        at_most: Mapping[str, int] | None = None,
        *,
        bytes_at_most: str | int | None = None,
        direction: Direction | None = None,
    ) -> None:
        """Fail where there are more collectives, or more bytes, than allowed.

        ``at_most`` is by kind, ``{"all_reduce": 0}``; kinds it does not name are free.
        ``bytes_at_most`` is what one rank sends in all, ``"64 MiB"``. ``direction`` is
        ``"forward"``, ``"backward"``, or ``None`` for both together.

        Raises:
            BudgetError: an AssertionError that names the ports and what they send; also where
                shapes are not known, so that nothing can be counted.
            SnapshotError: a kind, a number or a size that does not exist.
        """
        check_budget(self.ports, at_most or {}, bytes_at_most, direction)
