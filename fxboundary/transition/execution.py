"""Running a step on this rank's tensor: the shape work around one collective.

Written once for two tables of collectives, :class:`FunctionalCalls` (what captures see) and
``GroupCalls`` (what eager runs). Shards may be uneven where the global size is declared; every
rank then sends the largest chunk, padded, and what comes back is trimmed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fxboundary._torch_internals import GroupCalls
from fxboundary.errors import PlacementMismatchError
from fxboundary.mesh import LiveMesh
from fxboundary.placements import chunk_bounds
from fxboundary.transition.relayout import Box, Relayout, relayout
from fxboundary.transition.steps import REDUCTIONS, Step


class Calls(Protocol):
    """The collectives of one group; tensors are contiguous, chunks lie along dimension 0."""

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor: ...
    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...
    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor: ...
    def all_to_all(
        self, x: torch.Tensor, received: Sequence[Any] | None, sent: Sequence[Any] | None
    ) -> torch.Tensor:
        """``received`` and ``sent`` are lengths per rank; ``None`` means equal parts."""


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

    def all_to_all(
        self, x: torch.Tensor, received: Sequence[Any] | None, sent: Sequence[Any] | None
    ) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        equal = [x.shape[0] // self._n] * self._n
        return _wait(ops.all_to_all_single.default(x, received or equal, sent or equal, self._name))


def _wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(x)  # type: ignore[no-any-return]


CallsByDims = Mapping[tuple[int, ...], Calls]  # by the group's mesh dimensions, ascending


def functional_calls(mesh: LiveMesh) -> CallsByDims:
    return {dims: FunctionalCalls(g.name, g.size) for dims, g in mesh.groups.items()}


def eager_calls(mesh: LiveMesh) -> CallsByDims:
    return {dims: GroupCalls(g.group) for dims, g in mesh.groups.items()}


@dataclass(frozen=True)
class Site:
    """Where steps run: the mesh, this rank's coordinate, declared global sizes, the port."""

    mesh: LiveMesh
    coordinate: tuple[Any, ...]
    sizes: Mapping[int, int]
    port: str

    def group_sizes(self, step: Step) -> tuple[int, ...]:
        return tuple(self.mesh.spec.sizes[m] for m in step.mesh_dims)

    def n(self, step: Step) -> int:
        return math.prod(self.group_sizes(step))

    def whole(self, dim: int, outer: Sequence[int]) -> int | None:
        """Size of ``dim`` that is cut by nothing but ``outer``, where it is declared."""
        size = self.sizes.get(dim)
        if size is not None:
            for m in outer:
                size = chunk_bounds(size, self.mesh.spec.sizes[m], self.coordinate[m])[1]
        return size

    def name_of(self, step: Step) -> str:
        """``dp=2,tp=4``: the group of a step, for messages."""
        spec = self.mesh.spec
        return ",".join(f"{spec.names[m]}={spec.sizes[m]}" for m in step.mesh_dims)


def run_steps(
    steps: Sequence[Step], x: torch.Tensor, site: Site, calls: CallsByDims
) -> torch.Tensor:
    """Run a program; ``x`` itself comes back where there is nothing to do."""
    if steps and x.is_complex():
        return _run_complex(steps, x, site, calls)
    for step in steps:
        if step.kind in REDUCTIONS:
            x = _reduce(step, x, site, calls)
        elif x.dtype in _FLOAT8 and step.kind != "scale" and step.op != "product":
            # Not every backend carries these, nor has every device all kernels: a byte is a byte.
            x = _RUN[step.kind](step, x.view(torch.uint8), site, calls).view(x.dtype)
        else:
            x = _RUN[step.kind](step, x, site, calls)
    return x


_FLOAT8 = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))
)


def _reduce(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    if step.dtype:
        wide = x.to(getattr(torch, step.dtype))
        return _RUN[step.kind](step, wide, site, calls).to(x.dtype)
    if x.dtype in _FLOAT8:
        raise PlacementMismatchError(
            f"{site.port}: P({step.op}) of a {str(x.dtype).removeprefix('torch.')} tensor; say "
            f"in which dtype to reduce it (reduce_dtype: float32)"
        )
    return _RUN[step.kind](step, x, site, calls)


def _run_complex(
    steps: Sequence[Step], x: torch.Tensor, site: Site, calls: CallsByDims
) -> torch.Tensor:
    """As pairs of real numbers: not every backend carries complex ones."""
    bad = {step.op for step in steps} - {"sum", "avg"}
    if bad:
        raise PlacementMismatchError(f"{site.port}: P({min(bad)}) of a complex tensor")
    return torch.view_as_complex(
        run_steps(steps, torch.view_as_real(x.resolve_conj()), site, calls)
    )


def _group(step: Step, calls: CallsByDims) -> Calls:
    return calls[tuple(sorted(step.mesh_dims))]


def _all_reduce(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    group = _group(step, calls)
    if step.op == "avg" and not site.mesh.native_avg:
        return _divide(group.all_reduce(x, "sum"), site.n(step), site)
    return group.all_reduce(_averageable(x, step.op, site), step.op)


def _all_gather(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    x, whole = _pad_shard(step, x, site)
    return _join(step, _group(step, calls).all_gather(x.contiguous()), whole, site)


def _reduce_scatter(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    dim, group = _dim(step), _group(step, calls)
    x, length = _split(step, x, dim, site)
    if step.op == "avg" and not site.mesh.native_avg:
        y = _divide(group.reduce_scatter(x, "sum"), site.n(step), site)
    else:
        y = group.reduce_scatter(_averageable(x, step.op, site), step.op)
    return _trim(y, dim, length)


def _all_to_all(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    to = step.to_dim
    assert to is not None
    x, whole = _pad_shard(step, x, site)
    x, length = _split(step, x, to, site)
    return _trim(
        _join(step, _group(step, calls).all_to_all(x, None, None), whole, site), to, length
    )


def _all_to_all_v(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    coordinate = tuple(int(i) for i in site.coordinate)
    declared = tuple(sorted(site.sizes.items()))
    plan = relayout(step.src, step.dst, site.mesh.spec.sizes, coordinate, declared)
    unit = {d: _unit(step, x, d, i, plan, site) for i, d in enumerate(plan.dims)}
    pieces, sent, received = [], [], []
    for box in plan.sends:
        piece = None if box is None else _cut_box(x, plan.dims, box, unit)
        sent.append(0 if piece is None else piece.numel())
        if piece is not None:
            pieces.append(piece.reshape(-1))
    shapes = [None if b is None else _shape(x, plan.dims, b, unit) for b in plan.receives]
    received = [0 if shape is None else math.prod(shape) for shape in shapes]
    packed = torch.cat(pieces) if pieces else x.new_empty(0)
    arrived = _group(step, calls).all_to_all(packed.contiguous(), received, sent)
    parts = torch.split(arrived, received)
    found = {
        tuple(start for start, _ in box): part.view(shape)
        for box, shape, part in zip(plan.receives, shapes, parts, strict=True)
        if box is not None and shape is not None
    }
    if not found:
        return x.new_empty(_shape(x, plan.dims, _whole(plan.wanted), unit))
    return _assemble(found, plan.dims)


def _unit(step: Step, x: torch.Tensor, dim: int, i: int, plan: Relayout, site: Site) -> Any:
    """Elements in a unit of ``dim``.

    Raises:
        PlacementMismatchError: the shard is not a whole number of units, or not the declared one.
    """
    held = plan.held[i][1] - plan.held[i][0]
    declared = dim in site.sizes
    if declared and x.shape[dim] != held:
        raise _not_the_shard(step, x, dim, held, plan.units[i], site)
    if not declared and x.shape[dim] % held != 0:
        raise PlacementMismatchError(_uneven(step, x, dim, site))
    return 1 if declared else x.shape[dim] // held


def _cut_box(
    x: torch.Tensor, dims: Sequence[int], box: Box, unit: Mapping[int, Any]
) -> torch.Tensor:
    for dim, (start, stop) in zip(dims, box, strict=True):
        x = x.narrow(dim, start * unit[dim], (stop - start) * unit[dim])
    return x


def _shape(x: torch.Tensor, dims: Sequence[int], box: Box, unit: Mapping[int, Any]) -> list[Any]:
    shape = list(x.shape)
    for dim, (start, stop) in zip(dims, box, strict=True):
        shape[dim] = (stop - start) * unit[dim]
    return shape


def _whole(box: Box) -> Box:
    return tuple((0, stop - start) for start, stop in box)


def _assemble(parts: Mapping[tuple[int, ...], torch.Tensor], dims: Sequence[int]) -> torch.Tensor:
    """Boxes that tile a tensor, by where they start, put together one dimension after another."""
    if not dims:
        (part,) = parts.values()
        return part
    rows = []
    for start in sorted({key[0] for key in parts}):
        row = {key[1:]: part for key, part in parts.items() if key[0] == start}
        rows.append(_assemble(row, dims[1:]))
    return rows[0] if len(rows) == 1 else torch.cat(rows, dims[0])


def _slice(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    (m,) = step.mesh_dims
    dim, n, index = _dim(step), site.n(step), site.coordinate[m]
    whole = site.whole(dim, step.outer)
    if whole is None:
        if x.shape[dim] % n != 0:
            raise PlacementMismatchError(_uneven(step, x, dim, site))
        length = x.shape[dim] // n
        start = length * index
    else:
        _check_whole(step, x, dim, whole, site)
        start, length = chunk_bounds(whole, n, index)
    # A copy: the shard must neither keep the whole tensor alive nor alias a replicated value.
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _pad(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    (m,) = step.mesh_dims
    dim, n, index = _dim(step), site.n(step), site.coordinate[m]
    whole = site.whole(dim, step.outer)
    if whole is None:
        before, after = x.shape[dim] * index, x.shape[dim] * (n - 1 - index)
    else:
        before, length = chunk_bounds(whole, n, index)
        after = whole - before - length
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - dim - 1) + [before, after], 0).contiguous()


def _keep_first(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    (m,) = step.mesh_dims
    if site.coordinate[m] == 0:
        # A copy: as with the zeros elsewhere, it may be changed in place, and is contiguous.
        return x.clone(memory_format=torch.contiguous_format)
    return torch.full_like(x, step.op == "product", memory_format=torch.contiguous_format)


def _scale(step: Step, x: torch.Tensor, site: Site, calls: CallsByDims) -> torch.Tensor:
    return x * _averageable_factor(step.factor, x, site)


_RUN = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "slice": _slice,
    "pad": _pad,
    "keep_first": _keep_first,
    "scale": _scale,
}


def _dim(step: Step) -> int:
    assert step.dim is not None
    return step.dim


def _by_group_rank(step: Step, sizes: Sequence[int]) -> list[int]:
    """For each rank of the group, in its order, which cut of the nest it holds.

    A group counts its ranks row-major over ascending mesh dimensions; a nest may be in another
    order.
    """
    ascending = sorted(step.mesh_dims)
    if list(step.mesh_dims) == ascending:
        return list(range(math.prod(sizes)))
    size = dict(zip(step.mesh_dims, sizes, strict=True))
    found = []
    for index in itertools.product(*(range(size[m]) for m in ascending)):
        at = dict(zip(ascending, index, strict=True))
        position = 0
        for m in step.mesh_dims:
            position = position * size[m] + at[m]
        found.append(position)
    return found


def _cuts(size: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of all cuts of a nest, outermost mesh dimension first."""
    found = [(0, size)]
    for n in sizes:
        found = [
            (start + offset, length)
            for start, whole in found
            for offset, length in (chunk_bounds(whole, n, i) for i in range(n))
        ]
    return found


def _split(step: Step, x: torch.Tensor, dim: int, site: Site) -> tuple[torch.Tensor, int | None]:
    """``x`` cut along ``dim``, one equally large part for each rank of the group along dimension
    0; and this rank's length where parts are uneven.

    Raises:
        PlacementMismatchError: the size does not divide and the contract does not declare it:
            the ranks that put such shards together again could not know where to trim.
    """
    sizes, n = site.group_sizes(step), site.n(step)
    outer = step.to_outer if step.kind == "all_to_all" else step.outer
    whole = site.whole(dim, outer)
    ranks = _by_group_rank(step, sizes)
    in_order = ranks == list(range(n))
    if whole is None or whole % n == 0:
        if x.shape[dim] % n != 0:
            raise PlacementMismatchError(_uneven(step, x, dim, site))
        if in_order:
            return _stack(x, dim, n), None
        parts = torch.split(x, x.shape[dim] // n, dim) if x.shape[dim] != 0 else [x] * n
        return torch.cat([parts[position] for position in ranks]), None
    _check_whole(step, x, dim, whole, site)
    cuts = _cuts(whole, sizes)
    largest = max(length for _, length in cuts)
    parts = [_pad_to(x.narrow(dim, *cuts[position]), dim, largest) for position in ranks]
    return torch.cat(parts), cuts[_position(step, site)][1]


def _join(step: Step, x: torch.Tensor, whole: int | None, site: Site) -> torch.Tensor:
    """Parts of all ranks along dimension 0 → one tensor, parts along ``step.dim``."""
    sizes, n, dim = site.group_sizes(step), site.n(step), _dim(step)
    ranks = _by_group_rank(step, sizes)
    if ranks == list(range(n)) and (whole is None or whole % n == 0):
        return _unstack(x, dim, n)
    parts = [x] * n if x.shape[0] == 0 else list(torch.split(x, x.shape[0] // n))
    ordered = [parts[ranks.index(position)] for position in range(n)]
    if whole is not None:
        lengths = [length for _, length in _cuts(whole, sizes)]
        ordered = [p.narrow(dim, 0, k) for p, k in zip(ordered, lengths, strict=True) if k]
        if not ordered:
            return x.narrow(dim, 0, 0).contiguous() if n == 1 else parts[0].narrow(dim, 0, 0)
    return torch.cat(ordered, dim)


def _position(step: Step, site: Site) -> int:
    position = 0
    for m, n in zip(step.mesh_dims, site.group_sizes(step), strict=True):
        position = position * n + int(site.coordinate[m])
    return position


def _uneven(step: Step, x: torch.Tensor, dim: int, site: Site) -> str:
    group, n = site.name_of(step), site.n(step)
    return (
        f"{site.port}: dimension {dim} of size {x.shape[dim]} cannot be cut evenly over "
        f"{group}; pad it to a multiple of {n}, or declare its global size in the "
        f"contract (in_sizes / out_sizes, on every port that carries it)"
    )


def _pad_shard(step: Step, x: torch.Tensor, site: Site) -> tuple[torch.Tensor, int | None]:
    """This rank's shard as large as the largest, and the size that all shards have together.

    Raises:
        PlacementMismatchError: the shard is not the one that the declared size gives this rank.
    """
    dim = _dim(step)
    whole = site.whole(dim, step.outer)
    if whole is None:
        return x, None
    cuts = _cuts(whole, site.group_sizes(step))
    expected = cuts[_position(step, site)][1]
    if x.shape[dim] != expected:
        raise _not_the_shard(step, x, dim, expected, whole, site)
    return _pad_to(x, dim, max(length for _, length in cuts)), whole


def _check_whole(step: Step, x: torch.Tensor, dim: int, whole: int, site: Site) -> None:
    if x.shape[dim] != whole:
        raise PlacementMismatchError(
            f"{site.port}: dimension {dim} has {x.shape[dim]} elements, but its declared size "
            f"leaves {whole} to cut over {site.name_of(step)}"
        )


def _not_the_shard(
    step: Step, x: torch.Tensor, dim: int, expected: int, whole: int, site: Site
) -> PlacementMismatchError:
    return PlacementMismatchError(
        f"{site.port}: dimension {dim} has {x.shape[dim]} elements, but this rank's shard "
        f"of the declared size {whole} over {site.name_of(step)} has {expected}"
    )


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
    if not (x.is_floating_point() or x.is_complex()) or x.dtype in _FLOAT8:
        raise PlacementMismatchError(
            f"{site.port}: P(avg) of a {str(x.dtype).removeprefix('torch.')} tensor; an average "
            f"needs a floating-point dtype"
        )
    return factor
