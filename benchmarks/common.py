"""What the benchmarks share: alternating timings, a fake process group, results as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(**sizes: int) -> Iterator[DeviceMesh]:
    """A mesh on a fake process group: collectives cost their launch and move nothing."""
    world_size = 1
    for size in sizes.values():
        world_size *= size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def alternate(
    runs: Mapping[str, Callable[[], Any]], *, rounds: int, calls: int
) -> dict[str, float]:
    """Median over rounds of the seconds of one call; the candidates take turns.

    Ratios between candidates are then comparisons under the same conditions.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(max(calls // 10, 2)):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            samples[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(times) for name, times in samples.items()}


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, help="write the results here as well")
    return made


def write_json(path: Path | None, results: Any) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {"torch": torch.__version__, "python": platform.python_version()}
    path.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")


def verdict(value: float, target: float, *, at_most: bool) -> str:
    """``reached`` or ``missed``, with the target."""
    reached = value <= target if at_most else value >= target
    return f"{'reached' if reached else 'missed'} ({'≤' if at_most else '≥'} {target:g})"
