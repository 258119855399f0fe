"""The text of snapshots: folded without loss, read back, refused where it is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from records import gather, reduce, snapshot_of, snapshots, stacks

from fxboundary.testing import PortRecord, Snapshot, SnapshotError, StepRecord
from fxboundary.testing.text import MOST_PORTS


def names_of(text: str) -> list[str]:
    """The names of the lines of a text, and its blank lines."""
    heads = [line for line in text.splitlines() if not line.startswith((" ", "total "))]
    return [line.split("  ")[0] for line in heads]


def folded(*names: str) -> list[str]:
    snapshot = snapshot_of(*map(gather, names))
    assert Snapshot.from_text(str(snapshot)) == snapshot
    return names_of(str(snapshot))


@given(snapshots | stacks())
@settings(max_examples=300, deadline=None)
def test_a_text_reads_back_as_the_same_snapshot(snapshot):
    text = str(snapshot)
    assert text.isascii()
    assert Snapshot.from_text(text) == snapshot
    assert str(Snapshot.from_text(text)) == text


def test_layers_are_one_line_per_port_with_totals():
    ports = [p for i in range(32) for p in (gather(f"layers.{i}.mlp:in.x"), reduce(f"l.{i}:out"))]
    ports = [replace(p, name=p.name.replace("l.", "layers.")) for p in ports]
    assert_expected_inline(
        str(snapshot_of(*ports)),
        """\
layers.{0..31}.mlp:in.x  f32[1, 2, 8] -> [1, 8, 8]  tp: S(1)->R
    all_gather(dim=1, tp=4) 192 B  |  grad tp: P: reduce_scatter(dim=1, tp=4) 192 B
layers.{0..31}:out  f32[1, 8, 8] -> [1, 8, 8]  tp: P->R
    all_reduce(tp=4) 384 B  |  grad R: nothing
total forward: 32 all_gather 6 KiB, 32 all_reduce 12 KiB, together 18 KiB
total backward: 32 reduce_scatter 6 KiB""",
    )


def test_a_layer_that_differs_is_left_out_of_the_fold():
    names = [f"layers.{i}.{port}:x" for i in range(4) for port in ("a", "b")]
    assert folded("layers.0:x", *names) == ["layers.0:x", "layers.{0..3}.a:x", "layers.{0..3}.b:x"]
    assert folded(*names, "layers.3:x") == [
        "layers.{0..2}.a:x",
        "layers.{0..2}.b:x",
        "layers.3.a:x",
        "layers.3.b:x",
        "layers.3:x",
    ]
    assert folded("l.0:x", "l.2:x", "l.3:x", "l.1:x") == ["l.0:x", "l.{2..3}:x", "l.1:x"]


def test_numbers_within_numbers_are_folded():
    names = [f"m.{i}.k.{j}:x" for i in range(3) for j in range(2)]
    assert folded(*names) == ["m.{0..2}.k.{0..1}:x"]
    assert folded(*names, "m.3.k.0:x") == ["m.{0..2}.k.{0..1}:x", "m.3.k.0:x"]


def test_passes_over_the_same_layers_are_paragraphs():
    first, second = [f"l.{i}:x" for i in range(3)], [f"l.{i}:y" for i in range(3)]
    assert folded(*first, *second) == ["l.{0..2}:x", "", "l.{0..2}:y"]
    by_layer = [name for pair in zip(first, second, strict=True) for name in pair]
    assert folded(*by_layer) == ["l.{0..2}:x", "l.{0..2}:y"]
    assert folded("l:x", "l#2:x", "l#3:x") == ["l:x", "l#{2..3}:x"]


def test_names_that_are_no_plain_text_are_escaped():
    assert folded("größe:x", "a b:x", "a{0..1}:x") == [
        "gr%C3%B6%C3%9Fe:x",
        "a%20b:x",
        "a%7B0..1%7D:x",
    ]


def test_several_graphs_and_unknown_shapes():
    unknown = PortRecord("head:out", "[?]", "S(-1)->R", "R", None, None)
    maximum = replace(reduce("top:out"), backward=None)
    maximum = replace(maximum, forward=(StepRecord("all_reduce(max, tp=4)"),))
    snapshot = Snapshot(((gather("mlp:in.x"),), (unknown, maximum)))
    assert Snapshot.from_text(str(snapshot)) == snapshot
    assert_expected_inline(
        str(snapshot),
        """\
graph 1 of 2
mlp:in.x  f32[1, 2, 8] -> [1, 8, 8]  tp: S(1)->R
    all_gather(dim=1, tp=4) 192 B  |  grad tp: P: reduce_scatter(dim=1, tp=4) 192 B
graph 2 of 2
head:out  [?]  S(-1)->R
    shape unknown  |  grad R
top:out  f32[1, 8, 8] -> [1, 8, 8]  tp: P->R
    all_reduce(max, tp=4) ? B  |  grad R: no gradient
total forward: 1 all_gather 192 B, 1 all_reduce ? B, together ? B, 1 of unknown shape
total backward: 1 reduce_scatter 192 B, 1 of unknown shape""",
    )


def test_a_text_that_was_unfolded_by_hand_is_the_same_snapshot():
    snapshot = snapshot_of(gather("l.0:x"), gather("l.1:x"))
    head, detail, *totals = str(snapshot).splitlines()
    lines = [head.replace("{0..1}", "0"), detail, head.replace("{0..1}", "1"), detail, *totals, ""]
    assert Snapshot.from_text("\n".join(lines)) == snapshot


TEXT = str(snapshot_of(gather("l.0:x"), gather("l.1:x")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (TEXT, "", "not a snapshot of boundaries"),
        (TEXT, "modules: {}\n", "not a snapshot of boundaries"),
        ("total backward", "total back", "the last two lines are to be 'total forward: ...' and"),
        ("2 all_gather 384", "3 all_gather 384", "does not fit the ports above it"),
        ("l.{0..1}:x  ", "l.{0..1}:x ", "line 1: .* does not begin a port"),
        ("    all", "all", "line 1: .* does not begin a port"),
        ("{0..1}", "{1..0}", "line 1: range {1..0}: the first number is above the last"),
        ("{0..1}", "{0.1}", "line 1: name .*: braces are for ranges"),
        ("4) 192 B  |", "4)  |", "line 1: .*: all_gather needs its bytes, as in '192 B'"),
        ("192 B  |", "192 MB  |", "line 1: size '192 MB': no unit 'MB' .did you mean 'MiB'"),
        ("tp: P: reduce", "P reduce", "no ': STEPS' after the gradient's layout"),
        ("all_gather(dim=1, tp=4) 192 B  |", "all_gather, |", "is no step|does not begin a port"),
        ("all_gather(dim=1, tp=4) 192 B  |", "slice(dim=1) 1 B  |", "slice sends nothing"),
        ("l.{0", "graph 2 of 2\nl.{0", "line 1: 'graph 2 of 2' is out of place"),
        ("{0..1}", "{0..9999999999}", f"more than {MOST_PORTS} ports"),
    ],
)
def test_a_damaged_text_is_refused(old, new, message):
    with pytest.raises(SnapshotError, match=message):
        Snapshot.from_text(TEXT.replace(old, new, 1))
