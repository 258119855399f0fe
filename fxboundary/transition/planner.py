"""From one layout to another: the cheapest program, by a shortest-path search over layouts.

A program cuts only tensor dimensions that its ends cut; what each mesh dimension may become on the
way is said in :func:`_allowed`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fxboundary.errors import UnsupportedTransitionError
from fxboundary.mesh import MeshSpec
from fxboundary.placements import (
    Layout,
    chunk_bounds,
    named_layout_text,
    nests,
    placement_text,
    reduce_op,
    replicate,
    shard,
)
from fxboundary.transition.cost import CostModel
from fxboundary.transition.layout_graph import layout_graph
from fxboundary.transition.states import (
    AVG,
    SUM,
    WIDTH,
    R,
    State,
    becomes,
    cut_dim,
    encode,
    is_ordered,
    state_nests,
)
from fxboundary.transition.steps import Step


@dataclass(frozen=True)
class Tensor:
    """What a program is planned for: the global shape, and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int


def plan_steps(
    src: Layout,
    dst: Layout,
    mesh: MeshSpec,
    model: CostModel,
    tensor: Tensor | None = None,
    memory_limit: int | None = None,
) -> tuple[Step, ...]:
    """The cheapest steps that take ``src`` to ``dst``; the same on every rank.

    Shard dimensions must be normalised. Without a ``tensor`` the program is one for a large
    tensor of even shards: the program of a port never depends on the shape, so it is the same
    at all lengths. Mesh dimensions of size 1 change no value and are left out.

    Raises:
        UnsupportedTransitionError: the change has no meaning, or no program stays within
            ``memory_limit`` bytes besides the input.
    """
    refuse_meaningless(src, dst, mesh.names)
    start, goal = _state(src, mesh), _state(dst, mesh)
    search = Search(start, goal, mesh, model, tensor, memory_limit)
    steps = search.run()
    if steps is None:
        raise UnsupportedTransitionError(
            f"no program from {named_layout_text(src, mesh.names)} to "
            f"{named_layout_text(dst, mesh.names)}"
            + ("" if memory_limit is None else f" needs at most {memory_limit} bytes of memory")
        )
    return steps


class Search:
    """A* from one layout to another; what is left costs at least one collective, or nothing."""

    def __init__(
        self,
        start: State,
        goal: State,
        mesh: MeshSpec,
        model: CostModel,
        tensor: Tensor | None,
        memory_limit: int | None,
    ) -> None:
        self.start, self.goal, self.mesh = start, goal, mesh
        self._limit = math.inf if memory_limit is None else memory_limit
        dims = tuple(sorted({cut_dim(c) for c in (*start, *goal) if c > 0}))
        orders = any(is_ordered(state) for state in (start, goal))
        self._graph = layout_graph(mesh, dims, model, orders)
        self._tensor = tensor
        self._even = tensor is None or _is_even(tensor.shape, dims, mesh.sizes)
        self._allowed = _allowed(start, goal, dims)
        self._bytes: dict[State, float] = {}
        self._ahead: dict[State, tuple[float, float]] = {}

    def run(self) -> tuple[Step, ...] | None:
        goal, allowed, even, limit = self.goal, self._allowed, self._even, self._limit
        best: dict[State, float] = {self.start: 0.0}
        known, ahead = best.get, self._ahead.get
        bound, pushed = math.inf, 0
        first = self.bytes(self.start)
        queue: list[tuple[float, int, int, float, State, float, tuple[Step, ...]]] = [
            (0.0, 0, 0, 0.0, self.start, first, ())
        ]
        while queue:
            _, _, _, cost, state, before, steps = heapq.heappop(queue)
            if state == goal:
                return steps
            if cost > best[state]:
                continue
            for edge in self._graph.edges(state, goal):
                if edge.enters & allowed != edge.enters:
                    continue
                target, w = edge.target, edge.weights
                reached = (
                    cost
                    + w.latency
                    + (
                        edge.even * before
                        if even
                        else w.before * before + w.after * self.bytes(target)
                    )
                )
                if reached >= bound or reached >= known(target, math.inf):
                    continue
                after = before * edge.ratio if even else self.bytes(target)
                latency, half = ahead(target) or self.ahead(target)
                expected = reached + latency + half * after
                if expected >= bound:
                    continue
                held = w.held_before * before + w.held_after * after + (before if steps else 0)
                if held > limit:
                    continue
                best[target] = reached
                if target == goal:
                    bound = reached
                pushed += 1
                taken = steps if edge.step is None else (*steps, edge.step)
                entry = (expected, len(taken), pushed, reached, target, after, taken)
                heapq.heappush(queue, entry)
        return None

    def ahead(self, state: State) -> tuple[float, float]:
        """At least this many seconds are left, and seconds per byte of the shard.

        Shards that go elsewhere take a collective, and a reduction sends half of the shard.
        """
        fastest = self._graph.fastest
        found = (0.0, 0.0)
        for c, g in zip(state, self.goal, strict=True):
            if c and g >= 0:
                if c < 0:
                    found = (fastest.latency, 0.5 / fastest.bandwidth)
                    break
                if g == 0 or cut_dim(c) != cut_dim(g):
                    found = (fastest.latency, 0.0)
        self._ahead[state] = found
        return found

    def bytes(self, state: State) -> float:
        """Bytes of the largest shard."""
        found = self._bytes.get(state)
        if found is None:
            found = self._bytes[state] = _bytes(state, self.mesh.sizes, self._tensor)
        return found


def _is_even(shape: Sequence[int], dims: Sequence[int], sizes: Sequence[int]) -> bool:
    ranks = math.prod(sizes)
    return all(shape[dim] and shape[dim] % ranks == 0 for dim in dims)


def _allowed(start: State, goal: State, dims: Sequence[int]) -> int:
    """The bits of what each mesh dimension may become on the way.

    A mesh dimension that is replicated at both ends stays so: contracts do not name dimensions
    that are none of their business, and the values may well differ along these. Nor is a copy
    made use of that is only to become a term of a sum, or a sum touched that stays one. A sum
    that is reduced may be a shard of any dimension on the way; beside one a shard may become a
    term, to be reduced with it.
    """
    bits = 0
    sums = any(c in (SUM, AVG) for c in start)
    for m, (s, g) in enumerate(zip(start, goal, strict=True)):
        codes = {s, g}
        if s > 0 or (s < 0 and g >= 0):
            codes.add(R)
        if (s > 0 and g == R and sums) or AVG in (s, g):
            codes.add(SUM)
        for code in codes:
            bits |= becomes(m, code)
        if s < 0 and g == R:
            for dim in dims:
                bits |= becomes(m, 1 + dim * WIDTH)
    return bits


_NOMINAL = 1 << 26  # bytes of the large tensor that a program without a shape is planned for


def _bytes(state: State, sizes: Sequence[int], tensor: Tensor | None) -> float:
    cuts = state_nests(state)
    if tensor is None:
        return _NOMINAL / math.prod(sizes[m] for found in cuts.values() for m in found)
    shape = list(tensor.shape)
    for dim, mesh_dims in cuts.items():
        for m in mesh_dims:
            shape[dim] = chunk_bounds(shape[dim], sizes[m], 0)[1]
    return math.prod(shape) * tensor.itemsize


@cache
def _state(layout: Layout, mesh: MeshSpec) -> State:
    return encode(_without_ones(layout, mesh))


def _without_ones(layout: Layout, mesh: MeshSpec) -> Layout:
    found = list(layout)
    for dim, mesh_dims in nests(layout).items():
        wide = [m for m in mesh_dims if mesh.sizes[m] > 1]
        ordered = wide != sorted(wide)
        for place, m in enumerate(wide):
            found[m] = shard(dim, place if ordered else None)
    return tuple(p if n > 1 else replicate() for p, n in zip(found, mesh.sizes, strict=True))


def refuse_meaningless(src: Layout, dst: Layout, names: Sequence[str]) -> None:
    """Raise UnsupportedTransitionError where a change of layout has no meaning."""
    if not any(p.is_partial() for p in (*src, *dst)):
        return
    for name, s, d in zip(names, src, dst, strict=True):
        if s != d and d.is_partial() and not _can_become_partial(reduce_op(s), reduce_op(d)):
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


def _can_become_partial(src: str | None, dst: str | None) -> bool:
    return src is None or {src, dst} == {"sum", "avg"}
