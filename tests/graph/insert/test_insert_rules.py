"""``rewrite`` is right or refuses: sizes equal by chance, names, captures, what it keeps."""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import WIDTH, Stack, assert_close, mesh_of, mlp_contracts
from random_modules import INSTRUCTIONS, Around, Random
from ranks import fake_world
from torch.fx.experimental.proxy_tensor import make_fx

import fxboundary as fb
from fxboundary.graph.find import find_ports


def random_input(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# Random modules: whatever layout a contract claims for the output, it is right or refused.


def claims(names, ndim, partial):
    each = ["R", *(f"S({d})" for d in range(ndim)), *(["P"] if partial else [])]
    return [dict(zip(names, c, strict=True)) for c in itertools.product(each, repeat=len(names))]


def uneven(shape, layout):
    cut = {int(text[2:-1]) for text in layout.values() if text.startswith("S")}
    return {d: shape[d] for d in cut if shape[d] % dist.get_world_size()}


def contract(shape, y_shape, cut, out):
    found = {"in_src": {"x": {}}, "in_dst": {"x": cut}, "out_src": out, "out_dst": {}}
    if sizes := uneven(shape, cut):
        found["in_sizes"] = {"x": sizes}
    if sizes := uneven(y_shape, out):
        found["out_sizes"] = {"output": sizes}
    return {"inner": found}


def on_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def is_right(model, split, x):
    """Output and gradient of the input, against the module that is not split."""
    values = []
    for module in (model, split):
        own = x.clone().requires_grad_()
        y = module(own)
        if y.requires_grad:
            y.backward(random_input(*y.shape))
        values += [y.detach(), torch.zeros_like(own) if own.grad is None else own.grad]
    pairs = zip(values[:2], values[2:], strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b) for a, b in pairs)


def try_claims(program, shape, cut_dims, mesh, partial):
    """By claim: right, wrong or refused."""
    x, names = random_input(*shape), mesh.mesh_dim_names
    model = Around(Random(program, x))
    captured, y = torch.fx.symbolic_trace(model), model(x)
    cut = {name: f"S({d % len(shape)})" for name, d in zip(names, cut_dims, strict=True)}
    found = {}
    for claim in claims(names, y.dim(), partial):
        plan = fb.Plan(mesh, contract(shape, y.shape, cut, claim))
        try:
            split = fb.rewrite(captured, plan, (x,))
        except fb.FxBoundaryError:
            split = None
        accepted = on_all_ranks(split is not None)
        assert len(set(accepted)) == 1, f"only some ranks refuse {claim}\n{captured.code}"
        what = "refused"
        if split is not None:
            what = "right" if all(on_all_ranks(is_right(model, split, x))) else "wrong"
        found[tuple(claim.values())] = what, captured.code
    return found


def is_sum_of(claim, other):
    """Whether ``other`` tells of a sum over ranks what ``claim`` calls whole."""
    return all(a == b or (a, b) == ("R", "P") for a, b in zip(claim, other, strict=True))


def check_random(cases, sizes):
    mesh = mesh_of(**sizes)
    accepted = 0
    for program, shape, cut_dims in cases:
        partial = program[-1][0] == "contract"
        found = try_claims(program, shape, cut_dims, mesh, partial)
        right = [claim for claim, (what, _) in found.items() if what == "right"]
        accepted += bool(right)
        for claim, (what, code) in found.items():
            # That a value is a sum over ranks is the contract's to say.
            if what == "wrong" and "P" not in claim and not any(is_sum_of(claim, r) for r in right):
                raise AssertionError(f"{shape} cut in {cut_dims}, {claim} is wrong\n{code}")
    return accepted


def cases(sizes, shapes):
    return st.tuples(INSTRUCTIONS, shapes, st.tuples(*[st.integers(0, 2)] * len(sizes)))


def shapes(*sizes):
    return st.lists(st.sampled_from(sizes), min_size=2, max_size=3).map(tuple)


@pytest.mark.distributed
@pytest.mark.parametrize("odd", [False, True])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_random_module_is_right_or_refused(ranks2, odd, data):
    drawn = shapes(1, 2, 3, 4, 6) if odd else shapes(2, 4)
    batch = data.draw(st.lists(cases({"tp": 2}, drawn), min_size=10, max_size=10))
    ranks2.run(check_random, batch, {"tp": 2})


@pytest.mark.distributed
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(cases({"dp": 2, "tp": 2}, shapes(2, 4)), min_size=3, max_size=3))
def test_a_random_module_is_right_or_refused_on_two_mesh_dimensions(ranks4, batch):
    ranks4.run(check_random, batch, {"dp": 2, "tp": 2})


# One that is right by all means: batch, sequence, heads and head size are all 4.


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        q, k, v = (part.view(4, 4, 4, 4).transpose(1, 2) for part in self.qkv(x).split(16, -1))
        scores = q @ k.transpose(-1, -2) + torch.arange(4).view(1, 4, 1, 1)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        scores = torch.where(mask, scores, torch.full((4, 4), -1e3, dtype=x.dtype))
        y = scores.softmax(-1) @ v
        k, w = torch.cat([y, torch.zeros_like(y)], -1).chunk(2, -1)
        return self.out((k + w).transpose(1, 2).reshape(4, 4, 16))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        # torch.export refuses a checkpoint whose gradient is wanted; Dynamo keeps it.
        if torch.compiler.is_exporting():
            return x + self.attention(x)
        return x + torch.utils.checkpoint.checkpoint(self.attention, x, use_reentrant=False)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Checkpointed() for _ in range(2))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


ATTENTION = {
    "blocks.*.attention": {
        "in_src": {"x": {}},
        "in_dst": {"x": {"tp": "R"}},
        "out_src": {"tp": "P"},
        "out_dst": {},
        "params": {"qkv.*": {"tp": "S(0)"}, "out.weight": {"tp": "S(1)"}},
        "stacked": {"qkv.*": 3},
    }
}


def check_checkpointed():
    torch.manual_seed(0)
    reference = Nested().double()
    model, x = copy.deepcopy(reference), random_input(4, 4, 16)
    backend = fb.backend(plan=fb.Plan(mesh_of(tp=dist.get_world_size()), ATTENTION))
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    y.sum().backward()
    expected = reference(x)
    expected.sum().backward()
    assert_close(y.detach(), expected.detach(), "output", 1e-5)
    for name, param in reference.named_parameters():
        found = dict(model.named_parameters())[name].grad
        assert_close(found + 1, param.grad + 1, f"gradient of {name}", 1e-5)


@pytest.mark.compiled
@pytest.mark.distributed
def test_a_checkpointed_module_is_split_by_the_backend(ranks2):
    ranks2.run(check_checkpointed)


def check_equal_sizes(strict):
    torch.manual_seed(0)
    model = Nested().double()
    x = random_input(4, 4, 16)
    program = torch.export.export(copy.deepcopy(model), (x,), strict=strict)
    split = fb.rewrite(program, fb.Plan(mesh_of(tp=dist.get_world_size()), ATTENTION))
    expected = model(x)
    expected.sum().backward()
    y = split(x)
    y.sum().backward()
    assert_close(y.detach(), expected.detach(), "output", 1e-12)
    own = dict(split.named_parameters())["blocks.1.attention.out.weight"].grad
    full = model.blocks[1].attention.out.weight.grad
    assert_close(own, full.chunk(dist.get_world_size(), 1)[dist.get_rank()], "gradient", 1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize("strict", [False, True])
def test_equal_sizes_are_told_apart_by_their_origin(ranks2, strict):
    ranks2.run(check_equal_sizes, strict)


def check_dynamic():
    model, x = Stack().double(), random_input(4, 8, WIDTH)
    b, half = torch.export.Dim("b", min=2, max=32), torch.export.Dim("half", min=2, max=32)
    shapes = {"x": {0: b, 1: 2 * half}}
    program = torch.export.export(copy.deepcopy(model), (x,), dynamic_shapes=shapes)
    split = fb.rewrite(program, fb.Plan(mesh_of(tp=2), mlp_contracts(True)))
    for shape in [(4, 8, WIDTH), (3, 12, WIDTH)]:
        whole = random_input(*shape)
        local = whole.chunk(2, 1)[dist.get_rank()].contiguous()
        expected = model(whole).chunk(2, 1)[dist.get_rank()]
        assert_close(split(local).detach(), expected.detach(), f"output of {shape}", 1e-12)


@pytest.mark.distributed
def test_dynamic_sizes_stay_dynamic(ranks2):
    ranks2.run(check_dynamic)


# Structure, in a fake world.


@pytest.fixture
def mesh():
    with fake_world(2):
        yield mesh_of(tp=2)


def exported(model, *inputs, strict=False):
    return torch.export.export(model, inputs, strict=strict).module()


def port_names(gm):
    return [port.name for port in find_ports(gm)]


SHARDED = {"in_src": {"x": {}}, "in_dst": {"x": {"tp": "S(0)"}}, "out_src": {"tp": "S(0)"}}
SHARDED["out_dst"] = {"tp": "R"}


def refusal(model, contracts, mesh, *inputs):
    with pytest.raises(fb.FxBoundaryError) as error:
        fb.rewrite(exported(Around(model), *inputs), fb.Plan(mesh, {"inner": contracts}))
    return str(error.value)


def of(function):
    """A module whose forward is this function."""

    class Of(nn.Module):
        def forward(self, x):
            return function(x)

    return Of()


def test_the_second_call_of_a_module_has_a_number(mesh):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = of(torch.tanh)

        def forward(self, x):
            return self.inner(self.inner(x))

    split = fb.rewrite(exported(Twice(), random_input(4, 4)), fb.Plan(mesh, {"inner": SHARDED}))
    assert port_names(split) == ["inner:in.x", "inner:out", "inner#2:in.x", "inner#2:out"]


class Pair(nn.Module):
    def forward(self, a, b):
        late = b * 2
        return a - late


class Caller(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        return self.inner(x + 1, y)


def in_ports(*names):
    return {"in_src": {n: {} for n in names}, "in_dst": {n: {"tp": "S(0)"} for n in names}}


def test_inputs_get_the_names_of_the_signature(mesh):
    gm = exported(Caller(Pair()), random_input(4, 4), random_input(4, 4))
    contracts = {"inner": in_ports("b", "a") | {"out_src": {"tp": "S(0)"}, "out_dst": {}}}
    split = fb.rewrite(gm, fb.Plan(mesh, contracts))
    values = {port.name: port.node.args[0].name for port in find_ports(split)}
    assert (values["inner:in.a"], values["inner:in.b"]) == ("add", "y")


class Joint(nn.Module):
    def forward(self, a, b):
        return torch.maximum(a, b)


def test_ambiguous_inputs_are_listed_and_can_be_called_by_number(mesh):
    gm = exported(Caller(Joint()), random_input(4, 6), random_input(4, 6))
    with pytest.raises(fb.ContractError) as error:
        fb.rewrite(gm, fb.Plan(mesh, {"inner": in_ports("a")}))
    text = str(error.value)
    assert "inner:in.a: is ambiguous here; call the input by its number" in text
    assert "in.0: [4, 6] from add (test_insert_rules.py:" in text
    assert "in.1: [4, 6] from y" in text
    out = {"out_src": {"tp": "S(0)"}, "out_dst": {}}
    split = fb.rewrite(gm, fb.Plan(mesh, {"inner": in_ports("0", "1") | out}))
    assert port_names(split) == ["inner:in.0", "inner:in.1", "inner:out"]


def test_a_name_that_forward_lacks(mesh):
    gm = exported(Caller(Joint()), random_input(4, 6), random_input(4, 6))
    with pytest.raises(fb.ContractError, match="forward has no parameter 'c'; it has a, b"):
        fb.rewrite(gm, fb.Plan(mesh, {"inner": in_ports("c")}))


REFUSED = {
    "a literal size of unclear origin": lambda x: torch.arange(x.shape[0] * 4).view(4, 4) + x,
    "padding": lambda x: F.pad(x, [0, 0, 1, -1]),
    "a diagonal": lambda x: torch.diagonal(x) * x,
    "a size that is computed with": lambda x: x / x.shape[0],
    "entries of a whole tensor by an index that is cut": lambda x: torch.gather(
        torch.arange(16.0).view(4, 4), 1, x.long()
    ),
    "blocks of a diagonal": lambda x: (x @ x.T) @ x,
    "normalization": lambda x: F.normalize(x, dim=0),
    "what is cut in other places": lambda x: x + x.T.reshape(2, 2, 4).transpose(0, 1).reshape(4, 4),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_node_and_line(mesh, what):
    # By symbolic_trace, in which sizes are read where the graph runs.
    x = random_input(4, 4).float()
    gm = torch.fx.symbolic_trace(Around(of(REFUSED[what])))
    with pytest.raises(fb.PlacementMismatchError, match=r"inner: (node|port) .*"):
        fb.rewrite(gm, fb.Plan(mesh, {"inner": SHARDED}), (x,))


def test_a_refusal_names_the_source_line(mesh):
    text = refusal(of(lambda x: x.softmax(0)), SHARDED, mesh, random_input(4, 4))
    assert "inner: node softmax (test_insert_rules.py:" in text
    assert "works along dimension 0 as a whole, which is cut over tp" in text
    assert "fxboundary.apply" in text


@pytest.mark.parametrize("claimed", ["R", "S(1)"])
def test_an_output_that_is_not_cut_as_declared(mesh, claimed):
    contracts = SHARDED | {"out_src": {"tp": claimed}}
    text = refusal(of(torch.tanh), contracts, mesh, random_input(4, 4))
    assert re.search(r"inner:out: declared to be .*, but what arrives is cut in dimension 0", text)


def test_a_dimension_of_one_is_not_cut(mesh):
    text = refusal(of(torch.tanh), SHARDED | {"out_dst": {}}, mesh, random_input(1, 4))
    assert "a dimension of 1 cannot be cut" in text


def test_a_graph_is_rewritten_once(mesh):
    plan = fb.Plan(mesh, mlp_contracts(False))
    split = fb.rewrite(exported(Stack(), torch.zeros(2, 4, WIDTH)), plan)
    with pytest.raises(fb.ContractError, match="a graph is rewritten once"):
        fb.rewrite(split, plan)


def test_a_module_that_is_not_called(mesh):
    class Idle(Around):
        def forward(self, x):
            return x + 1

    x = random_input(4, 4)
    gm = exported(Idle(nn.Linear(4, 4).double()), x)
    with pytest.raises(fb.ContractError, match="inner"):
        fb.rewrite(gm, fb.Plan(mesh, {"inner": SHARDED}))


def test_arguments_that_are_not_understood(mesh):
    plan, x = fb.Plan(mesh, mlp_contracts(False)), torch.zeros(2, 4, WIDTH)
    with pytest.raises(fb.ContractError, match="write 'global' or 'local'"):
        fb.rewrite(exported(Stack(), x), plan, sizes="whole")
    with pytest.raises(fb.ContractError, match="not a Stack; capture it first"):
        fb.rewrite(Stack(), plan)
    with pytest.raises(fb.ContractError, match="give example_inputs"):
        fb.rewrite(torch.fx.symbolic_trace(Stack()), plan)
    with pytest.raises(fb.ContractError, match="has no processes"):
        fb.rewrite(exported(Stack(), x), fb.Plan({"tp": 2}, mlp_contracts(False)))


@pytest.mark.parametrize("capture", ["make_fx", "program's graph_module"])
def test_a_graph_without_modules_or_parameters_names_the_remedy(mesh, capture):
    model, x = Stack(), torch.zeros(2, 4, WIDTH)
    if capture == "make_fx":
        gm, remedy = make_fx(model)(x), "capture with torch.export or symbolic_trace"
    else:
        gm, remedy = torch.export.export(model, (x,)).graph_module, "rewrite the ExportedProgram"
    with pytest.raises(fb.ContractError, match=remedy):
        fb.rewrite(gm, fb.Plan(mesh, mlp_contracts(False)), (x,))


def test_a_graph_without_modules_can_be_split_as_a_whole(mesh):
    x = torch.zeros(2, 4, 6)
    gm = make_fx(lambda x: x.view(2, 24) + 1)(x)
    whole = in_ports("x_1") | {"out_src": {"tp": "S(0)"}, "out_dst": {}}
    split = fb.rewrite(gm, fb.Plan(mesh, {"": whole}), (x,))
    assert "view.default(redistribute_default, [1, 24])" in split.code


def test_local_sizes_stay(mesh):
    """A graph captured with this rank's sizes gets its ports and nothing else."""
    model = Stack(hidden=8)  # this rank's half
    gm = exported(model, torch.zeros(2, 4, WIDTH))
    split = fb.rewrite(gm, fb.Plan(mesh, mlp_contracts(False)), sizes="local")
    assert {port.name for port in find_ports(split)} >= {"layers.0.mlp:in.x", "layers.1.mlp:out"}
    found = dict(split.named_parameters())
    assert all(found[name] is param for name, param in gm.named_parameters())
    with pytest.raises(fb.PlacementMismatchError, match="changes the shape"):
        fb.rewrite(gm, fb.Plan(mesh, mlp_contracts(True)), sizes="local")


class Through(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return False


def test_the_graph_is_left_as_it_is_and_its_metadata_kept(mesh):
    x = torch.zeros(2, 4, WIDTH)
    gm = exported(Stack(), x)
    code = gm.code
    metadata = {node.name: dict(node.meta) for node in gm.graph.nodes}
    shapes = {name: param.shape for name, param in gm.named_parameters()}
    split = fb.rewrite(gm, fb.Plan(mesh, mlp_contracts(False)))
    split.graph.lint()
    assert gm.code == code
    assert shapes == {name: param.shape for name, param in gm.named_parameters()}
    assert all(node.meta == metadata[node.name] for node in gm.graph.nodes)
    for node in split.graph.nodes:
        if node.op == "call_function" and node.name in metadata:
            for key in ("nn_module_stack", "stack_trace"):
                assert node.meta[key] == metadata[node.name][key]
    linear = next(n for n in split.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert tuple(linear.meta["val"].shape) == (2, 4, 8)


def test_a_rewritten_graph_can_be_copied_and_pickled(mesh):
    model, x = Stack(), torch.zeros(2, 4, WIDTH)
    traced = torch.fx.GraphModule(model, Through().trace(model))
    split = fb.rewrite(traced, fb.Plan(mesh, mlp_contracts(False)), (x,))
    assert port_names(copy.deepcopy(split)) == port_names(split)
    assert len(find_ports(pickle.loads(pickle.dumps(split)))) == len(find_ports(split))
