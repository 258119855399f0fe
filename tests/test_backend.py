"""The torch.compile backend: what it finds, in which captures, and what it refuses."""

from __future__ import annotations

import copy
import logging
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from models import (
    MLP,
    WIDTH,
    Block,
    Stack,
    assert_close,
    assert_gradients,
    check_stack,
    full_gradients,
    mesh_of,
    mlp_contracts,
)
from torch._dynamo.compiled_autograd import _enable as compiled_autograd_with
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxboundary as fb
from fxboundary.graph.overlap import OverlapCollectives
from fxboundary.graph.verify import NoteEqualCollectives, VerifyPorts, source_identity
from fxboundary.peer.backend import LowerToPeers
from fxboundary.placements import local_shape_and_offset, parse_layout

BLOCK = ["norm:param.weight", "mlp:in.x", "mlp.down:param.bias", "mlp:out"]
ALL = [f"layers.{i}.{port}" for i in (0, 1) for port in BLOCK]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def split(model=None, contracts=None, **sizes):
    model = Stack() if model is None else model
    fb.apply(model, fb.Plan(mesh_of(**(sizes or {"tp": 4})), contracts or mlp_contracts(True)))
    return model


def names(backend):
    return [[port.name for port in graph.ports] for graph in backend.graphs]


def train(run, x):
    y = run(x.requires_grad_())
    y.float().sum().backward()
    return y


# What is captured


def test_a_model_is_one_graph_with_one_node_a_port(fake_world):
    fake_world(4)
    backend = fb.backend()
    train(torch.compile(split(), backend=backend, fullgraph=True), torch.randn(1, 2, WIDTH))
    assert names(backend) == [ALL]


def test_the_backend_is_registered_by_name(fake_world):
    fake_world(4)
    assert "fxboundary" in torch._dynamo.list_backends()
    run = torch.compile(split(), backend="fxboundary", fullgraph=True)
    assert train(run, torch.randn(1, 2, WIDTH)).shape == (1, 2, WIDTH)


def test_other_backends_run_the_ports_too(fake_world):
    fake_world(4)
    for backend in ("inductor", "aot_eager", "eager"):
        torch._dynamo.reset()
        run = torch.compile(split(), backend=backend, fullgraph=True)
        assert train(run, torch.randn(1, 2, WIDTH)).shape == (1, 2, WIDTH)


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedStack(Stack):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Checkpointed() for _ in range(2))


class Twice(nn.Module):
    """A checkpoint inside another."""

    def __init__(self):
        super().__init__()
        self.inner = CheckpointedStack()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def nested_checkpoint_values():
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Twice().double()
    model = copy.deepcopy(reference)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    reference(x).square().sum().backward()
    mesh = mesh_of(tp=2)
    contracts = {f"inner.{name}": c for name, c in mlp_contracts(False).items()}
    fb.apply(model, fb.Plan(mesh, contracts))
    backend = fb.backend()
    torch.compile(model, backend=backend, fullgraph=True)(x).square().sum().backward()
    assert_gradients(full_gradients(model), reference, 1e-12)
    return names(backend)


def test_c19_ports_in_nested_checkpoints_are_found_and_right(ranks2):
    ports = [f"inner.layers.{i}.{port}" for i in (0, 1) for port in BLOCK[1:]]
    assert ranks2.run(nested_checkpoint_values) == [[ports]] * 2


class BreaksInside(MLP):
    def forward(self, x):
        y = self.up(x)
        torch._dynamo.graph_break()
        return self.down(F.silu(y))


def broken_values():
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = nn.Sequential(BreaksInside()).double()
    model = copy.deepcopy(reference)
    x = torch.randn(4, 8, dtype=torch.float64)
    reference(x).square().sum().backward()
    contracts = {"0": mlp_contracts(False)["layers.*.mlp"]}
    fb.apply(model, fb.Plan(mesh_of(tp=2), contracts))
    backend = fb.backend()
    torch.compile(model, backend=backend)(x).square().sum().backward()
    assert_gradients(full_gradients(model), reference, 1e-12)
    return sorted(name.split(":")[-1] for graph in names(backend) for name in graph)


def test_a_graph_break_inside_a_region_loses_no_port(ranks2):
    assert ranks2.run(broken_values) == [["in.x", "out", "param.bias"]] * 2


def reference_and_model(**sizes):
    torch.manual_seed(0)
    reference = Stack(4).double()
    model = split(copy.deepcopy(reference), **sizes)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    reference(x).pow(2).mean().backward()
    return reference, model, x


def compiled_autograd():
    reference, model, x = reference_and_model(tp=2)
    local = x.chunk(2, 1)[torch.distributed.get_rank()]
    for run in (model, torch.compile(model, backend="fxboundary")):
        model.zero_grad()
        loss = run(local).pow(2).mean() / 2  # of this rank's half
        with compiled_autograd_with(torch.compile(backend="fxboundary")):
            loss.backward()
        assert_gradients(full_gradients(model), reference, 1e-12)


def test_compiled_autograd_traces_into_the_ports(ranks2):
    ranks2.run(compiled_autograd)


def data_parallel():
    reference, model, x = reference_and_model(dp=2, tp=1)
    mesh = mesh_of(dp=2, tp=1)
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 512  # several buckets, so several graphs
    model = DistributedDataParallel(
        model, process_group=mesh["dp"].get_group(), bucket_cap_mb=0.001
    )
    backend = fb.backend()
    run = torch.compile(model, backend=backend)
    run(x.chunk(2)[torch.distributed.get_rank()]).pow(2).mean().backward()
    assert_gradients(full_gradients(model.module), reference, 1e-12)
    return len(backend.graphs)


def test_ddp_may_split_the_graph_between_ports(ranks2):
    counts = ranks2.run(data_parallel)
    assert counts[0] == counts[1] > 1


def test_layers_compiled_alone_share_one_graph(fake_world):
    fake_world(4)
    model = split(Stack(layers=3))
    backend = fb.backend()
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    train(model, torch.randn(1, 2, WIDTH))
    assert names(backend) == [BLOCK]


def test_contracted_layers_of_a_list_share_one_graph_too(fake_world):
    fake_world(4)
    gather = {"in_src": {"x": {"tp": "S(1)"}}, "in_dst": {"x": {}},
              "out_src": {}, "out_dst": {"output": {"tp": "S(1)"}}}  # fmt: skip
    model = split(Stack(layers=3), {"layers.*": gather})
    backend = fb.backend()
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    train(model, torch.randn(1, 2, WIDTH))
    assert len(backend.graphs) == 1


def test_dynamic_sizes_are_one_graph(fake_world):
    fake_world(4)
    backend = fb.backend()
    run = torch.compile(split(), backend=backend, fullgraph=True)
    for batch, length in ((3, 4), (5, 6), (7, 9)):
        x = torch.randn(batch, length, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        assert train(run, x).shape == (batch, length, WIDTH)
    assert names(backend) == [ALL]
    assert "layers.0.mlp:in.x  f32[s0, s1, 8] -> [s0, 4*s1, 8]" in backend.graphs[0].text


CUT = {
    "layers.0": {"in_src": {"x": {}}, "in_dst": {"x": {"tp": "S(1)"}}},
    "layers.1": {"out_src": {"tp": "S(1)"}, "out_dst": {"tp": "R"}},
}


def dynamic_cut_values():
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Stack().double()
    model = split(copy.deepcopy(reference), CUT, tp=2)
    backend = fb.backend()
    run = torch.compile(model, backend=backend, fullgraph=True)
    for length in (4, 6, 10):
        x = torch.randn(2, length, WIDTH, dtype=torch.float64)
        torch._dynamo.mark_dynamic(x, 1)
        expected = reference(x)
        assert_close(run(x).detach(), expected.detach(), "output", 1e-12)
    try:
        run(torch.randn(2, 5, WIDTH, dtype=torch.float64))
    except Exception as error:
        return len(backend.graphs), str(error)


def test_a_length_that_tp_does_not_divide_is_an_error_that_says_what_to_do(ranks2):
    for graphs, message in ranks2.run(dynamic_cut_values):
        assert graphs == 1
        assert "layers.*:in.x: dimension 1 of size" in message
        assert "cannot be cut evenly over tp=2; pad it to a multiple of 2" in message


def test_autocast_reaches_the_ports(fake_world):
    fake_world(4)
    backend = fb.backend()
    run = torch.compile(split(), backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(torch.randn(1, 2, WIDTH, requires_grad=True))
    y.float().sum().backward()
    assert "layers.0.mlp:out  bf16[1, 8, 8] -> [1, 2, 8]" in backend.graphs[0].text


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_one_graph(fake_world, mode):
    fake_world(4)
    backend = fb.backend()
    run = torch.compile(split(), backend=backend, fullgraph=True)
    with mode():
        assert run(torch.randn(1, 2, WIDTH)).shape == (1, 2, WIDTH)
    assert names(backend) == [ALL]


def test_inference_on_ranks_equals_unsharded(ranks2):
    ranks2.run(inference_values)


def inference_values():
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Stack().double()
    model = split(copy.deepcopy(reference), mlp_contracts(False), tp=2)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    with torch.inference_mode():
        y = torch.compile(model, backend="fxboundary", fullgraph=True)(x)
        assert_close(y, reference(x), "output", 1e-13)


class ReadsShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x.to(self.linear.weight.dtype) * 2


def test_a_parameter_of_which_only_the_dtype_is_read_is_not_gathered(fake_world):
    fake_world(4)
    contract = {"0": {"params": {"linear.weight": {"tp": "S(0) -> R"}}}}
    backend = fb.backend()
    torch.compile(split(nn.Sequential(ReadsShape()), contract), backend=backend)(torch.ones(2))
    assert names(backend) == [[]]


# Caches


def cached_values(contracts_of):
    torch._dynamo.reset()
    check_stack(
        mesh_of(tp=2),
        contracts_of,
        sequence_parallel=False,
        wrap=lambda m: torch.compile(m, backend="fxboundary", fullgraph=True),
    )


def test_a_graph_that_cuts_is_right_on_every_rank_from_a_shared_cache(ranks2):
    """The ranks share a cache folder, and their graphs are equal but for the coordinate."""
    contracts = mlp_contracts(False)
    contracts["layers.*.norm"] = {
        "in_src": {"x": {}}, "in_dst": {"x": {"tp": "S(1)"}},
        "out_src": {"tp": "S(1)"}, "out_dst": {"tp": "R"},
    }  # fmt: skip
    for _ in range(2):
        ranks2.run(cached_values, contracts)


def two_groups_side_by_side():
    """Rank-independent group names: the tp groups of both dp rows compile to the same code."""
    torch._dynamo.reset()
    mesh = mesh_of(dp=2, tp=2)
    contract = {"": {"out_src": {"tp": "P"}, "out_dst": {"tp": "R"}}}
    model = nn.Identity()
    fb.apply(model, fb.Plan(mesh["tp"], contract))
    run = torch.compile(model, backend="fxboundary", fullgraph=True)
    return run(torch.full((3,), float(torch.distributed.get_rank()))).tolist()


def test_groups_side_by_side_reduce_within_themselves(ranks4):
    for _ in range(2):
        assert ranks4.run(two_groups_side_by_side) == [[1.0] * 3] * 2 + [[5.0] * 3] * 2


def test_source_identity_is_part_of_the_cache_key():
    noted = NoteEqualCollectives()
    assert source_identity() in VerifyPorts({}, noted).uuid()
    assert source_identity() in noted.uuid()
    assert VerifyPorts({}, noted, users=lambda graph: None).uuid() is None


def test_passes_do_not_take_each_others_place_in_the_cache():
    assert LowerToPeers().uuid() != OverlapCollectives().uuid()


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.q(x) + self.k(x.view_as(x)) + self.q(x)


def merged_values():
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Projections().double()
    model = copy.deepcopy(reference)
    mesh = mesh_of(tp=2)
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    expected = reference(x)
    expected.square().sum().backward()
    gather = {"in_src": {"input": {"tp": "S(1)"}}, "in_dst": {"input": {}}}
    fb.apply(model, fb.Plan(mesh, {"[qk]": gather}))
    run = torch.compile(model, backend=fb.backend(), fullgraph=True)
    y = run(x.chunk(2, 1)[mesh.get_local_rank()].requires_grad_())
    y.square().sum().backward()
    assert_close(y.detach(), expected.detach(), "output", 1e-13)
    assert_gradients(full_gradients(model), reference, 1e-13)


def test_equal_collectives_may_be_merged(ranks2):
    ranks2.run(merged_values)


# Refusals and silence


def test_a_lost_collective_is_an_error_that_names_its_port(fake_world):
    fake_world(4)

    def lose(graph):
        for node in list(graph.nodes):
            if "reduce_scatter" in str(node.target):
                (wait,) = node.users
                wait.replace_all_uses_with(node.args[0])
                graph.erase_node(wait)
                graph.erase_node(node)

    run = torch.compile(
        split(contracts=mlp_contracts(True)),
        backend=fb.backend(post_grad_custom_pre_pass=lose),
        fullgraph=True,
    )
    with pytest.raises(
        Exception, match=r"collectives of layers\.0\.mlp:out, layers\.1\.mlp:out are not"
    ):
        run(torch.randn(1, 2, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lowering": "function"},
            r"lowering='function': no such lowering \(did you mean 'functional'",
        ),
        (
            {"lowring": "auto"},
            r"option 'lowring': unknown to fxboundary "
            r"\(lowering, simplify, overlap\) and to Inductor",
        ),
    ],
)
def test_options_are_checked_by_name(options, message):
    with pytest.raises(fb.FxBoundaryError, match=message):
        fb.backend(**options)


def test_options_of_torch_compile_are_checked_and_passed_on(fake_world):
    fake_world(4)
    options = {"lowering": "functional", "epilogue_fusion": False}
    run = torch.compile(split(), backend="fxboundary", options=options)
    assert run(torch.randn(1, 2, WIDTH)).shape == (1, 2, WIDTH)
    bad = torch.compile(split(), backend="fxboundary", options={"epilogue_fusions": False})
    with pytest.raises(
        Exception, match=r"option 'epilogue_fusions': .* \(did you mean 'epilogue_fusion'"
    ):
        bad(torch.randn(1, 2, WIDTH))


def test_a_graph_without_ports_is_said_once_at_debug_level(caplog):
    sys.modules["fxboundary.backend"]._say_no_ports.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="fxboundary"):
        for size in (2, 3):
            torch._dynamo.reset()
            run = torch.compile(lambda x: x.sin() + 1, backend="fxboundary")
            assert torch.allclose(run(torch.ones(size)), torch.ones(size).sin() + 1)
    assert [
        (r.levelname, "without ports" in r.message)
        for r in caplog.records
        if r.name == "fxboundary"
    ] == [("DEBUG", True)]


def test_an_unsplit_model_is_refused_where_a_value_arrives_otherwise(fake_world):
    fake_world(4)
    plan = fb.Plan(mesh_of(tp=4), mlp_contracts(True))
    run = torch.compile(Stack(), backend=fb.backend(plan))
    with pytest.raises(Exception, match=r"norm:in\.x: declared to be tp: S\(1\), but .* is whole"):
        run(torch.randn(1, 2, WIDTH))


def test_an_unsplit_part_of_a_split_model_is_refused(fake_world):
    fake_world(4)
    model = Stack()
    fb.apply(model.layers[0], fb.Plan(mesh_of(tp=4), {"mlp": mlp_contracts(False)["layers.*.mlp"]}))
    run = torch.compile(model, backend=fb.backend(fb.Plan(mesh_of(tp=4), mlp_contracts(False))))
    with pytest.raises(Exception, match=r"layers\.1\.mlp: the plan contracts it, but it has no "):
        run(torch.randn(1, 2, WIDTH))


def test_a_plan_that_was_applied_is_accepted(fake_world):
    fake_world(4)
    model = Stack()
    plan = fb.Plan(mesh_of(tp=4), mlp_contracts(True))
    fb.apply(model, plan)
    backend = fb.backend(plan)
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(1, 2, WIDTH))
    assert names(backend) == [ALL]


def test_a_reduction_dtype_holds_at_every_port(fake_world):
    fake_world(4)
    contracts = mlp_contracts(True)
    contracts["layers.*.mlp"]["reduce_dtype"] = "float32"
    backend = fb.backend()
    run = torch.compile(split(Stack(1).bfloat16(), contracts), backend=backend, fullgraph=True)
    y = train(run, torch.randn(1, 2, WIDTH, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    (text,) = [graph.text for graph in backend.graphs]
    assert "grad tp: P: reduce_scatter(dim=1, float32, tp=4)" in text
    assert "    reduce_scatter(dim=1, float32, tp=4)  |  grad tp: S(1)" in text
    assert "grad tp: P: all_reduce(tp=4)" in text  # the norm's weight, whose contract is silent


class Relayouts(nn.Module):
    """Scales a tensor that arrives and leaves in layouts over two mesh dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale


TWO_DIMENSIONS = [
    ("S(0),S(1)", "S(1),S(0)"),  # one permutation
    ("S(0),S(0)", "R,S(0)"),
    ("S(0)[1],S(0)", "S(0),S(0)"),
    ("S(0)[1],S(0)", "S(1),R"),
    ("S(0),S(0)", "S(1),S(1)"),  # flattened all_to_all
    ("S(1),S(1)", "R,R"),  # flattened all_gather
]


def compiled_relayouts(src, dst, dynamic):
    mesh = mesh_of(dp=2, tp=2)
    names, me = ("dp", "tp"), tuple(mesh.get_coordinate())
    layouts = [dict(zip(names, text.split(","), strict=True)) for text in (src, dst)]
    model = Relayouts()
    contract = {"in_src": {"x": layouts[0]}, "in_dst": {"x": layouts[1]}}
    contract |= {"out_src": layouts[1], "out_dst": layouts[0]}
    fb.apply(model, fb.Plan(mesh, {"": contract}))
    backend = fb.backend()
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (8, 16, 32) if dynamic else (8,):
        whole = torch.arange(24.0 * rows, dtype=torch.float64).reshape(rows, 24)
        shape, offset = local_shape_and_offset(whole.shape, parse_layout(src), (2, 2), me)
        local = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        x = local.clone().requires_grad_()
        y = run(x)
        y.backward(local)
        assert_close(y, 2 * local, f"{rows} rows", 1e-15)
        assert_close(x.grad, 2 * local, f"gradient, {rows} rows", 1e-15)
    return len(backend.graphs)


@pytest.mark.parametrize(("src", "dst"), TWO_DIMENSIONS)
def test_compiled_ports_over_two_mesh_dimensions(ranks4, src, dst):
    assert ranks4.run(compiled_relayouts, src, dst, False) == [1] * 4


def test_relayouts_of_dynamic_sizes_are_one_graph(ranks4):
    assert ranks4.run(compiled_relayouts, "S(0),S(1)", "S(1),S(0)", True) == [1] * 4


def test_cuts_of_dynamic_sizes_are_one_graph(ranks4):
    assert ranks4.run(compiled_relayouts, "R,R", "S(0),S(1)", True) == [1] * 4
