"""Transition: a change of layout planned in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from fxboundary.errors import UnsupportedTransitionError
from fxboundary.mesh import MeshSpec
from fxboundary.placements import Layout, layout_text, placement_text
from fxboundary.transition.cost import DEFAULT_MODEL, CostModel
from fxboundary.transition.gradient import (
    adjoint_layout,
    check_gradient,
    default_gradient,
    gradient_factor,
    is_differentiable,
)
from fxboundary.transition.planner import Tensor, plan_steps
from fxboundary.transition.steps import NEEDS_COORDINATE, REDUCTIONS, Step


@dataclass(frozen=True)
class Request:
    """What both directions of a transition are planned for."""

    tensor: Tensor | None = None
    model: CostModel = DEFAULT_MODEL
    memory_limit: int | None = None
    reduce_dtype: str = ""

    def steps(self, src: Layout, dst: Layout, mesh: MeshSpec) -> tuple[Step, ...]:
        found = plan_steps(src, dst, mesh, self.model, self.tensor, self.memory_limit)
        if not self.reduce_dtype:
            return found
        return tuple(
            replace(step, dtype=self.reduce_dtype) if step.kind in REDUCTIONS else step
            for step in found
        )


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
    request: Request
    known_backward: tuple[Step, ...] | None = None

    @cached_property
    def differentiable(self) -> bool:
        return is_differentiable(self.src, self.dst)

    @cached_property
    def backward(self) -> tuple[Step, ...]:
        """Planned when it is first asked for; empty where there is no gradient."""
        if self.known_backward is not None:
            return self.known_backward
        if not self.differentiable:
            return ()
        steps = self.request.steps(self.grad, adjoint_layout(self.src), self.mesh)
        factor = gradient_factor(self.src, self.dst, self.mesh.sizes)
        return steps if factor == 1.0 else (*steps, Step("scale", (), factor=factor))

    def reversed(self) -> Transition:
        """The gradient's transition; its own gradient goes forward again."""
        dst = adjoint_layout(self.src)
        return Transition(
            self.grad,
            dst,
            default_gradient(dst),
            self.mesh,
            self.backward,
            self.request,
            known_backward=self.forward,
        )

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
        texts = [step.text(self.mesh.names, self.mesh.sizes) for step in steps]
        return ", ".join(texts) or "nothing"


PORT = Request()  # a port's program: the same for tensors of all shapes


@cache
def plan(
    src: Layout,
    dst: Layout,
    grad: Layout | None,
    mesh: MeshSpec,
    request: Request = PORT,
) -> Transition:
    """Plan both directions of a transition; shard dimensions must be normalised.

    Raises:
        UnsupportedTransitionError: the change has no meaning, or needs more memory.
        ContractError: the gradient layout does not fit dst.
    """
    grad = default_gradient(dst) if grad is None else grad
    check_gradient(dst, grad, mesh.names)
    return Transition(src, dst, grad, mesh, request.steps(src, dst, mesh), request)


def require_gradient(transition: Transition, where: str) -> None:
    """Raise UnsupportedTransitionError where a gradient is asked for that does not exist."""
    if not transition.differentiable:
        raise UnsupportedTransitionError(
            f"{where}: {layout_text(transition.src)} → {layout_text(transition.dst)} has no "
            f"gradient (max, min and product are not differentiable); detach the tensor or "
            f"use sum or avg"
        )
