"""fxboundary: declare tensor layouts at module boundaries; every change is one graph node."""

from fxboundary.apply import Handle, apply
from fxboundary.backend import backend
from fxboundary.boundary import (
    BoundaryExecutionOp,
    BoundaryOpLowerer,
    FxBoundaryWarning,
    PrecompiledBoundary,
    RedistOp,
)
from fxboundary.contract import Contract
from fxboundary.errors import (
    ContractError,
    FxBoundaryError,
    PlacementMismatchError,
    RankMismatchError,
    UnsupportedTransitionError,
)
from fxboundary.graph.insert.rewrite import rewrite
from fxboundary.graph.render import render
from fxboundary.graph.simplify.simplify import Simplified, simplify
from fxboundary.norms import clip_grad_norm_
from fxboundary.placements import parse_placement, resolve_placements
from fxboundary.plan import Plan
from fxboundary.state import full_state_dict, load_full_state_dict
from fxboundary.transition.cost import CostModel, Link
from fxboundary.transition.program import plan_transition

__all__ = [
    "BoundaryExecutionOp",
    "BoundaryOpLowerer",
    "Contract",
    "ContractError",
    "CostModel",
    "FxBoundaryError",
    "FxBoundaryWarning",
    "Handle",
    "Link",
    "PlacementMismatchError",
    "Plan",
    "PrecompiledBoundary",
    "RankMismatchError",
    "RedistOp",
    "Simplified",
    "UnsupportedTransitionError",
    "apply",
    "backend",
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "parse_placement",
    "plan_transition",
    "render",
    "resolve_placements",
    "rewrite",
    "simplify",
]
