"""Meshes: their static shape, and the registry through which the op finds a live one by name.

A port's arguments name the mesh, so that all ranks trace one and the same graph. The process
groups get rank-independent names as well (torch numbers them, differently on each rank): what
the compiler caches for one rank is then right for every other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from fxboundary.errors import ContractError, FxBoundaryError, RankMismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Backends that average inside a reduction; on any other an average is a sum, then a division.
_NATIVE_AVG = frozenset({"nccl", "gloo", "fake"})


@dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of the mesh dimensions: all that planning needs.

    ``flattens`` says whether several dimensions may be one group: where ranks ascend row-major.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    flattens: bool = True

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True)
class Group:
    """This rank's process group over some mesh dimensions, and its rank-independent name."""

    group: ProcessGroup
    name: str
    size: int


@dataclass(frozen=True, eq=False)
class LiveMesh:
    """A mesh with process groups, as this rank sees it.

    ``groups`` are keyed by the mesh dimensions that they span, ascending: each dimension alone,
    and, where the mesh can be flattened, each set of several.
    """

    name: str
    spec: MeshSpec
    mesh: DeviceMesh
    groups: Mapping[tuple[int, ...], Group]
    coordinate: tuple[int, ...]
    native_avg: bool


MeshLike: TypeAlias = "DeviceMesh | MeshSpec | Mapping[str, int]"

_REGISTRY: dict[str, LiveMesh] = {}


def mesh_spec(mesh: MeshLike) -> MeshSpec:
    """The static shape of a mesh.

    Raises:
        ContractError: the mapping holds something other than positive sizes.
    """
    if isinstance(mesh, MeshSpec):
        return mesh
    if isinstance(mesh, Mapping):
        for name, size in mesh.items():
            _check_name(str(name))
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ContractError(f"mesh.{name}: {size!r} is not a positive size")
        return MeshSpec(tuple(map(str, mesh)), tuple(mesh.values()))
    if not hasattr(mesh, "mesh_dim_names"):
        raise ContractError(f"mesh: expected names and sizes, as in tp: 2, found {mesh!r}")
    names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
    for name in names:
        _check_name(name)
    # A group counts its ranks in ascending order: only then is that the mesh's order everywhere.
    flattens = bool((mesh.mesh.flatten().diff() > 0).all())
    return MeshSpec(tuple(names), tuple(mesh.size(i) for i in range(mesh.ndim)), flattens)


def _check_name(name: str) -> None:
    if not name or any(c in name for c in ",=;#:+ "):
        raise ContractError(f"mesh: {name!r} is no name for a mesh dimension; write a plain word")


def parse_mesh(text: str) -> dict[str, int]:
    """Read ``dp=2,tp=4``.

    Raises:
        ContractError: the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip() or not re.fullmatch("[0-9]+", size.strip()) or int(size) < 1:
            raise ContractError(f"mesh {text!r}: write name=size, as in dp=2,tp=4")
        if name.strip() in sizes:
            raise ContractError(f"mesh {text!r}: {name.strip()} is given twice")
        sizes[name.strip()] = int(size)
    return sizes


def register_mesh(mesh: DeviceMesh) -> LiveMesh:
    """Make a mesh known by name; the same mesh again gives the same entry.

    Every rank must register its meshes in the same order: a second mesh of equal names and
    sizes gets a number.

    Raises:
        RankMismatchError: this rank is not part of the mesh.
    """
    spec = mesh_spec(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RankMismatchError(
            f"this rank is not part of the mesh {spec}: build the plan only on the mesh's ranks"
        )
    own = tuple(mesh.get_group(i) for i in range(mesh.ndim))
    native_avg = all(_backend(group) in _NATIVE_AVG for group in own)
    traits = ("" if native_avg else ";sum") + ("" if spec.flattens else ";unflattened")
    base = f"{spec}{traits}"
    name, number = base, 1
    while (entry := _REGISTRY.get(name)) is not None and _is_alive(entry):
        if all(entry.groups[i,].group is group for i, group in enumerate(own)):
            return entry
        number += 1
        name = f"{base}#{number}"
    groups = {}
    for dims in group_dims(spec):
        group = own[dims[0]] if len(dims) == 1 else _flattened(mesh, dims)
        alias = f"fxboundary:{name}:{'+'.join(spec.names[i] for i in dims)}"
        _alias_group(alias, group)
        groups[dims] = Group(group, alias, group.size())
    entry = LiveMesh(name, spec, mesh, groups, tuple(coordinate), native_avg)
    _REGISTRY[name] = entry
    return entry


def group_dims(spec: MeshSpec) -> list[tuple[int, ...]]:
    """The sets of mesh dimensions that have a group: each alone, then those of several.

    Dimensions of size 1 are in no set of several: nothing is communicated along them.
    """
    alone: list[tuple[int, ...]] = [(i,) for i in range(len(spec.sizes))]
    wide = [i for i, n in enumerate(spec.sizes) if n > 1]
    if not spec.flattens:
        return alone
    several = [c for k in range(2, len(wide) + 1) for c in itertools.combinations(wide, k)]
    return alone + several


def _flattened(mesh: DeviceMesh, dims: tuple[int, ...]) -> ProcessGroup:
    """This rank's group over several mesh dimensions. All ranks of the mesh join, in one order."""
    import torch.distributed as dist

    index: list[Any] = list(mesh.get_coordinate() or ())
    for i in dims:
        index[i] = slice(None)
    ranks = mesh.mesh[tuple(index)].flatten().tolist()
    backend = dist.get_backend(mesh.get_group(dims[0]))
    group: Any = dist.new_group(
        ranks, backend=backend, use_local_synchronization=True, group_desc="fxboundary"
    )
    return group  # type: ignore[no-any-return]


def named_spec(name: str) -> MeshSpec:
    """The static shape that a registered mesh's name tells, in any process.

    >>> str(named_spec("dp=2,tp=4;sum#2"))
    'dp=2,tp=4'
    """
    text, *traits = name.partition("#")[0].split(";")
    spec = mesh_spec(parse_mesh(text))
    return replace(spec, flattens="unflattened" not in traits)


def live_mesh(name: str) -> LiveMesh:
    """The registered mesh of that name.

    Raises:
        FxBoundaryError: there is none in this process.
    """
    entry = _REGISTRY.get(name)
    if entry is None or not _is_alive(entry):
        raise FxBoundaryError(
            f"no mesh {name!r} in this process: build the plan on the mesh first "
            f"(fxboundary.Plan(mesh, ...)); known: {', '.join(_REGISTRY) or 'none'}"
        )
    return entry


def _backend(group: ProcessGroup) -> str:
    import torch.distributed as dist

    return str(dist.get_backend(group))


# Read on torch 2.13.0 and 2.14.1: functional collectives look groups up in this registry.
def _alias_group(name: str, group: ProcessGroup) -> None:
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "_register_process_group"):
        raise FxBoundaryError("this torch has no group registry (read on 2.13.0 and 2.14.1)")
    register: Any = c10d._register_process_group
    register(name, group)


def _is_alive(entry: LiveMesh) -> bool:
    from torch._C import _distributed_c10d as c10d

    try:
        resolve: Any = c10d._resolve_process_group
        resolved = resolve(entry.groups[0,].name)
    except RuntimeError:
        return False
    return resolved is entry.groups[0,].group
