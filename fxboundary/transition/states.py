"""Layouts as tuples of integers, one per mesh dimension: what the planner's search hashes.

0 is R, a negative number a reduction, a positive one a cut of a tensor dimension and its place
among the cuts of that dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxboundary.placements import (
    REDUCE_OPS,
    Layout,
    nests,
    partial,
    reduce_op,
    replicate,
    shard,
)

State = tuple[int, ...]
R = 0
WIDTH = 16  # more cuts of one dimension than a mesh has dimensions
SUM, AVG = -1, -2


def cut_dim(code: int) -> int:
    return (code - 1) // WIDTH


def encode(layout: Layout) -> State:
    """A layout as integers."""
    found = [
        0 if p.is_replicate() else -1 - REDUCE_OPS.index(reduce_op(p) or "sum") for p in layout
    ]
    for dim, mesh_dims in nests(layout).items():
        for place, m in enumerate(mesh_dims):
            found[m] = 1 + dim * WIDTH + place
    return tuple(found)


def decode(state: State) -> Layout:
    """The layout that :func:`encode` made integers of."""
    found = [replicate() if c >= 0 else partial(REDUCE_OPS[-c - 1]) for c in state]
    for dim, mesh_dims in state_nests(state).items():
        ordered = list(mesh_dims) != sorted(mesh_dims)
        for place, m in enumerate(mesh_dims):
            found[m] = shard(dim, place if ordered else None)
    return tuple(found)


def state_nests(state: State) -> dict[int, tuple[int, ...]]:
    """Per tensor dimension the mesh dimensions that cut it, outermost first."""
    found: dict[int, tuple[int, ...]] = {}
    for _, m in sorted((c, m) for m, c in enumerate(state) if c > 0):
        dim = cut_dim(state[m])
        found[dim] = (*found.get(dim, ()), m)
    return found


def is_ordered(state: State) -> bool:
    """Whether a dimension is cut in another order than the mesh's."""
    return any(list(found) != sorted(found) for found in state_nests(state).values())


def renumbered(codes: Sequence[int], new: Sequence[int]) -> State:
    """Codes whose places are counted anew; of two at one place the ``new`` one is inside."""
    found = list(codes)
    for dim in {cut_dim(c) for c in codes if c > 0}:
        members = [m for m, c in enumerate(codes) if c > 0 and cut_dim(c) == dim]
        for place, m in enumerate(sorted(members, key=lambda m: (codes[m], m in new))):
            found[m] = 1 + dim * WIDTH + place
    return tuple(found)


def with_code(state: State, mesh_dims: Sequence[int], code: int) -> State:
    return tuple(code if m in mesh_dims else c for m, c in enumerate(state))


def with_cut(state: State, mesh_dims: Sequence[int], dim: int, place: int) -> State:
    codes = {m: 1 + dim * WIDTH + place + i for i, m in enumerate(mesh_dims)}
    return tuple(codes.get(m, c) for m, c in enumerate(state))


def becomes(m: int, code: int) -> int:
    """One bit for a mesh dimension and R, a reduction, or a tensor dimension."""
    kind = cut_dim(code) + 1 + len(REDUCE_OPS) if code > 0 else -code
    return 1 << (m + kind * 8)  # a mesh has fewer than 8 dimensions
