"""From one layout to another: the cheapest order of single-dimension steps.

A shortest-path search over layouts. An edge changes the placement on one mesh dimension; it is
valid when that dimension is the innermost one that shards the tensor dimension concerned, which
is what keeps nested shards right. Weights are bytes sent for a nominal tensor: the program of a
port never depends on the shape, so it is the same on all ranks and at all lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import cache

from fxboundary.errors import UnsupportedTransitionError
from fxboundary.placements import (
    Layout,
    Placement,
    named_layout_text,
    placement_text,
    reduce_op,
    replicate,
    shard_dim,
)
from fxboundary.transition.steps import Step

_NOMINAL_BYTES = 1 << 40
_LAUNCH = 1 << 24  # what one collective costs, in bytes of the nominal tensor
_LOCAL = 64  # a local copy costs 1/64 of sending the same bytes


@cache
def plan_steps(
    src: Layout, dst: Layout, sizes: tuple[int, ...], names: tuple[str, ...]
) -> tuple[Step, ...]:
    """Steps that take ``src`` to ``dst`` on a mesh of these sizes, cheapest first found.

    Shard dimensions must be normalised. Steps on mesh dimensions of size 1 change no value and
    are left out.

    Raises:
        UnsupportedTransitionError: the change has no meaning, as P → P(max).
    """
    _refuse_meaningless(src, dst, names)
    # A sum that was left is not entered again: it would be reduced twice.
    candidates = [
        _unique((d, replicate()) if s.is_partial() else (s, d, replicate()))
        for s, d in zip(src, dst, strict=True)
    ]
    queue: list[tuple[int, int, int, Layout, tuple[Step, ...]]] = [(0, 0, 0, src, ())]
    done: set[Layout] = set()
    pushed = 0
    while queue:
        cost, _, _, layout, steps = heapq.heappop(queue)
        if layout == dst:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for m, options in enumerate(candidates):
            for target in options:
                for step in _edge(layout, m, target, sizes[m]):
                    pushed += 1
                    reached = (*layout[:m], target, *layout[m + 1 :])
                    taken = (*steps, *step) if sizes[m] > 1 else steps
                    weight = cost + sum(_weight(s, layout, sizes) for s in step)
                    heapq.heappush(queue, (weight, len(taken), pushed, reached, taken))
    raise UnsupportedTransitionError(
        f"no program from {named_layout_text(src, names)} to {named_layout_text(dst, names)}"
    )


def _unique(placements: Sequence[Placement]) -> Layout:
    return tuple(dict.fromkeys(placements))


def _refuse_meaningless(src: Layout, dst: Layout, names: Sequence[str]) -> None:
    for name, s, d in zip(names, src, dst, strict=True):
        if (
            s != d
            and d.is_partial()
            and not _can_become_partial(placement_text(s), placement_text(d))
        ):
            raise UnsupportedTransitionError(
                f"{name}: {placement_text(s)} → {placement_text(d)} has no meaning; "
                f"reduce to R or S(dim) first"
            )
    for layout in (src, dst):
        ops = {op for p in layout if (op := reduce_op(p)) is not None}
        if len(ops) > 1 and not ops <= {"sum", "avg"}:
            raise UnsupportedTransitionError(
                f"{named_layout_text(layout, names)}: {' and '.join(sorted(ops))} give another "
                f"value in another order; reduce one of them first"
            )


def _can_become_partial(src: str, dst: str) -> bool:
    return dst in ("P", "P(avg)") and (src[0] in "RS" or src in ("P", "P(avg)"))


def _edge(layout: Layout, m: int, target: Placement, n: int) -> Iterator[tuple[Step, ...]]:
    """The steps that put ``target`` on mesh dimension ``m``, if that is a valid single move."""
    source = layout[m]
    if source == target:
        return
    s, d = placement_text(source), placement_text(target)
    a, b = shard_dim(source), shard_dim(target)
    if _sharded_inside(layout, m, a) or _sharded_inside(layout, m, b):
        return
    outer = _sharded_outside(layout, m, a)
    op = reduce_op(source) or "sum"
    match s[0], d[0]:
        case "S", "R":
            yield (Step("all_gather", m, a, outer=outer),)
        case "S", "S":
            yield (Step("all_to_all", m, a, b, outer=outer),)
        case "S", "P":
            yield (Step("pad", m, a, outer=outer), *_average(m, d, n))
        case "R", "S":
            yield (Step("slice", m, b),)
        case "R", "P":
            yield (Step("keep_first", m),) if d == "P" else ()
        case "P", "R":
            yield (Step("all_reduce", m, op=op),)
        case "P", "S":
            yield (Step("reduce_scatter", m, b, op=op),)
        case "P", "P" if {s, d} == {"P", "P(avg)"}:
            yield (Step("scale", m, factor=n if d == "P(avg)" else 1 / n),)


def _average(m: int, dst: str, n: int) -> tuple[Step, ...]:
    return (Step("scale", m, factor=n),) if dst == "P(avg)" else ()


def _sharded_inside(layout: Layout, m: int, dim: int | None) -> bool:
    return dim is not None and dim in map(shard_dim, layout[m + 1 :])


def _sharded_outside(layout: Layout, m: int, dim: int | None) -> tuple[int, ...]:
    return () if dim is None else tuple(i for i in range(m) if shard_dim(layout[i]) == dim)


def _weight(step: Step, layout: Layout, sizes: Sequence[int]) -> int:
    local = _NOMINAL_BYTES
    for placement, n in zip(layout, sizes, strict=True):
        local //= n if placement.is_shard() else 1
    if not step.is_collective:
        return local // _LOCAL + 1
    return sent_bytes(step, local, sizes[step.mesh_dim]) + _LAUNCH


def sent_bytes(step: Step, local_bytes: int, n: int) -> int:
    """Bytes one rank sends in a step whose input holds ``local_bytes``, ring algorithms.

    all_gather (n-1)·b, reduce_scatter and all_to_all (n-1)/n·b, all_reduce 2(n-1)/n·b: the
    bandwidth-optimal counts of Thakur, Rabenseifner, Gropp, "Optimization of Collective
    Communication Operations in MPICH" (2005).
    """
    match step.kind:
        case "all_gather":
            return (n - 1) * local_bytes
        case "reduce_scatter" | "all_to_all":
            return (n - 1) * local_bytes // n
        case "all_reduce":
            return 2 * (n - 1) * local_bytes // n
    return 0
