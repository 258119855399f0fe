"""Which parts of a tensor move between which ranks when its shards change: integers, no tensors.

Sizes are counted in units: the elements of a dimension whose global size is declared, else the
largest equal parts of which both layouts' shards are whole multiples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fxboundary.placements import Layout, chunk_bounds, nests, shard_dim

Box = tuple[tuple[int, int], ...]  # start and stop, per tensor dimension


@dataclass(frozen=True)
class Relayout:
    """What this rank sends and receives, per rank of the group (``None`` where nothing).

    ``dims`` are the tensor dimensions of the boxes, ``units`` their global sizes in units,
    ``held`` and ``wanted`` this rank's boxes before and after. ``sends`` are relative to
    ``held``, ``receives`` to ``wanted``.
    """

    dims: tuple[int, ...]
    units: tuple[int, ...]
    held: Box
    wanted: Box
    sends: tuple[Box | None, ...]
    receives: tuple[Box | None, ...]


def group_of(src: Layout, dst: Layout) -> tuple[int, ...]:
    """The mesh dimensions across which data moves from ``src`` to ``dst``, ascending.

    A mesh dimension that cuts a tensor dimension first in both layouts keeps data apart; what
    cuts inside of the first difference does not.
    """
    found: set[int] = set()
    before, after = nests(src), nests(dst)
    for dim in {*before, *after}:
        old, new = before.get(dim, ()), after.get(dim, ())
        common = next(
            (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
            min(len(old), len(new)),
        )
        found.update(old[common:], new[common:])
    return tuple(sorted(found))


def group_coordinates(
    coordinate: Sequence[int], sizes: Sequence[int], mesh_dims: Sequence[int]
) -> list[tuple[int, ...]]:
    """Mesh coordinates of the ranks of a group, in the group's order (row-major)."""
    found = []
    for index in itertools.product(*(range(sizes[m]) for m in mesh_dims)):
        member = list(coordinate)
        for m, i in zip(mesh_dims, index, strict=True):
            member[m] = i
        found.append(tuple(member))
    return found


def even_units(src: Layout, dst: Layout, sizes: Sequence[int], dim: int) -> int:
    """Into how many equal parts a dimension falls so that all shards are whole parts."""
    counts = [
        math.prod(n for p, n in zip(layout, sizes, strict=True) if shard_dim(p) == dim)
        for layout in (src, dst)
    ]
    return math.lcm(*counts)


@cache
def relayout(
    src: Layout,
    dst: Layout,
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    declared: tuple[tuple[int, int], ...],
) -> Relayout:
    """The relayout of this rank; ``declared`` are global sizes by dimension.

    Every part a rank lacks comes from the one rank that holds it and has the same coordinate on
    the mesh dimensions that do not cut it: itself, where it holds the part already.
    """
    known = dict(declared)
    dims = tuple(sorted({*nests(src), *nests(dst)}))
    units = tuple(known.get(d, even_units(src, dst, sizes, d)) for d in dims)
    mesh_dims = group_of(src, dst)
    members = group_coordinates(coordinate, sizes, mesh_dims)
    replicated = [m for m in mesh_dims if shard_dim(src[m]) is None]

    def box(layout: Layout, at: Sequence[int]) -> Box:
        return tuple(_interval(layout, d, u, sizes, at) for d, u in zip(dims, units, strict=True))

    held, wanted = box(src, coordinate), box(dst, coordinate)

    def is_source(sender: Sequence[int], receiver: Sequence[int]) -> bool:
        return all(sender[m] == receiver[m] for m in replicated)

    sends, receives = [], []
    for member in members:
        sends.append(
            _relative(_meet(held, box(dst, member)), held)
            if is_source(coordinate, member)
            else None
        )
        receives.append(
            _relative(_meet(box(src, member), wanted), wanted)
            if is_source(member, coordinate)
            else None
        )
    return Relayout(dims, units, held, wanted, tuple(sends), tuple(receives))


def _interval(
    layout: Layout, dim: int, size: int, sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, int]:
    start, length = 0, size
    for m in nests(layout).get(dim, ()):
        offset, length = chunk_bounds(length, sizes[m], coordinate[m])
        start += offset
    return start, start + length


def _meet(a: Box, b: Box) -> Box | None:
    box = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _relative(box: Box | None, whole: Box) -> Box | None:
    if box is None:
        return None
    return tuple((a - w[0], b - w[0]) for (a, b), w in zip(box, whole, strict=True))


def volume(box: Box | None) -> int:
    return 0 if box is None else math.prod(stop - start for start, stop in box)


def sent_units(plan: Relayout) -> int:
    """Units that this rank sends to others."""
    return sum(map(volume, plan.sends)) - volume(_meet(plan.held, plan.wanted))


@cache
def busiest_fraction(src: Layout, dst: Layout, sizes: tuple[int, ...]) -> float:
    """The larger of what one rank sends and receives, in its even shards; the busiest rank's.

    It receives its new shard without what it holds of it already, which is nothing on some rank
    where the cuts of a tensor dimension differ before one layout runs out of them. It sends its
    shard to every rank that holds it afterwards, but of copies only one sends: the part that a
    copy's own place cuts out.
    """
    before, after = nests(src), nests(dst)
    group = set(group_of(src, dst))
    held, wanted, own = held_wanted_own(src, dst, sizes)
    sent = 1.0
    for dim, new in after.items():
        shard = 1 / math.prod(sizes[m] for m in before.get(dim, ()))
        block = 1.0
        for m in new:
            block /= sizes[m]
            if m in group and shard_dim(src[m]) is None:
                sent *= min(1.0, max(1 / sizes[m], block / shard))
    for m in group:
        if shard_dim(src[m]) is not None and shard_dim(dst[m]) is None:
            sent *= sizes[m]
    return max(wanted - own, sent * held - own) / held


@cache
def is_permutation(src: Layout, dst: Layout, sizes: tuple[int, ...]) -> bool:
    """Whether ranks exchange whole shards, so that nothing is packed or put together."""
    held, wanted, _ = held_wanted_own(src, dst, sizes)
    if held != wanted:
        return False
    ends = ((0,) * len(sizes), tuple(n - 1 for n in sizes))
    plans = [relayout(src, dst, sizes, coordinate, ()) for coordinate in ends]
    return all(
        sum(box is not None for box in boxes) == 1
        for plan in plans
        for boxes in (plan.sends, plan.receives)
    )


def held_wanted_own(src: Layout, dst: Layout, sizes: Sequence[int]) -> tuple[float, float, float]:
    """Parts of the whole tensor in one rank's even shards before and after, and the least part
    that both hold on some rank."""
    before, after = nests(src), nests(dst)
    held = wanted = own = 1.0
    for dim in {*before, *after}:
        old, new = before.get(dim, ()), after.get(dim, ())
        a, b = (1 / math.prod(sizes[m] for m in nest) for nest in (old, new))
        held, wanted = held * a, wanted * b
        common = min(len(old), len(new))
        own *= min(a, b) if old[:common] == new[:common] else 0.0
    return held, wanted, own
