"""Collectives early, waits late: the order before and after, in graphs and in generated code."""

from __future__ import annotations

import copy
import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import MLP, WIDTH, Stack, assert_gradients, full_gradients, mesh_of
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule

import fxboundary as fb
from fxboundary.graph.overlap import overlap

C10D, ATEN = torch.ops._c10d_functional, torch.ops.aten


class Nodes:
    """A lowered graph, node by node; names say which collective is which."""

    def __init__(self):
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target, *args, name=None):
        return self.graph.create_node("call_function", target, args, {}, name)

    def gather(self, x, i):
        start = self.call(C10D.all_gather_into_tensor.default, x, 2, "g", name=f"S{i}")
        return self.call(C10D.wait_tensor.default, start, name=f"W{i}")

    def scatter(self, x, i):
        start = self.call(C10D.reduce_scatter_tensor.default, x, "sum", 2, "g", name=f"R{i}")
        return self.call(C10D.wait_tensor.default, start, name=f"V{i}")

    def mm(self, a, b, i):
        return self.call(ATEN.mm.default, a, b, name=f"M{i}")

    def order(self, *outputs):
        self.graph.output(outputs)
        GraphModule(nn.Module(), self.graph)
        return overlap(self.graph), self.names()

    def names(self):
        return " ".join(n.name for n in self.graph.nodes if n.op == "call_function")


def layers(g, n, cast=False):
    weights = [g.graph.placeholder(f"w{i}") for i in range(1, n + 1)]
    x = g.x
    for i, w in enumerate(weights, 1):
        if cast:
            w = g.call(ATEN._to_copy.default, w, name=f"C{i}")
        x = g.mm(x, g.gather(w, i), i)
    return x


def test_the_next_parameter_is_gathered_while_one_is_used():
    g = Nodes()
    assert g.order(layers(g, 4)) == (True, "S1 S2 W1 M1 S3 W2 M2 S4 W3 M3 W4 M4")
    assert not overlap(g.graph), "it stays once it is there"


def test_what_prepares_a_collective_rises_with_it():
    g = Nodes()
    assert g.order(layers(g, 3, cast=True))[1] == "C1 S1 C2 S2 W1 M1 C3 S3 W2 M2 W3 M3"


def test_gathers_that_stand_first_do_not_stay_there():
    """Inductor's reordering for locality leaves them so: all parameters at once."""
    g = Nodes()
    weights = [g.graph.placeholder(f"w{i}") for i in range(3)]
    starts = [
        g.call(C10D.all_gather_into_tensor.default, w, 2, "g", name=f"S{i}")
        for i, w in enumerate(weights, 1)
    ]
    x = g.x
    for i, start in enumerate(starts, 1):
        x = g.mm(x, g.call(C10D.wait_tensor.default, start, name=f"W{i}"), i)
    assert g.order(x)[1] == "S1 S2 W1 M1 S3 W2 M2 W3 M3"


def test_gradients_are_waited_for_at_the_next_one():
    g = Nodes()
    a = g.mm(g.x, g.x, 1)
    first = g.scatter(a, 1)
    b = g.mm(g.x, g.x, 2)
    second = g.scatter(b, 2)
    assert g.order(first, second, g.mm(b, g.x, 3))[1] == "M1 R1 M2 V1 R2 M3 V2"


def test_an_independent_kernel_hides_a_sum():
    g = Nodes()
    routed = g.call(ATEN.relu.default, g.scatter(g.mm(g.x, g.x, 1), 1), name="relu")
    assert g.order(g.mm(routed, g.mm(g.x, g.x, 2), 3))[1] == "M1 R1 V1 relu M2 M3"


def test_views_of_a_result_sink_with_its_wait():
    g = Nodes()
    w = g.call(ATEN.permute.default, g.gather(g.x, 1), [1, 0], name="T")
    assert g.order(g.mm(g.mm(g.x, g.x, 1), w, 2))[1] == "S1 M1 W1 T M2"


@pytest.mark.parametrize("writes", [True, False])
def test_nothing_moves_past_a_write(writes):
    g = Nodes()
    w = g.graph.placeholder("w")
    a = g.gather(w, 1)
    target = ATEN.copy_.default if writes else ATEN.add.Tensor
    g.call(target, w, g.x, name="write")
    b = g.gather(w, 2)
    order = g.order(g.mm(g.mm(g.x, a, 1), b, 2))[1]
    if writes:
        assert order == "S1 W1 write S2 M1 W2 M2"
    else:
        assert order.index("S2") < order.index("W1")


def test_it_is_linear():
    def seconds(n):
        graphs = [Nodes() for _ in range(3)]
        outputs = [layers(g, n) for g in graphs]
        begins = [time.process_time()]
        for g, x in zip(graphs, outputs, strict=True):
            g.order(x)
            begins.append(time.process_time())
        return min(b - a for a, b in itertools.pairwise(begins))

    assert seconds(1600) < 16 * seconds(400)  # 4 times as many nodes


# with Inductor


class Two(nn.Module):
    """A module split over ranks beside one that is not, as routed and shared experts."""

    def __init__(self):
        super().__init__()
        self.routed, self.shared = MLP(), MLP()

    def forward(self, x):
        return torch.relu(self.routed(x)) * self.shared(x)


WHOLE = {"": fb.Contract(params={"**": {"tp": "S(0) -> R"}})}
SPLIT = {
    "routed": fb.Contract(
        in_dst={"x": {"tp": "R"}},
        out_src={"tp": "P"},
        out_dst={"tp": "R"},
        params={
            "up.*": {"tp": "S(0)"},
            "down.weight": {"tp": "S(1)"},
            "down.bias": {"tp": "R -> P"},
        },
    )
}
LETTER = {"all_gather_into_tensor": "S", "all_reduce": "S", "all_reduce_": "S", "wait_tensor": "W"}
KERNEL = re.compile(r"(?:_c10d_functional|extern_kernels)\.(\w+)(?:\.default)?\(")


def kernels(model, x, **options):
    """The first graph's collectives (S), waits (W) and matmuls (M) in the order of its code."""
    torch._dynamo.reset()
    step = torch.compile(model, backend=fb.backend(**options))
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step, x)
    body = codes[0][codes[0].index("def call(") :].partition("def benchmark")[0]
    lines = [line for line in body.splitlines() if not line.strip().startswith("#")]
    found = [match[1] for line in lines if (match := KERNEL.search(line))]
    return "".join(LETTER.get(name, "M") for name in found)


@pytest.mark.compiled
def test_generated_code_gathers_one_parameter_ahead(fake_world):
    fake_world(2)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    fb.apply(model, fb.Plan(mesh_of(tp=2), WHOLE))
    x = torch.randn(4, 16)
    assert kernels(model, x) == "SSWMSWMSWMWM"
    assert "SWMSWM" in kernels(model, x, overlap=False), "if not, Inductor does it by itself now"


@pytest.mark.compiled
def test_generated_code_computes_while_it_reduces(fake_world):
    fake_world(2)
    model = Two()
    fb.apply(model, fb.Plan(mesh_of(tp=2), SPLIT))
    assert re.search("SM+W", kernels(model, torch.randn(4, WIDTH)))


def trained(contracts, make):
    torch.manual_seed(0)
    reference = make().double()
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    want = reference(x)
    want.pow(2).sum().backward()
    rank, n = dist.get_rank(), dist.get_world_size()
    if make is Stack:  # each rank has its part of the batch
        x, want = x.chunk(n)[rank], want.chunk(n)[rank]
    orders = []
    for on in (False, True):
        model = copy.deepcopy(reference)
        model.zero_grad()
        fb.apply(model, fb.Plan(mesh_of(tp=n), contracts))
        torch._dynamo.reset()
        step = torch.compile(model, backend=fb.backend(overlap=on), fullgraph=True)
        got = step(x)
        got.pow(2).sum().backward()
        torch.testing.assert_close(got, want)
        assert_gradients(full_gradients(model), reference, 1e-10)
        orders.append(kernels(model, x, overlap=on))
    return orders


@pytest.mark.distributed
@pytest.mark.compiled
@pytest.mark.parametrize(("contracts", "make"), [(WHOLE, Stack), (SPLIT, Two)])
def test_values_and_gradients_stay_and_ranks_agree(ranks2, contracts, make):
    first, second = ranks2.run(trained, contracts, make)
    assert first == second
