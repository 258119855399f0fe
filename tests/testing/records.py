"""Ports of snapshots made by hand, and strategies that make them."""

from __future__ import annotations

from hypothesis import strategies as st

from fxboundary.testing import PortRecord, Snapshot, StepRecord

GATHER = StepRecord("all_gather(dim=1, tp=4)", 192)
SCATTER = StepRecord("reduce_scatter(dim=1, tp=4)", 192)
REDUCE = StepRecord("all_reduce(tp=4)", 384)


def gather(name: str) -> PortRecord:
    shapes = "f32[1, 2, 8] -> [1, 8, 8]"
    return PortRecord(name, shapes, "tp: S(1)->R", "tp: P", (GATHER,), (SCATTER,))


def reduce(name: str) -> PortRecord:
    shapes = "f32[1, 8, 8] -> [1, 8, 8]"
    return PortRecord(name, shapes, "tp: P->R", "R", (REDUCE,), ())


def snapshot_of(*ports: PortRecord) -> Snapshot:
    return Snapshot((ports,)) if ports else Snapshot(())


# Few names and few numbers, so that much can be folded, wrongly too.
segments = st.sampled_from(["a", "0", "1", "2", "3"])
paths = st.lists(segments, min_size=1, max_size=4).map(".".join)
names = st.builds("{}{}:{}".format, paths, st.sampled_from(["", "#2", "#3"]), segments)
odd_names = st.text(min_size=1, max_size=6).map("{}:out".format)

sizes = st.none() | st.integers(0, 2**45)
collectives = st.builds(
    StepRecord,
    st.sampled_from(["all_gather(dim=1, tp=4)", "all_to_all_v(S(0), S(1)->S(1), R, dp=2, tp=4)"]),
    sizes,
)
steps = st.lists(collectives | st.just(StepRecord("scale(0.5)")), max_size=3).map(tuple)
layouts = st.sampled_from(["tp: S(1)->R", "identity"])
known = st.builds(
    PortRecord,
    names | odd_names,
    st.sampled_from(["f32[2, s0] -> [2, 4*s0]", "[?] -> [?]"]),
    layouts,
    st.sampled_from(["R", "dp: S(0), tp: P(avg)"]),
    steps,
    st.none() | steps,
)
unknown = st.builds(PortRecord, names, st.just("[?]"), layouts, st.just("R"), st.none(), st.none())
same = names.map(gather)
ports = st.lists(same, min_size=1, max_size=12) | st.lists(known | unknown | same, min_size=1)
snapshots = st.lists(ports.map(tuple), max_size=3).map(lambda graphs: Snapshot(tuple(graphs)))


@st.composite
def stacks(draw: st.DrawFn) -> Snapshot:
    """Numbered modules in numbered modules, a few ports of which are lost or doubled."""
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    labels = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    found = [
        gather(f"m.{i}.k.{j}.{label}:{port}")
        for _ in range(draw(st.integers(1, 2)))
        for i in range(outer)
        for port in draw(st.sampled_from(["x", "xy"]))
        for j in range(inner)
        for label in labels
    ]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(found) - 1))
        found[at : at + 1] = [found[at]] * draw(st.sampled_from([0, 2]))
        found = found or [gather("m:x")]
    return Snapshot((tuple(found),))
