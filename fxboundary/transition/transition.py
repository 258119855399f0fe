"""Transition: a change of layout planned in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from fxboundary.errors import UnsupportedTransitionError
from fxboundary.mesh import MeshSpec
from fxboundary.placements import Layout, layout_text, placement_text
from fxboundary.transition.gradient import (
    adjoint_layout,
    check_gradient,
    default_gradient,
    gradient_factor,
    is_differentiable,
)
from fxboundary.transition.planner import plan_steps
from fxboundary.transition.steps import NEEDS_COORDINATE, Step


@dataclass(frozen=True)
class Transition:
    """A change of layout with its gradient's: the identity of what a port does.

    ``grad`` is the layout in which the gradient arrives at dst; it leaves at src as
    ``adjoint_layout(src)``. ``forward`` and ``backward`` are the steps of both directions.
    Shard dimensions are normalised.
    """

    src: Layout
    dst: Layout
    grad: Layout
    mesh: MeshSpec
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    differentiable: bool

    @cached_property
    def needs_coordinate(self) -> bool:
        """Whether a step, forward or backward, depends on which rank runs it."""
        return any(step.kind in NEEDS_COORDINATE for step in (*self.forward, *self.backward))

    def arrow(self, separator: str = ", ") -> str:
        """``tp: S(1)->R``: the mesh dimensions that change, forward or backward."""
        parts = [
            f"{name}: {placement_text(s)}->{placement_text(d)}"
            for name, s, d, g in zip(self.mesh.names, self.src, self.dst, self.grad, strict=True)
            if s != d or g.is_partial()
        ]
        return separator.join(parts) or "identity"

    def steps_text(self, steps: Sequence[Step]) -> str:
        texts = [
            step.text(self.mesh.names[step.mesh_dim], self.mesh.sizes[step.mesh_dim])
            for step in steps
        ]
        return ", ".join(texts) or "nothing"


@cache
def plan(src: Layout, dst: Layout, grad: Layout | None, mesh: MeshSpec) -> Transition:
    """Plan both directions of a transition; shard dimensions must be normalised.

    Raises:
        UnsupportedTransitionError: the change has no meaning.
        ContractError: the gradient layout does not fit dst.
    """
    grad = default_gradient(dst) if grad is None else grad
    check_gradient(dst, grad, mesh.names)
    forward = plan_steps(src, dst, mesh.sizes, mesh.names)
    if not is_differentiable(src, dst):
        return Transition(src, dst, grad, mesh, forward, (), differentiable=False)
    backward = plan_steps(grad, adjoint_layout(src), mesh.sizes, mesh.names)
    factor = gradient_factor(src, dst, mesh.sizes)
    if factor != 1.0:
        backward = (*backward, Step("scale", 0, factor=factor))
    return Transition(src, dst, grad, mesh, forward, backward, differentiable=True)


def require_gradient(transition: Transition, where: str) -> None:
    """Raise UnsupportedTransitionError where a gradient is asked for that does not exist."""
    if not transition.differentiable:
        raise UnsupportedTransitionError(
            f"{where}: {layout_text(transition.src)} → {layout_text(transition.dst)} has no "
            f"gradient (max, min and product are not differentiable); detach the tensor or "
            f"use sum or avg"
        )
