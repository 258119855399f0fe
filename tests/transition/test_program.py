"""Programs: their text, their bytes by hand, their gradient's program, and refusals."""

from __future__ import annotations

import pytest
import torch

import fxboundary as fb
from fxboundary.transition.cost import CostModel, Link
from fxboundary.transition.program import bytes_text

MESH = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("src", "dst", "shape", "sent"),
    [
        # float32 (64, 1024) is 262144 bytes whole, a quarter is 65536
        ("S(1)", "R", (64, 1024), 3 * 65536),
        ("P", "R", (64, 1024), 2 * 3 * 262144 // 4),
        ("P(avg)", "R", (64, 1024), 2 * 3 * 262144 // 4),
        ("P", "S(0)", (64, 1024), 3 * 65536),
        ("S(0)", "S(1)", (64, 1024), 3 * 65536 // 4),
        ("R", "S(1)", (64, 1024), 0),
        ("R", "P", (64, 1024), 0),
        ("S(1)", "P", (64, 1024), 0),
        ("P", "P(avg)", (64, 1024), 0),
        # uneven: rank 0 holds 2 rows of 5; every chunk travels as large as the largest
        ("S(0)", "R", (5, 10), 3 * 2 * 10 * 4),
        ("P", "S(0)", (5, 10), 3 * 2 * 10 * 4),
        ("S(0)", "S(1)", (5, 8), 3 * 2 * 2 * 4),
    ],
)
def test_bytes_are_those_of_ring_algorithms(src, dst, shape, sent):
    assert fb.plan_transition({"tp": src}, {"tp": dst}, MESH, shape).bytes == sent


def test_bytes_follow_the_shape_from_step_to_step():
    # (8, 16) float32 is 512 bytes: halved over dp, then all-reduced over tp
    program = fb.plan_transition(["R", "P"], ["S(1)", "R"], MESH, (8, 16))
    assert program.bytes == 2 * 3 * 256 // 4
    # a shard of 64 bytes gathered over all 8 ranks
    program = fb.plan_transition(["S(0)", "S(0)"], ["R", "R"], MESH, (8, 16))
    assert program.bytes == 7 * 64
    halved = fb.plan_transition(["S(0)", "S(0)"], ["R", "R"], MESH, (8, 16), torch.bfloat16)
    assert halved.bytes == program.bytes // 2


def test_cost_is_latency_and_bytes_over_bandwidth_and_copies():
    model = CostModel({"tp": Link(latency=1.0, bandwidth=196608.0)}, copy_bandwidth=262144.0)
    program = fb.plan_transition(["R", "S(0)"], ["R", "R"], MESH, (64, 1024), model=model)
    assert program.bytes == 196608
    assert program.cost == pytest.approx(2.0)
    # chunks that do not lie along dimension 0 are copied once more
    program = fb.plan_transition(["R", "S(1)"], ["R", "R"], MESH, (64, 1024), model=model)
    assert program.cost == pytest.approx(3.0)


def test_several_mesh_dimensions_are_as_slow_as_the_slowest():
    links = {"dp": Link(1.0, 1e9), "tp": Link(0.5, 100.0)}
    model = CostModel(links, copy_bandwidth=1e30)
    program = fb.plan_transition(["P", "P"], ["R", "R"], MESH, (8,), torch.int8, model=model)
    assert program.transition.steps_text(program.steps) == "all_reduce(dp=2, tp=4)"
    assert program.cost == pytest.approx(1.0 + 2 * 7 / 8 * 8 / 100)


def test_links_inside_a_node_are_faster_by_default():
    mesh = {"dp": 4, "tp": 8}
    inside, across = (
        fb.plan_transition({name: "S(0)"}, {}, mesh, (1 << 20,)).cost for name in ("tp", "dp")
    )
    assert across > 2 * inside


def test_a_slow_dimension_is_crossed_with_less():
    """Across nodes the shard is gathered before the fast dimension makes it larger."""
    slow = CostModel({"dp": Link(1e-5, 1e9), "tp": Link(1e-5, 1e12)})
    program = fb.plan_transition(["S(1)", "S(0)"], ["R", "R"], MESH, (4096, 4096), model=slow)
    assert program.transition.steps_text(program.steps) == (
        "all_gather(dim=1, dp=2), all_gather(dim=0, tp=4)"
    )


def test_a_link_is_fitted_to_measurements():
    assert Link.fit([(0, 2.0), (100, 3.0), (200, 4.0)]) == Link(2.0, 100.0)
    with pytest.raises(fb.ContractError, match="at least two sizes"):
        Link.fit([(1, 1.0), (1, 2.0)])
    with pytest.raises(fb.ContractError, match="do not grow"):
        Link.fit([(1, 1.0), (2, 1.0)])


def test_peak_memory_is_counted_and_can_be_limited():
    # float32 (64, 64) is 16384 bytes whole, 2048 in eighths
    mesh = {"a": 2, "b": 4}
    src, dst = ["S(0)", "P"], ["R", "R"]
    program = fb.plan_transition(src, dst, mesh, (64, 64))
    assert program.transition.steps_text(program.steps) == ("pad(dim=0, a=2), all_reduce(a=2, b=4)")
    assert program.peak_memory == 2 * 16384
    leaner = fb.plan_transition(src, dst, mesh, (64, 64), memory_limit=24576)
    assert leaner.transition.steps_text(leaner.steps) == (
        "reduce_scatter(dim=0, b=4), all_gather(dim=0, a=2, b=4)"
    )
    assert leaner.peak_memory == 2048 + 16384
    assert leaner.cost > program.cost
    with pytest.raises(fb.UnsupportedTransitionError) as raised:
        fb.plan_transition(src, dst, mesh, (64, 64), memory_limit=10000)
    assert str(raised.value) == (
        "no program from a: S(0), b: P to R needs at most 10000 bytes of memory"
    )


def test_text_shows_the_change_the_steps_and_the_bytes():
    text = str(fb.plan_transition({"tp": "S(1)"}, {}, MESH, (64, 1024)))
    assert text == "S(1)→R @tp: all_gather(dim=1, tp=4) 192.0 KiB"
    text = str(fb.plan_transition(["R", "P"], ["S(1)", "R"], MESH, (8, 16)))
    assert text == "R→S(1) @dp, P→R @tp: slice(dim=1, dp=2), all_reduce(tp=4) 384 B"
    assert str(fb.plan_transition({}, {}, MESH, (8, 16))) == "identity: nothing 0 B"


def test_bytes_are_printed_in_binary_units():
    sizes = (0, 1023, 1024, 1536, 1 << 20, 5 << 30, 1 << 45)
    expected = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "32768.0 GiB"]
    assert [bytes_text(size) for size in sizes] == expected


def test_the_gradients_program_goes_back():
    program = fb.plan_transition({"tp": "S(1)"}, {}, MESH, (64, 1024), grad={"tp": "P"})
    assert str(program.backward) == "P→S(1) @tp: reduce_scatter(dim=1, tp=4) 192.0 KiB"
    assert program.backward.collectives == 1
    average = fb.plan_transition({"tp": "P(avg)"}, {}, MESH, (8, 8)).backward
    assert average.transition.forward == average.steps
    assert average.transition.steps_text(average.steps) == "scale(0.25)"


def test_layouts_are_given_by_name_or_in_mesh_order():
    by_name = fb.plan_transition({"tp": "P"}, {}, MESH, (8, 8))
    in_order = fb.plan_transition(["R", "P"], ("R", "R"), MESH, (8, 8))
    assert by_name.transition == in_order.transition


@pytest.mark.parametrize("layout", ["P", ["P"], ["P", "P", "P"]])
def test_another_number_of_placements_than_mesh_dimensions_is_refused(layout):
    with pytest.raises(fb.ContractError) as raised:
        fb.plan_transition(layout, {}, MESH, (8, 8))
    assert str(raised.value) == (
        f"layout {layout!r}: write one placement per mesh dimension (dp, tp), or a mapping by name"
    )


def test_a_shard_dimension_that_the_shape_lacks_is_refused():
    with pytest.raises(fb.PlacementMismatchError, match=r"S\(2\) shards a dimension that a "):
        fb.plan_transition({"tp": "S(2)"}, {}, MESH, (8, 8))


def test_a_program_of_a_static_mesh_does_not_run():
    program = fb.plan_transition({"tp": "P"}, {}, MESH, (8, 8))
    with pytest.raises(fb.FxBoundaryError, match="plan on a DeviceMesh to run"):
        program.run(torch.ones(8, 8))


@pytest.mark.parametrize("shape", [(-8,), (8.5,)])
def test_a_shape_of_other_than_sizes_is_refused(shape):
    with pytest.raises(fb.PlacementMismatchError, match="sizes are integers, none negative"):
        fb.plan_transition({"tp": "S(0)"}, {}, {"tp": 4}, shape)
