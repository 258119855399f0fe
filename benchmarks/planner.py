"""Every change of layout on a 2 × 4 mesh: collectives and bytes, DTensor and fxboundary.

All 240 transitions between layouts of R, S(0), S(1) and P on two mesh dimensions, for a small, a
middling and a large tensor: the planner trades launches against bytes. A fake process group of 8:
DTensor's collectives are counted as it issues them, with the bytes that ring algorithms send for
each; fxboundary's are those of its programs, on the busiest rank. The last part times planning.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import fake_mesh, parser, verdict, write_json
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxboundary as fb
from fxboundary.placements import Layout, layout_text, local_shape
from fxboundary.transition.cost import DEFAULT_MODEL, CostModel, Link, sent_bytes, traffic
from fxboundary.transition.program import Program

SIZES = {"a": 2, "b": 4}
KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "_dtensor.shard_dim_alltoall": "all_to_all",
}


@dataclass(frozen=True)
class Count:
    """Collectives launched, and bytes that the busiest rank sends."""

    launches: int
    bytes: int

    def dominated_by(self, other: Count) -> bool:
        """Worse in one respect, and better in none."""
        worse = self.launches > other.launches or self.bytes > other.bytes
        return worse and self.launches >= other.launches and self.bytes >= other.bytes


@dataclass(frozen=True)
class Row:
    """One transition; ``theirs`` is ``None`` where DTensor refuses it."""

    src: Layout
    dst: Layout
    ours: Count
    least: int
    theirs: Count | None

    def plain(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, "src": layout_text(self.src), "dst": layout_text(self.dst)}


class CountCollectives(TorchDispatchMode):
    """Counts functional collectives as they are issued."""

    def __init__(self, group_sizes: dict[str, int]) -> None:
        super().__init__()
        self._sizes = group_sizes
        self.launches = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = str(func).partition(".")
        kind = KINDS.get(name.split(".")[0]) or KINDS.get(f"{namespace}.{name.split('.')[0]}")
        if namespace in ("_c10d_functional", "_dtensor") and kind is not None:
            n = self._sizes[next(a for a in reversed(args) if isinstance(a, str))]
            self.launches += 1
            self.bytes += sent_bytes(kind, args[0].numel() * args[0].element_size(), n)
        return func(*args, **(kwargs or {}))


def transitions() -> Iterator[tuple[Layout, Layout]]:
    texts = [",".join(c) for c in itertools.product(("R", "S(0)", "S(1)", "P"), repeat=2)]
    layouts = [tuple(map(fb.parse_placement, text.split(","))) for text in texts]
    return ((s, d) for s, d in itertools.product(layouts, repeat=2) if s != d)


def through_dtensor(
    mesh: DeviceMesh, src: Layout, dst: Layout, shape: tuple[int, int]
) -> Count | None:
    local = torch.empty(local_shape(shape, src, tuple(SIZES.values()), (0, 0)))
    tensor = DTensor.from_local(local, mesh, src, run_check=False)
    counter = CountCollectives({g.group_name: g.size() for g in mesh.get_all_groups()})
    try:
        with counter:
            tensor.redistribute(placements=dst).to_local()
    except (RuntimeError, NotImplementedError):
        return None
    return Count(counter.launches, counter.bytes)


def plan(
    src: Layout, dst: Layout, shape: tuple[int, int], model: CostModel = DEFAULT_MODEL
) -> Program:
    return fb.plan_transition(src, dst, SIZES, shape, model=model)


def through_fxboundary(src: Layout, dst: Layout, shape: tuple[int, int]) -> tuple[Count, int]:
    program, sizes = plan(src, dst, shape), tuple(SIZES.values())
    busiest = max(
        sum(traffic(program.steps, program.src, shape, 4, sizes, coordinate))
        for coordinate in itertools.product(*map(range, sizes))
    )
    return Count(program.collectives, busiest), program.least_bytes


def planning_seconds(count: int) -> float:
    """Distinct transitions of a mesh of three dimensions, planned for the second shape."""
    options = ("R", "P", "S(0)", "S(1)", "S(2)")
    layouts = [list(c) for c in itertools.product(options, repeat=3)]
    pairs = list(itertools.product(layouts, repeat=2))
    random.Random(0).shuffle(pairs)
    for shape in ((64, 64, 64), (64, 64, 128)):
        start = time.perf_counter()
        for src, dst in pairs[:count]:
            fb.plan_transition(src, dst, {"a": 2, "b": 2, "c": 4}, shape)
    return time.perf_counter() - start


def compare(mesh: DeviceMesh, size: int) -> list[Row]:
    shape = (size, size)
    return [
        Row(src, dst, *through_fxboundary(src, dst, shape), through_dtensor(mesh, src, dst, shape))
        for src, dst in transitions()
    ]


def show(size: int, rows: list[Row]) -> None:
    both = [row for row in rows if row.theirs is not None]
    table = Table(title=f"({size}, {size}) float32")
    for heading in ("", "fxboundary", "DTensor"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("accepted", str(len(rows)), str(len(both)))
    table.add_row("launches, where both accept", *totals(both, "launches"))
    table.add_row("bytes, where both accept", *totals(both, "bytes"))
    table.add_row("launches, all", str(sum(row.ours.launches for row in rows)), "")
    table.add_row("at the least bytes", str(sum(r.ours.bytes <= r.least for r in rows)), "")
    Console().print(table)
    for field, other in (("launches", "bytes"), ("bytes", "launches")):
        worse = [r for r in both if r.theirs and getattr(r.ours, field) > getattr(r.theirs, field)]
        better = [r for r in worse if getattr(r.ours, other) < getattr(r.theirs, other)]
        print(
            f"more {field} than DTensor: {len(worse)}, of these with fewer {other}: {len(better)}"
        )
    worse_for_nothing = sum(r.ours.dominated_by(r.theirs) for r in both if r.theirs)
    print(f"worse without a gain: {verdict(worse_for_nothing, 0, at_most=True)}")


def totals(rows: list[Row], field: str) -> tuple[str, str]:
    counts = [(getattr(r.ours, field), getattr(r.theirs, field)) for r in rows]
    return str(sum(ours for ours, _ in counts)), str(sum(theirs for _, theirs in counts))


def main() -> None:
    options = parser(__doc__).parse_args()
    results: dict[str, Any] = {}
    with fake_mesh(**SIZES) as mesh:
        for size in (256, 1024, 4096):
            rows = compare(mesh, size)
            show(size, rows)
            results[str(size)] = [row.plain() for row in rows]
    launches = CostModel(inside=Link(1.0, 1e30), copy_bandwidth=1e30)
    fewest = sum(plan(src, dst, (256, 256), launches).collectives for src, dst in transitions())
    ours = sum(plan(src, dst, (256, 256)).collectives for src, dst in transitions())
    print(f"launches at 256: {ours}, fewest possible {fewest}: "
          f"{verdict(ours, fewest, at_most=True)}")  # fmt: skip
    seconds = planning_seconds(10_000)
    print(f"10 000 transitions of a 2 x 2 x 4 mesh planned in {seconds:.2f} s: "
          f"{verdict(seconds, 2, at_most=True)}")  # fmt: skip
    write_json(options.json, {**results, "planning_seconds": seconds})


if __name__ == "__main__":
    main()
