"""What each pass does and what it leaves alone, on graphs of a few nodes."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from models import mesh_of
from programs import Builder
from ranks import fake_world
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.checkpoint import checkpoint

import fxboundary as fb
from fxboundary.graph.find import find_ports, graph_modules
from fxboundary.graph.simplify.casts import move_casts
from fxboundary.graph.simplify.compose import compose
from fxboundary.graph.simplify.merge import merge
from fxboundary.graph.simplify.share import share
from fxboundary.placements import parse_layout
from fxboundary.static import capture


@pytest.fixture
def tp4():
    with fake_world(4):
        yield mesh_of(tp=4)


class Small(Builder):
    """Graphs over ``tp`` with outputs as they are."""

    @property
    def x(self):
        return self.values[0][0]

    def move(self, node, src, dst, grad=None):
        layouts = [parse_layout(text) for text in (src, dst)]
        return self.port(node, *layouts, None if grad is None else parse_layout(grad))

    def call(self, target, *args, **kwargs):
        return self.graph.call_function(target, args, kwargs)

    def close(self, *outputs, dtype=torch.float64):
        self.graph.output(outputs)
        gm = torch.fx.GraphModule(nn.Module(), self.graph)
        inputs = [torch.ones(8, 8, dtype=dtype), *[torch.ones((), dtype=dtype)] * len(self.weights)]
        with torch.enable_grad():  # and as it was afterwards: a graph may switch it off
            FakeTensorProp(gm, FakeTensorMode()).propagate(*inputs)
        return gm


def text(gm):
    """The nodes that compute something, ports as their steps."""
    gm.recompile()
    return "\n".join(_line(node) for node in gm.graph.nodes if node.op.startswith("call"))


def _line(node):
    target = node.target if isinstance(node.target, str) else node.target.__name__
    given = ", ".join(str(arg) for arg in node.args if isinstance(arg, (torch.fx.Node, int, float)))
    if not target.startswith("redistribute"):
        return f"{node} = {target}({given})"
    x, _, src, dst, grad, *_ = node.args
    return f"{node} = {src}->{dst} grad {grad} ({x})"


# compose


def test_two_ports_in_a_row_are_one(tp4):
    g = Small(tp4)
    gm = g.close(g.move(g.move(g.x, "P", "S(0)"), "S(0)", "R"))
    (change,) = compose(gm)
    assert str(change) == "compose: m2:in.x, m3:in.x -> m2:in.x>m3:in.x"
    assert_expected_inline(text(gm), """redistribute_default_2 = P->R grad R (x)""")


def test_a_round_trip_disappears(tp4):
    g = Small(tp4)
    gm = g.close(g.move(g.move(g.x, "S(0)", "R", "R"), "R", "S(0)"))
    (change,) = compose(gm)
    assert str(change) == "compose: m2:in.x, m3:in.x -> nothing"
    assert text(gm) == ""


def test_a_round_trip_keeps_the_sum_of_its_gradient(tp4):
    g = Small(tp4)
    gm = g.close(g.move(g.move(g.x, "R", "S(0)"), "S(0)", "R", "P"))
    compose(gm)
    assert_expected_inline(text(gm), """redistribute_default_2 = R->R grad P (x)""")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("S(0)", "R", "P"), ("R", "S(1)", None)),
        (("P", "R", "P"), ("R", "S(0)", None)),
        (("S(0)", "R", "R"), ("S(0)", "R", "R")),
    ],
    ids=["shards", "partial", "another layout between"],
)
def test_ports_that_mean_other_gradients_or_layouts_stay(tp4, first, second):
    g = Small(tp4)
    gm = g.close(g.move(g.move(g.x, *first), *second))
    before = text(gm)
    assert compose(gm) == []
    assert text(gm) == before


def test_ports_that_reduce_in_other_dtypes_stay(tp4):
    g = Small(tp4)
    first, second = g.move(g.x, "P", "S(0)"), None
    second = g.move(first, "S(0)", "R", "P")
    first.args = (*first.args[:8], "float32")
    second.args = (*second.args[:8], "float64")
    gm = g.close(second)
    assert compose(gm) == []


def test_the_first_port_stays_for_its_other_users_if_that_is_cheaper(tp4):
    """Reduced to R it costs an all_reduce; a slice of that is free, a reduce_scatter is not."""
    g = Small(tp4)
    whole = g.move(g.x, "P", "R")
    gm = g.close(whole, g.move(whole, "R", "S(0)"))
    assert compose(gm) == []
    g = Small(tp4)
    whole = g.move(g.x, "P", "R")
    gm = g.close(g.move(whole, "R", "S(0)"), g.move(whole, "R", "S(1)"))
    assert compose(gm) == []
    g = Small(tp4)
    shard = g.move(g.x, "R", "S(0)")
    gm = g.close(shard, g.move(shard, "S(0)", "R", "R"))
    assert len(compose(gm)) == 1
    assert_expected_inline(text(gm), """redistribute_default = R->S(0) grad S(0) (x)""")


# share


def test_equal_ports_of_one_value_are_one(tp4):
    g = Small(tp4)
    gm = g.close(*[g.move(g.x, "S(0)", "R", "P") for _ in range(3)])
    (change,) = share(gm)
    assert str(change) == "share: m2:in.x, m3:in.x, m4:in.x -> m2:in.x,m3:in.x,m4:in.x"
    assert text(gm).count("->") == 1


@pytest.mark.parametrize("other", [("S(0)", "R", "R"), ("S(1)", "R", "P"), ("S(0)", "S(1)", None)])
def test_ports_that_differ_stay(tp4, other):
    g = Small(tp4)
    gm = g.close(g.move(g.x, "S(0)", "R", "P"), g.move(g.x, *other))
    assert share(gm) == []


def test_a_value_that_is_written_to_between_two_ports_is_two_values(tp4):
    g = Small(tp4)
    value = g.call(torch.mul, g.x, 2.0)
    first = g.move(value, "S(0)", "R", "P")
    g.graph.call_method("mul_", (value, 3.0))
    gm = g.close(first, g.move(value, "S(0)", "R", "P"))
    assert share(gm) == []


def test_a_write_to_a_view_counts(tp4):
    g = Small(tp4)
    value = g.call(torch.mul, g.x, 2.0)
    first = g.move(value, "S(0)", "R", "P")
    row = g.graph.call_method("select", (value, 0, 0))
    g.graph.call_method("zero_", (row,))
    gm = g.close(first, g.move(value, "S(0)", "R", "P"))
    assert share(gm) == []


def test_gradient_modes_part_ports(tp4):
    g = Small(tp4)
    first = g.move(g.x, "S(0)", "R", "P")
    g.call(torch._C._set_grad_enabled, False)
    gm = g.close(first, g.move(g.x, "S(0)", "R", "P"))
    assert share(gm) == []


# merge


def test_partial_outputs_add_before_they_reduce(tp4):
    g = Small(tp4)
    a, b = (g.move(g.call(f, g.x), "P", "R") for f in (torch.sin, torch.cos))
    gm = g.close(g.call(torch.add, g.call(torch.add, g.x, a), b))
    (change,) = merge(gm)
    assert str(change) == "merge: m3:in.x, m5:in.x -> m3:in.x+m5:in.x"
    assert_expected_inline(
        text(gm),
        """\
sin = sin(x)
cos = cos(x)
add_2 = add(sin, cos)
redistribute_default_2 = P->R grad R (add_2)
add_3 = add(x, redistribute_default_2)""",
    )


def test_a_sum_that_follows_a_merged_one_and_another_use_merges_too(tp4):
    g = Small(tp4)
    a, b, c, d = (g.move(g.call(f, g.x), "P", "R") for f in (torch.sin, torch.cos) * 2)
    first = g.call(torch.add, g.call(torch.add, g.x, a), b)
    second = g.call(torch.add, g.call(torch.add, first, c), d)
    gm = g.close(first, second)
    assert [len(change.ports) for change in merge(gm)] == [2, 2]
    gm.graph.lint()


def test_factors_and_signs_go_along(tp4):
    g = Small(tp4)
    a, b = (g.move(g.call(f, g.x), "P", "R") for f in (torch.sin, torch.cos))
    half, minus = g.call(torch.mul, a, 0.5), g.graph.call_method("neg", (b,))
    gm = g.close(g.call(torch.add, half, minus))
    assert len(merge(gm)) == 1
    assert_expected_inline(
        text(gm),
        """\
sin = sin(x)
cos = cos(x)
mul_1 = mul(sin, 0.5)
neg_1 = neg(cos)
add_1 = add(mul_1, neg_1)
redistribute_default_2 = P->R grad R (add_1)""",
    )


def unmerged(g, case):
    a, b = (g.move(g.call(f, g.x), "P", "R") for f in (torch.sin, torch.cos))
    if case == "used elsewhere":
        return g.call(torch.add, a, b), a
    if case == "not linear":
        return (g.call(torch.add, a, g.call(torch.exp, b)),)
    if case == "alpha":
        return (g.call(torch.add, a, b, alpha=2),)
    if case == "another gradient":
        return (g.call(torch.add, a, g.move(g.call(torch.exp, g.x), "P", "R", "P")),)
    if case == "one over":
        return (g.call(torch.add, a, g.call(torch.div, 1.0, b)),)
    if case == "slices":
        a, b = (g.move(g.call(f, g.x), "R", "S(0)") for f in (torch.sin, torch.cos))
        return (g.call(torch.add, a, b),)
    assert case == "maximum"
    a, b = (g.move(g.call(f, g.x), "P(max)", "R") for f in (torch.sin, torch.cos))
    return (g.call(torch.add, a, b),)


CASES = [
    "used elsewhere",
    "not linear",
    "alpha",
    "another gradient",
    "one over",
    "slices",
    "maximum",
]


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_sum_of_equal_moves_stays(tp4, case):
    g = Small(tp4)
    gm = g.close(*unmerged(g, case))
    before = text(gm)
    assert merge(gm) == []
    assert text(gm) == before


# casts


def test_a_narrowing_cast_goes_before_a_gather(tp4):
    g = Small(tp4)
    gathered = g.move(g.x, "S(0)", "R", "P")
    gm = g.close(g.graph.call_method("to", (gathered, torch.float32)))
    (change,) = move_casts(gm)
    assert str(change) == "cast: m2:in.x -> m2:in.x"
    (port,) = find_ports(gm)
    assert port.dtype is torch.float32
    assert port.transition.request.reduce_dtype == "float64", "gradients are summed as before"


def test_casts_in_a_row_behind_a_gather(tp4):
    g = Small(tp4)
    gathered = g.move(g.x, "S(0)", "R", "R")
    half = g.graph.call_method("to", (gathered, torch.float32))
    gm = g.close(g.graph.call_method("to", (half, torch.bfloat16)))
    assert [change.name for change in move_casts(gm)] == ["cast", "cast"]
    (port,) = find_ports(gm)
    assert port.dtype == torch.bfloat16


def test_a_narrowing_cast_stays_behind_a_sum(tp4):
    g = Small(tp4)
    gm = g.close(g.graph.call_method("to", (g.move(g.x, "P", "R"), torch.float32)))
    assert move_casts(gm) == []


def test_a_widening_cast_goes_behind_a_gather(tp4):
    g = Small(tp4)
    wide = g.graph.call_method("double", (g.x,))
    gm = g.close(g.move(wide, "S(0)", "R", "R"), dtype=torch.float32)
    assert len(move_casts(gm)) == 1
    (port,) = find_ports(gm)
    assert port.dtype is torch.float32


@pytest.mark.parametrize(("src", "grad"), [("P", "R"), ("S(0)", "P")])
def test_a_widening_cast_stays_before_sums(tp4, src, grad):
    g = Small(tp4)
    wide = g.graph.call_method("double", (g.x,))
    gm = g.close(g.move(wide, src, "R", grad), dtype=torch.float32)
    assert move_casts(gm) == []


# graphs without values, subgraphs, the whole


class QKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) * self.v(x)


QKV_CONTRACTS = {
    "layers.*.[qkv]": {
        "in_src": {"input": {"tp": "S(1)"}},
        "in_dst": {"input": {"tp": "R"}},
        "params": {"weight": {"tp": "S(0)"}},
    },
    "layers.*.o": {
        "params": {"weight": {"tp": "S(1)"}},
        "out_src": {"tp": "P"},
        "out_dst": {"tp": "S(1)"},
    },
}


class Layer(QKV):
    def __init__(self, remat=False):
        super().__init__()
        self.o = nn.Linear(8, 8, bias=False)
        self.remat = remat

    def block(self, x):
        return self.o(super().forward(x))

    def forward(self, x):
        return x + (checkpoint(self.block, x, use_reentrant=False) if self.remat else self.block(x))


class Layers(nn.Module):
    def __init__(self, remat=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(remat) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def split(mesh):
    model = Layers()
    fb.apply(model, fb.Plan(mesh, QKV_CONTRACTS))
    return model


class AllTheWay(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return False


def test_a_graph_without_values(tp4):
    """Sharing needs no shapes; merging needs to know what a sum adds."""
    model = split(tp4)
    gm = torch.fx.GraphModule(model, AllTheWay().trace(model))
    simple = fb.simplify(gm)
    assert {change.name for change in simple.changes} == {"share"}
    assert len(find_ports(simple.graph_module)) == len(find_ports(gm)) - 4


def test_checkpointed_layers(tp4):
    plan = fb.Plan(tp4, QKV_CONTRACTS)
    (gm,) = capture(Layers(remat=True), plan, torch.zeros(2, 2, 8))
    simple = fb.simplify(gm)
    assert len(list(graph_modules(simple.graph_module))) == 3
    assert [change.name for change in simple.changes] == ["share", "share"]
    assert simple.changes[0].port == "layers.0.q:in.input,k:in.input,v:in.input"


def test_the_input_stays_as_it_is(tp4):
    (gm,) = capture(Layers(remat=True), fb.Plan(tp4, QKV_CONTRACTS), torch.zeros(2, 2, 8))
    before = fb.render(gm), gm.code
    assert fb.simplify(gm).changes
    assert (fb.render(gm), gm.code) == before


def test_only_graph_modules():
    with pytest.raises(fb.ContractError, match=r"takes a GraphModule, not a Linear"):
        fb.simplify(nn.Linear(2, 2))


def test_the_backend_reports_and_can_be_told_not_to(tp4, monkeypatch):
    monkeypatch.setattr(sys.modules["fxboundary.backend"], "_inductor", lambda gm, *_: gm.forward)
    model, reports = split(tp4), {}
    for simplify in (True, False):
        backend = fb.backend(simplify=simplify)
        torch._dynamo.reset()
        torch.compile(model, backend=backend)(torch.zeros(2, 2, 8))
        (reports[simplify],) = backend.graphs
    assert [change.name for change in reports[True].changes] == ["share", "share"]
    assert reports[False].changes == ()
    assert len(reports[True].ports) == 4 < len(reports[False].ports) == 8
    with pytest.raises(fb.FxBoundaryError, match="simplify='yes': write True, False or"):
        fb.backend(simplify="yes")
