"""Running a step on this rank's tensor: the shape work around one collective.

Written once for two tables of collectives, :class:`FunctionalCalls` (what captures see) and
``GroupCalls`` (what eager runs). Shards may be uneven where the global size is declared; every
rank then sends the largest chunk, padded, and what comes back is trimmed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fxboundary._torch_internals import GroupCalls
from fxboundary.errors import PlacementMismatchError
from fxboundary.mesh import LiveMesh
from fxboundary.placements import chunk_bounds
from fxboundary.transition.steps import Step


class Calls(Protocol):
    """The collectives of one group; tensors are contiguous, chunks lie along dimension 0."""

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor: ...
    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...
    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor: ...
    def all_to_all(self, x: torch.Tensor) -> torch.Tensor: ...


class FunctionalCalls:
    """Collectives as ``_c10d_functional`` operators with explicit waits."""

    def __init__(self, group_name: str, n: int) -> None:
        self._name, self._n = group_name, n

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return _wait(ops.all_reduce.default(x.contiguous(), op, self._name))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return _wait(ops.all_gather_into_tensor.default(x, self._n, self._name))

    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return _wait(ops.reduce_scatter_tensor.default(x, op, self._n, self._name))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        splits = [x.shape[0] // self._n] * self._n
        return _wait(ops.all_to_all_single.default(x, splits, splits, self._name))


def _wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(x)  # type: ignore[no-any-return]


def functional_calls(mesh: LiveMesh) -> Sequence[Calls]:
    return [
        FunctionalCalls(name, n) for name, n in zip(mesh.group_names, mesh.spec.sizes, strict=True)
    ]


def eager_calls(mesh: LiveMesh) -> Sequence[Calls]:
    return [GroupCalls(group) for group in mesh.groups]


@dataclass(frozen=True)
class Site:
    """Where steps run: the mesh, this rank's coordinate, declared global sizes, the port."""

    mesh: LiveMesh
    coordinate: tuple[Any, ...]
    sizes: Mapping[int, int]
    port: str

    def whole(self, step: Step) -> int | None:
        """Size of ``step.dim`` when the step's group has put its shards together, if declared."""
        if step.dim is None or step.dim not in self.sizes:
            return None
        size = self.sizes[step.dim]
        for m in step.outer:
            size = chunk_bounds(size, self.mesh.spec.sizes[m], self.coordinate[m])[1]
        return size


def run_steps(
    steps: Sequence[Step], x: torch.Tensor, site: Site, calls: Sequence[Calls]
) -> torch.Tensor:
    """Run a program; ``x`` itself comes back where there is nothing to do."""
    if steps and x.is_complex():
        return _run_complex(steps, x, site, calls)
    for step in steps:
        x = _RUN[step.kind](step, x, site, calls[step.mesh_dim])
    return x


def _run_complex(
    steps: Sequence[Step], x: torch.Tensor, site: Site, calls: Sequence[Calls]
) -> torch.Tensor:
    """As pairs of real numbers: not every backend carries complex ones."""
    bad = {step.op for step in steps} - {"sum", "avg"}
    if bad:
        raise PlacementMismatchError(f"{site.port}: P({min(bad)}) of a complex tensor")
    return torch.view_as_complex(
        run_steps(steps, torch.view_as_real(x.resolve_conj()), site, calls)
    )


def _n(step: Step, site: Site) -> int:
    return site.mesh.spec.sizes[step.mesh_dim]


def _all_reduce(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    if step.op == "avg" and not site.mesh.native_avg:
        return _divide(calls.all_reduce(x, "sum"), _n(step, site), site)
    return calls.all_reduce(_averageable(x, step.op, site), step.op)


def _all_gather(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    dim, n = _dim(step), _n(step, site)
    x, whole = _pad_shard(step, x, dim, site)
    return _trim(_unstack(calls.all_gather(x.contiguous()), dim, n), dim, whole)


def _reduce_scatter(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    dim, n = _dim(step), _n(step, site)
    chunk, length = _cut(step, x, dim, site)
    x = _stack(_pad_to(x, dim, chunk * n), dim, n)
    if step.op == "avg" and not site.mesh.native_avg:
        y = _divide(calls.reduce_scatter(x, "sum"), n, site)
    else:
        y = calls.reduce_scatter(_averageable(x, step.op, site), step.op)
    return _trim(y, dim, length)


def _all_to_all(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    dim, n = _dim(step), _n(step, site)
    to = step.to_dim
    assert to is not None
    chunk, length = _cut(step, x, to, site)
    x, whole = _pad_shard(step, x, dim, site)
    y = calls.all_to_all(_stack(_pad_to(x, to, chunk * n), to, n))
    return _trim(_trim(_unstack(y, dim, n), dim, whole), to, length)


def _slice(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    dim = _dim(step)
    chunk, length = _cut(step, x, dim, site)
    index = site.coordinate[step.mesh_dim]
    start = chunk * index if length is None else min(chunk * index, x.shape[dim])
    length = chunk if length is None else length
    # A copy: the shard must neither keep the whole tensor alive nor alias a replicated value.
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _pad(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    dim, n, index = _dim(step), _n(step, site), site.coordinate[step.mesh_dim]
    whole = site.whole(step)
    if whole is None:
        before, after = x.shape[dim] * index, x.shape[dim] * (n - 1 - index)
    else:
        before, length = chunk_bounds(whole, n, index)
        after = whole - before - length
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - dim - 1) + [before, after], 0).contiguous()


def _keep_first(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    if site.coordinate[step.mesh_dim] == 0:
        # A copy: as with the zeros elsewhere, it may be changed in place, and is contiguous.
        return x.clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _scale(step: Step, x: torch.Tensor, site: Site, calls: Calls) -> torch.Tensor:
    return x * _averageable_factor(step.factor, x, site)


_RUN = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "pad": _pad,
    "keep_first": _keep_first,
    "scale": _scale,
}


def _dim(step: Step) -> int:
    assert step.dim is not None
    return step.dim


def _cut(step: Step, x: torch.Tensor, dim: int, site: Site) -> tuple[Any, int | None]:
    """Chunk size along ``dim``, and this rank's length where shards are uneven.

    Raises:
        PlacementMismatchError: the size does not divide and the contract does not declare it:
            the ranks that put such shards together again could not know where to trim.
    """
    n = _n(step, site)
    size = x.shape[dim]
    if size % n == 0:
        return size // n, None
    if dim not in site.sizes:
        name = site.mesh.spec.names[step.mesh_dim]
        raise PlacementMismatchError(
            f"{site.port}: dimension {dim} of size {size} cannot be cut evenly over "
            f"{name}={n}; pad it to a multiple of {n}, or declare its global size in the "
            f"contract (in_sizes / out_sizes, on every port that carries it)"
        )
    return -(-size // n), chunk_bounds(size, n, site.coordinate[step.mesh_dim])[1]


def _pad_shard(
    step: Step, x: torch.Tensor, dim: int, site: Site
) -> tuple[torch.Tensor, int | None]:
    """This rank's shard as large as the largest, and the size that all shards have together.

    Raises:
        PlacementMismatchError: the shard is not the one that the declared size gives this rank.
    """
    whole = site.whole(step)
    if whole is None:
        return x, None
    n = _n(step, site)
    expected = chunk_bounds(whole, n, site.coordinate[step.mesh_dim])[1]
    if x.shape[dim] != expected:
        name = site.mesh.spec.names[step.mesh_dim]
        raise PlacementMismatchError(
            f"{site.port}: dimension {dim} has {x.shape[dim]} elements, but this rank's shard "
            f"of the declared size {whole} over {name}={n} has {expected}"
        )
    return _pad_to(x, dim, -(-whole // n)), whole


def _pad_to(x: torch.Tensor, dim: int, size: Any) -> torch.Tensor:
    if x.shape[dim] == size:
        return x
    padding = [0, 0] * (x.dim() - dim - 1) + [0, size - x.shape[dim]]
    return torch.constant_pad_nd(x, padding, 0)


def _trim(x: torch.Tensor, dim: int, length: int | None) -> torch.Tensor:
    if length is None or x.shape[dim] == length:
        return x
    return x.narrow(dim, 0, length).contiguous()


def _unstack(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Chunks along dimension 0 → chunks along ``dim``, in the form Inductor's passes match."""
    if dim == 0:
        return x
    if x.shape[0] == 0:
        return x.repeat_interleave(n, dim)
    return torch.cat(torch.split(x, x.shape[0] // n), dim)


def _stack(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Chunks along ``dim`` → chunks along dimension 0."""
    if dim == 0 or x.shape[dim] == 0:
        return x.contiguous() if dim == 0 else x.repeat_interleave(n, 0).contiguous()
    return torch.cat(torch.split(x, x.shape[dim] // n, dim))


def _divide(x: torch.Tensor, n: int, site: Site) -> torch.Tensor:
    return x / _averageable_factor(n, x, site)


def _averageable(x: torch.Tensor, op: str, site: Site) -> torch.Tensor:
    if op == "avg":
        _averageable_factor(1, x, site)
    return x


def _averageable_factor(factor: float, x: torch.Tensor, site: Site) -> float:
    if not (x.is_floating_point() or x.is_complex()):
        raise PlacementMismatchError(
            f"{site.port}: P(avg) of a {str(x.dtype).removeprefix('torch.')} tensor; an average "
            f"needs a floating-point dtype"
        )
    return factor
