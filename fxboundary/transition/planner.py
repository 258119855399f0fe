"""From one layout to another: the cheapest program, by a shortest-path search over layouts.

An edge is one step. It is there when it keeps nested shards right: only the innermost cuts of a
tensor dimension can be gathered or moved, and new cuts are made inside the others. Several mesh
dimensions are taken as one group wherever one collective can serve them. A program cuts only
tensor dimensions that its ends cut.

Layouts are tuples of integers here, for speed: 0 is R, a negative number a reduction, a positive
one a cut of a tensor dimension and its place among the cuts of that dimension.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from fxboundary.errors import UnsupportedTransitionError
from fxboundary.mesh import MeshSpec
from fxboundary.placements import (
    REDUCE_OPS,
    Layout,
    chunk_bounds,
    named_layout_text,
    nests,
    partial,
    placement_text,
    reduce_op,
    replicate,
    shard,
)
from fxboundary.transition.cost import CostModel, Link, Weights, weights
from fxboundary.transition.relayout import group_of
from fxboundary.transition.steps import Step

State = tuple[int, ...]
_R = 0
_WIDTH = 16  # more cuts of one dimension than a mesh has dimensions
_SUM, _AVG = -1, -2


@dataclass(frozen=True)
class Tensor:
    """What a program is planned for: the global shape, and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Edge:
    """One step to another layout; no step where the layout changes its name only.

    Seconds are ``latency + before·b + after·a``, from the bytes of the shard before and after,
    or with even shards ``latency + even·b``: then the shard becomes ``ratio`` times as large.
    """

    target: State
    step: Step | None
    weights: Weights
    ratio: float
    even: float
    enters: int  # the bits of what mesh dimensions become, see _bit


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
        orders = any(_is_ordered(state) for state in (start, goal))
        self._graph = _graph(mesh, dims, model, orders)
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
    sums = any(c in (_SUM, _AVG) for c in start)
    for m, (s, g) in enumerate(zip(start, goal, strict=True)):
        codes = {s, g}
        if s > 0 or (s < 0 and g >= 0):
            codes.add(_R)
        if (s > 0 and g == _R and sums) or _AVG in (s, g):
            codes.add(_SUM)
        for code in codes:
            bits |= _bit(m, code)
        if s < 0 and g == _R:
            for dim in dims:
                bits |= _bit(m, 1 + dim * _WIDTH)
    return bits


def _bit(m: int, code: int) -> int:
    """One bit for a mesh dimension and R, a reduction, or a tensor dimension."""
    kind = cut_dim(code) + 1 + len(REDUCE_OPS) if code > 0 else -code
    return 1 << (m + kind * 8)  # a mesh has fewer than 8 dimensions


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
def _graph(mesh: MeshSpec, dims: tuple[int, ...], model: CostModel, orders: bool) -> LayoutGraph:
    return LayoutGraph(mesh, dims, model, orders)


class LayoutGraph:
    """Layouts and the steps between them, found when they are first asked for.

    ``dims`` are the tensor dimensions that may be cut; ``orders`` says whether several new cuts
    are made in every order, or in the mesh's alone.
    """

    def __init__(
        self, mesh: MeshSpec, dims: tuple[int, ...], model: CostModel, orders: bool
    ) -> None:
        self.mesh, self.dims, self.model, self._orders = mesh, dims, model, orders
        self._wide = [m for m, n in enumerate(mesh.sizes) if n > 1]
        links = [model.link(mesh, (m,)) for m in self._wide] or [Link(0.0, math.inf)]
        self.fastest = Link(min(x.latency for x in links), max(x.bandwidth for x in links))
        self._steps: dict[State, tuple[Edge, ...]] = {}
        self._edges: dict[tuple[State, State], tuple[Edge, ...]] = {}

    def edges(self, state: State, goal: State) -> tuple[Edge, ...]:
        """All steps from a layout, relayouts straight to the goal among them."""
        found = self._edges.get((state, goal))
        if found is None:
            steps = self._steps.get(state)
            if steps is None:
                steps = self._steps[state] = tuple(self._find(state))
            found = (*steps, *self._find_relayouts(state, goal))
            self._edges[state, goal] = found
        return found

    def _find_relayouts(self, state: State, goal: State) -> Iterator[Edge]:
        """Steps that bring some mesh dimensions to their goal at once, where nothing is pending."""
        targets = [max(g, _R) for g in goal]  # whole, before it becomes a term of a sum
        moved = [m for m in self._wide if state[m] >= 0 and state[m] != targets[m]]
        reached = set()
        for k in range(1, len(moved) + 1):
            for chosen in itertools.combinations(moved, k):
                codes = [targets[m] if m in chosen else c for m, c in enumerate(state)]
                target = _renumbered(codes, chosen)
                src, dst = decode(state), decode(target)
                group = group_of(src, dst)
                alone = len(group) == 1 or self.mesh.flattens
                # Cuts alone need no communication.
                if alone and target not in reached and any(state[m] > 0 for m in group):
                    reached.add(target)
                    step = Step("all_to_all_v", group, src=src, dst=dst)
                    yield self._edge(state, target, step)

    def _edge(self, state: State, target: State, step: Step | None) -> Edge:
        found = Weights(0, 0, 0, 0, 0) if step is None else weights(step, self.mesh, self.model)
        ratio = self._cuts(state) / self._cuts(target)
        enters = 0
        for m, (before, after) in enumerate(zip(state, target, strict=True)):
            if before != after:
                enters |= _bit(m, after)
        return Edge(target, step, found, ratio, found.before + found.after * ratio, enters)

    def _cuts(self, state: State) -> int:
        return math.prod(n for c, n in zip(state, self.mesh.sizes, strict=True) if c > 0)

    def _find(self, state: State) -> Iterator[Edge]:
        cuts = state_nests(state)
        for dim, nest in cuts.items():
            for k in range(len(nest) if self.mesh.flattens else 1):
                outer, inner = nest[: len(nest) - k - 1], nest[len(nest) - k - 1 :]
                yield self._edge(
                    state, _with(state, inner, _R), Step("all_gather", inner, dim, outer=outer)
                )
                for to in self.dims:
                    if to != dim:
                        around = cuts.get(to, ())
                        step = Step("all_to_all", inner, dim, to, outer=outer, to_outer=around)
                        target = _cut(state, inner, to, len(around))
                        yield self._edge(state, target, step)
            (*outer_dims, last) = nest
            pad = Step("pad", (last,), dim, outer=tuple(outer_dims))
            yield self._edge(state, _with(state, (last,), _SUM), pad)
        yield from self._reductions(state, cuts)
        for m in self._wide:
            if state[m] == _R:
                for dim in self.dims:
                    around = cuts.get(dim, ())
                    cut = Step("slice", (m,), dim, outer=around)
                    target = _cut(state, (m,), dim, len(around))
                    yield self._edge(state, target, cut)
                for c, op in enumerate(REDUCE_OPS, 1):
                    # A mean, a largest or a smallest of equal values is that value.
                    keep = Step("keep_first", (m,), op=op) if op in ("sum", "product") else None
                    yield self._edge(state, _with(state, (m,), -c), keep)
            elif state[m] in (_SUM, _AVG):
                n = self.mesh.sizes[m]
                other, factor = (_AVG, n) if state[m] == _SUM else (_SUM, 1 / n)
                scale = Step("scale", (m,), factor=factor)
                yield self._edge(state, _with(state, (m,), other), scale)

    def _reductions(self, state: State, cuts: dict[int, tuple[int, ...]]) -> Iterator[Edge]:
        pending: dict[int, list[int]] = {}
        for m in self._wide:
            if state[m] < 0:
                pending.setdefault(state[m], []).append(m)
        for code, members in pending.items():
            op = REDUCE_OPS[-code - 1]
            for k in range(1, len(members) + 1 if self.mesh.flattens else 2):
                for group in itertools.combinations(members, k):
                    yield self._edge(
                        state, _with(state, group, _R), Step("all_reduce", group, op=op)
                    )
                    ways = itertools.permutations(group) if self._orders else (group,)
                    for dim, order in itertools.product(self.dims, ways):
                        around = cuts.get(dim, ())
                        step = Step("reduce_scatter", order, dim, op=op, outer=around)
                        yield self._edge(state, _cut(state, order, dim, len(around)), step)


def cut_dim(code: int) -> int:
    return (code - 1) // _WIDTH


@cache
def _state(layout: Layout, mesh: MeshSpec) -> State:
    return encode(_without_ones(layout, mesh))


def encode(layout: Layout) -> State:
    """A layout as integers."""
    found = [
        0 if p.is_replicate() else -1 - REDUCE_OPS.index(reduce_op(p) or "sum") for p in layout
    ]
    for dim, mesh_dims in nests(layout).items():
        for place, m in enumerate(mesh_dims):
            found[m] = 1 + dim * _WIDTH + place
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


def _is_ordered(state: State) -> bool:
    """Whether a dimension is cut in another order than the mesh's."""
    return any(list(found) != sorted(found) for found in state_nests(state).values())


def _renumbered(codes: Sequence[int], new: Sequence[int]) -> State:
    """Codes whose places are counted anew; of two at one place the ``new`` one is inside."""
    found = list(codes)
    for dim in {cut_dim(c) for c in codes if c > 0}:
        members = [m for m, c in enumerate(codes) if c > 0 and cut_dim(c) == dim]
        for place, m in enumerate(sorted(members, key=lambda m: (codes[m], m in new))):
            found[m] = 1 + dim * _WIDTH + place
    return tuple(found)


def _with(state: State, mesh_dims: Sequence[int], code: int) -> State:
    return tuple(code if m in mesh_dims else c for m, c in enumerate(state))


def _cut(state: State, mesh_dims: Sequence[int], dim: int, place: int) -> State:
    codes = {m: 1 + dim * _WIDTH + place + i for i, m in enumerate(mesh_dims)}
    return tuple(codes.get(m, c) for m, c in enumerate(state))


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
