"""What people put around a split model: FSDP2, clipping, wrappers, initialization, checkpoints."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from models import WIDTH, Stack, assert_close, assert_gradients, full_gradients, mesh_of
from models import mlp_contracts as contracts_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import fxboundary as fb


def reference_and_model(mesh, contracts):
    torch.manual_seed(0)
    reference = Stack().double()
    model = copy.deepcopy(reference)
    handle = fb.apply(model, fb.Plan(mesh, contracts))
    return reference, model, handle


def inputs():
    return torch.randn(4, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def fsdp_around(sequence_parallel):
    mesh = mesh_of(dp=2, tp=2)
    reference, model, _ = reference_and_model(mesh, contracts_of(sequence_parallel))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    dp, tp = mesh.get_coordinate()
    for _ in range(3):
        local = inputs().chunk(2)[dp]
        local = local.chunk(2, 1)[tp] if sequence_parallel else local
        expected, y = reference(inputs()), model(local)
        mine = expected.chunk(2)[dp]
        mine = mine.chunk(2, 1)[tp] if sequence_parallel else mine
        assert_close(y, mine.detach(), "output", 1e-11)
        # The mean over the batch; of a sequence's half each rank has its own tokens.
        expected.pow(2).mean().backward()
        (y.pow(2).sum() / local.shape[0] / inputs()[0].numel()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in fb.full_state_dict(model).items():
        assert_close(tensor, reference.state_dict()[name], name, 1e-11)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fsdp_goes_around_a_split_model(ranks4, sequence_parallel):
    ranks4.run(fsdp_around, sequence_parallel)


def clipped(norm_type, sharded_data):
    mesh = mesh_of(dp=2, tp=2)
    contracts = contracts_of(False)
    if sharded_data:
        contracts[""] = {
            "params": {"**": {"dp": "S(0)[1] -> R"}},
            "param_grad": {"**": {"dp": "R"}},
        }
    reference, model, _ = reference_and_model(mesh, contracts)
    for module in (reference, model):
        module(inputs()).pow(2).sum().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    norm = fb.clip_grad_norm_(model, 0.5, norm_type)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_gradients(full_gradients(model), reference, 1e-12)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("sharded_data", [False, True])
def test_gradients_are_clipped_by_the_whole_models_norm(ranks4, norm_type, sharded_data):
    ranks4.run(clipped, norm_type, sharded_data)


def wrapped_state():
    reference, model, _ = reference_and_model(mesh_of(tp=2), contracts_of(False))
    apply_activation_checkpointing(model, check_fn=lambda m: m in list(model.layers))
    for name, tensor in fb.full_state_dict(model).items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    other = {name: tensor + 1 for name, tensor in reference.state_dict().items()}
    fb.load_full_state_dict(model, other)
    for name, tensor in fb.full_state_dict(model).items():
        assert torch.equal(tensor, other[name]), name


def test_checkpoints_of_wrapped_modules_are_whole(ranks2):
    ranks2.run(wrapped_state)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"steps": getattr(self, "steps", 0)}

    def set_extra_state(self, state):
        self.steps = state["steps"]


def test_extra_state_is_kept(fake_world):
    fake_world(2)
    model = nn.Sequential(Extra(4, 4))
    fb.apply(model, fb.Plan(mesh_of(tp=2), {"0": {"params": {"bias": {"tp": "R"}}}}))
    model[0].steps = 7
    state = fb.full_state_dict(model)
    model[0].steps = 0
    fb.load_full_state_dict(model, state)
    assert model[0].steps == 7


def test_a_model_of_dtensors_is_refused(fake_world):
    fake_world(4)
    mesh = mesh_of(dp=2, tp=2)
    model = Stack()
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(fb.ContractError, match="is a DTensor; apply the plan before fully_shard"):
        fb.apply(model, fb.Plan(mesh, contracts_of(False)))


def test_initializing_split_parameters_is_refused(fake_world):
    fake_world(2)
    _, model, handle = reference_and_model(mesh_of(tp=2), contracts_of(False))
    with pytest.raises(fb.FxBoundaryError, match=r"Linear\.reset_parameters: its parameters are"):
        model.layers[0].mlp.up.reset_parameters()
    handle.remove()


@pytest.mark.parametrize("attribute", ["weight", "bias"])
def test_a_parameter_that_was_taken_away_is_an_error(fake_world, attribute):
    fake_world(2)
    _, model, handle = reference_and_model(mesh_of(tp=2), contracts_of(False))
    parametrize.register_parametrization(model.layers[0].mlp.up, attribute, nn.Identity())
    message = rf"{attribute}: the parameter of this port is gone; parametrize or prune before"
    with pytest.raises(fb.FxBoundaryError, match=message):
        fb.full_state_dict(model)
    with pytest.raises(fb.FxBoundaryError, match=message):
        handle.remove()


def test_an_absent_used_parameter_is_no_attribute(fake_world):
    fake_world(2)
    _, model, _ = reference_and_model(mesh_of(tp=2), contracts_of(False))
    down = model.layers[0].mlp.down
    del down.bias
    assert not hasattr(down, "bias")
    down.register_buffer("bias", torch.zeros(WIDTH))
    assert torch.equal(down.bias, torch.zeros(WIDTH))


@pytest.mark.parametrize(
    ("module", "layout", "problem"),
    [
        (nn.Embedding(8, 4), "S(0)", "an embedding looks up rows by their number"),
        (nn.EmbeddingBag(8, 4), "S(0)", "an embedding looks up rows by their number"),
        (nn.Embedding(8, 4, max_norm=1.0), "S(1)", "max_norm rescales whole rows"),
        (nn.Embedding(8, 4, max_norm=1.0), "S(0) -> R", "max_norm rescales whole rows"),
        (nn.BatchNorm1d(8), "S(0)", "running statistics are buffers"),
    ],
)
def test_shards_that_a_module_would_misread_are_refused(fake_world, module, layout, problem):
    fake_world(2)
    model = nn.Sequential(module)
    plan = fb.Plan(mesh_of(tp=2), {"0": {"params": {"weight": {"tp": layout}}}})
    with pytest.raises(fb.ContractError, match=rf"0\.weight: {problem}"):
        fb.apply(model, plan)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(self.inner(x), inplace=True)


def test_operations_in_place_are_right_on_a_mesh_dimension_of_one(fake_world):
    fake_world(1)
    model = InPlace()
    expected = model(torch.ones(2, 4))
    contract = {"out_src": {"tp": "P"}, "out_dst": {"tp": "R"}}
    fb.apply(model, fb.Plan(mesh_of(tp=1), {"inner": contract}))
    y = model(torch.ones(2, 4))
    y.sum().backward()
    assert torch.equal(y, expected)
    assert dist.get_world_size() == 1


class Frozen(nn.Linear):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise RuntimeError("frozen")
        super().__setattr__(name, value)


def test_a_module_that_guards_its_attributes_is_split_and_restored(fake_world):
    fake_world(2)
    model = nn.Sequential(Frozen(4, 4))
    handle = fb.apply(model, fb.Plan(mesh_of(tp=2), {"0": {"params": {"*": {"tp": "S(0)"}}}}))
    assert model[0].weight.shape == (2, 4)
    handle.remove()
    assert type(model[0]) is Frozen


def test_a_parameter_that_cannot_be_cut_is_refused_before_any_is(fake_world):
    fake_world(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.eye(4).to_sparse())
    plan = fb.Plan(mesh_of(tp=2), {"*": {"params": {"weight": {"tp": "S(0)"}}}})
    with pytest.raises(fb.ContractError, match=r"1\.params\.weight: a torch\.sparse_coo tensor"):
        fb.apply(model, plan)
    assert model[0].weight.shape == (4, 4)


@pytest.mark.parametrize(
    "value", [None, [1.0], torch.eye(8).to_sparse(), torch.empty(16, 8, device="meta")]
)
def test_values_that_cannot_be_loaded_are_found_before_any_is(fake_world, value):
    fake_world(2)
    reference, model, _ = reference_and_model(mesh_of(tp=2), contracts_of(False))
    before = model.layers[0].norm.weight.clone()
    state = {name: tensor + 1 for name, tensor in reference.state_dict().items()}
    state["layers.1.mlp.up.weight"] = value
    with pytest.raises(fb.FxBoundaryError, match=r"cannot load: layers\.1\.mlp\.up\.weight is "):
        fb.load_full_state_dict(model, state)
    assert torch.equal(model.layers[0].norm.weight, before)


def test_names_are_those_of_the_unsharded_model_inside_wrappers(fake_world):
    fake_world(2)
    reference, model, _ = reference_and_model(mesh_of(tp=2), contracts_of(False))
    compiled = torch.compile(model, backend="fxboundary")
    assert list(fb.full_state_dict(compiled)) == list(reference.state_dict())
    fb.load_full_state_dict(compiled, reference.state_dict())


def test_removing_from_parameters_that_are_no_shards_changes_nothing(fake_world):
    fake_world(2)
    _, model, handle = reference_and_model(mesh_of(tp=2), contracts_of(False))
    model.layers[1].mlp.up.weight = nn.Parameter(torch.zeros(16, WIDTH))
    message = r"weight: expected this rank's shard \(8, 8\) of \(16, 8\), found \(16, 8\); load"
    for _ in range(2):
        with pytest.raises(fb.PlacementMismatchError, match=message):
            handle.remove()
    assert model.layers[0].mlp.up.weight.shape == (8, WIDTH)


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x * 2, x


@pytest.mark.filterwarnings("ignore::fxboundary.FxBoundaryWarning")
def test_an_absent_output_breaks_no_graph(fake_world):
    fake_world(2)
    layouts = {"a": {"tp": "P"}, "b": {"tp": "P"}, "c": {"tp": "P"}}
    model = TwoOutputs()
    contract = {"out_src": layouts, "out_dst": {name: {} for name in layouts}}
    fb.apply(model, fb.Plan(mesh_of(tp=2), {"": contract}))
    y, _ = torch.compile(model, backend="fxboundary", fullgraph=True)(torch.ones(2))
    assert torch.equal(y, torch.full((2,), 2.0))


class Cached(nn.Module):
    def forward(self, x, cache):
        cache["k"] = torch.cat([cache["k"], x])
        return x


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_cache_whose_layout_stays_is_written_by_the_module(fake_world, compile_it):
    fake_world(2)
    model = Cached()
    layout = {"cache.k": {"tp": "S(1)"}}
    fb.apply(model, fb.Plan(mesh_of(tp=2), {"": {"in_src": layout, "in_dst": layout}}))
    run = torch.compile(model, backend="fxboundary", fullgraph=True) if compile_it else model
    cache = {"k": torch.zeros(1, 2)}
    for _ in range(2):
        run(torch.ones(1, 2), cache)
    assert cache["k"].shape == (3, 2)
