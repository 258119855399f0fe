"""How the gradient of a transition travels: the table of transitions, backward side."""

from __future__ import annotations

import pytest

import fxboundary as fb
from fxboundary.placements import layout_text
from fxboundary.transition.gradient import adjoint_layout, default_gradient


def backward(src, dst, grad, mesh=None, factor=True):
    program = fb.plan_transition([src], [dst], mesh or {"tp": 4}, (8, 8), grad=[grad])
    return program.transition.steps_text(program.transition.backward)


@pytest.mark.parametrize(
    ("src", "dst", "grad", "text"),
    [
        ("S(1)", "R", "P", "reduce_scatter(dim=1, tp=4)"),
        ("S(1)", "R", "R", "slice(dim=1, tp=4)"),
        ("R", "S(1)", "S(1)", "all_gather(dim=1, tp=4)"),
        ("P", "R", "R", "nothing"),
        ("P", "R", "P", "all_reduce(tp=4)"),
        ("P", "S(0)", "S(0)", "all_gather(dim=0, tp=4)"),
        ("S(0)", "S(1)", "S(1)", "all_to_all(gather=1, split=0, tp=4)"),
        ("R", "R", "P", "all_reduce(tp=4)"),
        ("R", "R", "R", "nothing"),
        ("R", "P", "R", "nothing"),
        ("S(1)", "P", "R", "slice(dim=1, tp=4)"),
        ("P", "P", "R", "nothing"),
        ("S(1)", "S(1)", "S(1)", "nothing"),
        ("P(avg)", "R", "R", "scale(0.25)"),
        ("P(avg)", "S(0)", "S(0)", "all_gather(dim=0, tp=4), scale(0.25)"),
        ("R", "P(avg)", "R", "scale(4)"),
        ("P", "P(avg)", "R", "scale(4)"),
        ("P(avg)", "P", "R", "scale(0.25)"),
        ("P(avg)", "P(avg)", "R", "nothing"),
        ("R", "R", "P(avg)", "all_reduce(avg, tp=4)"),
    ],
)
def test_the_gradients_steps(src, dst, grad, text):
    assert backward(src, dst, grad) == text


def test_the_gradient_of_a_replicated_value_is_replicated_unless_said():
    layout = fb.resolve_placements({"a": "S(1)", "b": "P", "d": "P(avg)"}, ("a", "b", "c", "d"))
    assert layout_text(adjoint_layout(layout)) == "S(1),R,R,R"
    assert default_gradient(layout) == adjoint_layout(layout)


@pytest.mark.parametrize(
    ("dst", "grad", "allowed"),
    [
        ("S(0)", "R", "S(0)"),
        ("S(0)", "S(1)", "S(0)"),
        ("P", "P", "R"),
        ("P(avg)", "S(0)", "R"),
        ("R", "S(0)", "P or P(avg) or R"),
        ("R", "P(max)", "P or P(avg) or R"),
    ],
)
def test_a_gradient_layout_that_cannot_be_is_refused(dst, grad, allowed):
    with pytest.raises(fb.ContractError) as raised:
        fb.plan_transition({}, {"tp": dst}, {"dp": 2, "tp": 4}, (8, 8), grad={"tp": grad})
    assert str(raised.value) == (
        f"tp: the gradient of a value placed {dst} cannot arrive as {grad}; write {allowed}"
    )


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_a_gradient_that_does_not_exist_is_refused(op):
    program = fb.plan_transition([f"P({op})"], ["R"], {"tp": 4}, (8, 8))
    with pytest.raises(fb.UnsupportedTransitionError) as raised:
        _ = program.backward
    assert str(raised.value) == (
        f"this program: P({op}) → R has no gradient (max, min and product are not "
        f"differentiable); detach the tensor or use sum or avg"
    )


def test_factors_of_several_averages_multiply():
    mesh = {"a": 2, "b": 3, "c": 1}
    program = fb.plan_transition(["P(avg)", "P(avg)", "P(avg)"], ["R", "R", "R"], mesh, (6, 6))
    (scale,) = program.transition.backward
    assert scale.factor == pytest.approx(1 / 6)
