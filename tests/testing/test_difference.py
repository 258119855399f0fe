"""The difference of two snapshots, as a reviewer reads it."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline
from hypothesis import given, settings
from records import gather, reduce, snapshot_of, snapshots, stacks

from fxboundary.testing import Snapshot, StepRecord, diff


def layers(port, count=32):
    return snapshot_of(*(replace(port, name=f"layers.{i}.{port.name}") for i in range(count)))


@given(snapshots | stacks(), snapshots | stacks())
@settings(max_examples=150, deadline=None)
def test_equal_snapshots_and_only_these_have_no_difference(a, b):
    assert diff(a, a) == ""
    assert (diff(a, b) == "") == (a == b)


def test_another_layout_in_all_layers_is_said_once():
    sharded = StepRecord("reduce_scatter(dim=1, tp=4)", 192)
    new = replace(
        reduce("mlp:out"),
        shapes="f32[1, 8, 8] -> [1, 2, 8]",
        layouts="tp: P->S(1)",
        gradient="tp: S(1)",
        forward=(sharded,),
        backward=(StepRecord("all_gather(dim=1, tp=4)", 192),),
    )
    assert_expected_inline(
        diff(layers(reduce("mlp:out")), layers(new)),
        """\
+1 reduce_scatter 192 B at layers.{0..31}.mlp:out (forward), 32 ports
-1 all_reduce 384 B at layers.{0..31}.mlp:out (forward), 32 ports
+1 all_gather 192 B at layers.{0..31}.mlp:out (backward), 32 ports
shapes f32[1, 8, 8] -> [1, 8, 8], now f32[1, 8, 8] -> [1, 2, 8] at layers.{0..31}.mlp:out, 32 ports
layouts tp: P->R, now tp: P->S(1) at layers.{0..31}.mlp:out, 32 ports
gradient R, now tp: S(1) at layers.{0..31}.mlp:out, 32 ports
total forward: reduce_scatter 0 -> 32, all_reduce 32 -> 0, 12 KiB -> 6 KiB
total backward: all_gather 0 -> 32, 0 B -> 6 KiB""",
    )


def test_a_port_more_and_one_less():
    old = snapshot_of(gather("a:x"), reduce("a:out"))
    new = snapshot_of(gather("b:x"), reduce("a:out"))
    assert_expected_inline(
        diff(old, new),
        """\
-1 all_gather 192 B at a:x (forward)
-1 reduce_scatter 192 B at a:x (backward)
+1 all_gather 192 B at b:x (forward)
+1 reduce_scatter 192 B at b:x (backward)
lost port at a:x: f32[1, 2, 8] -> [1, 8, 8]  tp: S(1)->R
new port at b:x: f32[1, 2, 8] -> [1, 8, 8]  tp: S(1)->R
total forward: unchanged
total backward: unchanged""",
    )


def test_as_many_collectives_of_other_sizes():
    old = reduce("a:out")
    new = replace(old, forward=(StepRecord("all_reduce(tp=4)", 768),))
    assert_expected_inline(
        diff(layers(old, 2), layers(new, 2)),
        """\
steps all_reduce(tp=4) 384 B, now all_reduce(tp=4) 768 B at layers.{0..1}.a:out (forward), 2 ports
total forward: 768 B -> 1.5 KiB
total backward: unchanged""",
    )


def test_what_no_port_shows():
    a, b, c = gather("a:x"), reduce("b:out"), reduce("c:out")
    assert diff(snapshot_of(a, b, c), snapshot_of(a, c, b)).startswith(
        "the ports run in another order, from c:out on\n"
    )
    assert "graphs with ports: 1, now 2" in diff(snapshot_of(a, b), Snapshot(((a,), (b,))))
    moved = diff(Snapshot(((a,), (b, c))), Snapshot(((a, b), (c,))))
    assert "ports of each graph: [1, 2], now [2, 1]" in moved


def test_a_second_call_of_a_port_is_told_from_the_first():
    once, twice = snapshot_of(gather("a:x")), snapshot_of(gather("a:x"), gather("a:x"))
    assert "new port at a:x" in diff(once, twice)
