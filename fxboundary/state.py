"""Sharding and gathering parameters, and checkpoints that do not know about either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn

from fxboundary.errors import FxBoundaryError, PlacementMismatchError
from fxboundary.mesh import LiveMesh
from fxboundary.params import ParamPort
from fxboundary.placements import local_shape_and_offset, near, replicate
from fxboundary.transition.move import bind, redistribute
from fxboundary.transition.transition import plan

BOUND = "__fxboundary__"  # the attribute of a contracted module's class that holds its record


def shard_tensor(full: torch.Tensor, port: ParamPort, mesh: LiveMesh) -> torch.Tensor:
    """This rank's shard of a full tensor, in memory of its own; no communication."""
    if not port.is_sharded:
        return full
    pieces = [_cut(part, port, mesh) for part in _split(full, port)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, port.shard_dim)
    return whole.clone(memory_format=torch.contiguous_format)


def _split(full: torch.Tensor, port: ParamPort) -> tuple[torch.Tensor, ...]:
    return (full,) if port.parts is None else torch.split(full, list(port.parts), port.shard_dim)


def _cut(full: torch.Tensor, port: ParamPort, mesh: LiveMesh) -> torch.Tensor:
    shape, offset = local_shape_and_offset(
        full.shape, port.stored, mesh.spec.sizes, mesh.coordinate
    )
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start, length)
    return full


def gather_tensor(local: torch.Tensor, port: ParamPort, mesh: LiveMesh) -> torch.Tensor:
    """The full tensor, on every rank. Every rank of the mesh joins; meta tensors need none."""
    if not port.is_sharded:
        return local
    if local.is_meta:
        return local.new_empty(port.shape)
    if port.parts is None:
        return _gather(local, port, mesh, port.shape)
    shapes = [_with_size(port, size) for size in port.parts]
    lengths = [
        local_shape_and_offset(shape, port.stored, mesh.spec.sizes, mesh.coordinate)[0][
            port.shard_dim
        ]
        for shape in shapes
    ]
    parts = torch.split(local, lengths, port.shard_dim)
    full = [_gather(part, port, mesh, s) for part, s in zip(parts, shapes, strict=True)]
    return torch.cat(full, port.shard_dim)


def _with_size(port: ParamPort, size: int) -> tuple[int, ...]:
    return tuple(size if dim == port.shard_dim else s for dim, s in enumerate(port.shape))


def _gather(
    local: torch.Tensor, port: ParamPort, mesh: LiveMesh, shape: tuple[int, ...]
) -> torch.Tensor:
    full = (replicate(),) * len(mesh.spec.names)
    transition = plan(port.stored, full, None, mesh.spec)
    move = bind(transition, mesh, f":param.{port.name}", mesh.coordinate, dict(enumerate(shape)))
    with torch.no_grad():
        return redistribute(local, move)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile`` and ``DistributedDataParallel``, whose names count."""
    from torch._dynamo import OptimizedModule
    from torch.nn.parallel import DistributedDataParallel

    while isinstance(model, (OptimizedModule, DistributedDataParallel)):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
    return model


def check_shards(params: Mapping[int, tuple[nn.Parameter, ParamPort]], mesh: LiveMesh) -> None:
    """Refuse parameters that are not this rank's shards, before anything is gathered.

    Raises:
        PlacementMismatchError: names the parameter and its shape.
    """
    for param, port in params.values():
        shapes = [port.shape] if port.parts is None else [_with_size(port, n) for n in port.parts]
        cuts = [
            local_shape_and_offset(shape, port.stored, mesh.spec.sizes, mesh.coordinate)[0]
            for shape in shapes
        ]
        expected = list(cuts[0])
        if port.parts is not None:
            expected[port.shard_dim] = sum(cut[port.shard_dim] for cut in cuts)
        if tuple(param.shape) != tuple(expected):
            raise PlacementMismatchError(
                f"{port.name}: expected this rank's shard {tuple(expected)} of {port.shape}, found "
                f"{tuple(param.shape)}; load whole parameters with load_full_state_dict"
            )


def stored_param(module: nn.Module, port: ParamPort) -> nn.Parameter:
    """The parameter of a port as it is stored.

    Raises:
        FxBoundaryError: something has taken it away.
    """
    param = module._parameters.get(port.name)
    if param is None:
        raise FxBoundaryError(
            f"{type(module).__name__}.{port.name}: the parameter of this port is gone; "
            f"parametrize or prune before apply"
        )
    return param


def _by_identity(model: nn.Module) -> dict[int, tuple[ParamPort, LiveMesh]]:
    """Ports by parameter: names in a state dict may be renamed by hooks and wrappers."""
    return {
        id(stored_param(module, port)): (port, mesh)
        for _, module, port, mesh in sharded_params(model)
    }


def sharded_params(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, ParamPort, LiveMesh]]:
    """Name, owner, port and mesh of every parameter that is stored sharded."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        record = getattr(type(module), BOUND, None)
        if record is None:
            continue
        for port in record.params:
            if port.is_sharded:
                yield f"{prefix}.{port.name}".lstrip("."), module, port, record.mesh


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` with full tensors, on every rank, as the unsharded model has it.

    Every rank of the mesh must call it. Tied parameters are gathered once and stay one tensor.
    Parameters that FSDP2 shards on top are put together as well.

    Raises:
        FxBoundaryError: a split parameter was taken away from its module.
    """
    from torch.distributed.tensor import DTensor

    model = unwrapped(model)
    ports = _by_identity(model)
    state, gathered = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == _EXTRA:
            state[name] = tensor
            continue
        if id(tensor) not in gathered:
            local = tensor.detach()
            local = local.full_tensor() if isinstance(local, DTensor) else local
            port = ports.get(id(tensor))
            gathered[id(tensor)] = local if port is None else gather_tensor(local, *port)
        state[name] = gathered[id(tensor)]
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load full tensors into a model, sharded or not; no communication.

    Parameters on the meta device are created on the device of the tensor that is loaded.

    Raises:
        FxBoundaryError: names that are missing or that the model does not have, values that are
            no dense tensors, parameters that FSDP2 has sharded on top; nothing is loaded then.
        PlacementMismatchError: a tensor of another shape than the full parameter's; likewise.
    """
    from torch.distributed.tensor import DTensor

    model = unwrapped(model)
    entries = model.state_dict(keep_vars=True)
    _check_names(list(entries), list(state))
    targets = {n: t for n, t in entries.items() if n.rpartition(".")[2] != _EXTRA}
    unfit = [n for n in targets if not _is_loadable(state[n])]
    if unfit:
        raise FxBoundaryError(
            f"cannot load: {unfit[0]} is {_kind(state[unfit[0]])}; full, dense tensors are needed"
        )
    sharded = [name for name, target in targets.items() if isinstance(target, DTensor)]
    if sharded:
        raise FxBoundaryError(
            f"cannot load: {sharded[0]} is a DTensor; load_full_state_dict before fully_shard"
        )
    identities = _by_identity(model)
    ports = {n: identities[id(t)] for n, t in targets.items() if id(t) in identities}
    shapes = {n: ports[n][0].shape if n in ports else tuple(t.shape) for n, t in targets.items()}
    wrong = [
        f"{name}: expected the full shape {shape}, got {tuple(state[name].shape)}"
        for name, shape in shapes.items()
        if tuple(state[name].shape) != shape
    ]
    if wrong:
        raise PlacementMismatchError("cannot load: " + "; ".join(wrong))
    materialized: dict[int, Any] = {}
    for name, target in targets.items():
        local = state[name]
        if name in ports:
            local = shard_tensor(local, *ports[name])
        if not target.is_meta:
            with torch.no_grad():
                target.copy_(local)
            continue
        if id(target) not in materialized:
            materialized[id(target)] = _like(target, local)
        _assign(model, name, materialized[id(target)])
    for name in entries.keys() - targets.keys():
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])


_EXTRA = "_extra_state"  # torch's name for what get_extra_state returns


def _is_loadable(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return value.layout is torch.strided and not value.is_meta


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"no tensor but {value!r}"
    return f"a {type(value).__name__} ({value.layout}, {value.device})"


def _check_names(known: list[str], given: list[str]) -> None:
    missing = [name for name in known if name not in given]
    unexpected = [f"{name}{near(name, known)}" for name in given if name not in known]
    if missing or unexpected:
        raise FxBoundaryError(
            "cannot load: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("missing", missing), ("unexpected", unexpected))
                if names
            )
        )


def _like(target: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    value = local.detach().clone().to(target.dtype)
    if isinstance(target, nn.Parameter):
        return nn.Parameter(value, requires_grad=target.requires_grad)
    return value


def _assign(model: nn.Module, name: str, value: torch.Tensor) -> None:
    prefix, _, leaf = name.rpartition(".")
    module = model.get_submodule(prefix)
    table: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
    table[leaf] = value


def change_params(
    params: Mapping[int, tuple[nn.Parameter, ParamPort]],
    change: Callable[[torch.Tensor, ParamPort], torch.Tensor],
) -> None:
    """Replace the data (and the gradient) of parameters in place: their identity stays."""
    for param, port in params.values():
        gradient = param.grad
        param.grad = None
        param.data = change(param.data, port)
        if gradient is not None:
            param.grad = change(gradient, port)
