"""Four Llama-like layers, TP + SP: contracts against ``parallelize_module`` on the same layouts.

A fake process group of 4, so that times are Python, dispatch, compute and compilation, without
transport. Three models with equal parameters:

- ``ports``: split by ``fxboundary.apply``;
- ``no ports``: the same local parameters without any boundary. Shapes must still fit, so it runs on
  the full sequence (norms and residuals on n times as many rows): a bound from above on the
  model's own work;
- ``parallelize_module``: torch's DTensor styles (SequenceParallel, Colwise, Rowwise). It leaves the
  gradients of norm weights ``Partial``: the all_reduce of each comes with the optimizer step, and
  is counted here as one that is still due.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import alternate, fake_mesh, parser, verdict, write_json
from rich.console import Console
from rich.table import Table
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxboundary as fb
from fxboundary.graph.collectives import find_collectives

N, LAYERS, BATCH, SEQUENCE, WIDTH, HEADS = 4, 4, 1, 32, 64, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def contracts() -> dict[str, fb.Contract]:
    sequence = {"x": {"tp": "S(1)"}}

    def shared(column: str, row: str) -> fb.Contract:
        return fb.Contract(
            in_src=sequence,
            in_dst={"x": {"tp": "R"}},
            out_src={"tp": "P"},
            out_dst={"tp": "S(1)"},
            params={column: {"tp": "S(0)"}, row: {"tp": "S(1)"}},
        )

    return {
        "layers.*.*_norm": fb.Contract(in_src=sequence, in_dst=sequence),
        "layers.*.attention": shared("w[qkv].weight", "wo.weight"),
        "layers.*.feed_forward": shared("w[13].weight", "w2.weight"),
    }


def with_ports(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fb.apply(model, fb.Plan(mesh, contracts()))
    return model


def without_ports(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    split = with_ports(copy.deepcopy(model), mesh)
    for (name, local), (_, full) in zip(
        split.named_parameters(), model.named_parameters(), strict=True
    ):
        assert local.numel() in (full.numel(), full.numel() // N), name
        full.data = local.data.clone()
    return model


def with_parallelize_module(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(
            layer,  # type: ignore[arg-type]
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "ffn_norm": SequenceParallel(),
                "attention": gather,
                "feed_forward": gather,
                "attention.w[qkv]": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w[13]": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


BUILD = {
    "ports": with_ports,
    "no ports": without_ports,
    "parallelize_module": with_parallelize_module,
}


def build(name: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return BUILD[name](Layers(), mesh)


def rows(name: str) -> int:
    return SEQUENCE if name == "no ports" else SEQUENCE // N


def step(run: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    x = torch.ones(BATCH, rows(name), WIDTH, requires_grad=True)
    run(x).sum().backward()


def eager(mesh: DeviceMesh, rounds: int) -> dict[str, float]:
    models = {name: build(name, mesh) for name in BUILD}
    return alternate(
        {name: (lambda m=m, n=name: step(m, n)) for name, m in models.items()},
        rounds=rounds,
        calls=10,
    )


class Recorder(CustomGraphPass):
    """Collectives of the post-grad graphs, and bytes of their larger side."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {}

    def __call__(self, graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        for collective in find_collectives(graph.owning_module):
            entry = self.found.setdefault(collective.kind, [0, 0])
            entry[0] += 1
            entry[1] += collective.bytes

    def uuid(self) -> Any:
        return None


def compile_once(name: str, mesh: DeviceMesh) -> tuple[float, float, dict[str, list[int]]]:
    """Seconds to capture and compile a training step cold, of these in our pass, collectives."""
    torch._dynamo.reset()
    model, recorder = build(name, mesh), Recorder()
    own: list[float] = []
    with fresh_cache(), torch._inductor.config.patch(post_grad_custom_pre_pass=recorder):
        start = time.perf_counter()
        backend: Any = timed_backend(own) if name == "ports" else "inductor"
        step(torch.compile(model, backend=backend, fullgraph=True), name)
        seconds = time.perf_counter() - start
    due = [g for p in model.parameters() if is_partial(g := p.grad)]
    if due:
        size = sum(g.to_local().numel() * g.to_local().element_size() for g in due)
        recorder.found["all_reduce still due"] = [len(due), size]
    return seconds, sum(own), recorder.found


def is_partial(gradient: Any) -> bool:
    return any(p.is_partial() for p in getattr(gradient, "placements", ()))


def timed_backend(own: list[float]) -> Callable[..., Any]:
    """The backend, with the time that it spends outside Inductor."""
    module, backend = sys.modules["fxboundary.backend"], fb.backend()
    inductor = module._inductor

    def compile_graph(gm: Any, inputs: Any) -> Any:
        inside: list[float] = []

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return inductor(*arguments)
            finally:
                inside.append(time.perf_counter() - start)

        module._inductor = timed
        start = time.perf_counter()
        try:
            return backend(gm, inputs)
        finally:
            module._inductor = inductor
            own.append(time.perf_counter() - start - sum(inside))

    return compile_graph


def compiled(mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    names = ("ports", "parallelize_module")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    own: list[float] = []
    collectives = {}
    for name in names:  # the first compilation of a process pays for imports
        compile_once(name, mesh)
    for _ in range(rounds):
        for name in names:
            total, ours, collectives[name] = compile_once(name, mesh)
            seconds[name].append(total)
            if name == "ports":
                own.append(ours / total)
    medians = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    share = sorted(own)[len(own) // 2]
    return {"seconds": medians, "pass share": share, "collectives": collectives}


def show_eager(times: dict[str, float]) -> None:
    table = Table(title="4 layers, TP + SP on 4 fake ranks, eager forward + backward")
    table.add_column("")
    table.add_column("ms", justify="right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e3:.2f}")
    Console().print(table)
    bound = times["ports"] / times["no ports"]
    peer = times["parallelize_module"] / times["ports"]
    print(f"ports: {bound:.2f} x no ports: {verdict(bound, 1.9, at_most=True)}")
    print(f"ports: {peer:.1f} x faster than parallelize_module: {verdict(peer, 5, at_most=False)}")


def show_compiled(results: dict[str, Any]) -> None:
    table = Table(title="compiled training step: collectives, forward and backward")
    table.add_column("")
    for name in results["collectives"]:
        table.add_column(name, justify="right")
    kinds = sorted({kind for found in results["collectives"].values() for kind in found})
    for kind in kinds:
        cells = [results["collectives"][n].get(kind, [0, 0]) for n in results["collectives"]]
        table.add_row(kind, *(f"{count} × · {size} B" for count, size in cells))
    seconds = results["seconds"]
    table.add_row("capture + compile", *(f"{s:.1f} s" for s in seconds.values()))
    Console().print(table)
    totals = {
        name: [sum(entry[i] for entry in found.values()) for i in (0, 1)]
        for name, found in results["collectives"].items()
    }
    for i, what in enumerate(("collectives", "bytes")):
        ours, peer = totals["ports"][i], totals["parallelize_module"][i]
        print(f"{what}: {ours} against {peer}: {verdict(ours / peer, 1, at_most=True)}")
    ratio = seconds["ports"] / seconds["parallelize_module"]
    print(f"capture + compile: {ratio:.2f} x: {verdict(ratio, 0.95, at_most=True)}")
    share = results["pass share"]
    print(f"own pass: {share:.1%} of it: {verdict(share, 0.03, at_most=True)}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--eager", action="store_true", help="only the eager step")
    arguments.add_argument("--compiled", action="store_true", help="only the compiled step")
    arguments.add_argument("--rounds", type=int, default=15, help="of the eager step")
    arguments.add_argument("--compile-rounds", type=int, default=3)
    options = arguments.parse_args()
    both = options.eager == options.compiled
    results: dict[str, Any] = {}
    with fake_mesh(tp=N) as mesh:
        if both or options.eager:
            results["eager"] = eager(mesh, options.rounds)
            show_eager(results["eager"])
        if both or options.compiled:
            results["compiled"] = compiled(mesh, options.compile_rounds)
            show_compiled(results["compiled"])
    write_json(options.json, results)


if __name__ == "__main__":
    main()
