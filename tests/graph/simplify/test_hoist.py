"""Ports in loops: moved out where they are invariant, left where that would cost something."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import assert_gradients, full_gradients, mesh_of
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fxboundary as fb
from fxboundary.graph.find import find_ports, graph_modules
from fxboundary.graph.simplify.hoist import hoist
from fxboundary.graph.simplify.share import share

WIDTH = 8
# Gathered at use; what ranks compute from it differs, so that its gradient is partial.
GATHERED = {"lin": fb.Contract(params={"weight": {"tp": "S(0) -> R"}})}


class Half(nn.Module):
    """A linear map that computes in another dtype than it is stored in."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.ones(WIDTH, WIDTH)), dtype

    def forward(self, x):
        return (x.to(self.dtype) @ self.weight.to(self.dtype)).to(x.dtype)


class Loop(nn.Module):
    """One layer, ``kind`` says in which loop and with what else."""

    def __init__(self, kind="scan", layer=None):
        super().__init__()
        self.kind = kind
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False) if layer is None else layer

    def step(self, carry, x):
        y = torch.tanh(self.lin(x)) + carry
        return y, y.clone()

    def forward(self, x):
        first = torch.zeros_like(x[0])
        if self.kind == "scan":
            return scan(self.step, first, x)[1]
        if self.kind == "outside too":
            return scan(self.step, self.lin(x[0]), x)[1]
        if self.kind == "map":
            return map_rows(lambda row: torch.tanh(self.lin(row)), x)
        if self.kind == "nested":
            return map_rows(lambda rows: scan(self.step, torch.zeros_like(rows[0]), rows)[1], x)
        if self.kind == "while":
            start = torch.zeros((), dtype=torch.long)
            body = lambda i, row: (i + 1, torch.tanh(self.lin(row)))  # noqa: E731
            return while_loop(lambda i, _: i < 3, body, (start, first))[1]
        if self.kind == "checkpoint":
            x = checkpoint(self.lin, x, use_reentrant=False)
            return checkpoint(self.lin, x, use_reentrant=False)
        if self.kind == "checkpoint in the loop":
            remat = lambda row: checkpoint(self.lin, row, use_reentrant=False)  # noqa: E731
            return map_rows(remat, x)
        assert self.kind == "loop in a checkpoint"
        return checkpoint(lambda rows: scan(self.step, first, rows)[1], x, use_reentrant=False)


LOOPS = ["scan", "map", "nested", "outside too"]
KEPT = ["while", "checkpoint", "checkpoint in the loop"]


def inputs(kind):
    shape = (3, 4, 2, WIDTH) if kind == "nested" else (3, 2, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def dynamo(model, plan, x):
    fb.apply(model, plan)
    found = []
    torch._dynamo.reset()
    torch.compile(model, backend=lambda gm, _: found.append(gm) or gm, fullgraph=True)(x)
    return found[0]


def exported(model, plan, x):
    fb.apply(model, plan)
    return torch.export.export(model, (x,)).module()


CAPTURES = [dynamo, exported]


def inside(gm):
    """Names of the ports in subgraphs."""
    return [p.name for p in find_ports(gm) if p.graph_module is not gm]


@pytest.mark.parametrize("captured", CAPTURES)
@pytest.mark.parametrize("kind", ["scan", "map", "nested"])
def test_a_gather_in_a_loop_is_one_before_it(fake_world, kind, captured):
    fake_world(4)
    gm = captured(Loop(kind), fb.Plan(mesh_of(tp=4), GATHERED), inputs(kind))
    assert inside(gm) == ["lin:param.weight"]
    simple = fb.simplify(gm)
    (port,) = find_ports(simple.graph_module)
    assert port.graph_module is simple.graph_module
    assert port.name == "lin:param.weight"
    assert {str(change) for change in simple.changes} == {
        "hoist: lin:param.weight -> lin:param.weight"
    }
    assert inside(gm) == ["lin:param.weight"], "the given graph stays as it is"
    for module in graph_modules(simple.graph_module):
        module.graph.lint()


@pytest.mark.parametrize("captured", CAPTURES)
def test_what_is_gathered_outside_too_is_shared_with_it(fake_world, captured):
    fake_world(4)
    gm = captured(Loop("outside too"), fb.Plan(mesh_of(tp=4), GATHERED), inputs("scan"))
    simple = fb.simplify(gm)
    assert [change.name for change in simple.changes] == ["hoist", "share"]
    (port,) = find_ports(simple.graph_module)
    assert port.graph_module is simple.graph_module


def test_a_loop_in_a_checkpoint_stays_there(fake_world):
    fake_world(4)
    with torch.no_grad():  # torch itself cannot run this one backward
        gm = dynamo(Loop("loop in a checkpoint"), fb.Plan(mesh_of(tp=4), GATHERED), inputs("scan"))
    simple = fb.simplify(gm)
    assert [change.name for change in simple.changes] == ["hoist"]
    (port,) = find_ports(simple.graph_module)
    (block,) = (m for m in graph_modules(simple.graph_module) if port.graph_module is m)
    assert block is not simple.graph_module
    assert any("scan" in node.name for node in block.graph.nodes)


@pytest.mark.parametrize("kind", KEPT)
def test_what_may_not_run_or_is_recomputed_stays(fake_world, kind):
    fake_world(4)
    gm = dynamo(Loop(kind), fb.Plan(mesh_of(tp=4), GATHERED), inputs(kind))
    simple = fb.simplify(gm)
    assert simple.changes == ()
    assert inside(simple.graph_module) == inside(gm)
    assert inside(gm)


def test_a_loop_over_no_rows_stays(fake_world):
    fake_world(4)
    gm = dynamo(Loop("map"), fb.Plan(mesh_of(tp=4), GATHERED), inputs("map"))
    (loop,) = (node for node in gm.graph.nodes if "map_impl" in node.name)
    (rows,) = loop.args[1]
    value = rows.meta["example_value"]
    rows.meta["example_value"] = value[:0]
    assert hoist(gm) == []
    rows.meta["example_value"] = value
    assert len(hoist(gm)) == 1


def test_a_loop_over_as_many_rows_as_come_runs_at_least_once(fake_world):
    fake_world(4)
    model, x = Loop("map"), inputs("map")
    fb.apply(model, fb.Plan(mesh_of(tp=4), GATHERED))
    torch._dynamo.mark_dynamic(x, 0)
    backend = fb.backend()
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert [change.name for change in backend.graphs[0].changes] == ["hoist"]


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_an_input_that_is_written_to_stays(fake_world, where):
    fake_world(4)
    gm = dynamo(Loop(), fb.Plan(mesh_of(tp=4), GATHERED), inputs("scan"))
    (port,) = find_ports(gm)
    graph = gm.graph if where == "outside" else port.graph_module.graph
    weight = next(n for n in graph.nodes if n.op == "placeholder" and "weight" in n.name)
    with graph.inserting_before(next(n for n in graph.nodes if n.op.startswith("call"))):
        written = graph.call_method("mul_", (weight, 2.0))
    assert hoist(gm) == []
    graph.erase_node(written)
    assert len(hoist(gm)) == 1


def test_another_mode_inside_of_the_loop_stays(fake_world):
    fake_world(4)
    gm = dynamo(Loop(), fb.Plan(mesh_of(tp=4), GATHERED), inputs("scan"))
    (port,) = find_ports(gm)
    graph = port.graph_module.graph
    with graph.inserting_before(port.node):
        switch = graph.call_function(torch._C._set_grad_enabled, (False,))
    assert hoist(gm) == []
    graph.erase_node(switch)
    assert len(hoist(gm)) == 1


def test_a_body_that_two_loops_run_stays(fake_world):
    """The second one's inputs are others."""
    fake_world(4)
    gm = dynamo(Loop("map"), fb.Plan(mesh_of(tp=4), GATHERED), inputs("map"))
    (loop,) = (node for node in gm.graph.nodes if "map_impl" in node.name)
    with gm.graph.inserting_after(loop):
        gm.graph.node_copy(loop)
    assert hoist(gm) == []


def test_a_weight_that_the_body_uses_as_stored_too_keeps_its_place(fake_world):
    class Both(Loop):
        def step(self, carry, x):
            rows = next(self.lin.parameters())
            y = torch.tanh(self.lin(x)) + carry + rows.sum()
            return y, y.clone()

    fake_world(4)
    gm = dynamo(Both(), fb.Plan(mesh_of(tp=4), GATHERED), inputs("scan"))
    (loop,) = (node for node in gm.graph.nodes if node.name == "scan")
    before = list(loop.args[3])
    assert len(hoist(gm)) == 1
    (port,) = find_ports(gm)
    assert list(loop.args[3]) == [*before, port.node]


# casts


def test_a_cast_before_a_port_moves_with_it(fake_world):
    fake_world(4)
    gm = dynamo(Loop(layer=Half()), fb.Plan(mesh_of(tp=4), GATHERED), inputs("scan"))
    simple = fb.simplify(gm)
    assert [change.name for change in simple.changes] == ["cast", "hoist"]
    (port,) = find_ports(simple.graph_module)
    assert port.graph_module is simple.graph_module
    assert port.dtype is torch.bfloat16


class Twice(nn.Module):
    def __init__(self, dtypes=(torch.bfloat16, torch.bfloat16)):
        super().__init__()
        self.lin, self.dtypes = Half(), dtypes

    def forward(self, x):
        for dtype in self.dtypes:
            self.lin.dtype = dtype
            x = torch.tanh(self.lin(x))
        return x


@pytest.mark.parametrize("captured", CAPTURES)
def test_equal_casts_of_one_value_are_one(fake_world, captured):
    """Each use gathers a cast of its own, once casts have moved before the gathers."""
    fake_world(4)
    gm = captured(Twice(), fb.Plan(mesh_of(tp=4), GATHERED), torch.randn(2, WIDTH))
    simple = fb.simplify(gm)
    assert [change.name for change in simple.changes][-1] == "share"
    (port,) = find_ports(simple.graph_module)
    casts = [n for n in simple.graph_module.graph.nodes if port.node.args[0] is n]
    assert len(casts) == 1


def test_other_casts_of_one_value_are_others(fake_world):
    fake_world(4)
    model = Twice((torch.bfloat16, torch.float16))
    gm = dynamo(model, fb.Plan(mesh_of(tp=4), GATHERED), torch.randn(2, WIDTH))
    simple = fb.simplify(gm)
    assert [change.name for change in simple.changes] == ["cast", "cast"]
    assert share(simple.graph_module) == []


# values


class Eager:
    """Runs what Dynamo captured."""

    def __init__(self, simplify):
        self.simplify = simplify

    def __call__(self, gm: GraphModule, _):
        return fb.simplify(gm).graph_module if self.simplify else gm


def backward(step, x):
    """The output, after the gradients of a loss that weighs its elements apart."""
    y = step(x)
    (y * torch.linspace(0.5, 2, WIDTH, dtype=y.dtype)).sum().backward()
    return y.detach()


def compared(kind, layer, compiled):
    """Each rank runs its part of the batch; gradients are those of the whole one."""
    torch.manual_seed(0)
    reference = Loop(kind, Half(torch.float64) if layer else None)
    nn.init.normal_(reference.lin.weight)
    reference = reference if layer else reference.double()
    x = inputs(kind).to(torch.float32 if layer else torch.float64)
    want = backward(reference, x)

    model = copy.deepcopy(reference)
    model.zero_grad()
    rank, n = dist.get_rank(), dist.get_world_size()
    fb.apply(model, fb.Plan(mesh_of(tp=n), GATHERED))
    for simplify in (False, True):
        torch._dynamo.reset()
        model.zero_grad()
        backend = fb.backend(simplify=simplify) if compiled else Eager(simplify)
        got = backward(torch.compile(model, backend=backend, fullgraph=True), x.chunk(n, -2)[rank])
        torch.testing.assert_close(got, want.chunk(n, -2)[rank], rtol=1e-5, atol=1e-5)
        assert_gradients(full_gradients(model), reference, 1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [*LOOPS, *KEPT[1:]])
def test_values_and_gradients_stay(ranks2, kind):
    ranks2.run(compared, kind, False, False)


@pytest.mark.distributed
def test_values_and_gradients_stay_with_casts(ranks2):
    ranks2.run(compared, "scan", True, False)


@pytest.mark.distributed
@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["scan", "map"])
def test_values_and_gradients_stay_compiled(ranks2, kind):
    ranks2.run(compared, kind, False, True)
