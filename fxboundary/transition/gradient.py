"""The gradient side of a transition: which layout a gradient arrives in, and leaves in.

The gradient of a sharded value is sharded alike, of a partial value replicated. Of a replicated
value it is partial where the consuming region shares its work over the mesh dimension, and
replicated where each rank repeats the same work: src and dst alone do not tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxboundary.errors import ContractError
from fxboundary.placements import Layout, placement_text, reduce_op, replicate


def adjoint_layout(layout: Layout) -> Layout:
    """Layout of the gradient of a value outside any region: S(d) → S(d), P → R, R → R."""
    return tuple(p if p.is_shard() else replicate() for p in layout)


def default_gradient(dst: Layout) -> Layout:
    """How the gradient arrives where nothing else is said: each rank repeats the work."""
    return adjoint_layout(dst)


def check_gradient(dst: Layout, grad: Layout, names: Sequence[str]) -> None:
    """Refuse a gradient layout that a value of layout ``dst`` cannot have.

    Raises:
        ContractError: names the mesh dimension and what is allowed there.
    """
    for name, placement, gradient in zip(names, dst, grad, strict=True):
        allowed = {placement_text(placement)} if placement.is_shard() else {"R"}
        if placement.is_replicate():
            allowed = {"R", "P", "P(avg)"}
        if placement_text(gradient) not in allowed:
            raise ContractError(
                f"{name}: the gradient of a value placed {placement_text(placement)} cannot "
                f"arrive as {placement_text(gradient)}; write {' or '.join(sorted(allowed))}"
            )


def is_differentiable(src: Layout, dst: Layout) -> bool:
    """Whether the transition has a gradient: max, min and product have none."""
    return all(reduce_op(p) in (None, "sum", "avg") for p in (*src, *dst))


def gradient_factor(src: Layout, dst: Layout, sizes: Sequence[int]) -> float:
    """What averages add to the backward: 1/n for each P(avg) in src, n for each in dst.

    A value ``mean(x_i)`` has ``dx_i = G / n``; a region that holds a term of such a mean
    returns ``G / n``, from which the transition's source needs ``G``.
    """
    factor = 1.0
    for s, d, n in zip(src, dst, sizes, strict=True):
        factor *= n if placement_text(d) == "P(avg)" else 1
        factor /= n if placement_text(s) == "P(avg)" else 1
    return factor
