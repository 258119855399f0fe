"""Reported failures of systems of this kind, reduced; each test names the public report."""

from __future__ import annotations

import copy
import time
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from models import (
    MLP,
    WIDTH,
    assert_close,
    assert_gradients,
    check_llama,
    full_gradients,
    llama_contracts,
    mesh_of,
    world,
)

import fxboundary as fb
from fxboundary.graph.collectives import find_collectives


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend=fb.backend(), fullgraph=True)


def sharded(x, mesh, dim):
    return x.chunk(mesh["tp"].size(), dim)[mesh["tp"].get_local_rank()].contiguous()


# C03, pytorch#172932: leaving and entering a layout changes the gradient.


def partial_through_an_empty_region(compile_it):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    partial = {"input": {"tp": "P"}}
    fb.apply(
        model,
        fb.Plan(
            mesh_of(tp=2),
            {
                "0": {"in_src": partial, "in_dst": partial},
                "1": {"out_src": {"tp": "P"}, "out_dst": {"tp": "R"}},
            },
        ),
    )
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    value = (compiled(model) if compile_it else model)(x)
    (value * torch.tensor([3.0, 5.0])).sum().backward()
    return value.tolist(), x.grad.tolist()


@pytest.mark.parametrize("compile_it", [False, True])
def test_c03_a_partial_that_passes_an_empty_region_keeps_its_gradient(ranks2, compile_it):
    for value, gradient in ranks2.run(partial_through_an_empty_region, compile_it):
        assert value == [2.0, 4.0]
        assert gradient == [3.0, 5.0]


# C04, torchtitan#2532: a replicated parameter under sharded activations.


def norm_weight_under_sequence_parallelism(stored):
    mesh = mesh_of(dp=2, tp=2)
    reference = nn.Sequential(nn.RMSNorm(WIDTH)).double()
    model = copy.deepcopy(reference)
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 6, WIDTH, dtype=torch.float64)
    (reference(x) * w).sum().backward()
    activations = {"x": {"dp": "S(0)", "tp": "S(1)"}}
    params = {"weight": {"dp": "S(0) -> R"}} if stored == "sharded" else None
    fb.apply(model, fb.Plan(mesh, {"0": {"in_src": activations, "in_dst": activations,
                                         "params": params}}))  # fmt: skip
    dp = mesh["dp"].get_local_rank()

    def local(t):
        return sharded(t.chunk(2)[dp], mesh, 1)

    (model(local(x)) * local(w)).sum().backward()
    assert_gradients(full_gradients(model), reference, 1e-14)


@pytest.mark.parametrize("stored", ["replicated", "sharded"])
def test_c04_norm_weight_gradient_is_summed_over_sequence_shards(ranks4, stored):
    ranks4.run(norm_weight_under_sequence_parallelism, stored)


# C05, text-generation-inference#1036, torchtitan#4332: the bias of a row-parallel linear.


def row_parallel_bias(outside, tp, compile_it):
    mesh = mesh_of(tp=tp)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double()
    model = copy.deepcopy(reference)
    x, w = torch.randn(2, 2, 4, WIDTH, dtype=torch.float64)
    expected = reference(x)
    (expected * w).sum().backward()
    features = {"input": {"tp": "S(-1)"}}
    contract = fb.Contract(
        in_src=features,
        in_dst=features,
        out_src={"tp": "P"},
        out_dst={"tp": outside},
        params={"weight": {"tp": "S(1)"}, "bias": {"tp": "R -> P"}},
    )
    fb.apply(model, fb.Plan(mesh, {"0": contract}))
    y = (compiled(model) if compile_it else model)(sharded(x, mesh, -1))
    local = (lambda t: t) if outside == "R" else (lambda t: sharded(t, mesh, 1))
    (y * local(w)).sum().backward()
    assert_close(y.detach(), local(expected.detach()), "output", 1e-14)
    assert_gradients(full_gradients(model), reference, 1e-14)


@pytest.mark.parametrize("outside", ["R", "S(1)"])
def test_c05_row_parallel_bias_is_added_once(ranks2, ranks4, outside):
    ranks2.run(row_parallel_bias, outside, 2, False)
    ranks2.run(row_parallel_bias, outside, 2, True)
    ranks4.run(row_parallel_bias, outside, 4, False)


# C06, LightX2V#1453: vectors and scalars treated alike.


class ScaledLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x) * self.scale


def column_parallel_with_a_scalar(names):
    mesh = mesh_of(tp=2)
    torch.manual_seed(0)
    reference = nn.Sequential(ScaledLinear()).double()
    model = copy.deepcopy(reference)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    expected = reference(x)
    expected.square().sum().backward()
    contract = fb.Contract(
        in_src={"x": {}}, in_dst={"x": {}}, out_src={"tp": "S(-1)"}, out_dst={"tp": "R"},
        params={name: {"tp": "S(0)"} for name in names},
    )  # fmt: skip
    fb.apply(model, fb.Plan(mesh, {"0": contract}))
    shapes = [tuple(p.shape) for _, p in sorted(model.named_parameters())]
    y = model(x)
    y.square().sum().backward()
    assert_close(y.detach(), expected.detach(), "output", 1e-14)
    assert_gradients(full_gradients(model), reference, 1e-14)
    return shapes


@pytest.mark.parametrize("names", [("linear.weight", "linear.bias"), ("**",)])
def test_c06_the_bias_is_cut_with_its_weight_and_the_scalar_stays_whole(ranks2, names):
    for shapes in ranks2.run(column_parallel_with_a_scalar, names):
        assert shapes == [(2,), (2, WIDTH), ()]


# C07, torchtitan#3374: hooks that assume one tensor.


class Router(nn.Module):
    def forward(self, x):
        return x * 2, x.argmax(-1), None


def router_outputs(compile_it):
    model = nn.Sequential(Router())
    contract = fb.Contract(out_src={"logits": {"tp": "P"}}, out_dst={"logits": {"tp": "R"}})
    fb.apply(model, fb.Plan(mesh_of(tp=2), {"0": contract}))
    out = (compiled(model) if compile_it else model)(torch.tensor([[1.0, 5.0, 2.0]]))
    return type(out).__name__, out[0].tolist(), out[1].tolist(), out[1].dtype, out[2]


@pytest.mark.parametrize("compile_it", [False, True])
def test_c07_outputs_that_the_contract_does_not_name_come_back_untouched(ranks2, compile_it):
    for out in ranks2.run(router_outputs, compile_it):
        assert out == ("tuple", [[4.0, 20.0, 8.0]], [1], torch.int64, None)


# C08, pytorch#124114: hooks that look at positions only.


class Attend(nn.Module):
    def forward(self, query, key=None, *, bias=None):
        out = query if key is None else query + key
        return out if bias is None else out + bias


def call_styles(compile_it):
    mesh = mesh_of(tp=2)
    inputs = {"query": {"tp": "S(0)"}, "key": {"tp": "S(0)"}, "bias": {"tp": "S(0)"}}
    model = Attend()
    fb.apply(model, fb.Plan(mesh, {"": fb.Contract(in_src=inputs, in_dst={})}))
    run = compiled(model) if compile_it else model
    q, k, b = (torch.arange(4.0) * scale for scale in (1, 10, 100))
    q_, k_, b_ = (sharded(t, mesh, 0) for t in (q, k, b))
    return [
        torch.equal(run(q_, k_), q + k),
        torch.equal(run(q_, key=k_), q + k),
        torch.equal(run(query=q_, key=k_, bias=b_), q + k + b),
        torch.equal(run(q_, bias=b_), q + b),
        torch.equal(run(q_), q),
        torch.equal(run(q_, None), q),
    ]


@pytest.mark.parametrize("compile_it", [False, True])
def test_c08_positions_keywords_and_absent_inputs(ranks2, compile_it):
    assert ranks2.run(call_styles, compile_it) == [[True] * 6] * 2


# C09, autoparallel#517: a partial on another mesh dimension reduced early, then again.


def test_c09_a_partial_on_another_mesh_dimension_is_reduced_once():
    mesh = {"dp": 2, "cp": 2}
    cut = fb.plan_transition(["R", "P"], ["S(1)", "P"], mesh, (4, 8))
    assert (cut.collectives, cut.bytes) == (0, 0)
    reduce = fb.plan_transition(["S(1)", "P"], ["S(1)", "R"], mesh, (4, 8))
    assert [(step.kind, step.mesh_dims) for step in reduce.steps] == [("all_reduce", (1,))]


# C10, pytorch#146045: duplicates merged, but left running.


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


def three_gathers_of_one_value(simplify):
    mesh = mesh_of(tp=4)
    torch.manual_seed(0)
    reference = Projections().double()
    model = copy.deepcopy(reference)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    expected = reference(x)
    (expected * weight).sum().backward()
    contract = {
        "in_src": {"input": {"tp": "S(1)"}},
        "in_dst": {"input": {"tp": "R"}},
        "params": {"weight": {"tp": "S(0)"}, "bias": {"tp": "S(0)"}},
    }
    fb.apply(model, fb.Plan(mesh, {"[qkv]": contract}))
    joint, idle = [], []

    def look(graph):
        joint.extend((c.kind, c.port) for c in find_collectives(graph.owning_module))
        idle.extend(n.name for n in graph.nodes if n.op == "call_function" and not n.users)

    backend = fb.backend(simplify=simplify, joint_custom_post_pass=look)
    x_local = sharded(x.detach(), mesh, 1).requires_grad_()
    torch._dynamo.reset()
    y = torch.compile(model, backend=backend, fullgraph=True)(x_local)
    (y * sharded(weight, mesh, 2)).sum().backward()
    assert_close(y.detach(), sharded(expected.detach(), mesh, 2), "output", 1e-13)
    assert_close(x_local.grad, sharded(x.grad, mesh, 1), "input gradient", 1e-13)
    assert_gradients(full_gradients(model), reference, 1e-13)
    return joint, idle


def test_c10_three_gathers_of_one_value_are_one_each_way(ranks4):
    name = "q:in.input,k:in.input,v:in.input"
    for joint, idle in ranks4.run(three_gathers_of_one_value, True):
        assert joint == [("all_gather", name), ("reduce_scatter", name)]
        assert idle == []


def test_c10_unsimplified_they_are_right_too(ranks4):
    for joint, _ in ranks4.run(three_gathers_of_one_value, False):
        assert [kind for kind, _ in joint].count("reduce_scatter") == 3


# C11, pytorch#146693: the gathered copy is kept for backward, not the shard.


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.seen = ()

    def forward(self, x):
        gate, up = self.gate.weight, self.up.weight
        if not torch.compiler.is_compiling():
            self.seen = tuple(map(weakref.ref, (x, gate, up)))
        return F.linear(x, gate).tanh() * F.linear(x, up)


C11 = {
    "in_backward": {
        "in_src": {"x": {"tp": "S(0)"}},
        "in_dst": {"x": {"tp": "R"}},
        "params": {"**": {"tp": "S(0)"}},
    },
    "param_backward": {
        "in_src": {"x": {"tp": "S(0)"}},
        "in_dst": {"x": {"tp": "S(0)"}},
        "params": {"**": {"tp": "S(0) -> R"}},
    },
}


def kept_for_backward(field, decision, compile_it):
    """How many whole tensors forward kept; compiled, the collectives of either graph too."""
    mesh = mesh_of(tp=4)
    torch.manual_seed(0)
    reference = Gated().double()
    model = copy.deepcopy(reference)
    x = torch.randn(16, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = reference(x)
    expected.square().sum().backward()
    of_input = field == "in_backward"
    names = ["x"] if of_input else ["**"]
    contract = C11[field] | {field: dict.fromkeys(names, decision)}
    fb.apply(model, fb.Plan(mesh, {"": contract}))
    whole = (16, WIDTH) if of_input else (WIDTH, WIDTH)
    kept, graphs = [], []

    def look(graph):
        (output,) = graph.find_nodes(op="output")
        graphs.append(" ".join(c.kind for c in find_collectives(graph.owning_module)))
        kept.append(sum(tuple(n.meta["val"].shape) == whole for n in output.all_input_nodes))

    torch._dynamo.reset()
    backend = fb.backend(post_grad_custom_post_pass=look)
    run = torch.compile(model, backend=backend) if compile_it else model
    x_local = sharded(x.detach(), mesh, 0).requires_grad_()
    y = run(x_local)
    time.sleep(0.2)  # the thread that ran a collective lets go of its tensors a moment later
    kept.append(sum((t := ref()) is not None and tuple(t.shape) == whole for ref in model.seen))
    t = None
    for again in (not compile_it, False):
        x_local.grad = None
        model.zero_grad()
        y.square().sum().backward(retain_graph=again)
        if not again:
            break
    dim = 1 if of_input else 0
    assert_close(y.detach(), sharded(expected.detach(), mesh, dim), "output", 1e-13)
    assert_close(x_local.grad, sharded(x.grad, mesh, 0), "input gradient", 1e-13)
    assert_gradients(full_gradients(model), reference, 1e-13)
    return kept[0], graphs


@pytest.mark.parametrize(
    ("field", "whole", "forward", "backward"),
    [
        ("in_backward", 1, "all_gather", "reduce_scatter"),
        ("param_backward", 2, "all_gather all_gather", "reduce_scatter reduce_scatter"),
    ],
)
def test_c11_a_port_says_what_backward_keeps(ranks4, field, whole, forward, backward):
    def on_ranks(*args):
        first, *others = ranks4.run(kept_for_backward, field, *args)
        assert others == [first] * 3
        return first

    assert on_ranks("save", True) == (whole, [forward, backward])
    kept, (first, second) = on_ranks("recompute", True)
    assert (kept, first) == (0, forward)
    assert sorted(second.split()) == sorted(f"{forward} {backward}".split())
    assert on_ranks("save", False)[0] == whole
    assert on_ranks("recompute", False)[0] == 0


# C16, pytorch#192000: waiting after a graph break.


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP()

    def forward(self, x):
        y = self.mlp(x)
        torch._dynamo.graph_break()
        return y.square() + x


def port_before_a_break():
    mesh = mesh_of(tp=2)
    torch.manual_seed(0)
    reference = Broken().double()
    model = copy.deepcopy(reference)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    expected = reference(x)
    expected.sum().backward()
    contract = fb.Contract(
        in_src={"x": {}}, in_dst={"x": {}}, out_src={"tp": "P"}, out_dst={"tp": "R"},
        params={"up.*": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}, "down.bias": {"tp": "R->P"}},
    )  # fmt: skip
    fb.apply(model, fb.Plan(mesh, {"mlp": contract}))
    torch._dynamo.reset()
    backend = fb.backend()
    y = torch.compile(model, backend=backend)(x)
    y.sum().backward()
    assert_close(y.detach(), expected.detach(), "output", 1e-14)
    assert_gradients(full_gradients(model), reference, 1e-13)
    return [[port.name for port in graph.ports] for graph in backend.graphs]


def test_c16_a_value_used_after_a_graph_break_is_complete(ranks2):
    for graphs in ranks2.run(port_before_a_break):
        assert graphs == [["mlp:in.x", "mlp.down:param.bias", "mlp:out"], []]


# C17: hooks of the module that is compiled run in frames of their own.


def contracted_root(how):
    mesh = mesh_of(tp=2)
    torch.manual_seed(0)
    reference = MLP().double()
    model = copy.deepcopy(reference)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    expected = reference(x)
    expected.sum().backward()
    contract = fb.Contract(
        in_src={"x": {"tp": "S(0)"}}, in_dst={"x": {}}, out_src={"tp": "P"}, out_dst={"tp": "R"},
        params={"up.*": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}, "down.bias": {"tp": "R->P"}},
    )  # fmt: skip
    fb.apply(model, fb.Plan(mesh, {"": contract}))
    torch._dynamo.reset()
    backend = fb.backend()
    if how == "torch.compile":
        run = torch.compile(model, backend=backend, fullgraph=True)
    elif how == "forward":
        run = torch.compile(model.forward, backend=backend, fullgraph=True)
    else:
        model.compile(backend=backend, fullgraph=True)
        run = model
    y = run(sharded(x, mesh, 0))
    y.sum().backward()
    assert_close(y.detach(), expected.detach(), "output", 1e-14)
    assert_gradients(full_gradients(model), reference, 1e-13)
    return [[port.name for port in graph.ports] for graph in backend.graphs]


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "forward"])
def test_c17_a_contracted_root_is_one_graph_with_its_ports(ranks2, how):
    for graphs in ranks2.run(contracted_root, how):
        assert graphs == [[":in.x", "down:param.bias", ":out"]]


# C18: tied embedding and head, cut along a vocabulary that tp does not divide.


def tied_contracts(vocab):
    contracts = llama_contracts(False)
    contracts["model.embed_tokens"] = {
        "params": {"weight": {"tp": "S(0) -> R"}},
        "param_grad": {"weight": {"tp": "R"}},
    }
    contracts["lm_head"]["out_sizes"] = {"output": {-1: vocab}}
    return contracts


def tied_uneven_vocabulary(tp, compile_it):
    vocab = 67
    mesh = mesh_of(tp=tp)
    model = check_llama(
        mesh,
        tied_contracts(vocab),
        wrap=compiled if compile_it else lambda model: model,
        tolerance=2e-6 if compile_it else 1e-12,
        tie=True,
        vocab=vocab,
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight or (
        model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
    )
    state = fb.full_state_dict(model)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    return sorted(state), state["lm_head.weight"].tolist()


def test_c18_tied_uneven_vocabulary(ranks2, ranks4):
    from models import llama

    reference = llama(tie=True, vocab=67)
    two, four = ranks2.run(tied_uneven_vocabulary, 2, False), ranks4.run(
        tied_uneven_vocabulary, 4, False
    )  # fmt: skip
    for names, weight in (*two, *four):
        assert names == sorted(reference.state_dict())
        assert weight == reference.lm_head.weight.tolist()


def test_c18_tied_uneven_vocabulary_compiled(ranks2):
    ranks2.run(tied_uneven_vocabulary, 2, True)


def reload_on_another_tp(state):
    from models import llama

    vocab, (_, n) = 67, world()
    model = llama(tie=True, vocab=vocab)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fb.apply(model, fb.Plan(mesh_of(tp=n), tied_contracts(vocab)))
    fb.load_full_state_dict(model, state)
    ids = torch.arange(16).view(2, 8)
    return model(input_ids=ids).logits.detach()


def save_from_tp2():
    from models import llama

    model = llama(tie=True, vocab=67)
    fb.apply(model, fb.Plan(mesh_of(tp=2), tied_contracts(67)))
    return fb.full_state_dict(model)


def test_c18_a_checkpoint_reloads_on_another_tp(ranks2, ranks4):
    from models import llama

    state = ranks2.run(save_from_tp2)[0]
    expected = llama(tie=True, vocab=67)(input_ids=torch.arange(16).view(2, 8)).logits
    for logits in ranks4.run(reload_on_another_tp, state):
        assert_close(logits, expected.detach(), "logits", 1e-12)


def undeclared_vocabulary():
    contracts = tied_contracts(67)
    del contracts["lm_head"]["out_sizes"]
    from models import llama

    model = llama(tie=True, vocab=67)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(fb.ContractError) as error:
        fb.apply(model, fb.Plan(mesh_of(tp=2), contracts))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    return str(error.value)


def test_c18_an_uneven_output_without_its_global_size_is_refused(ranks2):
    for message in ranks2.run(undeclared_vocabulary):
        assert "lm_head.out_src.output.tp: S(-1)" in message
        assert "out_sizes={'output': {-1: ...}}" in message


# C14, pytorch#134646: rule-by-rule plans gather everything to transpose shards.


def transposed_shards():
    mesh = mesh_of(a=2, b=2)
    i, j = mesh.get_coordinate()
    whole = torch.arange(64.0).reshape(8, 8)
    program = fb.plan_transition(["S(0)", "S(1)"], ["S(1)", "S(0)"], mesh, (8, 8))
    y = program.run(whole[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].contiguous())
    right = torch.equal(y, whole[4 * j : 4 * j + 4, 4 * i : 4 * i + 4])
    return right, program.collectives, program.bytes, program.peak_memory


def test_c14_transposed_shards_are_exchanged_by_the_two_ranks_that_differ(ranks4):
    block = 4 * 4 * 4
    assert ranks4.run(transposed_shards) == [
        (True, 1, sent, block) for sent in (0, block, block, 0)
    ]
