"""Running a step on this rank's tensor: the shape work around one collective.

Shards may be uneven where the global size is declared; every rank then sends the largest cut,
padded, and what comes back is trimmed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxboundary.errors import PlacementMismatchError
from fxboundary.transition.relayout import Box, Relayout
from fxboundary.transition.site import BoundStep, Calls, Cuts
from fxboundary.transition.steps import REDUCTIONS

_FLOAT8 = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))
)


def run_steps(steps: Sequence[BoundStep], x: torch.Tensor) -> torch.Tensor:
    """Run a program; ``x`` itself comes back where there is nothing to do."""
    if steps and x.is_complex():
        return _run_complex(steps, x)
    for b in steps:
        kind = b.step.kind
        if kind in REDUCTIONS:
            x = _reduce(b, x)
        elif x.dtype in _FLOAT8 and kind != "scale" and b.step.op != "product":
            # Not every backend carries these, nor has every device all kernels: a byte is a byte.
            x = _RUN[kind](b, x.view(torch.uint8)).view(x.dtype)
        else:
            x = _RUN[kind](b, x)
    return x


def _reduce(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    run = _RUN[b.step.kind]
    if b.step.dtype:
        return run(b, x.to(getattr(torch, b.step.dtype))).to(x.dtype)
    if x.dtype in _FLOAT8:
        raise PlacementMismatchError(
            f"{b.site.port}: P({b.step.op}) of a {_name(x.dtype)} tensor; say in which dtype to "
            f"reduce it (reduce_dtype: float32)"
        )
    return run(b, x)


def _run_complex(steps: Sequence[BoundStep], x: torch.Tensor) -> torch.Tensor:
    """As pairs of real numbers: not every backend carries complex ones."""
    bad = {b.step.op for b in steps} - {"sum", "avg"}
    if bad:
        raise PlacementMismatchError(f"{steps[0].site.port}: P({min(bad)}) of a complex tensor")
    return torch.view_as_complex(run_steps(steps, torch.view_as_real(x.resolve_conj())))


def _calls(b: BoundStep) -> Calls:
    assert b.calls is not None
    return b.calls


def _all_reduce(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    op = b.step.op
    if op == "avg" and not b.site.mesh.native_avg:
        return _divide(b, _calls(b).all_reduce(x, "sum"))
    return _calls(b).all_reduce(_averageable(b, x, op), op)


def _all_gather(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    return _join(b, _calls(b).all_gather(_pad_shard(b, x).contiguous()))


def _reduce_scatter(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    dim, op = _dim(b), b.step.op
    x = _split(b, x, dim, b.cuts)
    if op == "avg" and not b.site.mesh.native_avg:
        y = _divide(b, _calls(b).reduce_scatter(x, "sum"))
    else:
        y = _calls(b).reduce_scatter(_averageable(b, x, op), op)
    return _trim(b, y, dim, b.cuts)


def _all_to_all(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    to = b.step.to_dim
    assert to is not None
    x = _split(b, _pad_shard(b, x), to, b.to_cuts)
    return _trim(b, _join(b, _calls(b).all_to_all(x, None, None)), to, b.to_cuts)


def _all_to_all_v(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    plan = b.relayout
    assert plan is not None
    unit = {dim: _unit(b, x, i, plan) for i, dim in enumerate(plan.dims)}
    pieces = [None if box is None else _cut_box(x, plan.dims, box, unit) for box in plan.sends]
    sent = [0 if piece is None else piece.numel() for piece in pieces]
    flat = [piece.reshape(-1) for piece in pieces if piece is not None]
    shapes = [None if box is None else _shape(x, plan.dims, box, unit) for box in plan.receives]
    received = [0 if shape is None else math.prod(shape) for shape in shapes]
    packed = flat[0] if len(flat) == 1 else torch.cat([*flat, x.new_empty(0)])
    arrived = _calls(b).all_to_all(packed.contiguous(), received, sent)
    found = {
        tuple(start for start, _ in box): part.view(shape)
        for box, shape, part in zip(
            plan.receives, shapes, torch.split(arrived, received), strict=True
        )
        if box is not None and shape is not None
    }
    if not found:
        return x.new_empty(_shape(x, plan.dims, plan.wanted, unit))
    return _assemble(found, plan.dims)


def _unit(b: BoundStep, x: torch.Tensor, i: int, plan: Relayout) -> Any:
    """Elements in a unit of the ``i``-th dimension of a relayout.

    Raises:
        PlacementMismatchError: the shard is not a whole number of units, or not the declared one.
    """
    dim, held = plan.dims[i], plan.held[i][1] - plan.held[i][0]
    if dim in b.site.sizes:
        if x.shape[dim] != held:
            raise _not_the_shard(b, x, dim, held, plan.units[i])
        return 1
    if x.shape[dim] % held != 0:
        raise _uneven(b, x, dim)
    return x.shape[dim] // held


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


def _slice(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    dim = _dim(b)
    if b.cuts is None:
        length = _even(b, x, dim)
        start = length * b.place
    else:
        _check_whole(b, x, dim, b.cuts)
        start, length = b.cuts[b.place]
    # A copy: the shard must neither keep the whole tensor alive nor alias a replicated value.
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _pad(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    dim = _dim(b)
    if b.cuts is None:
        before, after = x.shape[dim] * b.place, x.shape[dim] * (b.n - 1 - b.place)
    else:
        before, length = b.cuts[b.place]
        after = _size(b.cuts) - before - length
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - dim - 1) + [before, after], 0).contiguous()


def _keep_first(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    if b.place == 0:
        # A copy: as with the zeros elsewhere, it may be changed in place, and is contiguous.
        return x.clone(memory_format=torch.contiguous_format)
    return torch.full_like(x, b.step.op == "product", memory_format=torch.contiguous_format)


def _scale(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    return _averageable(b, x, "avg") * b.step.factor


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


def _dim(b: BoundStep) -> int:
    assert b.step.dim is not None
    return b.step.dim


def _size(cuts: Cuts) -> int:
    return sum(length for _, length in cuts)


def _largest(cuts: Cuts) -> int:
    return max(length for _, length in cuts)


def _split(b: BoundStep, x: torch.Tensor, dim: int, cuts: Cuts | None) -> torch.Tensor:
    """``x`` cut along ``dim``: an equally large part for each rank, along dimension 0."""
    if cuts is not None:
        _check_whole(b, x, dim, cuts)
    if cuts is not None and _size(cuts) % b.n:
        largest = _largest(cuts)
        places = b.ranks or range(b.n)
        return torch.cat([_pad_to(x.narrow(dim, *cuts[place]), dim, largest) for place in places])
    length = _even(b, x, dim)
    if b.ranks is None:
        return _stack(x, dim, b.n)
    parts = torch.split(x, length, dim) if x.shape[dim] != 0 else [x] * b.n
    return torch.cat([parts[place] for place in b.ranks])


def _join(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    """Parts of all ranks along dimension 0 → one tensor, parts along the step's ``dim``."""
    dim, uneven = _dim(b), b.cuts is not None and _size(b.cuts) % b.n != 0
    if b.ranks is None and not uneven:
        return _unstack(x, dim, b.n)
    parts = [x] * b.n if x.shape[0] == 0 else list(torch.split(x, x.shape[0] // b.n))
    if b.ranks is not None:
        parts = [parts[b.ranks.index(place)] for place in range(b.n)]
    if uneven and b.cuts is not None:
        parts = [
            part.narrow(dim, 0, length)
            for part, (_, length) in zip(parts, b.cuts, strict=True)
            if length
        ]
    return torch.cat(parts, dim)


def _even(b: BoundStep, x: torch.Tensor, dim: int) -> Any:
    """The length of an even cut.

    Raises:
        PlacementMismatchError: the size does not divide and the contract does not declare it:
            the ranks that put such shards together again could not know where to trim.
    """
    if x.shape[dim] % b.n != 0:
        raise _uneven(b, x, dim)
    return x.shape[dim] // b.n


def _uneven(b: BoundStep, x: torch.Tensor, dim: int) -> PlacementMismatchError:
    return PlacementMismatchError(
        f"{b.site.port}: dimension {dim} of size {x.shape[dim]} cannot be cut evenly over "
        f"{b.group_text}; pad it to a multiple of {b.n}, or declare its global size in the "
        f"contract (in_sizes / out_sizes, on every port that carries it)"
    )


def _pad_shard(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    """This rank's shard as large as the largest.

    Raises:
        PlacementMismatchError: the shard is not the one that the declared size gives this rank.
    """
    if b.cuts is None:
        return x
    dim, expected = _dim(b), b.cuts[b.place][1]
    if x.shape[dim] != expected:
        raise _not_the_shard(b, x, dim, expected, _size(b.cuts))
    return _pad_to(x, dim, _largest(b.cuts))


def _check_whole(b: BoundStep, x: torch.Tensor, dim: int, cuts: Cuts) -> None:
    if x.shape[dim] != _size(cuts):
        raise PlacementMismatchError(
            f"{b.site.port}: dimension {dim} has {x.shape[dim]} elements, but its declared size "
            f"leaves {_size(cuts)} to cut over {b.group_text}"
        )


def _not_the_shard(
    b: BoundStep, x: torch.Tensor, dim: int, expected: int, whole: int
) -> PlacementMismatchError:
    return PlacementMismatchError(
        f"{b.site.port}: dimension {dim} has {x.shape[dim]} elements, but this rank's shard "
        f"of the declared size {whole} over {b.group_text} has {expected}"
    )


def _pad_to(x: torch.Tensor, dim: int, size: Any) -> torch.Tensor:
    if x.shape[dim] == size:
        return x
    padding = [0, 0] * (x.dim() - dim - 1) + [0, size - x.shape[dim]]
    return torch.constant_pad_nd(x, padding, 0)


def _trim(b: BoundStep, x: torch.Tensor, dim: int, cuts: Cuts | None) -> torch.Tensor:
    """Without the padding of an uneven cut."""
    if cuts is None or x.shape[dim] == cuts[b.place][1]:
        return x
    return x.narrow(dim, 0, cuts[b.place][1]).contiguous()


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


def _divide(b: BoundStep, x: torch.Tensor) -> torch.Tensor:
    return _averageable(b, x, "avg") / b.n


def _averageable(b: BoundStep, x: torch.Tensor, op: str) -> torch.Tensor:
    exact = not (x.is_floating_point() or x.is_complex()) if op == "avg" else False
    if exact or (op == "avg" and x.dtype in _FLOAT8):
        raise PlacementMismatchError(
            f"{b.site.port}: P(avg) of a {_name(x.dtype)} tensor; an average needs a "
            f"floating-point dtype of at least 16 bits"
        )
    return x


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
