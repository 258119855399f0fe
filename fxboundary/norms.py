"""The norm of gradients of which each rank holds a part."""

from __future__ import annotations

import math

import torch
import torch.nn as nn

from fxboundary._torch_internals import GroupCalls
from fxboundary.mesh import LiveMesh
from fxboundary.state import sharded_params, stored_param


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients in place so that the whole model's norm is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, which would take the norm of each rank's shards and
    scale every rank differently. Returns the norm before, the same on all ranks; every rank of
    the mesh must call it. ``norm_type`` may be ``inf``.
    """
    total = _norm(model, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(scale.to(param.grad.device, param.grad.dtype))
    return total


def _norm(model: nn.Module, norm_type: float) -> torch.Tensor:
    ports = {
        id(stored_param(module, port)): (port, mesh)
        for _, module, port, mesh in sharded_params(model)
    }
    shards: dict[tuple[LiveMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for param in model.parameters():
        if param.grad is None:
            continue
        mesh: LiveMesh | None = None
        dims: tuple[int, ...] = ()
        if id(param) in ports:
            port, mesh = ports[id(param)]
            dims = tuple(m for m, p in enumerate(port.stored) if p.is_shard())
        shards.setdefault((mesh, dims), []).append(param.grad)
    parts = [_reduced(mesh, dims, grads, norm_type) for (mesh, dims), grads in shards.items()]
    if not parts:
        return torch.tensor(0.0)
    if math.isinf(norm_type):
        return torch.stack(parts).amax()
    return torch.stack(parts).sum() ** (1 / norm_type)


def _reduced(
    mesh: LiveMesh | None, dims: tuple[int, ...], gradients: list[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The largest magnitude, or the sum of powers, of gradients sharded over these dimensions."""
    norms = torch.stack(
        [torch.linalg.vector_norm(g, norm_type) if g.numel() else g.sum() for g in gradients]
    )
    found = norms.amax() if math.isinf(norm_type) else (norms**norm_type).sum()
    for m in dims:
        if mesh is not None:
            calls = GroupCalls(mesh.groups[m,].group)
            found = calls.all_reduce(found, "max" if math.isinf(norm_type) else "sum")
    return found
