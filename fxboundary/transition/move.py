"""Move: a transition bound to a mesh and a port, as it runs, and its derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fxboundary._torch_internals import in_transform, is_plain_eager
from fxboundary.mesh import LiveMesh
from fxboundary.transition.execution import run_steps
from fxboundary.transition.site import (
    BoundStep,
    Site,
    bind_steps,
    eager_calls,
    functional_calls,
)
from fxboundary.transition.transition import Transition, require_gradient


@dataclass(frozen=True, eq=False)
class Move:
    """A transition bound to a mesh and a port: what runs, forward or backward.

    ``functional`` steps are understood by every capture; ``eager`` ones go through the process
    groups, for plain tensors that nothing watches.
    """

    transition: Transition
    port: str
    functional: tuple[BoundStep, ...]
    eager: tuple[BoundStep, ...]
    adjoint_functional: tuple[BoundStep, ...]
    adjoint_eager: tuple[BoundStep, ...]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The move without a gradient of its own."""
        return run_steps(self.eager if is_plain_eager(x) else self.functional, x)

    @cached_property
    def adjoint(self) -> Move:
        """The backward of this move; its own backward is this move again."""
        return Move(
            self.transition,
            self.port,
            self.adjoint_functional,
            self.adjoint_eager,
            self.functional,
            self.eager,
        )


def bind(
    transition: Transition,
    mesh: LiveMesh,
    port: str,
    coordinate: Sequence[int] = (),
    sizes: Mapping[int, int] | None = None,
) -> Move:
    """Bind a transition to the groups of a mesh; ``sizes`` are declared global sizes by dim."""
    site = Site(mesh, tuple(coordinate), dict(sizes or {}), port)
    functional, eager = functional_calls(mesh), eager_calls(mesh)
    return Move(
        transition,
        port,
        bind_steps(transition.forward, site, functional),
        bind_steps(transition.forward, site, eager),
        bind_steps(transition.backward, site, functional),
        bind_steps(transition.backward, site, eager),
    )


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Move) -> torch.Tensor:
        ctx.move = move
        return move.run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return redistribute(gradient, ctx.move.adjoint), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return redistribute(tangent, ctx.move)


class _TransformedRedistribute(_Redistribute):
    """The form that ``torch.func`` needs; it costs three times the other."""

    @staticmethod
    def forward(x: torch.Tensor, move: Move) -> torch.Tensor:  # type: ignore[override]
        return move.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.move = inputs[1]

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int, None], x: torch.Tensor, move: Move) -> tuple[Any, int]:
        # As the last dimension the batch leaves every other, and so every step, where it is.
        return redistribute(x.movedim(in_dims[0], -1), move), -1


def redistribute(x: torch.Tensor, move: Move) -> torch.Tensor:
    """Run a move, differentiably where ``x`` asks for it."""
    transformed = in_transform()
    if not transformed and not (x.requires_grad and torch.is_grad_enabled()):
        return move.run(x)
    if not move.eager and not move.adjoint_eager and move.transition.differentiable:
        return x  # nothing either way, as on a mesh dimension of size 1
    if not move.transition.differentiable:
        require_gradient(move.transition, move.port)
    function = _TransformedRedistribute if transformed else _Redistribute
    return function.apply(x, move)  # type: ignore[no-any-return]
