"""Parameters whose layout changes at use: properties of the class of the module that owns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from fxboundary.boundary import is_dtensor
from fxboundary.contract import Contract
from fxboundary.errors import FxBoundaryError
from fxboundary.mesh import LiveMesh
from fxboundary.ops import PortOp
from fxboundary.params import ParamPort


@dataclass(frozen=True)
class BoundModule:
    """What the class of a contracted module knows: found on it by the backend and by state."""

    label: str
    mesh: LiveMesh
    contract: Contract | None
    params: tuple[ParamPort, ...]


def used_params(cls: type[nn.Module], record: BoundModule) -> dict[str, Any]:
    """What a subclass of ``cls`` needs, so that its parameters are read as they are used."""
    namespace: dict[str, Any] = {
        port.name: _used_param(port, record) for port in record.params if port.changes_at_use
    }
    if hasattr(cls, "reset_parameters") and any(
        port.is_sharded or port.changes_at_use for port in record.params
    ):
        namespace["reset_parameters"] = _reset_parameters
    return namespace


def param_op(port: ParamPort, mesh: LiveMesh, label: str) -> PortOp:
    """The operation of a parameter's port, from the layout it is stored in."""
    layouts = (port.stored, port.used, port.grad)
    where = f"{label}:param.{port.name}"
    return PortOp(mesh, *layouts, where, port.sizes(mesh.spec), port.reduce_dtype, port.backward)


def _used_param(port: ParamPort, record: BoundModule) -> property:
    name, op = port.name, param_op(port, record.mesh, record.label)

    def used(self: nn.Module) -> torch.Tensor | None:
        if name not in self._parameters:
            raise AttributeError(name)  # a buffer, or nothing: nn.Module.__getattr__ goes on
        param = self._parameters[name]
        # Outside of forward FSDP2 keeps shards of its own here, and looks for them by this name.
        return param if param is None or is_dtensor(param) else op(param)

    return property(used)


def _reset_parameters(self: nn.Module) -> None:
    raise FxBoundaryError(
        f"{type(self).__name__}.reset_parameters: its parameters are split, and would be "
        f"initialized as if they were whole; initialize before apply, or load_full_state_dict"
    )
