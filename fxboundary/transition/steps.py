"""The vocabulary of programs: one collective or local action on one mesh dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "all_gather",  # S(d) → R
    "reduce_scatter",  # P → S(d)
    "all_reduce",  # P → R
    "all_to_all",  # S(a) → S(b)
    "slice",  # R → S(d): this rank's chunk
    "pad",  # S(d) → P: this rank's chunk at its place, zeros elsewhere
    "keep_first",  # R → P: the value on index 0, zeros elsewhere
    "scale",  # P(sum) ⇄ P(avg), and the gradients of averages
]

COLLECTIVES: frozenset[Kind] = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
)
NEEDS_COORDINATE: frozenset[Kind] = frozenset({"slice", "pad", "keep_first"})


@dataclass(frozen=True)
class Step:
    """One step.

    ``dim`` is the tensor dimension gathered, scattered, cut or padded (for ``all_to_all`` the
    one that becomes whole), ``to_dim`` the one an ``all_to_all`` shards. Where a step puts
    shards together, ``outer`` lists the mesh dimensions that shard ``dim`` around this one and
    stay: with them a declared global size becomes the size that is whole within the group.
    """

    kind: Kind
    mesh_dim: int
    dim: int | None = None
    to_dim: int | None = None
    op: str = "sum"
    factor: float = 1.0
    outer: tuple[int, ...] = ()

    @property
    def is_collective(self) -> bool:
        return self.kind in COLLECTIVES

    def text(self, name: str, size: int) -> str:
        """``all_gather(dim=1, tp=4)``; ``name`` and ``size`` are the mesh dimension's."""
        if self.kind == "scale":
            return f"scale({self.factor:g})"
        arguments = [] if self.dim is None else [f"dim={self.dim}"]
        if self.to_dim is not None:
            arguments = [f"gather={self.dim}", f"split={self.to_dim}"]
        if self.op != "sum":
            arguments.append(self.op)
        return f"{self.kind}({', '.join([*arguments, f'{name}={size}'])})"
