"""The planner's program is as cheap as the best of all programs, found by trying all of them."""

from __future__ import annotations

import itertools

import pytest
import torch

import fxboundary as fb
from fxboundary.mesh import MeshSpec
from fxboundary.placements import nests, parse_layout, shard_dim
from fxboundary.transition.cost import CostModel, Link, cost
from fxboundary.transition.relayout import group_of
from fxboundary.transition.steps import Step, layout_after

DIMS = (0, 1)
LAYOUTS = [
    *(parse_layout(",".join(c)) for c in itertools.product(("R", "P", "S(0)", "S(1)"), repeat=2)),
    parse_layout("S(0)[1],S(0)[0]"),
    parse_layout("S(1)[1],S(1)[0]"),
]
GROUPS = [(0,), (1,), (0, 1), (1, 0)]


def steps_between(src, dst, sizes):
    """Every step of the vocabulary that is right from one layout to the other."""
    before = nests(src)
    for group in GROUPS:
        pending = all(src[m].is_partial() for m in group)
        if pending and group != (1, 0):
            yield Step("all_reduce", group)
        for dim in DIMS:
            nest = before.get(dim, ())
            innermost = nest[len(nest) - len(group) :] == group
            outer = nest[: len(nest) - len(group)]
            if pending:
                yield Step("reduce_scatter", group, dim, outer=nest)
            if innermost:
                yield Step("all_gather", group, dim, outer=outer)
                for to in DIMS:
                    if to != dim:
                        around = before.get(to, ())
                        yield Step("all_to_all", group, dim, to, outer=outer, to_outer=around)
                if len(group) == 1:
                    yield Step("pad", group, dim, outer=outer)
            if len(group) == 1 and src[group[0]].is_replicate():
                yield Step("slice", group, dim, outer=nest)
        if len(group) == 1 and src[group[0]].is_replicate():
            yield Step("keep_first", group)
    moved = group_of(src, dst)
    still = all(s.is_partial() == d.is_partial() for s, d in zip(src, dst, strict=True))
    if still and any(shard_dim(src[m]) is not None for m in moved):
        yield Step("all_to_all_v", moved, src=src, dst=dst)


def allowed_between(src, dst):
    """Layouts that a program may pass through, by what each mesh dimension may be on the way.

    Nothing else than its ends, and: R after a shard or a sum; where a sum is to be reduced, a
    shard of any dimension that an end cuts; where a shard is to be whole and there is a sum, a
    term of one.
    """
    ends = (*src, *dst)
    cuts = [fb.parse_placement(f"S({p.dim})") for p in ends if p.is_shard()]
    sums = any(p.is_partial() for p in src)
    options = []
    for s, d in zip(src, dst, strict=True):
        found = [plain(s), plain(d)]
        if s.is_shard() or (s.is_partial() and not d.is_partial()):
            found.append(fb.parse_placement("R"))
        if s.is_partial() and d.is_replicate():
            found += cuts
        if s.is_shard() and d.is_replicate() and sums:
            found.append(fb.parse_placement("P"))
        options.append(found)
    for layout in LAYOUTS:
        if all(plain(p) in found for p, found in zip(layout, options, strict=True)):
            yield layout


def plain(placement):
    return fb.parse_placement(f"S({placement.dim})") if placement.is_shard() else placement


def goes_to_goal(step, dst):
    """Whether an all_to_all_v brings what it changes to its goal, new cuts inside of old ones."""
    if step.kind != "all_to_all_v" or step.dst == dst:
        return True
    changed = [m for m in (0, 1) if plain(step.src[m]) != plain(step.dst[m])]
    goals = [fb.parse_placement("R") if p.is_partial() else plain(p) for p in dst]
    if not changed or any(plain(step.dst[m]) != goals[m] for m in changed):
        return False
    nested = [nest for nest in nests(step.dst).values() if len(nest) == 2]
    return not nested or changed == [nested[0][1]]


def cheapest(src, dst, shape, spec, model):
    """Seconds of the best program, by relaxing every step until nothing improves."""
    allowed = list(allowed_between(src, dst))
    seconds = {src: 0.0}
    improved = True
    while improved:
        improved = False
        for a, b in itertools.product(list(seconds), allowed):
            for step in EDGES[a, b]:
                if not goes_to_goal(step, dst):
                    continue
                found = seconds[a] + cost([step], a, shape, 4, spec, model)[0]
                if found < seconds.get(b, float("inf")) - 1e-18:
                    seconds[b] = found
                    improved = True
    return seconds[dst]


EDGES = {
    (a, b): [s for s in steps_between(a, b, None) if layout_after(s, a) == b]
    for a, b in itertools.product(LAYOUTS, repeat=2)
}
UNEQUAL = CostModel({"a": Link(3e-5, 1e10), "b": Link(1e-5, 3e11)})


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)])
@pytest.mark.parametrize("shape", [(16, 16), (1024, 1024), (8192, 8192)])
@pytest.mark.parametrize("model", [CostModel(), UNEQUAL], ids=["equal", "unequal"])
def test_no_program_is_cheaper(sizes, shape, model):
    spec = MeshSpec(("a", "b"), sizes)
    for src, dst in itertools.product(LAYOUTS, repeat=2):
        program = fb.plan_transition(src, dst, spec, shape, torch.float32, model=model)
        best = cheapest(src, dst, shape, spec, model)
        assert program.cost == pytest.approx(best, rel=1e-9, abs=1e-15), (
            f"{program}: {program.cost}, but {best} is possible"
        )
