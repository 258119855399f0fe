"""Values and gradients of every transition on gloo ranks, against plain whole-tensor semantics.

A case is a list ``(src, dst, grad, shape, dtype)`` on a mesh.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from definition import assemble, cut, make_locals
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxboundary as fb
from fxboundary.placements import parse_layout
from fxboundary.transition.gradient import adjoint_layout

MESHES: dict = {}


def mesh_of(*sizes):
    if sizes not in MESHES:
        MESHES[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)])
    return MESHES[sizes]


def gathered(tensor, sizes):
    """All ranks' tensors by coordinate."""
    tensors = [None] * dist.get_world_size()
    dist.all_gather_object(tensors, tensor.detach())
    return dict(zip(itertools.product(*map(range, sizes)), tensors, strict=True))


def same(found, expected, what):
    assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
    assert found.dtype == expected.dtype, what
    assert found.is_contiguous(), f"{what}: not contiguous"
    assert torch.equal(found, expected), f"{what}: {found} is not {expected}"


def check_cases(sizes, cases):
    mesh = mesh_of(*sizes)
    me = tuple(mesh.get_coordinate())
    pending = []
    for number, (src, dst, grad, shape, dtype) in enumerate(cases):
        s, d, g = map(parse_layout, (src, dst, grad))
        program = fb.plan_transition(s, d, mesh, shape, dtype, grad=g)
        inputs = make_locals(s, sizes, shape, dtype, number)
        arriving = make_locals(g, sizes, shape, dtype, number + 7)
        x = inputs[me].clone()
        if x.is_floating_point() and program.transition.differentiable:
            x.requires_grad_()
        y = program.run(x)
        gradient = None
        if x.requires_grad:
            (gradient,) = torch.autograd.grad(y, x, arriving[me])
        assert torch.equal(x, inputs[me]), f"{src} → {dst}: the input was changed"
        pending.append((y.detach(), gradient, s, d, g, inputs, arriving))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(y, gradient) for y, gradient, *_ in pending])
    for number, (_, _, s, d, g, inputs, arriving) in enumerate(pending):
        shape = cases[number][3]
        what = f"case {cases[number]} on {sizes}"
        outputs = [answers[number] for answers in everyone]
        by_rank = dict(zip(inputs, outputs, strict=True))
        check_forward({c: y for c, (y, _) in by_rank.items()}, inputs, s, d, sizes, shape, me, what)
        if by_rank[me][1] is not None:
            check_backward(
                {c: gradient for c, (_, gradient) in by_rank.items()},
                arriving,
                s,
                d,
                g,
                sizes,
                shape,
                me,
                what,
            )
    return len(cases)


def check_forward(outputs, inputs, src, dst, sizes, shape, me, what):
    whole = assemble(inputs, src, sizes, shape)
    found = assemble(outputs, dst, sizes, shape)
    assert torch.equal(found, whole), f"{what}: {found} is not {whole}"
    # Not only the whole: every shard has the shape that its layout gives.
    assert outputs[me].shape == cut(whole, dst, sizes, me).shape, what
    assert outputs[me].dtype == whole.dtype, what
    assert outputs[me].is_contiguous(), f"{what}: not contiguous"


def check_backward(gradients, arriving, src, dst, grad, sizes, shape, me, what):
    """The value ``v`` of the source has gradient ``G``; a sum's terms have ``G`` each, an
    average's ``G / n``. What arrives at an average is a term's gradient: ``G`` is n times it."""
    whole = assemble(arriving, grad, sizes, shape)
    for placement, n in zip(dst, sizes, strict=True):
        whole = whole * n if placement.is_partial() and placement.reduce_op == "avg" else whole
    for placement, n in zip(src, sizes, strict=True):
        whole = whole / n if placement.is_partial() and placement.reduce_op == "avg" else whole
    same(gradients[me], cut(whole, adjoint_layout(src), sizes, me), f"gradient, {what}")


def gradients_of(dst):
    """Every layout in which the gradient of ``dst`` may arrive."""
    options = [
        [p] if p.startswith("S") else ["R", "P"] if p == "R" else ["R"] for p in dst.split(",")
    ]
    return [",".join(grad) for grad in itertools.product(*options)]


def pairs(placements, mesh_ndim):
    layouts = [",".join(c) for c in itertools.product(placements, repeat=mesh_ndim)]
    return [
        (src, dst, grad)
        for src, dst in itertools.product(layouts, repeat=2)
        for grad in gradients_of(dst)
    ]


def cases_for(shape, mesh_ndim, dtype, placements=("R", "P", "P(avg)")):
    shards = tuple(f"S({dim})" for dim in range(len(shape)))
    return [(*pair, shape, dtype) for pair in pairs((*placements, *shards), mesh_ndim)]


def test_every_pair_on_two_ranks(ranks2):
    cases = [
        *cases_for((6,), 1, torch.float64),
        *cases_for((4, 6), 1, torch.float32),
        *cases_for((3, 5), 1, torch.float64),
        *cases_for((2, 4, 6), 1, torch.bfloat16),
        *cases_for((3, 1, 5), 1, torch.float64),
    ]
    assert ranks2.run(check_cases, (2,), cases)[0] == len(cases)


def test_every_pair_on_four_ranks(ranks4):
    cases = [
        *cases_for((8,), 1, torch.float64),
        *cases_for((4, 8), 1, torch.float32),
        *cases_for((8, 4, 4), 1, torch.bfloat16),
        # uneven: 5 over 4 leaves 2, 2, 1, 0 and 3 over 4 leaves 1, 1, 1, 0
        *cases_for((5, 3), 1, torch.float64),
        *cases_for((5, 1, 6), 1, torch.float32),
        *cases_for((5,), 1, torch.bfloat16),
    ]
    assert ranks4.run(check_cases, (4,), cases)[0] == len(cases)


def test_every_pair_on_two_mesh_dimensions(ranks4):
    """Nested shards, even and uneven, partials beside shards, both gradients of R."""
    cases = [
        *cases_for((4, 8), 2, torch.float64, ("R", "P")),
        *cases_for((5, 3), 2, torch.float32, ("R", "P")),
        *cases_for((7,), 2, torch.float64),
    ]
    assert ranks4.run(check_cases, (2, 2), cases, timeout=200)[0] == len(cases)


ORDERED = (
    "S(0)[1],S(0)[0]",
    "S(1)[1],S(1)[0]",
    "S(0),S(0)",
    "S(0),R",
    "R,S(0)",
    "S(1),S(0)",
    "R,R",
)


def test_shards_in_a_declared_order(ranks4):
    layouts = (*ORDERED, "P,P", "P,S(0)")
    cases = [
        (src, dst, grad, shape, dtype)
        for src, dst in itertools.product(layouts, repeat=2)
        for grad in gradients_of(dst)
        for shape, dtype in (((4, 8), torch.float64), ((5, 3), torch.float32))
    ]
    assert ranks4.run(check_cases, (2, 2), cases)[0] == len(cases)


def sampled(mesh_ndim, count):
    """Transitions drawn at random: any layouts, cuts of one dimension in any order."""
    draw = random.Random(mesh_ndim)
    shapes = [(8, 16), (5, 3), (16,), (7,), (4, 1, 6), (0, 4), (3, 9, 2)]

    def layout(ndim):
        options = ["R", "P", *(f"S({dim})" for dim in range(ndim))]
        found = draw.choices(options, k=mesh_ndim)
        for dim in range(ndim):
            members = [m for m, text in enumerate(found) if text == f"S({dim})"]
            for m, place in zip(
                members, draw.sample(range(len(members)), len(members)), strict=True
            ):
                found[m] = f"S({dim})[{place}]"
        return ",".join(found)

    for _ in range(count):
        shape = draw.choice(shapes)
        src, dst = layout(len(shape)), layout(len(shape))
        yield src, dst, draw.choice(gradients_of(dst)), shape, torch.float64


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
def test_sampled_transitions_on_eight_ranks(ranks8, sizes):
    cases = list(sampled(len(sizes), 150))
    assert ranks8.run(check_cases, sizes, cases, timeout=240) == [len(cases)] * 8


def test_averages_beside_shards_on_two_mesh_dimensions(ranks4):
    found = cases_for((5, 2), 2, torch.float64)
    cases = [case for case in found if "avg" in case[0] or "avg" in case[1]]
    assert ranks4.run(check_cases, (2, 2), cases[::3])[0] > 100


def test_empty_tensors_and_tensors_smaller_than_the_mesh(ranks4):
    cases = [*cases_for((0, 3), 1, torch.float64), *cases_for((1, 2), 1, torch.float64)]
    assert ranks4.run(check_cases, (4,), cases)[0] == len(cases)
    cases = [*cases_for((1, 0), 2, torch.float64, ("R", "P"))]
    assert ranks4.run(check_cases, (2, 2), cases[::4])[0] == 100


def test_scalars_are_reduced(ranks4):
    cases = [(*pair, (), torch.float64) for pair in pairs(("R", "P", "P(avg)"), 1)]
    assert ranks4.run(check_cases, (4,), cases)[0] == len(cases)


def test_integers_move_and_sum(ranks4):
    cases = [
        (src, dst, grad, (5, 4), torch.int64)
        for src, dst, grad in pairs(("R", "P", "P(max)", "S(0)", "S(1)"), 1)
        if dst != "P(max)" and not (src == "P(max)" and dst == "P")
    ]
    assert ranks4.run(check_cases, (4,), cases)[0] == len(cases)


def test_extremes_and_products_reduce_without_a_gradient(ranks4):
    cases = [
        (f"P({op})", dst, dst, (5, 4), torch.float64)
        for op in ("max", "min", "product")
        for dst in ("R", "S(0)", "S(1)")
    ]
    assert ranks4.run(check_cases, (4,), cases)[0] == len(cases)


def refused_gradients():
    program = fb.plan_transition(["P(max)"], ["R"], mesh_of(2), (4,))
    x = torch.ones(4, requires_grad=True)
    try:
        program.run(x)
    except fb.UnsupportedTransitionError as error:
        with torch.no_grad():
            return str(error), program.run(x).tolist()


def test_a_gradient_through_an_extreme_is_refused(ranks2):
    for message, value in ranks2.run(refused_gradients):
        assert message.startswith("program: P(max) → R has no gradient (max, min and product ")
        assert value == [1.0] * 4


def uneven_nested_gather():
    mesh = mesh_of(2, 2)
    whole = torch.arange(15.0).reshape(5, 3)
    rows = [(0, 2), (2, 3), (3, 4), (4, 5)][dist.get_rank()]
    program = fb.plan_transition(["S(0)", "S(0)"], ["R", "R"], mesh, (5, 3))
    return torch.equal(program.run(whole[slice(*rows)].clone()), whole)


def test_c01_an_uneven_nested_gather_loses_no_row(ranks4):
    """pytorch#194457: flattening an uneven nested gather loses a row."""
    assert ranks4.run(uneven_nested_gather) == [True] * 4


def there_and_back():
    mesh = mesh_of(4)
    whole = torch.arange(50.0).reshape(5, 10)
    local = fb.plan_transition(["R"], ["S(0)"], mesh, (5, 10)).run(whole)
    back = fb.plan_transition(["S(0)"], ["R"], mesh, (5, 10)).run(local)
    return local.shape[0], torch.equal(back, whole)


def test_c02_uneven_shards_are_not_padded_into_the_result(ranks4):
    """pytorch#103306."""
    assert ranks4.run(there_and_back) == [(2, True), (2, True), (1, True), (0, True)]


def partial_through_an_idle_region():
    mesh = mesh_of(2)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    inside = fb.plan_transition(["P"], ["P"], mesh, (2,)).run(x)
    value = fb.plan_transition(["P"], ["R"], mesh, (2,)).run(inside)
    (value * torch.tensor([3.0, 5.0])).sum().backward()
    return value.tolist(), x.grad.tolist()


def test_c03_leaving_and_re_entering_a_partial_keeps_its_gradient(ranks2):
    """pytorch#172932."""
    assert ranks2.run(partial_through_an_idle_region) == [([2.0, 4.0], [3.0, 5.0])] * 2


def second_derivative(grad):
    """loss = Σ w·f(Σ_r x_r), f = cube. The work on the sum is repeated (grad R), or its terms
    are shared between the ranks (grad P). dloss/dx_r = 3 w s², then the penalty Σ (dloss/dx)²
    on this rank's own gradient, so that its gradient is the sum over ranks of the penalties'."""
    mesh, rank = mesh_of(2), dist.get_rank()
    x = (torch.tensor([1.0, 2.0], dtype=torch.float64) * (rank + 1)).requires_grad_()
    weight = torch.tensor([3.0, 5.0], dtype=torch.float64)
    if grad == "P":
        weight = weight * torch.tensor([rank == 0, rank == 1])
    s = fb.plan_transition(["P"], ["R"], mesh, (2,), grad=[grad]).run(x)
    (first,) = torch.autograd.grad((weight * s**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return first.detach(), second


def test_double_backward_of_an_all_reduce(ranks2):
    terms = [torch.tensor([1.0, 2.0], dtype=torch.float64) * (r + 1) for r in range(2)]
    xs = [t.clone().requires_grad_() for t in terms]
    weight = torch.tensor([3.0, 5.0], dtype=torch.float64)
    loss = (weight * (xs[0] + xs[1]) ** 3).sum()
    firsts = torch.autograd.grad(loss, xs, create_graph=True)
    seconds = torch.autograd.grad(sum((f**2).sum() for f in firsts), xs)
    for grad in ("R", "P"):
        for (first, second), f, s in zip(
            ranks2.run(second_derivative, grad), firsts, seconds, strict=True
        ):
            torch.testing.assert_close(first, f.detach())
            torch.testing.assert_close(second, s)


def odd_strides():
    mesh, rank = mesh_of(2), dist.get_rank()
    base = torch.arange(24.0).reshape(2, 3, 4) + 100 * rank
    found = []
    for src, dst in itertools.product(("R", "P", "S(0)", "S(1)", "S(2)"), repeat=2):
        x = base.permute(2, 0, 1)  # (4, 2, 3), not contiguous
        shape = list(x.shape)
        if src.startswith("S"):
            shape[int(src[2])] *= 2
        program = fb.plan_transition([src], [dst], mesh, shape)
        odd, plain = program.run(x), program.run(x.contiguous())
        found.append(torch.equal(odd, plain) and (src == dst or odd.stride() == plain.stride()))
    return found


def test_inputs_of_any_stride_give_contiguous_results(ranks2):
    for answers in ranks2.run(odd_strides):
        assert all(answers)


def wrong_shard():
    program = fb.plan_transition(["S(0)"], ["R"], mesh_of(2), (4, 3))
    try:
        program.run(torch.ones(4, 3))
    except fb.PlacementMismatchError as error:
        return str(error)


def test_a_tensor_that_is_not_this_ranks_shard_is_refused(ranks2):
    for message in ranks2.run(wrong_shard):
        assert message.endswith("expected this rank's shard (2, 3), got (4, 3)")


def integer_average():
    program = fb.plan_transition(["P(avg)"], ["R"], mesh_of(2), (2,), torch.int64)
    try:
        program.run(torch.ones(2, dtype=torch.int64))
    except fb.PlacementMismatchError as error:
        return str(error)


def test_an_average_of_integers_is_refused(ranks2):
    for message in ranks2.run(integer_average):
        assert "P(avg) of a int64 tensor; an average needs a floating-point dtype" in message


def backward_program():
    """The gradient's program, run by itself, does what backward does."""
    mesh, found = mesh_of(2), []
    for src, dst, grad in pairs(("R", "P", "P(avg)", "S(0)", "S(1)"), 1):
        program = fb.plan_transition([src], [dst], mesh, (3, 2), torch.float64, grad=[grad])
        me = (dist.get_rank(),)
        x = make_locals(parse_layout(src), (2,), (3, 2), torch.float64, 1)[me].requires_grad_()
        arriving = make_locals(parse_layout(grad), (2,), (3, 2), torch.float64, 2)[me]
        (expected,) = torch.autograd.grad(program.run(x), x, arriving)
        found.append(torch.equal(program.backward.run(arriving), expected))
    return found


def test_the_gradients_program_is_what_backward_runs(ranks2):
    for answers in ranks2.run(backward_program):
        assert all(answers)


def against_dtensor(sizes, shape):
    """Forward values of DTensor's redistribute, where it accepts the change."""
    mesh, compared = mesh_of(*sizes), 0
    me = tuple(mesh.get_coordinate())
    placements = ("R", "P", *(f"S({dim})" for dim in range(len(shape))))
    layouts = [parse_layout(",".join(c)) for c in itertools.product(placements, repeat=len(sizes))]
    for src, dst in itertools.product(layouts, repeat=2):
        local = make_locals(src, sizes, shape, torch.float64, 3)[me]
        whole = torch.empty(shape)
        wrapped = DTensor.from_local(
            local, mesh, src, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        try:
            expected = wrapped.redistribute(placements=dst).to_local()
        except (RuntimeError, NotImplementedError):
            continue
        found = fb.plan_transition(src, dst, mesh, shape, torch.float64).run(local)
        if any(p.is_partial() for p in dst):
            # terms of a sum may be chosen otherwise; their sum may not
            found, expected = (
                assemble(gathered(t, sizes), dst, sizes, shape) for t in (found, expected)
            )
        assert torch.equal(found, expected), f"{src} → {dst}: {found} is not {expected}"
        compared += 1
    return compared


def test_values_equal_dtensors(ranks4):
    assert min(ranks4.run(against_dtensor, (4,), (5, 4))) >= 13
    assert min(ranks4.run(against_dtensor, (2, 2), (4, 8))) >= 160


def wide_reductions():
    """Sums of bfloat16 taken in float32, forward and backward, and how many others differ."""
    mesh = mesh_of(4)
    terms = [
        torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for rank in range(4)
    ]
    term, rank = terms[dist.get_rank()], dist.get_rank()
    expected = torch.stack(terms).float().sum(0).bfloat16()
    shard = expected.chunk(4)[rank]

    def program(dst, reduce_dtype, src="P", **grad):
        return fb.plan_transition(
            [src], [dst], mesh, (1000,), torch.bfloat16, reduce_dtype=reduce_dtype, **grad
        )

    x = term.clone().requires_grad_()
    program("R", torch.float32, "R", grad=["P"]).run(x).backward(term)
    narrow = (program("R", None).run(term) != expected).sum().item()
    wide = torch.equal(program("R", torch.float32).run(term), expected)
    wide_shard = torch.equal(program("S(0)", torch.float32).run(term), shard)
    return narrow, wide, wide_shard, torch.equal(x.grad, expected)


def test_sums_may_be_taken_in_a_wider_dtype(ranks4):
    for narrow, *right in ranks4.run(wide_reductions):
        assert narrow > 10
        assert right == [True, True, True]


def float8_moves():
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    whole = torch.arange(16.0).reshape(4, 4).to(torch.float8_e4m3fn)
    local = cut(whole, parse_layout("S(0),S(1)"), (2, 2), divmod(rank, 2)).contiguous()
    found = []
    for dst in ("R,R", "S(1),S(0)", "R,P", "S(0),R"):
        program = fb.plan_transition(["S(0)", "S(1)"], dst.split(","), mesh, (4, 4), whole.dtype)
        found.append((dst, program.run(local).float()))
    try:
        fb.plan_transition(["P", "R"], ["R", "R"], mesh, (4, 4), whole.dtype).run(whole)
    except fb.PlacementMismatchError as error:
        return found, str(error)


def test_float8_moves_and_is_not_summed(ranks4):
    whole = torch.arange(16.0).reshape(4, 4).to(torch.float8_e4m3fn).float()
    for rank, (found, message) in enumerate(ranks4.run(float8_moves)):
        for dst, value in found:
            expected = cut(whole, parse_layout(dst), (2, 2), divmod(rank, 2))
            if dst == "R,P":  # its own columns are this rank's term
                columns = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
                expected = torch.zeros_like(whole)
                expected[:, columns] = whole[:, columns]
            assert torch.equal(value, expected), dst
        assert message == (
            "program: P(sum) of a float8_e4m3fn tensor; say in which dtype to reduce it "
            "(reduce_dtype: float32)"
        )
