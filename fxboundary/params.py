"""Parameters as ports: which layout each is stored in, used in, and gets its gradient in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parameter import is_lazy

from fxboundary.contract import Contract, layout_pair
from fxboundary.errors import ContractError, PlacementMismatchError, UnsupportedTransitionError
from fxboundary.mesh import MeshSpec
from fxboundary.patterns import is_pattern, matches
from fxboundary.placements import (
    Layout,
    Placement,
    chunk_bounds,
    global_shape,
    near,
    normalize_dims,
    parse_placement,
    placement_text,
    replicate,
    shard_dim,
    shard_dims,
)
from fxboundary.transition.gradient import adjoint_layout
from fxboundary.transition.transition import plan as plan_layouts


@dataclass(frozen=True)
class ParamPort:
    """One parameter of one module: ``shape`` is the global shape.

    ``parts`` are the sizes, along the shard dimension, of what the parameter stacks.
    """

    name: str
    shape: tuple[int, ...]
    stored: Layout
    used: Layout
    grad: Layout
    parts: tuple[int, ...] | None = None
    reduce_dtype: str = ""
    backward: str = ""

    @property
    def is_sharded(self) -> bool:
        return any(p.is_shard() for p in self.stored)

    @property
    def shard_dim(self) -> int:
        return min(shard_dims(self.stored))

    @property
    def changes_at_use(self) -> bool:
        """Whether a use needs a node: another layout, or a gradient to be reduced."""
        return self.stored != self.used or any(g.is_partial() for g in self.grad)

    def sizes(self, mesh: MeshSpec) -> dict[int, int]:
        """Global sizes of the dimensions that a step at use cuts unevenly."""
        cuts = [self._shards(layout, mesh) for layout in (self.stored, self.used)]
        dims = {dim for counts in cuts for dim, n in counts.items() if self.shape[dim] % n}
        return {dim: self.shape[dim] for dim in sorted(dims)}

    def is_uneven(self, mesh: MeshSpec) -> bool:
        if self.parts is None:
            return bool(self.sizes(mesh))
        n = self._shards(self.stored, mesh)[self.shard_dim]
        return any(size % n for size in self.parts)

    @staticmethod
    def _shards(layout: Layout, mesh: MeshSpec) -> dict[int, int]:
        counts: dict[int, int] = {}
        for placement, n in zip(layout, mesh.sizes, strict=True):
            if (dim := shard_dim(placement)) is not None:
                counts[dim] = counts.get(dim, 1) * n
        return counts


def resolve_params(
    model: nn.Module, matched: Mapping[str, Contract], mesh: MeshSpec, local_params: bool
) -> tuple[dict[tuple[str, str], ParamPort], list[str]]:
    """A port for every parameter of a contracted module, by (owner's name, parameter's name).

    Returns the ports and all problems found, each with its module and parameter.
    """
    from torch.distributed.tensor import DTensor

    ports: dict[tuple[str, str], ParamPort] = {}
    problems = _unknown_names(model, matched)
    for owner, module in model.named_modules(remove_duplicate=False):
        enclosing = [name for name in matched if _encloses(name, owner)]
        if not enclosing:
            continue
        for name, param in module.named_parameters(recurse=False):
            chain = [(_relative(outer, owner, name), matched[outer]) for outer in enclosing]
            where = f"{enclosing[-1] or '<root>'}.params.{chain[-1][0]}"
            if isinstance(param, DTensor):
                problems.append(
                    f"{where}: is a DTensor; apply the plan before fully_shard, and instead of "
                    f"parallelize_module"
                )
                continue
            if param.layout is not torch.strided:
                problems.append(f"{where}: a {param.layout} tensor cannot be cut")
                continue
            if is_lazy(param):
                problems.append(f"{where}: not initialized; call the model once before apply")
                continue
            shape = tuple(param.shape)
            try:
                ports[owner, name] = _port(name, shape, chain, mesh, local_params)
            except (ContractError, PlacementMismatchError, UnsupportedTransitionError) as error:
                problems.append(f"{where}: {error}")
    return ports, problems + _disagreements(model, ports, mesh)


def _encloses(outer: str, owner: str) -> bool:
    return outer == "" or owner == outer or owner.startswith(outer + ".")


def _relative(outer: str, owner: str, name: str) -> str:
    path = f"{owner}.{name}" if owner else name
    return path[len(outer) + 1 :] if outer else path


def _unknown_names(model: nn.Module, matched: Mapping[str, Contract]) -> list[str]:
    problems = []
    for module_name, contract in matched.items():
        module = model.get_submodule(module_name)
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        for field in ("params", "param_grad", "stacked", "param_units", "param_backward"):
            problems += [
                f"{module_name or '<root>'}.{field}.{key}: no such parameter{near(key, names)}"
                for key in getattr(contract, field) or {}
                if not any(matches(key, name) for name in names)
            ]
    return problems


Chain = Sequence[tuple[str, Contract]]  # outermost contract first, with the name relative to it


def _port(
    name: str, shape: tuple[int, ...], chain: Chain, mesh: MeshSpec, local_params: bool
) -> ParamPort:
    declared = _declared(chain, len(shape))
    stored, used = (
        normalize_dims(layout, len(shape)) for layout in layout_pair(declared, mesh.names)
    )
    if local_params:
        shape = global_shape(shape, stored, mesh.sizes)
    grad = _gradient(chain, used, stored, mesh)
    parts = _parts(chain, shape, stored, used)
    reduce_dtype = [c.reduce_dtype for _, c in chain if c.reduce_dtype is not None]
    options = "".join(reduce_dtype[-1:]), _lookup(chain, "param_backward") or ""
    port = ParamPort(name, shape, stored, used, grad, parts, *options)
    plan_layouts(stored, used, grad, mesh)
    _check_units(chain, port, mesh)
    return port


def _declared(chain: Chain, ndim: int) -> dict[str, tuple[Placement, Placement]]:
    """Layouts by mesh dimension: an inner contract, and a later entry, before others.

    A pattern passes over dimensions that a parameter lacks (a scalar stays whole); an exact
    name does not, and is refused later.
    """
    found: dict[str, tuple[Placement, Placement]] = {}
    for name, contract in chain:
        for key, layout in (contract.params or {}).items():
            if not matches(key, name):
                continue
            for mesh_dim, pair in layout.items():
                if is_pattern(key) and not all(_fits(p, ndim) for p in pair):
                    pair = (replicate(), replicate())
                found[mesh_dim] = pair
    return found


def _fits(placement: Placement, ndim: int) -> bool:
    dim = shard_dim(placement)
    return dim is None or -ndim <= dim < ndim


def _gradient(chain: Chain, used: Layout, stored: Layout, mesh: MeshSpec) -> Layout:
    """As declared by the innermost contract that says; else by the rule of shared work."""
    rule = adjoint_layout(used)
    return tuple(
        _declared_gradient(chain, name)
        or (
            parse_placement("P")
            if used[i].is_replicate() and (not stored[i].is_replicate() or _shares(chain, name))
            else rule[i]
        )
        for i, name in enumerate(mesh.names)
    )


def _declared_gradient(chain: Chain, mesh_dim: str) -> Placement | None:
    found = None
    for name, contract in chain:
        for key, layout in (contract.param_grad or {}).items():
            if matches(key, name):
                found = layout.get(mesh_dim, found)
    return found


def _shares(chain: Chain, mesh_dim: str) -> bool:
    """Whether the region shares its work over a mesh dimension: the innermost contract that
    mentions the dimension says so."""
    for _, contract in reversed(chain):
        if mesh_dim in contract.mentioned_dims():
            return mesh_dim in contract.shared_dims()
    return False


def _lookup(chain: Chain, field: str) -> Any:
    found = None
    for name, contract in chain:
        for key, value in (getattr(contract, field) or {}).items():
            if matches(key, name):
                found = value
    return found


def _parts(
    chain: Chain, shape: tuple[int, ...], stored: Layout, used: Layout
) -> tuple[int, ...] | None:
    stacked = _lookup(chain, "stacked")
    dims = shard_dims(stored)
    if stacked is None or not dims:
        return None
    if len(dims) > 1 or stored != used:
        raise ContractError(
            "a stacked parameter is sharded on one dimension, and used as it is stored"
        )
    size = shape[dims.pop()]
    parts = (size // stacked,) * stacked if isinstance(stacked, int) else tuple(stacked)
    if sum(parts) != size:
        raise ContractError(f"stacked parts {parts} do not add up to its size {size}")
    return parts


def _check_units(chain: Chain, port: ParamPort, mesh: MeshSpec) -> None:
    unit = _lookup(chain, "param_units")
    if unit is None or not port.is_sharded:
        return
    for name, n, placement in zip(mesh.names, mesh.sizes, port.used, strict=True):
        if (dim := shard_dim(placement)) is None:
            continue
        for size in port.parts or (port.shape[dim],):
            lengths = [chunk_bounds(size, n, index)[1] for index in range(n)]
            if any(length % unit or not length for length in lengths):
                raise ContractError(
                    f"{name}: {size} elements in units of {unit} cannot be split over "
                    f"{name}={n} (shards of {', '.join(map(str, lengths))}); use a size of "
                    f"{name} that divides {size // unit}, or store the parameter R"
                )


def _disagreements(
    model: nn.Module, ports: Mapping[tuple[str, str], ParamPort], mesh: MeshSpec
) -> list[str]:
    """Tied parameters whose contracts store them differently."""
    first: dict[int, tuple[str, ParamPort | None]] = {}
    problems = []
    for owner, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False):
            port, path = ports.get((owner, name)), f"{owner}.{name}".lstrip(".")
            other_path, other = first.setdefault(id(param), (path, port))
            if _storage(port, mesh) != _storage(other, mesh):
                problems.append(
                    f"{path} is tied to {other_path}, but one is stored "
                    f"{_stored_text(port, mesh)} and the other {_stored_text(other, mesh)}; "
                    f"store both alike, and change the layout at use, as in 'S(0) -> R'"
                )
    return problems


def _storage(port: ParamPort | None, mesh: MeshSpec) -> Any:
    if port is None or not port.is_sharded:
        return (replicate(),) * len(mesh.names), None
    return port.stored, port.parts


def _stored_text(port: ParamPort | None, mesh: MeshSpec) -> str:
    stored, parts = _storage(port, mesh)
    texts = [f"{name}: {placement_text(p)}" for name, p in zip(mesh.names, stored, strict=True)]
    return "{" + ", ".join(texts) + "}" + (f" in parts {parts}" if parts else "")
