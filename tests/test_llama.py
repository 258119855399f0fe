"""Models split by contracts against the unsharded model, on gloo ranks."""

from __future__ import annotations

import pytest
import torch
from models import check_llama, check_stack, llama_contracts, mesh_of, mlp_contracts

import fxboundary as fb

# In the compiled model Inductor fuses Hugging Face's float32 norm and keeps no rounding
# between its operations: the last bits of float32, in a float64 model.
COMPILED_LLAMA = 2e-6


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend=fb.backend(), fullgraph=True)


def stack_on(sequence_parallel, compile_it, tp, hidden=16):
    check_stack(
        mesh_of(tp=tp),
        mlp_contracts(sequence_parallel),
        sequence_parallel=sequence_parallel,
        wrap=compiled if compile_it else lambda model: model,
        hidden=hidden,
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_mlp_with_biases_equals_unsharded(ranks2, ranks4, sequence_parallel):
    ranks2.run(stack_on, sequence_parallel, False, 2)
    ranks4.run(stack_on, sequence_parallel, False, 4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_mlp_equals_unsharded(ranks2, sequence_parallel):
    ranks2.run(stack_on, sequence_parallel, True, 2)


def test_hidden_size_that_tp_does_not_divide_equals_unsharded(ranks4):
    ranks4.run(stack_on, True, False, 4, hidden=13)
    ranks4.run(stack_on, True, True, 4, hidden=13)


def llama_on(sequence_parallel, compile_it, tp):
    check_llama(
        mesh_of(tp=tp),
        llama_contracts(sequence_parallel),
        wrap=compiled if compile_it else lambda model: model,
        tolerance=COMPILED_LLAMA if compile_it else 1e-12,
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_llama_equals_unsharded(ranks2, ranks4, sequence_parallel):
    ranks2.run(llama_on, sequence_parallel, False, 2)
    ranks4.run(llama_on, sequence_parallel, False, 4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_llama_equals_unsharded(ranks2, sequence_parallel):
    ranks2.run(llama_on, sequence_parallel, True, 2)


def data_parallel_contracts(sequence_parallel, how):
    """The whole model on a shard of the batch: gradients averaged over dp, or parameters
    sharded over it as well."""
    contracts = llama_contracts(sequence_parallel)
    batch = {"input_ids": {"dp": "S(0)"}}
    root = {"in_src": batch, "in_dst": batch, "param_grad": {"**": {"dp": "P(avg)"}}}
    if how != "replicated":
        order = "[1]" if how == "sharded after tp" else ""
        root["params"] = {"**": {"dp": f"S(0){order} -> R"}}
    return {"": root, **contracts}


def llama_with_data_parallel(sequence_parallel, how, compile_it):
    check_llama(
        mesh_of(dp=2, tp=2),
        data_parallel_contracts(sequence_parallel, how),
        wrap=compiled if compile_it else lambda model: model,
        data_dim="dp",
        tolerance=COMPILED_LLAMA if compile_it else 1e-12,
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("how", ["replicated", "sharded", "sharded after tp"])
def test_llama_on_a_mesh_with_data_parallel_equals_unsharded(ranks4, sequence_parallel, how):
    ranks4.run(llama_with_data_parallel, sequence_parallel, how, False)


def test_compiled_llama_on_a_mesh_with_data_parallel_equals_unsharded(ranks4):
    ranks4.run(llama_with_data_parallel, True, "replicated", True, timeout=200)


def too_few_kv_heads(kv_heads):
    try:
        check_llama(mesh_of(tp=4), llama_contracts(True), kv_heads=kv_heads)
    except fb.ContractError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_ranks_is_refused_before_anything_is_changed(ranks4, kv_heads):
    messages = ranks4.run(too_few_kv_heads, kv_heads)
    assert len(set(messages)) == 1
    assert "model.layers.0.self_attn.params.k_proj.weight: tp: " in messages[0]
    assert f"{kv_heads * 8} elements in units of 8 cannot be split over tp=4" in messages[0]
