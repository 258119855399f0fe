"""Move: a transition bound to a mesh and a port, as it runs, and its derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fxboundary._torch_internals import in_transform, is_plain_eager
from fxboundary.mesh import LiveMesh
from fxboundary.transition.execution import (
    CallsByDims,
    Site,
    eager_calls,
    functional_calls,
    run_steps,
)
from fxboundary.transition.steps import Step
from fxboundary.transition.transition import Transition, require_gradient


@dataclass(frozen=True, eq=False)
class Move:
    """A transition bound to a mesh and a port: what runs, forward or backward."""

    transition: Transition
    site: Site
    functional: CallsByDims
    eager: CallsByDims
    steps: tuple[Step, ...]
    adjoint_steps: tuple[Step, ...]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Through functional collectives, which every capture understands."""
        return run_steps(self.steps, x, self.site, self.functional)

    def run_eager(self, x: torch.Tensor) -> torch.Tensor:
        """Through the process groups; for plain tensors that nothing watches."""
        return run_steps(self.steps, x, self.site, self.eager)

    @cached_property
    def adjoint(self) -> Move:
        """The backward of this move; its own backward is this move again."""
        return Move(
            self.transition,
            self.site,
            self.functional,
            self.eager,
            self.adjoint_steps,
            self.steps,
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
    return Move(
        transition,
        site,
        functional_calls(mesh),
        eager_calls(mesh),
        transition.forward,
        transition.backward,
    )


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Move) -> torch.Tensor:
        ctx.move = move
        return _run(x, move)

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
        return _run(x, move)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.move = inputs[1]

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int, None], x: torch.Tensor, move: Move) -> tuple[Any, int]:
        # As the last dimension the batch leaves every other, and so every step, where it is.
        return redistribute(x.movedim(in_dims[0], -1), move), -1


def _run(x: torch.Tensor, move: Move) -> torch.Tensor:
    return move.run_eager(x) if is_plain_eager(x) else move.run(x)


def redistribute(x: torch.Tensor, move: Move) -> torch.Tensor:
    """Run a move, differentiably where ``x`` asks for it."""
    transformed = in_transform()
    if not transformed and not (x.requires_grad and torch.is_grad_enabled()):
        return _run(x, move)
    if not move.transition.differentiable:
        require_gradient(move.transition, move.site.port)
    function = _TransformedRedistribute if transformed else _Redistribute
    return function.apply(x, move)  # type: ignore[no-any-return]
