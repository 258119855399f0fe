"""Peer memory on one host: what a boundary costs, and a whole model, on 2 processes.

``--boundaries``: four row-parallel linears, each with an all_reduce, residual and RMSNorm. The cost
of a boundary is the time above that of the same model without communication, by four. Three
compiled models take turns: ``functional`` (gloo), ``peer``, and ``alone``. ``kernels`` are those
that Inductor generates for a step; besides, each boundary has one copy, the publish.

``--model``: four Llama-like layers, width 512, TP 2: inference of a number of rows, and training
steps with sequence parallelism. ``parallelize_module`` with ``torch.compile`` on gloo, ours on gloo
(``functional``), ours on peer memory, and the same local model without any communication.

One thread a process. What the processes compute is compared before anything is timed.
"""

from __future__ import annotations

import copy
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from common import alternate, parser, verdict, write_json
from rich.console import Console
from rich.table import Table
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxboundary as fb

RANKS, BLOCKS, LAYERS, MODEL_WIDTH, HEADS = 2, 4, 4, 512, 8
ROWS, WIDTHS = (1, 16, 128, 512), (1024, 4096)
MODEL_ROWS, SEQUENCES = (1, 16, 128), (32, 256)


# Models


class Boundaries(nn.Module):
    """Linears of which each rank holds the columns that its part of the input needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, residual = x, x
        for block in self.blocks:
            residual = block(part) + residual
            part = self.norm(residual)
        return residual


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = width // HEADS
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 3 * width, bias=False)
        self.w3 = nn.Linear(width, 3 * width, bias=False)
        self.w2 = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(width), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(MODEL_WIDTH) for _ in range(LAYERS)))


def contracts(sequence_parallel: bool) -> dict[str, fb.Contract]:
    outside = {"tp": "S(1)" if sequence_parallel else "R"}

    def shared(column: str, row: str) -> fb.Contract:
        return fb.Contract(
            in_src={"x": outside},
            in_dst={"x": {"tp": "R"}},
            out_src={"tp": "P"},
            out_dst=outside,
            params={column: {"tp": "S(0)"}, row: {"tp": "S(1)"}},
        )

    found = {
        "*.attention": shared("w[qkv].weight", "wo.weight"),
        "*.feed_forward": shared("w[13].weight", "w2.weight"),
    }
    if sequence_parallel:
        found["*.*_norm"] = fb.Contract(in_src={"x": outside}, in_dst={"x": outside})
    return found


def split(model: nn.Module, plan: fb.Plan) -> nn.Module:
    fb.apply(model, plan)
    return model


def alone(model: nn.Module, plan: fb.Plan) -> nn.Module:
    """This rank's parameters, and no port."""
    cut = split(copy.deepcopy(model), plan)
    for local, full in zip(cut.parameters(), model.parameters(), strict=True):
        full.data = local.data.clone()
    return model


def with_parallelize_module(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> Any:
    outside = Shard(1) if sequence_parallel else Replicate()
    gather = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    norms: dict[str, Any] = (
        {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        if sequence_parallel
        else {}
    )
    for layer in model:  # type: ignore[union-attr]
        parallelize_module(
            layer,
            mesh,
            norms
            | {
                "attention": gather,
                "feed_forward": gather,
                "attention.w[qkv]": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=outside),
                "feed_forward.w[13]": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=outside),
            },
        )
    return model


# Runs, on every rank


def compiled(model: nn.Module, lowering: str | None) -> Callable[..., Any]:
    """What was compiled before stays: a reset of Dynamo would have it run uncompiled."""
    backend: Any = fb.backend(lowering=lowering) if lowering else "inductor"
    return torch.compile(model, backend=backend, fullgraph=True)


def boundaries(mesh: DeviceMesh, rows: int, width: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    contract = {"blocks.*": fb.Contract(out_src={"tp": "P"}, out_dst={"tp": "R"})}
    plan = fb.Plan(mesh, contract)
    torch.manual_seed(0)
    models = {
        "functional": (split(Boundaries(width), plan), "functional"),
        "peer": (split(Boundaries(width), plan), "peer"),
        "alone": (Boundaries(width), None),
    }
    for model, _ in models.values():
        model.load_state_dict(models["alone"][0].state_dict())
    x = torch.randn(rows, width)
    with torch.no_grad():
        runs, kernels, values = {}, {}, {}
        for name, (model, lowering) in models.items():
            run = compiled(model, lowering)
            values[name], (code, *_) = run_and_get_code(run, x)
            kernels[name] = len(re.findall(r"^ {8}cpp_fused", code, re.MULTILINE))
            runs[name] = lambda run=run: run(x)
        torch.testing.assert_close(values["peer"], values["functional"], rtol=1e-4, atol=1e-4)
        seconds = timed(runs, rounds)
    cost = {k: (seconds[k] - seconds["alone"]) / BLOCKS for k in ("functional", "peer")}
    return {
        "rows": rows,
        "width": width,
        "microseconds": {k: v * 1e6 for k, v in cost.items()},
        "ratio": cost["functional"] / cost["peer"],
        "kernels": kernels,
    }


def whole_model(mesh: DeviceMesh, rows: int, train: bool, rounds: int) -> dict[str, Any]:
    plan = fb.Plan(mesh, contracts(train))
    models: dict[str, tuple[nn.Module, str | None]] = {
        "parallelize_module": (with_parallelize_module(layers(), mesh, train), None),
        "functional": (split(layers(), plan), "functional"),
        "peer": (split(layers(), plan), "peer"),
        "alone": (alone(layers(), plan), None),
    }
    torch.manual_seed(1)
    whole = torch.randn(1, rows, MODEL_WIDTH)
    runs, results = {}, {}
    for name, (model, lowering) in models.items():
        # Without an all_gather a model sees its own tokens only: it gets all of them.
        part = whole.chunk(RANKS, 1)[dist.get_rank()] if train and name != "alone" else whole
        run = step(compiled(model, lowering), part.contiguous(), train)
        results[name] = run()
        runs[name] = run
    for name in ("functional", "parallelize_module"):
        torch.testing.assert_close(results["peer"], results[name], rtol=1e-3, atol=1e-4)
    seconds = timed(runs, rounds)
    return {"rows": rows, "milliseconds": {k: v * 1e3 for k, v in seconds.items()}}


def step(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, train: bool
) -> Callable[[], torch.Tensor]:
    """One step; gives the output, or in training the gradient of the input."""

    def infer() -> torch.Tensor:
        with torch.no_grad():
            return run(x)

    def learn() -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        run(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return learn if train else infer


def timed(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    dist.barrier()
    return alternate(runs, rounds=rounds, calls=10)


def on_rank(rank: int, port: int, parts: Sequence[str], rounds: int, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    if "boundaries" in parts:
        found["boundaries"] = [
            boundaries(mesh, rows, width, rounds) for width in WIDTHS for rows in ROWS
        ]
    if "model" in parts:
        found["inference"] = [whole_model(mesh, rows, False, rounds) for rows in MODEL_ROWS]
        found["training"] = [whole_model(mesh, rows, True, rounds) for rows in SEQUENCES]
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


# Reports


def report(found: Mapping[str, Any]) -> None:
    console = Console()
    if "boundaries" in found:
        table = Table("width", "rows", "gloo µs", "peer µs", "ratio", "kernels", title="A boundary")
        targets = {1: 8, 16: 8, 128: 5, 512: 5}
        for entry in found["boundaries"]:
            cost, kernels, ratio = entry["microseconds"], entry["kernels"], entry["ratio"]
            target = targets[entry["rows"]]
            table.add_row(
                str(entry["width"]),
                str(entry["rows"]),
                f"{cost['functional']:.0f}",
                f"{cost['peer']:.0f}",
                f"{ratio:.1f} {verdict(ratio, target, at_most=False)}",
                f"{kernels['peer']}, alone {kernels['alone']}",
            )
        console.print(table)
    for part, targets in (
        ("inference", {1: 2.8, 16: 2.4, 128: 1.5}),
        ("training", {32: 1.5, 256: 1.35}),
    ):
        if part not in found:
            continue
        names = list(found[part][0]["milliseconds"])
        table = Table("rows", *(f"{name} ms" for name in names), "faster", "alone", title=part)
        for entry in found[part]:
            ms = entry["milliseconds"]
            faster = ms["parallelize_module"] / ms["peer"]
            above = ms["peer"] / ms["alone"]
            table.add_row(
                str(entry["rows"]),
                *(f"{ms[name]:.1f}" for name in names),
                f"{faster:.2f} {verdict(faster, targets[entry['rows']], at_most=False)}",
                f"{above:.2f} {verdict(above, 1.12, at_most=True)}" if part == "inference" else "",
            )
        console.print(table)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--boundaries", action="store_true")
    arguments.add_argument("--model", action="store_true")
    arguments.add_argument("--rounds", type=int, default=15)
    given = arguments.parse_args()
    parts = [name for name in ("boundaries", "model") if getattr(given, name)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(
        on_rank,
        (port, parts or ["boundaries", "model"], given.rounds, answers),
        nprocs=RANKS,
        join=False,
    )
    while not context.join():  # raises what a process raised
        pass
    found = answers.get()
    report(found)
    write_json(given.json, found)


if __name__ == "__main__":
    main()
