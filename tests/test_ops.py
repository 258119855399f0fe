"""The operator: one node in captures, right fake shapes, right autograd, clear errors."""

from __future__ import annotations

import copy

import pytest
import torch
from models import WIDTH, Stack, assert_close, mesh_of, mlp_contracts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fxboundary as fb
from fxboundary.mesh import register_mesh
from fxboundary.ops import OP, PortOp
from fxboundary.placements import parse_layout


def port(src, dst, grad=None, sizes=None, **mesh):
    live = register_mesh(mesh_of(**(mesh or {"tp": 4})))
    layouts = [parse_layout(text) for text in (src, dst, grad or dst.replace("P", "R"))]
    return PortOp(live, *layouts, "m:in.x", sizes)


CHANGES = [
    ("S(1)", "R", (2, 3, 5), (2, 12, 5)),
    ("S(-1)", "R", (2, 3, 5), (2, 3, 20)),
    ("S(0)", "R", (2, 3, 5), (8, 3, 5)),
    ("R", "S(1)", (2, 8, 5), (2, 2, 5)),
    ("P", "R", (2, 3), (2, 3)),
    ("P", "S(-2)", (8, 3), (2, 3)),
    ("S(0)", "S(2)", (2, 3, 8), (8, 3, 2)),
    ("S(2)", "S(0)", (8, 3, 2), (2, 3, 8)),
    ("R", "P", (2, 3), (2, 3)),
    ("S(1)", "P", (2, 3), (2, 12)),
]


@pytest.mark.parametrize(("src", "dst", "shape", "expected"), CHANGES)
def test_fake_and_real_results_have_the_same_shape_and_strides(
    fake_world, src, dst, shape, expected
):
    fake_world(4)
    op = port(src, dst)
    for x in (torch.randn(shape), torch.randn(*shape[::-1]).permute(*reversed(range(len(shape))))):
        real = op(x)
        with FakeTensorMode() as mode:
            fake = op(mode.from_tensor(x))
        traced = make_fx(op)(x)(x)
        assert real.shape == expected
        assert fake.shape == traced.shape == real.shape
        if src != "R":  # R → P keeps the value itself on the first rank
            assert fake.stride() == traced.stride() == real.stride()
            assert real.is_contiguous()


@pytest.mark.parametrize(("src", "dst", "shape", "expected"), CHANGES)
def test_symbolic_shapes_follow(fake_world, src, dst, shape, expected):
    fake_world(4)
    op = port(src, dst)
    traced = make_fx(op, tracing_mode="symbolic")(torch.randn(shape))
    (result,) = traced.graph.find_nodes(op="output")[0].all_input_nodes
    assert any(isinstance(size, torch.SymInt) for size in result.meta["val"].shape)
    double = torch.randn([2 * size for size in shape])
    assert traced(double).shape == op(double).shape == tuple(2 * size for size in expected)


def test_dynamo_sees_one_node_with_readable_arguments(fake_world):
    fake_world(4)
    op, graphs = port("S(1)", "R", "P"), []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm

    torch.compile(lambda x: op(x) * 2, backend=keep, fullgraph=True)(torch.ones(2, 2))
    (node,) = [n for n in graphs[0].graph.nodes if "redistribute" in str(n.target)]
    assert node.args[1:] == ("tp=4", "S(1)", "R", "P", "m:in.x", [], "", "", "")


def test_only_a_port_that_cuts_carries_the_coordinate():
    from ranks import fake_world

    with fake_world(4, 3):
        assert port("S(1)", "R", "P").args[5] == []  # gathers, and scatters the gradient
        assert port("S(1)", "R", "R").args[5] == [3]  # cuts the gradient
        assert port("R", "S(0)").args[5] == [3]


def test_pre_dispatch_captures_keep_the_node(fake_world):
    fake_world(4)
    traced = make_fx(port("P", "R"), pre_dispatch=True)(torch.ones(2))
    assert OP.default in [node.target for node in traced.graph.nodes]


def test_an_unknown_mesh_says_to_build_the_plan_first():
    with pytest.raises(
        fb.FxBoundaryError, match=r"no mesh 'tp=99' in this process: build the plan"
    ):
        OP(torch.ones(2), "tp=99", "P", "R", "R", "m:out", [], "")


def test_a_reduction_without_gradient_says_so(fake_world):
    fake_world(4)
    op = port("P(max)", "R")
    assert op(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(
        fb.UnsupportedTransitionError, match=r"m:in\.x: P\(max\) → R has no gradient"
    ):
        op(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        op(torch.ones(2, requires_grad=True))


def test_errors_name_the_port(fake_world):
    fake_world(4)
    with pytest.raises(fb.PlacementMismatchError, match=r"m:in\.x: S\(2\) shards a dimension that"):
        port("S(2)", "R")(torch.ones(2, 2))
    with pytest.raises(fb.PlacementMismatchError, match=r"m:in\.x: dimension 0 of size 6 cannot be "
                       r"cut evenly over tp=4; pad it to a multiple of 4, or declare"):  # fmt: skip
        port("R", "S(0)")(torch.ones(6))
    with pytest.raises(fb.PlacementMismatchError, match=r"m:in\.x: P\(avg\) of a int64 tensor"):
        port("P(avg)", "R")(torch.ones(2, dtype=torch.int64))
    with pytest.raises(
        fb.PlacementMismatchError, match="5 elements, but this rank's shard of the de"
    ):
        port("S(0)", "R", sizes={0: 10})(torch.ones(5))


def gradgrad_is_right():
    torch.manual_seed(0)
    op = port("S(0)", "R", "P", tp=2)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def loss(t):  # each rank a part of the work: its gradient is partial
        return (op(t) ** 3).sum() / 2

    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(gradient, 3 * x**2)
    return (second / x).round(decimals=9).unique().tolist()


def test_gradients_of_gradients_go_back_through_the_forward(ranks2):
    assert ranks2.run(gradgrad_is_right) == [[6.0]] * 2


def asynchronous_input():
    import torch.distributed._functional_collectives as funcol

    mesh = mesh_of(tp=2)
    op = port("P", "R", tp=2)
    x = funcol.all_gather_tensor(torch.ones(1, 2), 0, mesh.get_group())
    assert type(x) is not torch.Tensor
    return op(x).tolist()


def test_an_asynchronous_tensor_is_waited_for(ranks2):
    assert ranks2.run(asynchronous_input) == [[[2.0, 2.0], [2.0, 2.0]]] * 2


def forward_mode():
    op = port("P", "R", tp=2)
    value = torch.full((2,), 1.0 + torch.distributed.get_rank())
    _, from_func = torch.func.jvp(op, (value,), (10 * value,))
    with forward_ad.dual_level():
        from_dual = forward_ad.unpack_dual(op(forward_ad.make_dual(value, 10 * value))).tangent
    return from_func.tolist(), from_dual.tolist()


def test_forward_mode_derivatives_are_redistributed_too(ranks2):
    assert ranks2.run(forward_mode) == [([30.0, 30.0], [30.0, 30.0])] * 2


def vmapped_model(sequence_parallel):
    torch.manual_seed(0)
    reference = Stack().double()
    model = copy.deepcopy(reference)
    fb.apply(model, fb.Plan(mesh_of(tp=2), mlp_contracts(sequence_parallel)))
    rank = torch.distributed.get_rank()
    samples = torch.randn(3, 2, 4, WIDTH, dtype=torch.float64)

    def local(x):
        return x.chunk(2, 2)[rank] if sequence_parallel else x

    def gradients(module, x):
        def loss(params, sample):
            return torch.func.functional_call(module, params, (sample,)).pow(2).sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(module.named_parameters()), x)

    last = torch.func.vmap(model, in_dims=2)(local(samples).movedim(0, 2))
    assert_close(last, local(torch.func.vmap(reference)(samples)), "output", 1e-13)
    expected, actual = gradients(reference, samples), gradients(model, local(samples))
    for name, gradient in expected.items():
        if ".up." in name:
            gradient = gradient.chunk(2, 1)[rank]
        if ".down.weight" in name:
            gradient = gradient.chunk(2, 2)[rank]
        assert_close(actual[name], gradient, f"per-sample gradient of {name}", 1e-13)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vmap_gives_per_sample_gradients(ranks2, sequence_parallel):
    ranks2.run(vmapped_model, sequence_parallel)


def complex_values():
    x = torch.complex(torch.ones(2), torch.tensor([0.0, 1.0 + torch.distributed.get_rank()]))
    reduced, gathered = port("P", "R", tp=2)(x), port("S(0)", "R", tp=2)(x.conj())
    return reduced.tolist(), gathered.tolist()


def test_complex_tensors_travel_as_pairs(ranks2):
    expected = ([2 + 0j, 2 + 3j], [1 + 0j, 1 - 1j, 1 + 0j, 1 - 2j])
    assert ranks2.run(complex_values) == [expected] * 2
