"""Whole models whose collectives are reads of peers, against the unsharded ones."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    WIDTH,
    Stack,
    assert_close,
    assert_gradients,
    full_gradients,
    llama,
    llama_contracts,
    mesh_of,
    mlp_contracts,
)
from torch._inductor.utils import run_and_get_code

import fxboundary as fb

pytestmark = [pytest.mark.distributed, pytest.mark.compiled]


def stack_step(sequence_parallel, steps=3):
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Stack(2).double()
    model = copy.deepcopy(reference)
    (tp,) = mesh_of(tp=torch.distributed.get_world_size()).shape
    fb.apply(model, fb.Plan(mesh_of(tp=tp), mlp_contracts(sequence_parallel)))
    compiled = torch.compile(model, backend=fb.backend(lowering="peer"), fullgraph=True)
    codes = []
    for step in range(steps):
        x = torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True)
        whole = x.detach().requires_grad_()
        right = reference(whole)
        (right * step).sum().backward()
        part = x.chunk(tp, 1)[torch.distributed.get_rank()] if sequence_parallel else x
        part = part.detach().requires_grad_()
        y, code = run_and_get_code(lambda part=part: compiled(part))
        (y * step).sum().backward()
        codes += code
        if sequence_parallel:
            right = right.chunk(tp, 1)[torch.distributed.get_rank()]
        assert_close(y, right, "output", 1e-12)
    assert_gradients(full_gradients(model), reference, 1e-12)
    return codes


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_stack_of_blocks(ranks2, sequence_parallel):
    codes, *_ = ranks2.run(stack_step, sequence_parallel, timeout=300)
    open("/tmp/rep/code.py", "w").write("\n".join(codes))
    assert not any("_c10d_functional" in code for code in codes)
