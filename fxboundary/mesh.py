"""Meshes: their static shape, and the registry through which the op finds a live one by name.

A port's arguments name the mesh, so that all ranks trace one and the same graph. The process
groups get rank-independent names as well (torch numbers them, differently on each rank): what
the compiler caches for one rank is then right for every other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fxboundary.errors import ContractError, FxBoundaryError, RankMismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Backends that average inside a reduction; on any other an average is a sum, then a division.
_NATIVE_AVG = frozenset({"nccl", "gloo", "fake"})


@dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of the mesh dimensions: all that planning needs."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, eq=False)
class LiveMesh:
    """A mesh with process groups, as this rank sees it."""

    name: str
    spec: MeshSpec
    mesh: DeviceMesh
    groups: tuple[ProcessGroup, ...]
    group_names: tuple[str, ...]
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
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ContractError(f"mesh.{name}: {size!r} is not a positive size")
        return MeshSpec(tuple(map(str, mesh)), tuple(mesh.values()))
    if not hasattr(mesh, "mesh_dim_names"):
        raise ContractError(f"mesh: expected names and sizes, as in tp: 2, found {mesh!r}")
    names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
    return MeshSpec(tuple(names), tuple(mesh.size(i) for i in range(mesh.ndim)))


def parse_mesh(text: str) -> dict[str, int]:
    """Read ``dp=2,tp=4``.

    Raises:
        ContractError: the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip() or not size.strip().isdigit() or int(size) < 1:
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
    groups = tuple(mesh.get_group(i) for i in range(mesh.ndim))
    native_avg = all(_backend(group) in _NATIVE_AVG for group in groups)
    base = f"{spec}" if native_avg else f"{spec};sum"
    name, number = base, 1
    while (entry := _REGISTRY.get(name)) is not None and _is_alive(entry):
        if all(a is b for a, b in zip(entry.groups, groups, strict=True)):
            return entry
        number += 1
        name = f"{base}#{number}"
    group_names = tuple(f"fxboundary:{name}:{dim}" for dim in spec.names)
    for group_name, group in zip(group_names, groups, strict=True):
        _alias_group(group_name, group)
    entry = LiveMesh(name, spec, mesh, groups, group_names, tuple(coordinate), native_avg)
    _REGISTRY[name] = entry
    return entry


def named_spec(name: str) -> MeshSpec:
    """The static shape that a registered mesh's name tells, in any process.

    >>> str(named_spec("dp=2,tp=4;sum#2"))
    'dp=2,tp=4'
    """
    return mesh_spec(parse_mesh(name.partition("#")[0].partition(";")[0]))


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
        resolved = resolve(entry.group_names[0])
    except RuntimeError:
        return False
    return resolved is entry.groups[0]
