"""Layouts and the steps between them: the graph that the planner searches.

An edge is one step. It is there when it keeps nested shards right: only the innermost cuts of a
tensor dimension can be gathered or moved, and new cuts are made inside the others. Several mesh
dimensions are taken as one group wherever one collective can serve them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fxboundary.mesh import MeshSpec
from fxboundary.placements import REDUCE_OPS
from fxboundary.transition.cost import CostModel, Link, Weights, weights
from fxboundary.transition.relayout import group_of
from fxboundary.transition.states import (
    AVG,
    SUM,
    R,
    State,
    becomes,
    decode,
    renumbered,
    state_nests,
    with_code,
    with_cut,
)
from fxboundary.transition.steps import Step


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
    enters: int  # the bits of what mesh dimensions become, see states.becomes


@cache
def layout_graph(
    mesh: MeshSpec, dims: tuple[int, ...], model: CostModel, orders: bool
) -> LayoutGraph:
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
        targets = [max(g, R) for g in goal]  # whole, before it becomes a term of a sum
        moved = [m for m in self._wide if state[m] >= 0 and state[m] != targets[m]]
        reached = set()
        for k in range(1, len(moved) + 1):
            for chosen in itertools.combinations(moved, k):
                codes = [targets[m] if m in chosen else c for m, c in enumerate(state)]
                target = renumbered(codes, chosen)
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
                enters |= becomes(m, after)
        return Edge(target, step, found, ratio, found.before + found.after * ratio, enters)

    def _cuts(self, state: State) -> int:
        return math.prod(n for c, n in zip(state, self.mesh.sizes, strict=True) if c > 0)

    def _find(self, state: State) -> Iterator[Edge]:
        cuts = state_nests(state)
        for dim, nest in cuts.items():
            for k in range(len(nest) if self.mesh.flattens else 1):
                outer, inner = nest[: len(nest) - k - 1], nest[len(nest) - k - 1 :]
                yield self._edge(
                    state, with_code(state, inner, R), Step("all_gather", inner, dim, outer=outer)
                )
                for to in self.dims:
                    if to != dim:
                        around = cuts.get(to, ())
                        step = Step("all_to_all", inner, dim, to, outer=outer, to_outer=around)
                        target = with_cut(state, inner, to, len(around))
                        yield self._edge(state, target, step)
            (*outer_dims, last) = nest
            pad = Step("pad", (last,), dim, outer=tuple(outer_dims))
            yield self._edge(state, with_code(state, (last,), SUM), pad)
        yield from self._reductions(state, cuts)
        for m in self._wide:
            if state[m] == R:
                for dim in self.dims:
                    around = cuts.get(dim, ())
                    cut = Step("slice", (m,), dim, outer=around)
                    target = with_cut(state, (m,), dim, len(around))
                    yield self._edge(state, target, cut)
                for c, op in enumerate(REDUCE_OPS, 1):
                    # A mean, a largest or a smallest of equal values is that value.
                    keep = Step("keep_first", (m,), op=op) if op in ("sum", "product") else None
                    yield self._edge(state, with_code(state, (m,), -c), keep)
            elif state[m] in (SUM, AVG):
                n = self.mesh.sizes[m]
                other, factor = (AVG, n) if state[m] == SUM else (SUM, 1 / n)
                scale = Step("scale", (m,), factor=factor)
                yield self._edge(state, with_code(state, (m,), other), scale)

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
                        state, with_code(state, group, R), Step("all_reduce", group, op=op)
                    )
                    ways = itertools.permutations(group) if self._orders else (group,)
                    for dim, order in itertools.product(self.dims, ways):
                        around = cuts.get(dim, ())
                        step = Step("reduce_scatter", order, dim, op=op, outer=around)
                        yield self._edge(state, with_cut(state, order, dim, len(around)), step)
