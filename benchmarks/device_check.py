"""Checks and times on a GPU what tests on CPUs cannot: one script, a few minutes.

With several GPUs each rank takes one (nccl); with one GPU a single rank runs the same code.
``--device cpu`` runs it on gloo ranks, to check the script itself.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxboundary as fb

WIDTH = 256


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


SEQUENCE = {"x": {"tp": "S(1)"}}
CONTRACTS = {
    "*.norm": fb.Contract(in_src=SEQUENCE, in_dst=SEQUENCE),
    "*.mlp": fb.Contract(
        in_src=SEQUENCE,
        in_dst={"x": {"tp": "R"}},
        out_src={"tp": "P"},
        out_dst={"tp": "S(1)"},
        params={
            "up.*": {"tp": "S(0)"},
            "down.weight": {"tp": "S(1)"},
            "down.bias": {"tp": "R -> P"},
        },
    ),
}


def check_transitions(mesh: DeviceMesh, device: torch.device) -> str:
    """Every pair of layouts against DTensor, values and gradients of the sum of squares."""
    from torch.distributed.tensor import DTensor

    n, checked = mesh.size(), 0
    texts = ("R", "S(0)", "S(1)", "P")
    for src, dst in product(texts, texts):
        program = fb.plan_transition([src], [dst], mesh, (4 * n, 8 * n))
        torch.manual_seed(0 if src == "R" else 1 + dist.get_rank())
        shape = {"S(0)": (4, 8 * n), "S(1)": (4 * n, 8)}.get(src, (4 * n, 8 * n))
        x = torch.randn(shape, device=device)
        ours = program.run(x)
        try:
            placement = [fb.parse_placement(src)]
            wrapped = DTensor.from_local(x, mesh, placement, run_check=False)
            peer = wrapped.redistribute(placements=[fb.parse_placement(dst)]).to_local()
        except (RuntimeError, NotImplementedError):
            continue  # DTensor refuses R → P
        if dst != "P":  # a partial value may be split over the ranks in more ways than one
            torch.testing.assert_close(ours, peer)
        checked += 1
    return f"{checked} transitions equal DTensor's"


def check_model(mesh: DeviceMesh, device: torch.device, compile_it: bool) -> str:
    """A contracted model against the unsharded one: output and every gradient."""
    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block()).to(device)
    model = copy.deepcopy(reference)
    n, rank = mesh.size(), mesh.get_local_rank()
    x, w = torch.randn(2, 2, 8 * n, WIDTH, device=device)
    expected = reference(x)
    (expected * w).sum().backward()
    fb.apply(model, fb.Plan(mesh, CONTRACTS))
    run: Any = torch.compile(model, backend="fxboundary", fullgraph=True) if compile_it else model

    def local(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(n, 1)[rank].contiguous()

    start = time.perf_counter()
    y = run(local(x))
    (y * local(w)).sum().backward()
    seconds = time.perf_counter() - start
    torch.testing.assert_close(y, local(expected), rtol=1e-3, atol=1e-3)
    for (name, p), (_, q) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        dim = next((d for d in range(p.dim()) if p.shape[d] != q.shape[d]), None)
        full = q.grad if dim is None else q.grad.chunk(n, dim)[rank]
        torch.testing.assert_close(p.grad, full, rtol=1e-3, atol=1e-3, msg=name)
    return f"output and {len(list(model.parameters()))} gradients equal; first step {seconds:.1f} s"


def time_boundary(mesh: DeviceMesh, device: torch.device) -> str:
    """An eager P → R boundary against the bare functional collective."""
    ops, group = torch.ops._c10d_functional, mesh.get_group().group_name
    contract = fb.Contract(out_src={"tp": "P"}, out_dst={"tp": "R"})
    ours = fb.PrecompiledBoundary(contract, mesh, ("tp",)).redistribute_outputs
    x = torch.randn(16, 1024, device=device)

    def bare(t: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(ops.all_reduce(t, "sum", group))

    times = {name: _seconds(lambda f=f: f(x), device) for name, f in (("a", ours), ("b", bare))}
    return (
        f"P → R of 16 x 1024: {times['a'] * 1e6:.1f} µs, bare functional {times['b'] * 1e6:.1f} µs"
    )


def _seconds(run: Callable[[], Any], device: torch.device, calls: int = 200) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    samples = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        samples.append((time.perf_counter() - start) / calls)
    return sorted(samples)[2]


def rank_main(rank: int, world_size: int, kind: str, store: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
    )
    mesh = init_device_mesh(kind, (world_size,), mesh_dim_names=("tp",))
    checks: dict[str, Callable[[], str]] = {
        "transitions": lambda: check_transitions(mesh, device),
        "eager model": lambda: check_model(mesh, device, compile_it=False),
        "compiled model": lambda: check_model(mesh, device, compile_it=True),
        "eager boundary": lambda: time_boundary(mesh, device),
    }
    for name, check in checks.items():
        result = check()
        if rank == 0:
            print(f"  {name}: {result}", flush=True)
    dist.destroy_process_group()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = arguments.parse_args()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nccl, CUDA kernels and their times are not checked")
        return 0
    world_size = torch.cuda.device_count() if options.device == "cuda" else 2
    print(f"{world_size} rank(s) on {options.device}")
    with TemporaryDirectory() as folder:
        arguments_of_rank = (world_size, options.device, str(Path(folder) / "store"))
        mp.spawn(rank_main, args=arguments_of_rank, nprocs=world_size)
    command = [sys.executable, "-m", "fxboundary", "demo", "--steps", "5"]
    command += ["--device", options.device, "--ranks", str(world_size)]
    return subprocess.run(command, timeout=200, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
