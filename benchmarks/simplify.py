"""How the time of ``fb.simplify`` grows with a graph, and what it saves in Llama-like layers.

``--time``: a chain of layers built by hand, of 10³, 10⁴ and 10⁵ nodes. Each layer has work for
every pass: projections that each gather the same activation, a cast behind a port, a port behind a
port, partial outputs that are added.

``--layers``: a compiled training step of layers as in ``llama_layers.py`` on 4 fake ranks, where
each projection (q, k, v, gate, up) is contracted on its own input, by one who thinks of one linear
at a time. Tensor parallelism alone (TP), and with sequence parallelism (TP + SP). Collectives are
those of the graphs that Inductor gets, per layer; bytes are what one rank sends with ring
algorithms. AOTAutograd merges equal forward collectives by itself, so what the ports say is shown
too. The least known is Megatron's: two all_reduces in each direction (TP), or two all_gathers and
two reduce_scatters (TP + SP).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import fake_mesh, parser, verdict, write_json
from llama_layers import BATCH, HEADS, LAYERS, SEQUENCE, WIDTH, Attention, Layers, N, is_partial
from rich.console import Console
from rich.table import Table
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx import Graph, GraphModule, Node

import fxboundary as fb
from fxboundary.graph.collectives import find_collectives
from fxboundary.mesh import register_mesh
from fxboundary.ops import OP, PortOp
from fxboundary.placements import parse_layout
from fxboundary.testing import snapshot
from fxboundary.transition.cost import sent_bytes

SIZES = (1_000, 10_000, 100_000)
DIRECTIONS = ("forward", "backward")
# Collectives and bytes of one layer in one direction, by kind.
Counts = dict[str, tuple[float, float]]


# Time


class Chain:
    """A graph of parallel blocks under tensor and sequence parallelism, activations (rows, width).

    Values are recorded as a capture records them, each with memory of its own.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._graph, self._module = register_mesh(mesh), Graph(), ""
        self._values = {d: torch.empty(8, 8, dtype=d, device="meta") for d in _DTYPES}
        self._weight = self._recorded(self._graph.placeholder("w"))
        self._x = self._recorded(self._graph.placeholder("x"))
        self._layers = 0

    def _recorded(self, node: Node, dtype: torch.dtype = torch.float32) -> Node:
        node.meta["val"] = torch.empty_like(self._values[dtype])
        node.meta["nn_module_stack"] = {self._module: (self._module, nn.Module)}
        return node

    def _call(self, target: Any, *args: Any, dtype: torch.dtype = torch.float32) -> Node:
        return self._recorded(self._graph.call_function(target, args), dtype)

    def _port(self, x: Node, label: str, src: str, dst: str) -> Node:
        self._module = f"layers.{self._layers}.{label.partition(':')[0]}"
        grad = {"S(0)": "P"}.get(src, "R") if dst == "R" else dst  # a gathered value is shared
        layouts = (parse_layout(text) for text in (src, dst, grad))
        return self._call(OP.default, x, *PortOp(self._mesh, *layouts, label).args)

    def add_layer(self) -> None:
        call = self._call
        h = call(torch.tanh, self._x)
        q, k, v, gate, up = (
            call(torch.mul, self._port(h, f"{name}:in.x", "S(0)", "R"), self._weight)
            for name in ("q", "k", "v", "gate", "up")
        )
        narrow = self._recorded(
            self._graph.call_method("to", (self._port(h, "router:in.x", "S(0)", "R"), _NARROW)),
            _NARROW,
        )
        routed = call(torch.sigmoid, narrow, dtype=_NARROW)
        scale = self._recorded(self._graph.call_method("to", (routed, torch.float32)))
        attention = call(torch.mul, call(torch.mul, call(torch.mul, q, k), v), scale)
        mlp = call(torch.mul, call(torch.sin, gate), up)
        whole = self._port(call(torch.neg, attention), "o:out", "P", "R")
        moved = (
            self._port(attention, "o:out", "P", "S(0)"),
            self._port(mlp, "down:out", "P", "S(0)"),
            self._port(whole, "stats:in.x", "R", "S(0)"),
        )
        for branch in moved:
            self._x = call(torch.add, self._x, branch)
        self._layers += 1

    def finish(self, nodes: int) -> tuple[GraphModule, int]:
        """A graph of about so many nodes, and its number of layers."""
        while len(self._graph.nodes) < nodes:
            self.add_layer()
        self._graph.output(self._x)
        return GraphModule(nn.Module(), self._graph), self._layers


_NARROW = torch.bfloat16
_DTYPES = (torch.float32, _NARROW)


def measure_time(mesh: DeviceMesh, rounds: int) -> list[dict[str, float]]:
    """Seconds of ``fb.simplify`` by number of nodes; the smaller graphs more often."""
    found = []
    for size in SIZES:
        gm, layers = Chain(mesh).finish(size)
        fb.simplify(gm)
        seconds = []
        for _ in range(rounds if size < SIZES[-1] else max(rounds // 3, 1)):
            gc.collect()
            start = time.perf_counter()
            changes = fb.simplify(gm).changes
            seconds.append(time.perf_counter() - start)
        found.append(
            {
                "nodes": len(gm.graph.nodes),
                "seconds": statistics.median(seconds),
                "changes": len(changes) / layers,
            }
        )
    return found


def show_time(found: list[dict[str, float]]) -> None:
    table = Table(title="fb.simplify of a chain of layers")
    for heading in ("nodes", "changes a layer", "s", "µs a node", "of the size before"):
        table.add_column(heading, justify="right")
    growth = []
    for i, row in enumerate(found):
        each = row["seconds"] / row["nodes"]
        if i:
            growth.append(each / (found[i - 1]["seconds"] / found[i - 1]["nodes"]))
        table.add_row(
            f"{row['nodes']:.0f}",
            f"{row['changes']:.1f}",
            f"{row['seconds']:.2f}",
            f"{each * 1e6:.1f}",
            f"{growth[-1]:.2f} x" if i else "",
        )
    Console().print(table)
    # Not 1: of 10³ nodes all that is touched fits a cache of the processor, of 10⁵ nothing does.
    print(f"µs a node, at ten times the nodes: {verdict(max(growth), 1.5, at_most=True)}")


# Layers


class AnyLength(Attention):
    """Attention that asks for the length behind its projections, which may gather it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def layers() -> Layers:
    model = Layers()
    for layer in model.layers:
        layer.attention = AnyLength()
    return model


def contracts(sequence_parallel: bool) -> dict[str, fb.Contract]:
    """Every linear by itself: columns take whole inputs, rows give sums."""
    outside = {"tp": "S(1)" if sequence_parallel else "R"}
    column = fb.Contract(
        in_src={"input": outside}, in_dst={"input": {}}, params={"weight": {"tp": "S(0)"}}
    )
    row = fb.Contract(out_src={"tp": "P"}, out_dst=outside, params={"weight": {"tp": "S(1)"}})
    found = {
        "layers.*.attention.w[qkv]": column,
        "layers.*.attention.wo": row,
        "layers.*.feed_forward.w[13]": column,
        "layers.*.feed_forward.w2": row,
    }
    if sequence_parallel:
        norm = fb.Contract(in_src={"x": outside}, in_dst={"x": outside})
        found["layers.*.*_norm"] = norm
    return found


def styles(sequence_parallel: bool, each: bool) -> dict[str, ParallelStyle]:
    """The same for ``parallelize_module``; ``each`` linear by itself, or inputs by module."""
    outside = Shard(1) if sequence_parallel else Replicate()
    column = ColwiseParallel(input_layouts=outside) if each else ColwiseParallel()
    row = RowwiseParallel(output_layouts=outside)
    found: dict[str, ParallelStyle] = {
        "attention.w[qkv]": column,
        "attention.wo": row,
        "feed_forward.w[13]": column,
        "feed_forward.w2": row,
    }
    if not each:
        shared = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
        found |= {"attention": shared, "feed_forward": shared}
    if sequence_parallel:
        found |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    return found


class Recorder(CustomGraphPass):
    """Collectives of the post-grad graphs, by direction, and what one rank sends."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in DIRECTIONS}
        self.sent: dict[str, Counter[str]] = {name: Counter() for name in DIRECTIONS}

    def __call__(self, graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        tangents = [n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name]
        direction = "backward" if tangents else "forward"
        for found in find_collectives(graph.owning_module):
            local = found.bytes // N if found.kind == "all_gather" else found.bytes
            self.counts[direction][found.kind] += 1
            self.sent[direction][found.kind] += sent_bytes(found.kind, local, N)  # type: ignore[arg-type]

    def per_layer(self) -> dict[str, Counts]:
        return {
            direction: {
                kind: (count / LAYERS, self.sent[direction][kind] / LAYERS)
                for kind, count in sorted(counts.items())
            }
            for direction, counts in self.counts.items()
        }

    def uuid(self) -> Any:
        return None


def train(model: nn.Module, backend: Any, rows: int) -> Recorder:
    recorder = Recorder()
    torch._dynamo.reset()
    with fresh_cache(), torch._inductor.config.patch(post_grad_custom_pre_pass=recorder):
        x = torch.ones(BATCH, rows, WIDTH, requires_grad=True)
        torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    gradients = [g for p in model.parameters() if is_partial(g := p.grad)]
    for gradient in gradients:  # DTensor leaves these to the optimizer's step
        local = gradient.to_local()
        recorder.counts["backward"]["all_reduce"] += 1
        recorder.sent["backward"]["all_reduce"] += sent_bytes("all_reduce", local.nbytes, N)
    return recorder


def ported(mesh: DeviceMesh, sequence_parallel: bool, simplify: bool) -> dict[str, Any]:
    model, backend = layers(), fb.backend(simplify=simplify)
    fb.apply(model, fb.Plan(mesh, contracts(sequence_parallel)))
    rows = SEQUENCE // N if sequence_parallel else SEQUENCE
    compiled = train(model, backend, rows).per_layer()
    found = snapshot(backend)
    ports = {
        direction: {
            kind: (total.count / LAYERS, (total.bytes or 0) / LAYERS)
            for kind, total in sorted(found.totals(direction).items())  # type: ignore[arg-type]
        }
        for direction in DIRECTIONS
    }
    return {"ports": ports, "compiled": compiled}


def parallelized(mesh: DeviceMesh, sequence_parallel: bool, each: bool) -> dict[str, Counts]:
    model = layers()
    for layer in model.layers:
        parallelize_module(layer, mesh, styles(sequence_parallel, each))  # type: ignore[arg-type]
    rows = SEQUENCE // N if sequence_parallel else SEQUENCE
    return train(model, "inductor", rows).per_layer()


def least(sequence_parallel: bool) -> dict[str, Counts]:
    size = BATCH * SEQUENCE * WIDTH * torch.float32.itemsize
    half: float = sent_bytes("reduce_scatter", size, N)
    kinds = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
    one = {kind: (2.0, 2 * half * (2 if kind == "all_reduce" else 1)) for kind in kinds}
    return dict.fromkeys(DIRECTIONS, one)


def measure_layers(mesh: DeviceMesh) -> dict[str, dict[str, dict[str, Counts]]]:
    results = {}
    for name, sequence_parallel in (("TP", False), ("TP + SP", True)):
        before = ported(mesh, sequence_parallel, simplify=False)
        after = ported(mesh, sequence_parallel, simplify=True)
        results[name] = {
            "ports, as declared": before["ports"],
            "ports, simplified": after["ports"],
            "compiled, as declared": before["compiled"],
            "compiled, simplified": after["compiled"],
            "DTensor, by linear": parallelized(mesh, sequence_parallel, each=True),
            "DTensor, by block": parallelized(mesh, sequence_parallel, each=False),
            "least known": least(sequence_parallel),
        }
    return results


def show_layers(results: dict[str, dict[str, dict[str, Counts]]]) -> None:
    for name, rows in results.items():
        table = Table(title=f"{name}: collectives of one layer, and what one rank sends")
        table.add_column("")
        for direction in DIRECTIONS:
            table.add_column(direction)
            table.add_column("sent", justify="right")
        for what, found in rows.items():
            cells = [part for d in DIRECTIONS for part in _cells(found[d])]
            table.add_row(what, *cells, end_section=what.endswith("simplified"))
        Console().print(table)
        ours, minimum, peer = (
            _sent(rows[key]) for key in ("compiled, simplified", "least known", "DTensor, by block")
        )
        print(f"{name}: {ours / minimum:.3f} x the least bytes: "
              f"{verdict(ours / minimum, 1.05, at_most=True)}")  # fmt: skip
        print(f"{name}: {ours / peer:.3f} x parallelize_module's bytes: "
              f"{verdict(ours / peer, 1, at_most=True)}")  # fmt: skip


def _cells(counts: Mapping[str, tuple[float, float]]) -> tuple[str, str]:
    kinds = "\n".join(f"{count:g} {kind}" for kind, (count, _) in counts.items())
    sent = "\n".join(f"{size:.0f} B" for _, size in counts.values())
    return kinds, sent


def _sent(found: Mapping[str, Counts]) -> float:
    return sum(size for counts in found.values() for _, size in counts.values())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--time", action="store_true", help="only the time by size")
    arguments.add_argument("--layers", action="store_true", help="only the layers' collectives")
    arguments.add_argument("--rounds", type=int, default=3, help="of each size")
    options = arguments.parse_args()
    both = options.time == options.layers
    results: dict[str, Any] = {}
    with fake_mesh(tp=N) as mesh:
        if both or options.time:
            results["time"] = measure_time(mesh, options.rounds)
            show_time(results["time"])
        if both or options.layers:
            results["layers"] = measure_layers(mesh)
            show_layers(results["layers"])
    write_json(options.json, results)


if __name__ == "__main__":
    main()
