"""Graphs captured on one device and rewritten, against the unsplit model on gloo ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from models import (
    WIDTH,
    Stack,
    assert_close,
    llama,
    llama_contracts,
    mesh_of,
    mlp_contracts,
    token_loss,
)

import fxboundary as fb


def batch(vocab=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (2, 16), generator=generator)


def assert_gradients_of_shards(module, reference, tolerance):
    """Each gradient equals the unsplit one's, or this rank's chunk of it."""
    n, rank = dist.get_world_size(), dist.get_rank()
    found = dict(module.named_parameters(remove_duplicate=False))
    for name, param in reference.named_parameters(remove_duplicate=False):
        expected, shard = param.grad, found[name]
        for dim, (whole, local) in enumerate(zip(expected.shape, shard.shape, strict=True)):
            if whole != local:
                expected = expected.chunk(n, dim)[rank]
        assert shard.grad is not None, f"{name} has no gradient"
        assert_close(shard.grad, expected, f"gradient of {name}", tolerance)


def export(model, strict):
    arguments = {"input_ids": batch(), "use_cache": False}
    return torch.export.export(model, (), arguments, strict=strict)


def exported_llama(sequence_parallel, strict):
    reference = llama()
    program = export(copy.deepcopy(reference), strict)
    expected = reference(input_ids=batch()).logits
    token_loss(expected, batch()).backward()
    split = fb.rewrite(program, fb.Plan(mesh_of(tp=2), llama_contracts(sequence_parallel)))
    logits = split(input_ids=batch(), use_cache=False).logits
    token_loss(logits, batch()).backward()
    assert_close(logits.detach(), expected.detach(), "logits", 1e-12)
    assert_gradients_of_shards(split, reference, 1e-12)
    numbers = [sum(p.numel() for p in m.parameters()) for m in (split, reference)]
    assert numbers[0] < numbers[1]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_exported_llama_becomes_the_program_of_a_rank(ranks2, sequence_parallel, strict):
    ranks2.run(exported_llama, sequence_parallel, strict)


def unsplit_llama(sequence_parallel):
    reference = llama()
    model = copy.deepcopy(reference)
    expected = reference(input_ids=batch()).logits
    token_loss(expected, batch()).backward()
    plan = fb.Plan(mesh_of(tp=2), llama_contracts(sequence_parallel))
    compiled = torch.compile(model, backend=fb.backend(plan=plan), fullgraph=True)
    logits = compiled(input_ids=batch()).logits
    token_loss(logits, batch()).backward()
    assert_close(logits.detach(), expected.detach(), "logits", 2e-6)
    for name, param in model.named_parameters():
        expected = dict(reference.named_parameters())[name].grad
        assert_close(param.grad, expected, f"gradient of {name}", 2e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_unsplit_llama_is_split_by_the_backend_alone(ranks2, sequence_parallel):
    ranks2.run(unsplit_llama, sequence_parallel)


def local(x, sequence_parallel):
    n, rank = dist.get_world_size(), dist.get_rank()
    return x.chunk(n, 1)[rank].contiguous() if sequence_parallel else x


def stack_of(capture, sequence_parallel):
    """Values and gradients of a rewritten Stack, and that its original is untouched."""
    torch.manual_seed(0)
    reference = Stack().double()
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    weight = torch.randn_like(x)
    x_reference = x.clone().requires_grad_()
    expected = reference(x_reference)
    (expected * weight).sum().backward()

    captured = CAPTURES[capture](copy.deepcopy(reference), x)
    before = captured.print_readable(print_output=False)
    plan = fb.Plan(mesh_of(tp=dist.get_world_size()), mlp_contracts(sequence_parallel))
    split = fb.rewrite(captured, plan, (x,))
    assert captured.print_readable(print_output=False) == before
    assert torch.equal(captured(x), reference(x))
    x_local = local(x, sequence_parallel).clone().requires_grad_()
    y = split(x_local)
    (y * local(weight, sequence_parallel)).sum().backward()
    assert_close(y.detach(), local(expected.detach(), sequence_parallel), "output", 1e-13)
    assert_close(x_local.grad, local(x_reference.grad, sequence_parallel), "input gradient", 1e-13)
    assert_gradients_of_shards(split, reference, 1e-13)


class Through(torch.fx.Tracer):
    """Traces into every module."""

    def is_leaf_module(self, module, name):
        return False


def traced_through(model, x):
    return torch.fx.GraphModule(model, Through().trace(model))


CAPTURES = {
    "symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model),
    "custom tracer": traced_through,
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_graph_becomes_the_program_of_a_rank(ranks4, capture, sequence_parallel):
    ranks4.run(stack_of, capture, sequence_parallel)
