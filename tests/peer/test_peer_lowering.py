"""Whole models whose collectives are reads of peers, against the unsharded ones."""

from __future__ import annotations

import copy
import itertools

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
from fxboundary.mesh import register_mesh
from fxboundary.ops import PortOp
from fxboundary.placements import parse_layout
from fxboundary.transition.steps import COLLECTIVES
from fxboundary.transition.transition import plan as plan_transition

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
    assert not any("ops._c10d_functional" in code for code in codes)


def llama_step(sequence_parallel, train):
    torch._dynamo.reset()
    reference = llama()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    model = llama()
    tp = torch.distributed.get_world_size()
    fb.apply(model, fb.Plan(mesh_of(tp=tp), llama_contracts(sequence_parallel)))
    compiled = torch.compile(model, backend=fb.backend(lowering="peer"), fullgraph=True)
    if not train:
        with torch.no_grad():
            out, codes = run_and_get_code(lambda: compiled(input_ids=ids).logits)
            assert_close(out, reference(input_ids=ids).logits, "logits", 1e-5)
        return codes
    right = reference(input_ids=ids, labels=ids)
    right.loss.backward()
    out, codes = run_and_get_code(lambda: compiled(input_ids=ids, labels=ids))
    assert_close(out.logits, right.logits, "logits", 1e-5)
    _, more = run_and_get_code(lambda: out.loss.backward())
    assert_gradients(full_gradients(model), reference, 1e-5)
    return codes + more


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_llama(ranks2, sequence_parallel, train):
    codes, *_ = ranks2.run(llama_step, sequence_parallel, train, timeout=300)
    assert not any("ops._c10d_functional" in code for code in codes)


def moves_of(sizes):
    """A port for each transition that needs a collective forward or backward."""
    live = register_mesh(mesh_of(**sizes))
    placements = itertools.product(("R", "S(0)", "S(1)", "P"), repeat=len(sizes))
    layouts = [parse_layout(",".join(p)) for p in placements]
    found = []
    for src, dst in itertools.permutations(layouts, 2):
        transition = plan_transition(src, dst, None, live.spec)
        steps = [*transition.forward, *transition.backward]
        kinds = {step.kind for step in steps}
        if kinds & COLLECTIVES and "all_to_all_v" not in kinds:
            found.append(PortOp(live, src, dst, transition.grad, f"m{len(found)}:in.x"))
    return found


def transitions(sizes, dtype, every=1):
    """On one rank: all transitions in one graph, against the operator run eagerly."""
    torch._dynamo.reset()
    moves = moves_of(sizes)[::every]

    def work(*xs):
        return [torch.sin(move(x * 0.25)) + 1 for move, x in zip(moves, xs, strict=True)]

    compiled = torch.compile(work, backend=fb.backend(lowering="peer"), fullgraph=True)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        xs = [torch.randn(16, 32, generator=generator).to(dtype) for _ in moves]
        results = []
        for run in (work, compiled):
            leaves = [x.clone().requires_grad_() for x in xs]
            ys = run(*leaves)
            weights = [torch.linspace(1, 2, y.numel(), dtype=dtype).view_as(y) for y in ys]
            torch.autograd.backward(ys, weights)
            results.append([*ys, *[leaf.grad for leaf in leaves]])
        tolerance = 1e-12 if dtype == torch.float64 else 2e-2
        for right, found, move in zip(*results, moves * 2, strict=True):
            assert found.dtype == right.dtype
            assert_close(found.double(), right.double(), repr(move.args[:4]), tolerance)
    return len(moves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_all_transitions_of_one_mesh_dimension(ranks4, dtype):
    assert ranks4.run(transitions, {"tp": 4}, dtype, timeout=300) == [9] * 4


def test_transitions_of_two_mesh_dimensions(ranks4):
    assert ranks4.run(transitions, {"dp": 2, "tp": 2}, torch.float64, 12, timeout=500) == [13] * 4
