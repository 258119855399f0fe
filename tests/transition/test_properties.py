"""Any layout to any other, on any mesh: what runs is what the layouts mean.

All ranks are simulated in one process, so that thousands of cases take seconds; the same cases
run on real groups in ``test_values.py``.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from definition import assemble, cut, make_locals
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulate import run_everywhere

import fxboundary as fb
from fxboundary.mesh import MeshSpec
from fxboundary.placements import nests, shard
from fxboundary.transition.gradient import adjoint_layout

MANY = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 16)
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3)


@st.composite
def layouts(draw, mesh_ndim, ndim, ops):
    """Placements per mesh dimension, cuts of one dimension in any order."""
    options = ["R", *ops, *(f"S({d})" for d in range(ndim))]
    found = [fb.parse_placement(draw(st.sampled_from(options))) for _ in range(mesh_ndim)]
    for dim, mesh_dims in nests(tuple(found)).items():
        order = draw(st.permutations(range(len(mesh_dims))))
        if list(order) != sorted(order):
            for m, k in zip(mesh_dims, order, strict=True):
                found[m] = shard(dim, k)
    return tuple(found)


@st.composite
def transitions(draw, ops=("P",)):
    sizes, shape = tuple(draw(meshes)), tuple(draw(shapes))
    src = draw(layouts(len(sizes), len(shape), ops))
    dst = draw(layouts(len(sizes), len(shape), ops))
    grad = tuple(
        fb.parse_placement(draw(st.sampled_from(["R", "P"]))) if p.is_replicate() else g
        for p, g in zip(dst, adjoint_layout(dst), strict=True)
    )
    return sizes, shape, src, dst, grad


def spec(sizes):
    return MeshSpec(tuple("abcd"[: len(sizes)]), tuple(sizes))


def check(outputs, whole, layout, sizes, shape):
    for coordinate, output in outputs.items():
        assert output.shape == cut(whole, layout, sizes, coordinate).shape
        assert output.dtype == whole.dtype
    assert torch.equal(assemble(outputs, layout, sizes, shape), whole)


@MANY
@given(transitions(), st.integers(0, 99))
def test_values_and_gradients_are_those_of_the_layouts(case, seed):
    sizes, shape, src, dst, grad = case
    program = fb.plan_transition(src, dst, spec(sizes), shape, torch.float64, grad=grad)
    inputs = make_locals(src, sizes, shape, torch.float64, seed)
    outputs = run_everywhere(program.steps, inputs, spec(sizes), shape)
    whole = assemble(inputs, src, sizes, shape)
    check(outputs, whole, dst, sizes, shape)
    arriving = make_locals(grad, sizes, shape, torch.float64, seed + 1)
    back = run_everywhere(program.backward.steps, arriving, spec(sizes), shape)
    gradient = assemble(arriving, grad, sizes, shape)
    check(back, gradient, adjoint_layout(src), sizes, shape)


@MANY
@given(transitions(ops=("P", "P(avg)")), st.integers(0, 99))
def test_averages_keep_values_and_scale_gradients(case, seed):
    sizes, shape, src, dst, grad = case
    assume(any("avg" in str(p) for p in (*src, *dst)))
    program = fb.plan_transition(src, dst, spec(sizes), shape, torch.float64, grad=grad)
    inputs = make_locals(src, sizes, shape, torch.float64, seed)
    outputs = run_everywhere(program.steps, inputs, spec(sizes), shape)
    whole = assemble(inputs, src, sizes, shape)
    torch.testing.assert_close(assemble(outputs, dst, sizes, shape), whole)
    arriving = make_locals(grad, sizes, shape, torch.float64, seed + 1)
    back = run_everywhere(program.backward.steps, arriving, spec(sizes), shape)
    gradient = assemble(arriving, grad, sizes, shape)
    for s, d, n in zip(src, dst, sizes, strict=True):
        gradient = gradient * (n if fb_op(d) == "avg" else 1) / (n if fb_op(s) == "avg" else 1)
    torch.testing.assert_close(assemble(back, adjoint_layout(src), sizes, shape), gradient)


def fb_op(placement):
    return placement.reduce_op if placement.is_partial() else None


@MANY
@given(transitions(), st.integers(0, 99))
def test_backward_is_the_adjoint(case, seed):
    """``<A x, y> = <x, Aᵀ y>``: x varies with every term of a sum, y is a gradient of dst.

    A replica counts once on each side, a term of a sum each time; a gradient that arrives as a
    sum counts with the value that all ranks share.
    """
    sizes, shape, src, dst, grad = case
    program = fb.plan_transition(src, dst, spec(sizes), shape, torch.float64, grad=grad)
    x = make_locals(src, sizes, shape, torch.float64, seed)
    y = make_locals(grad, sizes, shape, torch.float64, seed + 1)
    ax = run_everywhere(program.steps, x, spec(sizes), shape)
    aty = run_everywhere(program.backward.steps, y, spec(sizes), shape)
    left = inner(ax, dst, y, grad, sizes)
    right = inner(x, src, aty, adjoint_layout(src), sizes)
    assert left == pytest.approx(right, rel=1e-12, abs=1e-9)


def inner(values, layout, gradients, grad, sizes):
    """The sum over ranks, one replica each: along a mesh dimension where both are replicated."""
    total = 0.0
    for coordinate, value in values.items():
        copies = [v.is_replicate() and g.is_replicate() for v, g in zip(layout, grad, strict=True)]
        if all(i == 0 for i, copy in zip(coordinate, copies, strict=True) if copy):
            total += (value * gradients[coordinate]).sum().item()
    return total


@MANY
@given(transitions(ops=("P",)), st.sampled_from(["max", "min", "product"]), st.integers(0, 99))
def test_extremes_and_products(case, op, seed):
    sizes, shape, src, dst, _ = case
    to = fb.parse_placement(f"P({op})")
    src, dst = (tuple(to if p.is_partial() else p for p in layout) for layout in (src, dst))
    program = fb.plan_transition(src, dst, spec(sizes), shape, torch.int64)
    inputs = make_locals(src, sizes, shape, torch.int64, seed, -2, 3)
    outputs = run_everywhere(program.steps, inputs, spec(sizes), shape)
    check(outputs, assemble(inputs, src, sizes, shape), dst, sizes, shape)


DTYPES = [
    torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@MANY
@given(transitions(ops=()), st.sampled_from(DTYPES), st.integers(0, 99))
def test_shards_of_every_dtype_move_bit_for_bit(case, dtype, seed):
    sizes, shape, src, dst, _ = case
    program = fb.plan_transition(src, dst, spec(sizes), shape, dtype)
    inputs = make_locals(src, sizes, shape, torch.float32, seed)
    inputs = {c: x.to(dtype) for c, x in inputs.items()}
    outputs = run_everywhere(program.steps, inputs, spec(sizes), shape)
    as_float = {c: torch.view_as_real(y).sum(-1) if dtype.is_complex else y.float()
                for c, y in outputs.items()}  # fmt: skip
    expected = {c: torch.view_as_real(x).sum(-1) if dtype.is_complex else x.float()
                for c, x in inputs.items()}  # fmt: skip
    assert {y.dtype for y in outputs.values()} == {dtype}
    check(as_float, assemble(expected, src, sizes, shape), dst, sizes, shape)


def every_layout(ndim, ops=("P",)):
    options = ["R", *ops, *(f"S({d})" for d in range(ndim))]
    return [tuple(map(fb.parse_placement, c)) for c in itertools.product(options, repeat=2)]


def test_no_transition_of_the_two_by_four_mesh_is_refused():
    for src, dst in itertools.product(every_layout(2), repeat=2):
        fb.plan_transition(src, dst, {"a": 2, "b": 4}, (16, 16))
