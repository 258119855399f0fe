"""The vocabulary of programs: one collective or local action on the ranks of one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fxboundary.placements import (
    Layout,
    Placement,
    layout_text,
    nests,
    partial,
    reduce_op,
    replicate,
    shard,
    shard_dim,
)

Kind = Literal[
    "all_gather",  # S(d) → R
    "reduce_scatter",  # P → S(d)
    "all_reduce",  # P → R
    "all_to_all",  # S(a) → S(b), equal parts
    "all_to_all_v",  # any shards → any others; each rank gets what it lacks from one that has it
    "slice",  # R → S(d): this rank's chunk
    "pad",  # S(d) → P: this rank's chunk at its place, zeros elsewhere
    "keep_first",  # R → P: the value on index 0, the reduction's neutral element elsewhere
    "scale",  # P(sum) ⇄ P(avg), and the gradients of averages
]

COLLECTIVES: frozenset[Kind] = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all_v"}
)
REDUCTIONS: frozenset[Kind] = frozenset({"all_reduce", "reduce_scatter"})
NEEDS_COORDINATE: frozenset[Kind] = frozenset({"slice", "pad", "keep_first", "all_to_all_v"})


@dataclass(frozen=True)
class Step:
    """One step, on one mesh dimension or on several flattened into one group.

    ``mesh_dims`` are in the order in which they cut ``dim``, outermost first; where there is no
    such order, ascending. ``dim`` is the tensor dimension gathered, scattered, cut or padded
    (for ``all_to_all`` the one that becomes whole), ``to_dim`` the one an ``all_to_all``
    shards. ``outer`` lists the mesh dimensions that cut ``dim`` around these and stay,
    ``to_outer`` those around ``to_dim``: with them a declared global size becomes the size that
    is whole within the group. An ``all_to_all_v`` goes from the layout ``src`` to ``dst``. A
    reduction with a ``dtype`` is done in it, and its result cast back.
    """

    kind: Kind
    mesh_dims: tuple[int, ...]
    dim: int | None = None
    to_dim: int | None = None
    op: str = "sum"
    factor: float = 1.0
    outer: tuple[int, ...] = ()
    to_outer: tuple[int, ...] = ()
    src: Layout = ()
    dst: Layout = ()
    dtype: str = ""

    @property
    def is_collective(self) -> bool:
        return self.kind in COLLECTIVES

    def text(self, names: Sequence[str], sizes: Sequence[int]) -> str:
        """``all_gather(dim=1, tp=4)``; ``names`` and ``sizes`` are the mesh's."""
        if self.kind == "scale":
            return f"scale({self.factor:g})"
        arguments = [] if self.dim is None else [f"dim={self.dim}"]
        if self.to_dim is not None:
            arguments = [f"gather={self.dim}", f"split={self.to_dim}"]
        if self.src:
            arguments = [f"{layout_text(self.src)}->{layout_text(self.dst)}"]
        if self.op != "sum":
            arguments.append(self.op)
        if self.dtype:
            arguments.append(self.dtype)
        arguments += [f"{names[m]}={sizes[m]}" for m in self.mesh_dims]
        return f"{self.kind}({', '.join(arguments)})"


def layout_after(step: Step, layout: Layout) -> Layout:
    """The layout of a step's output; that of its input is ``layout``."""
    if step.kind == "all_to_all_v":
        return step.dst
    cuts = nests(layout)
    found = dict(enumerate(layout))
    target = step.to_dim if step.kind == "all_to_all" else step.dim
    if step.kind in ("all_gather", "all_to_all", "pad"):
        assert step.dim is not None
        cuts[step.dim] = tuple(m for m in cuts[step.dim] if m not in step.mesh_dims)
    if step.kind in ("reduce_scatter", "all_to_all", "slice"):
        assert target is not None
        cuts[target] = (*cuts.get(target, ()), *step.mesh_dims)
    for m in step.mesh_dims:
        match step.kind:
            case "all_gather" | "all_reduce":
                found[m] = replicate()
            case "reduce_scatter" | "all_to_all" | "slice":
                found[m] = shard(target if target is not None else 0)
            case "pad" | "keep_first":
                found[m] = partial(step.op)
            case "scale":
                found[m] = partial("sum" if reduce_op(found[m]) == "avg" else "avg")
    return from_cuts(found, cuts)


def from_cuts(placements: Mapping[int, Placement], cuts: Mapping[int, tuple[int, ...]]) -> Layout:
    """A layout whose tensor dimensions are cut in these orders."""
    found = dict(placements)
    for dim, mesh_dims in cuts.items():
        ordered = list(mesh_dims) != sorted(mesh_dims)
        for order, m in enumerate(mesh_dims):
            if shard_dim(found[m]) == dim:
                found[m] = shard(dim, order if ordered else None)
    return tuple(found[m] for m in sorted(found))
