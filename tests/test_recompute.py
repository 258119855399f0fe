"""Eager backward moves a port's value anew: once for all its uses, and never a stale one."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from models import mesh_of
from ranks import fake_world
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fxboundary as fb
from fxboundary.recompute import keeping_origins, remember_origin
from fxboundary.testing import snapshot


class Doubling:
    """Stands for a port: counts how often it moves a value."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return torch.cat([x, x])

    def moved(self, x):
        y = torch.cat([x, x])
        remember_origin(y, x, self, "block:in.x")
        return y


@pytest.fixture
def x():
    return torch.arange(6.0).reshape(2, 3).requires_grad_()


def test_uses_of_one_value_share_one_move(x):
    move = Doubling()
    with keeping_origins():
        y = move.moved(x)
        z = y.sin() + y.square() + y.view(3, 4).exp().view(4, 3)
    for backwards in (1, 2):
        (gradient,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
        assert move.calls == backwards
    torch.testing.assert_close(gradient, 2 * (x.cos() + 2 * x + x.exp()).detach())


def test_gradients_of_gradients(x):
    with keeping_origins():
        z = Doubling().moved(x).pow(3)
    (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 12 * x.detach())


def test_a_value_that_was_written_to_is_kept(x):
    move = Doubling()
    with keeping_origins():
        y = move.moved(x)
        y.mul_(2)
        z = y.square()
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert move.calls == 0
    torch.testing.assert_close(gradient, 16 * x.detach())


def test_a_source_that_was_written_to_is_an_error(x):
    with keeping_origins():
        z = Doubling().moved(x).square()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(fb.FxBoundaryError, match=r"^block:in.x: .*modified in place"):
        torch.autograd.grad(z.sum(), x)


def test_a_cast_of_a_value_is_kept(x):
    move = Doubling()
    with keeping_origins():
        z = move.moved(x).double().square()
    torch.autograd.grad(z.sum(), x)
    assert move.calls == 0


def test_hooks_that_are_there_already_decide(x):
    move, seen = Doubling(), []
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t), keeping_origins():
        z = move.moved(x).square()
    torch.autograd.grad(z.sum(), x)
    assert len(seen) == 1
    assert move.calls == 0


def test_without_gradients_nothing_is_hooked(x):
    with torch.no_grad(), keeping_origins():
        assert not Doubling().moved(x).square().requires_grad


class Block(nn.Module):
    def __init__(self, remat):
        super().__init__()
        self.inner, self.remat = nn.Linear(8, 8), remat

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.remat else self.inner(x)


@pytest.mark.parametrize("remat", [False, True])
def test_checkpoint_around_a_port_that_recomputes(remat):
    with fake_world(2):
        model = Block(remat)
        contract = {
            "in_src": {"input": {"tp": "S(0)"}},
            "in_dst": {"input": {"tp": "R"}},
            "in_backward": {"input": "recompute"},
        }
        fb.apply(model, fb.Plan(mesh_of(tp=2), {"inner": contract}))
        model(torch.ones(3, 8, requires_grad=True)).sum().backward()
        assert model.inner.weight.grad.shape == (8, 8)


def test_snapshots_count_what_backward_repeats():
    contract = {
        "in_src": {"input": {"tp": "S(0)"}},
        "in_dst": {"input": {"tp": "R"}},
        "params": {"weight": {"tp": "S(0)"}, "bias": {"tp": "S(0)"}},
        "in_backward": {"input": "recompute"},
    }
    found = snapshot(nn.Linear(8, 8), fb.Plan({"tp": 2}, {"": contract}), torch.zeros(2, 8))
    assert_expected_inline(
        str(found).partition("total ")[2],
        """\
forward: 1 all_gather 64 B
total backward: 1 all_gather 64 B, 1 reduce_scatter 64 B, together 128 B""",
    )


def test_parameters_are_looked_up():
    contracts = {"": {"param_backward": {"wieght": "save"}}}
    with fake_world(2), pytest.raises(fb.ContractError, match=r"param_backward\.wieght: no such"):
        fb.apply(nn.Linear(8, 8), fb.Plan(mesh_of(tp=2), contracts))
