"""Models of Hugging Face, captured whole and rewritten, against themselves unsplit on gloo."""

from __future__ import annotations

import copy

import hf_models
import pytest
import torch
import torch.distributed as dist
from models import assert_close, mesh_of

import fxboundary as fb
from fxboundary.graph.insert.rewrite import insert_boundaries

MODELS = ["LLAMA", "LLAMA_SP", "GPT2", "QWEN3", "MIXTRAL", "BERT", "VIT", "T5"]
ALWAYS = {"GPT2", "T5"}  # and Llama, in test_values.py


def exported(strict):
    def capture(model, example, plan):
        program = torch.export.export(model, (), example.inputs(), strict=strict)
        return fb.rewrite(program, plan)

    return capture


def dynamo(model, example, plan):
    """What the backend compiles, run eagerly; parameters stay whole."""

    def split(gm, _):
        insert_boundaries(gm, plan)
        return gm

    torch._dynamo.reset()
    return torch.compile(model, backend=split, fullgraph=True)


CAPTURES = {"export": exported(False), "strict export": exported(True), "dynamo": dynamo}


def check(name, capture):
    example = getattr(hf_models, name)
    reference = example.make()
    model = copy.deepcopy(reference)
    expected = getattr(reference(**example.inputs()), example.output)
    weight = torch.randn(expected.shape, dtype=expected.dtype, generator=_generator())
    (expected * weight).sum().backward()

    plan = fb.Plan(mesh_of(tp=dist.get_world_size()), example.contracts)
    split = CAPTURES[capture](model, example, plan)
    output = getattr(split(**example.inputs()), example.output)
    (output * weight).sum().backward()
    assert_close(output.detach(), expected.detach(), "output", example.tolerance)
    owner = model if capture == "dynamo" else split
    found = dict(owner.named_parameters(remove_duplicate=False))
    stacked = [key for c in example.contracts.values() for key in c.get("stacked", ())]
    largest = max(param.grad.abs().max() for param in reference.parameters())
    for key, param in reference.named_parameters():
        gradient = found[key].grad
        assert gradient is not None, f"{key} has no gradient"
        parts = 1 if capture == "dynamo" or not key.endswith(tuple(stacked)) else 3
        parts = 2 if parts > 1 and "gate_up" in key else parts
        right = own(param.grad, gradient.shape, parts)
        # The bias of keys has no influence: its gradient is zero, but for rounding.
        if right.abs().max() < 1e-12 * largest:
            right, gradient = right + largest, gradient + largest
        assert_close(gradient, right, f"gradient of {key}", example.tolerance)


def own(full, shape, parts):
    """This rank's chunk of a gradient, or its chunks of each of the parts."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for dim, (whole, local) in enumerate(zip(full.shape, shape, strict=True)):
        if whole != local:
            pieces = [part.chunk(n, dim)[rank] for part in full.chunk(parts, dim)]
            return torch.cat(pieces, dim)
    return full


def _generator():
    return torch.Generator().manual_seed(2)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.matrix) for name in MODELS],
)
def test_a_captured_model_is_the_unsplit_one_on_every_rank(ranks2, name, capture):
    ranks2.run(check, name, capture)
