"""Which steps a change of layout takes, and which changes are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import fxboundary as fb
from fxboundary.mesh import MeshSpec
from fxboundary.transition.cost import DEFAULT_MODEL, sent_bytes
from fxboundary.transition.layout_graph import layout_graph
from fxboundary.transition.planner import plan_steps


def steps(src, dst, mesh):
    program = fb.plan_transition(src, dst, mesh, (256, 256, 256))
    return program.transition.steps_text(program.steps)


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        ("S(1)", "R", "all_gather(dim=1, tp=4)"),
        ("S(-1)", "R", "all_gather(dim=2, tp=4)"),
        ("R", "S(1)", "slice(dim=1, tp=4)"),
        ("P", "R", "all_reduce(tp=4)"),
        ("P(avg)", "R", "all_reduce(avg, tp=4)"),
        ("P(max)", "R", "all_reduce(max, tp=4)"),
        ("P", "S(0)", "reduce_scatter(dim=0, tp=4)"),
        ("P(avg)", "S(2)", "reduce_scatter(dim=2, avg, tp=4)"),
        ("S(0)", "S(2)", "all_to_all(gather=0, split=2, tp=4)"),
        ("R", "P", "keep_first(tp=4)"),
        ("R", "P(avg)", "nothing"),
        ("S(1)", "P", "pad(dim=1, tp=4)"),
        ("S(1)", "P(avg)", "pad(dim=1, tp=4), scale(4)"),
        ("P", "P(avg)", "scale(4)"),
        ("P(avg)", "P", "scale(0.25)"),
        ("R", "R", "nothing"),
        ("P", "P", "nothing"),
        ("P(max)", "P(max)", "nothing"),
        ("S(1)", "S(-2)", "nothing"),
    ],
)
def test_one_mesh_dimension_takes_one_step(src, dst, text):
    assert steps([src], [dst], {"tp": 4}) == text


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        # several mesh dimensions are one group where one collective can serve them
        ("P,P", "R,R", "all_reduce(dp=2, tp=4)"),
        ("S(0),S(0)", "R,R", "all_gather(dim=0, dp=2, tp=4)"),
        ("P,P", "S(0),S(0)", "reduce_scatter(dim=0, dp=2, tp=4)"),
        ("S(0),S(0)", "S(1),S(1)", "all_to_all(gather=0, split=1, dp=2, tp=4)"),
        ("S(0),S(1)", "S(1),S(0)", "all_to_all_v(S(0),S(1)->S(1),S(0), dp=2, tp=4)"),
        # of two cuts of one dimension, the inner leaves alone
        ("S(0),S(0)", "S(0),R", "all_gather(dim=0, tp=4)"),
        ("S(0)[1],S(0)[0]", "R,S(0)", "all_gather(dim=0, dp=2)"),
        ("S(0),S(0)", "R,S(0)", "all_to_all_v(S(0),S(0)->R,S(0), dp=2, tp=4)"),
        # what is local comes in the order of the cuts
        ("R,R", "S(0),S(0)", "slice(dim=0, dp=2), slice(dim=0, tp=4)"),
        ("R,R", "S(0)[1],S(0)[0]", "slice(dim=0, tp=4), slice(dim=0, dp=2)"),
        # what shrinks the tensor comes before what moves it
        ("R,P", "S(1),R", "slice(dim=1, dp=2), all_reduce(tp=4)"),
        ("P,S(1)", "S(0),R", "reduce_scatter(dim=0, dp=2), all_gather(dim=1, tp=4)"),
    ],
)
def test_two_mesh_dimensions_take_the_cheapest_program(src, dst, text):
    assert steps(src.split(","), dst.split(","), {"dp": 2, "tp": 4}) == text


@pytest.mark.parametrize(
    ("src", "dst", "small", "large"),
    [
        (
            "S(0)[1],S(0)[0]",
            "R,R",
            "all_gather(dim=0, tp=4, dp=2)",
            "all_gather(dim=0, dp=2), all_gather(dim=0, tp=4)",
        ),
        (
            "P,P",
            "S(0)[1],S(0)[0]",
            "reduce_scatter(dim=0, tp=4, dp=2)",
            "reduce_scatter(dim=0, tp=4), reduce_scatter(dim=0, dp=2)",
        ),
    ],
)
def test_chunks_in_another_order_than_the_groups_cost_a_copy(src, dst, small, large):
    for rows, text in ((8, small), (1 << 20, large)):
        found = fb.plan_transition(src.split(","), dst.split(","), {"dp": 2, "tp": 4}, (rows, 64))
        assert found.transition.steps_text(found.steps) == text


def test_small_tensors_are_reduced_in_one_launch_and_large_ones_with_fewer_bytes():
    def program(rows):
        found = fb.plan_transition(["S(0)", "P"], ["R", "R"], {"dp": 2, "tp": 4}, (rows, 1024))
        return found.transition.steps_text(found.steps)

    assert program(8) == "pad(dim=0, dp=2), all_reduce(dp=2, tp=4)"
    assert program(1 << 16) == "reduce_scatter(dim=0, tp=4), all_gather(dim=0, dp=2, tp=4)"


def test_a_partial_on_another_dimension_stays_partial():
    """Case C09, autoparallel#517."""
    mesh = {"dp": 2, "cp": 2}
    first = fb.plan_transition(["R", "P"], ["S(1)", "P"], mesh, (4, 8))
    assert (first.collectives, first.bytes) == (0, 0)
    assert first.transition.steps_text(first.steps) == "slice(dim=1, dp=2)"
    second = fb.plan_transition(["S(1)", "P"], ["S(1)", "R"], mesh, (4, 8))
    assert second.transition.steps_text(second.steps) == "all_reduce(cp=2)"
    assert second.collectives == 1


def test_mesh_dimensions_of_size_one_cost_nothing():
    placements = ["R", "P", "P(avg)", "S(0)", "S(1)"]
    for src, dst in itertools.product(placements, repeat=2):
        program = fb.plan_transition([src], [dst], {"tp": 1}, (4, 8))
        assert program.steps == ()
        assert program.transition.backward == ()
        assert (program.collectives, program.bytes, program.cost) == (0, 0, 0)
    assert steps(["S(0)", "P"], ["R", "R"], {"dp": 1, "tp": 2}) == "all_reduce(tp=2)"


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("P", "P(product)"),
        ("P(max)", "P"),
        ("P(max)", "P(avg)"),
        ("P(max)", "P(min)"),
        ("P(avg)", "P(max)"),
    ],
)
def test_a_change_without_a_meaning_is_refused_by_name(src, dst):
    with pytest.raises(fb.UnsupportedTransitionError) as raised:
        fb.plan_transition({"tp": src}, {"tp": dst}, {"dp": 2, "tp": 4}, (8, 8))
    expected = f"tp: {src} → {dst} has no meaning; reduce to R or S(dim) first"
    assert str(raised.value) == expected
    assert isinstance(raised.value, NotImplementedError)


def test_reductions_that_do_not_commute_are_refused():
    with pytest.raises(fb.UnsupportedTransitionError) as raised:
        fb.plan_transition(["P(max)", "P"], ["R", "R"], {"dp": 2, "tp": 4}, (8, 8))
    assert str(raised.value) == (
        "dp: P(max), tp: P: max and sum give another value in another order; "
        "reduce one of them first"
    )
    allowed = fb.plan_transition(["P(avg)", "P"], ["R", "R"], {"dp": 2, "tp": 4}, (8, 8))
    assert allowed.collectives == 1
    assert allowed.transition.steps_text(allowed.steps) == "scale(0.5), all_reduce(dp=2, tp=4)"


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        ("R", "P(max)", "nothing"),
        ("R", "P(min)", "nothing"),
        ("R", "P(product)", "keep_first(product, tp=4)"),
        ("S(0)", "P(max)", "all_gather(dim=0, tp=4)"),
        ("S(0)", "P(product)", "all_gather(dim=0, tp=4), keep_first(product, tp=4)"),
    ],
)
def test_a_value_is_its_own_largest_smallest_and_product(src, dst, text):
    assert steps([src], [dst], {"tp": 4}) == text


SPEC = MeshSpec(("a", "b", "c"), (2, 2, 2))


def test_every_pair_has_a_program_that_never_reduces_twice():
    placements = [Replicate(), Partial(), Shard(0), Shard(1)]
    for src in itertools.product(placements, repeat=3):
        for dst in itertools.product(placements, repeat=3):
            found = plan_steps(src, dst, SPEC, DEFAULT_MODEL)
            reduced = [
                m for s in found if s.kind in ("all_reduce", "reduce_scatter") for m in s.mesh_dims
            ]
            assert len(reduced) == len(set(reduced))


def test_plans_do_not_depend_on_what_was_planned_before():
    request = ((Shard(0), Partial(), Shard(1)), (Shard(1), Shard(0), Replicate()))
    found = plan_steps(*request, SPEC, DEFAULT_MODEL)
    for other in itertools.permutations(request[0]):
        plan_steps(other, request[1], SPEC, DEFAULT_MODEL)
    layout_graph.cache_clear()
    assert plan_steps(*request, SPEC, DEFAULT_MODEL) == found


def test_a_mesh_whose_ranks_do_not_ascend_is_not_flattened():
    spec = MeshSpec(("dp", "tp"), (2, 4), flattens=False)
    found = fb.plan_transition(["S(0)", "S(0)"], ["R", "R"], spec, (8, 8))
    assert found.transition.steps_text(found.steps) == (
        "all_gather(dim=0, tp=4), all_gather(dim=0, dp=2)"
    )
    assert fb.plan_transition(["S(0)", "S(1)"], ["S(1)", "S(0)"], spec, (8, 8)).collectives > 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 300),
        ("reduce_scatter", 75),
        ("all_to_all", 75),
        ("all_reduce", 150),
        ("slice", 0),
        ("pad", 0),
        ("keep_first", 0),
        ("scale", 0),
    ],
)
def test_bytes_sent_of_a_hundred_over_four_ranks(kind, expected):
    assert sent_bytes(kind, 100, 4) == expected


def test_dtype_does_not_change_the_plan():
    plans = [
        fb.plan_transition(["P", "S(1)"], ["S(1)", "P"], {"a": 2, "b": 2}, (4, 4), dtype).steps
        for dtype in (torch.float64, torch.bfloat16, torch.int64)
    ]
    assert plans[0] == plans[1] == plans[2]
