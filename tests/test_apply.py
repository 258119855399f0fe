"""apply: parameters in place, ports on classes, everything restored; and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn as nn
from models import (
    MLP,
    MLP_PARAMS,
    WIDTH,
    Stack,
    assert_close,
    assert_gradients,
    full_gradients,
    mesh_of,
    mlp_contracts,
)

import fxboundary as fb

SHARDED = {"x": {"tp": "S(1)"}}
GATHER = {"in_src": SHARDED, "in_dst": {"x": {}}}


def plan(contracts, **sizes):
    return fb.Plan(mesh_of(**(sizes or {"tp": 4})), contracts)


def refused(model, contracts, **sizes):
    """The problems of a plan that does not fit, after checking that nothing was changed."""
    classes = [type(module) for module in model.modules()]
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(fb.ContractError) as error:
        fb.apply(model, plan(contracts, **sizes))
    assert [type(module) for module in model.modules()] == classes
    assert [p.shape for p in model.parameters()] == shapes
    return error.value.problems


# Parameters


def test_parameters_are_cut_in_place_and_names_stay(fake_world):
    fake_world(4)
    model = Stack()
    weight, names = model.layers[0].mlp.up.weight, list(model.state_dict())
    fb.apply(model, plan(mlp_contracts(True)))
    assert list(model.state_dict()) == names
    assert model.layers[0].mlp.up.weight is weight
    assert weight.shape == (4, WIDTH)
    assert model.layers[0].mlp.down.weight.shape == (WIDTH, 4)
    assert weight.untyped_storage().nbytes() == weight.numel() * 4


def test_a_gradient_that_is_there_is_cut_with_its_parameter(fake_world):
    fake_world(4)
    model = Stack()
    model(torch.randn(1, 4, WIDTH)).sum().backward()
    full = model.layers[0].mlp.up.weight.grad.clone()
    fb.apply(model, plan(mlp_contracts(False)))
    assert torch.equal(model.layers[0].mlp.up.weight.grad, full[:4])


def test_a_meta_model_is_cut_without_memory_and_loaded_later(fake_world):
    fake_world(4)
    torch.manual_seed(0)
    full = Stack()
    with torch.device("meta"):
        model = Stack()
    fb.apply(model, plan(mlp_contracts(True)))
    assert model.layers[0].mlp.up.weight.is_meta
    assert model.layers[0].mlp.up.weight.shape == (4, WIDTH)
    fb.load_full_state_dict(model, full.state_dict())
    assert torch.equal(model.layers[0].mlp.up.weight, full.layers[0].mlp.up.weight[:4])
    assert isinstance(model.layers[0].mlp.up.weight, nn.Parameter)


def test_local_parameters_are_left_alone_when_told(fake_world):
    fake_world(4)
    model = Stack(hidden=4)
    weight = model.layers[0].mlp.up.weight.clone()
    fb.apply(model, plan(mlp_contracts(False)), local_params=True)
    assert torch.equal(model.layers[0].mlp.up.weight, weight)
    assert fb.full_state_dict(model)["layers.0.mlp.up.weight"].shape == (16, WIDTH)


# Removing


def remove_restores():
    torch.manual_seed(0)
    model = Stack(hidden=13)
    before = copy.deepcopy(model.state_dict())
    classes = [type(m) for m in model.modules()]
    parameters = list(model.parameters())
    x = torch.randn(2, 8, WIDTH)
    expected = model(x)
    handle = fb.apply(model, plan(mlp_contracts(True)))
    handle.remove()
    handle.remove()
    assert [type(m) for m in model.modules()] == classes
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(model(x), expected)
    fb.apply(model, plan(mlp_contracts(True))).remove()


def test_remove_restores_the_model_exactly(ranks4):
    ranks4.run(remove_restores)


def remove_after_training():
    torch.manual_seed(0)
    model = nn.Sequential(MLP())
    handle = fb.apply(model, plan({"0": {"params": MLP_PARAMS}}))
    with torch.no_grad():
        model[0].up.weight.fill_(torch.distributed.get_rank())
    handle.remove()
    return model[0].up.weight[:, 0].tolist()


def test_remove_keeps_the_values_that_training_gave(ranks4):
    expected = [float(rank) for rank in range(4) for _ in range(4)]
    assert ranks4.run(remove_after_training) == [expected] * 4


# State


def state_round_trip():
    torch.manual_seed(0)
    reference = Stack(hidden=13)
    model = Stack(hidden=13)
    fb.apply(model, plan(mlp_contracts(True)))
    fb.load_full_state_dict(model, reference.state_dict())
    state = fb.full_state_dict(model)
    return all(torch.equal(state[n], t) for n, t in reference.state_dict().items()) and list(
        state
    ) == list(reference.state_dict())


def test_full_state_round_trip(ranks4):
    assert all(ranks4.run(state_round_trip))


def test_loading_refuses_wrong_names_and_shapes_before_anything_is_loaded(fake_world):
    fake_world(4)
    model = Stack()
    fb.apply(model, plan(mlp_contracts(False)))
    before = copy.deepcopy(model.state_dict())
    state = Stack().state_dict()
    state["layers.0.mlp.upp.weight"] = state.pop("layers.0.mlp.up.weight")
    message = "missing layers.0.mlp.up.weight; unexpected layers.0.mlp.upp.weight (did you mean"
    with pytest.raises(fb.FxBoundaryError, match=re.escape(message)):
        fb.load_full_state_dict(model, state)
    state = Stack().state_dict()
    state["layers.1.mlp.up.weight"] = torch.zeros(4, WIDTH)
    with pytest.raises(fb.PlacementMismatchError, match=r"expected the full shape \(16, 8\), got"):
        fb.load_full_state_dict(model, state)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


class Packed(nn.Module):
    """One weight that stacks gate and up, or query, key and value of different sizes."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts
        self.packed = nn.Linear(WIDTH, sum(parts))

    def forward(self, x):
        local = [part * self.packed.weight.shape[0] // sum(self.parts) for part in self.parts]
        return torch.cat(
            [y.sin() * (i + 1) for i, y in enumerate(self.packed(x).split(local, -1))], -1
        )


def packed_parts(stacked, parts):
    mesh = mesh_of(tp=2)
    torch.manual_seed(0)
    reference = nn.Sequential(Packed(parts)).double()
    model = copy.deepcopy(reference)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    reference(x).sum().backward()
    cut = {"packed.*": {"tp": "S(0)"}}
    contract = fb.Contract(params=cut, stacked={"packed.*": stacked}, param_grad={})
    fb.apply(model, fb.Plan(mesh, {"0": contract}))
    model(x).sum().backward()
    assert_gradients(full_gradients(model), reference, 1e-14)
    state = fb.full_state_dict(model)
    assert all(torch.equal(state[n], t) for n, t in reference.state_dict().items())
    rank = mesh.get_local_rank()
    own = [p.chunk(2)[rank] for p in reference[0].packed.weight.split(parts)]
    assert torch.equal(model[0].packed.weight, torch.cat(own))


@pytest.mark.parametrize(("stacked", "parts"), [(2, [6, 6]), ([8, 4, 4], [8, 4, 4])])
def test_packed_parameters_are_cut_part_by_part_and_come_back_in_order(ranks2, stacked, parts):
    ranks2.run(packed_parts, stacked, parts)


# Calls


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


Pair = namedtuple("Pair", ["hidden", "aux"])


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def model_output(x):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))


STRUCTURES = {
    "tuple": (lambda x: (x, x + 1), "hidden", lambda out: out[0]),
    "list": (lambda x: [x, None], "hidden", lambda out: out[0]),
    "named tuple": (lambda x: Pair(x, None), "hidden", lambda out: out.hidden),
    "dict": (lambda x: {"aux": x + 1, "hidden": x}, "hidden", lambda out: out["hidden"]),
    "ordered dict": (lambda x: OrderedDict(hidden=x), "hidden", lambda out: out["hidden"]),
    "dataclass": (lambda x: Result(x), "hidden", lambda out: out.hidden),
    "ModelOutput": (model_output, "last_hidden_state", lambda out: out.last_hidden_state),
    "nested": (lambda x: {"a": [None, (x,)]}, "a.1.0", lambda out: out["a"][1][0]),
    "nested in ModelOutput": (model_output, "hidden_states.1", lambda out: out.hidden_states[1]),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("compile_it", [False, True])
def test_outputs_of_every_structure_keep_it(fake_world, structure, compile_it):
    fake_world(4)
    make, name, read = STRUCTURES[structure]
    model = nn.Sequential(Returns(make))
    contract = fb.Contract(out_src={name: {"tp": "S(0)"}}, out_dst={name: {"tp": "R"}})
    fb.apply(model, plan({"0": contract}))
    run = model
    if compile_it:
        torch._dynamo.reset()
        run = torch.compile(model, backend="eager", fullgraph=True)
    out = run(torch.ones(2, 3))
    assert type(out) is type(make(torch.ones(1)))
    assert read(out).shape == (8, 3)


class SharedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.alias = self.inner

    def forward(self, x):
        return self.inner(x) + self.alias(x)


def test_a_module_that_is_called_twice_has_its_ports_twice(fake_world):
    fake_world(4)
    model = SharedTwice()
    gather = {"in_src": {"input": {"tp": "S(0)"}}, "in_dst": {"input": {}}}
    fb.apply(model, plan({"inner": gather, "alias": gather}))
    assert model(torch.ones(2)).shape == (8,)
    backend = fb.backend(simplify=False)
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2))
    assert len(backend.graphs[0].ports) == 2


def test_one_module_with_two_names_and_two_contracts_is_refused(fake_world):
    fake_world(4)
    gather = {"in_src": {"input": {"tp": "S(0)"}}, "in_dst": {"input": {}}}
    problems = refused(SharedTwice(), {"inner": gather, "alias": {}})
    assert problems == ["alias is the same module as inner, with another contract"]


def test_nested_boundaries_each_do_their_part(fake_world):
    fake_world(4)
    model = nn.Sequential(nn.Sequential(nn.Identity()))
    fb.apply(
        model,
        plan(
            {
                "0": {"in_src": {"input": {}}, "in_dst": {"input": {"tp": "S(0)"}}},
                "0.0": {"in_src": {"input": {"tp": "S(0)"}}, "in_dst": {"input": {}}},
            }
        ),
    )
    assert model(torch.ones(8, 2)).shape == (8, 2)


class ReadsChild(nn.Module):
    """As nn.MultiheadAttention does: the parent reads the child's weight past its forward."""

    def __init__(self):
        super().__init__()
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.out_proj.weight)


def test_a_parameter_that_the_parent_reads_is_a_port(fake_world):
    fake_world(4)
    model = nn.Sequential(ReadsChild())
    fb.apply(model, plan({"0": {"params": {"out_proj.weight": {"tp": "S(0) -> R"}}}}))
    assert model(torch.ones(2, WIDTH)).shape == (2, WIDTH)
    backend = fb.backend()
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, WIDTH))
    assert [p.name for p in backend.graphs[0].ports] == ["0.out_proj:param.weight"]


def func_grad_equals_autograd():
    torch.manual_seed(0)
    model = Stack()
    fb.apply(model, plan(mlp_contracts(True)))
    x = torch.randn(2, 2, WIDTH)
    model(x).square().sum().backward()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p):
        return torch.func.functional_call(model, p, (x,)).square().sum()

    stored = dict(model.named_parameters())
    for name, gradient in torch.func.grad(loss)(params).items():
        assert_close(gradient, stored[name].grad, name, 1e-6)


def test_func_grad_gives_the_gradients_of_autograd(ranks4):
    ranks4.run(func_grad_equals_autograd)


def test_a_deep_copy_keeps_its_ports(fake_world):
    fake_world(4)
    model = Stack()
    fb.apply(model, plan(mlp_contracts(True)))
    assert copy.deepcopy(model)(torch.randn(1, 2, WIDTH)).shape == (1, 2, WIDTH)
    assert "up" in repr(model)
    assert type(model.layers[0].mlp).__name__ == "MLP"


# Refusals


def test_applying_twice_is_an_error(fake_world):
    fake_world(4)
    model = Stack()
    fb.apply(model, plan(mlp_contracts(True)))
    with pytest.raises(
        fb.ContractError, match=r"applied to layers\.0\.norm already: call its handle"
    ):
        fb.apply(model, plan(mlp_contracts(True)))


def test_a_plan_without_processes_cannot_be_applied():
    with pytest.raises(fb.ContractError, match=r"mesh \(tp=4\) has no processes"):
        fb.apply(Stack(), fb.Plan({"tp": 4}, mlp_contracts(True)))


def test_a_pattern_that_matches_nothing_lists_near_misses(fake_world):
    fake_world(4)
    assert refused(Stack(), {"layer.*.mlp": GATHER}) == [
        "layer.*.mlp: matches no module (did you mean 'layers.*.mlp' or 'layers.*.mlp.up' "
        "or 'layers.*.mlp.down'?)"
    ]


def test_all_problems_are_reported_together(fake_world):
    fake_world(4)
    two = {"x": {"tp": "S(1)"}, "hidden": {"tp": "S(1)"}}
    problems = refused(
        Stack(),
        {
            "layers.0.mlp": {
                "in_src": two,
                "params": {"upp.weight": {"tp": "S(0)"}, "up.bias": {"tp": "S(1)"}},
            },
            "blocks.*": {},
        },
    )
    assert problems == [
        "blocks.*: matches no module",
        "layers.0.mlp.params.upp.weight: no such parameter (did you mean 'up.weight' or "
        "'down.weight'?)",
        "layers.0.mlp.params.up.bias: S(1) shards a dimension that a tensor of 1 dimensions "
        "does not have",
        "layers.0.mlp.in_dst.hidden: forward has no parameter 'hidden'; it has x",
    ]


def test_ports_of_a_module_without_forward_are_refused(fake_world):
    fake_world(4)
    assert refused(Stack(), {"layers": GATHER}) == [
        "layers.in_dst: ModuleList has no forward, so no ports; contract its children"
    ]


def test_parameters_below_a_module_list_can_be_named(fake_world):
    fake_world(4)
    model = Stack()
    fb.apply(model, plan({"layers": {"params": {"*.mlp.up.weight": {"tp": "S(0)"}}}}))
    assert model.layers[1].mlp.up.weight.shape == (4, WIDTH)


def test_tied_parameters_stored_differently_are_refused(fake_world):
    fake_world(4)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(8, WIDTH), "head": nn.Linear(WIDTH, 8, bias=False)}
    )
    model.head.weight = model.embed.weight
    problems = refused(model, {"head": {"params": {"weight": {"tp": "S(0)"}}}})
    assert problems == [
        "head.weight is tied to embed.weight, but one is stored {tp: S(0)} and the other {tp: R}; "
        "store both alike, and change the layout at use, as in 'S(0) -> R'"
    ]


def test_a_forward_replaced_on_the_instance_is_refused(fake_world):
    fake_world(4)
    model = Stack()
    model.layers[0].mlp.forward = lambda x: x
    (problem,) = refused(model, {"layers.0.mlp": GATHER})
    assert problem.startswith("layers.0.mlp: its forward is replaced on the instance")


def test_a_recurrent_weight_whose_gradient_must_be_reduced_is_refused(fake_world):
    fake_world(4)
    model = nn.Sequential(nn.LSTM(4, 4))
    (problem, *_) = refused(model, {"0": {"params": {"weight_ih_l0": {"tp": "S(0) -> R"}}}})
    assert problem.startswith("0.weight_ih_l0: recurrent modules read their weights past")


@pytest.mark.parametrize(
    ("stacked", "layout", "message"),
    [
        (5, "S(0)", r"stacked parts .* do not add up to its size 16"),
        (2, "S(0) -> R", r"sharded on one dimension, and used as it is stored"),
    ],
)
def test_stacked_parts_that_do_not_fit_are_refused(fake_world, stacked, layout, message):
    fake_world(4)
    contract = {"params": {"up.weight": {"tp": layout}}, "stacked": {"up.weight": stacked}}
    with pytest.raises(fb.ContractError, match=message):
        fb.apply(Stack(), plan({"layers.0.mlp": contract}))


def test_a_nested_entry_that_is_not_there_names_the_port(fake_world):
    fake_world(4)
    model = nn.Sequential(Returns(lambda x: x))
    contract = {"in_src": {"x.ids": {"tp": "S(0)"}}, "in_dst": {}}
    fb.apply(model, plan({"0": contract}))
    with pytest.raises(fb.PlacementMismatchError, match=r"0:in\.x\.ids: no entry 'ids' in a dict"):
        model({"id": torch.ones(2)})


class TakesMask(nn.Module):
    def forward(self, hidden, attention_mask=None):
        return hidden


def test_the_only_input_is_the_first_parameter_unless_it_is_a_misspelt_other(fake_world):
    fake_world(4)
    model = nn.Sequential(TakesMask())
    cut = {"tp": "S(0)"}
    (problem,) = refused(model, {"0": {"in_src": {"attention_msk": cut}, "in_dst": {}}})
    assert "no parameter 'attention_msk' (did you mean 'attention_mask'?)" in problem
    fb.apply(model, plan({"0": {"in_src": {"x": cut}, "in_dst": {}}}))
    assert model(torch.ones(2)).shape == (8,)


# Modules of torch that compute past their children's forward

ENCODER = {
    "linear1": {"params": {"*": {"tp": "S(0)"}}},
    "linear2": {
        "params": {"weight": {"tp": "S(1)"}, "bias": {"tp": "R -> P"}},
        "out_src": {"tp": "P"},
        "out_dst": {"tp": "R"},
    },
}


def encoder_layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).double().eval()


def check_encoder():
    layer = encoder_layer()
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    reference = copy.deepcopy(layer)
    handle = fb.apply(layer, plan(ENCODER, tp=2))
    stack = nn.TransformerEncoder(encoder_layer(), 2).eval()
    padding = torch.tensor([[False, False, True, True], [False] * 4])
    with torch.no_grad():
        expected = stack(x, src_key_padding_mask=padding)
        fb.apply(stack, plan({f"layers.*.{k}": v for k, v in ENCODER.items()}, tp=2))
        actual = stack(x, src_key_padding_mask=padding)
        # The fast path leaves zeros where the mask hides a position; what counts is the rest.
        assert_close(actual[~padding], expected[~padding], "masked encoder", 1e-13)
        assert_close(layer(x), reference(x), "layer", 1e-13)
        handle.remove()
        assert type(layer) is nn.TransformerEncoderLayer
        assert_close(layer(x), reference(x), "layer, removed", 1e-13)


def test_the_encoders_fast_path_does_not_pass_over_ports(ranks2):
    ranks2.run(check_encoder)


def test_ports_that_a_parent_never_calls_are_refused(fake_world):
    fake_world(4)
    model = nn.Sequential(nn.MultiheadAttention(16, 4))
    (problem,) = refused(model, {"0.out_proj": {"out_src": {"tp": "P"}, "out_dst": {"tp": "R"}}})
    assert problem.startswith("0.out_proj: nn.MultiheadAttention reads the weights of its out_proj")
    assert problem.endswith("contract 0 itself")


def test_an_uninitialized_parameter_is_refused(fake_world):
    fake_world(4)
    model = nn.Sequential(nn.LazyLinear(4, bias=False))
    with pytest.raises(fb.ContractError, match=r"0\.params\.weight: not initialized; call the"):
        fb.apply(model, plan({"0": {"params": {"weight": {"tp": "S(0)"}}}}))


def test_applying_inside_inference_mode_is_refused(fake_world):
    fake_world(4)
    with torch.inference_mode(), pytest.raises(fb.ContractError, match="outside of it"):
        fb.apply(Stack(), plan(mlp_contracts(False)))
