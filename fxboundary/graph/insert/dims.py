"""What a dimension of a tensor is made of, and which parts of it are cut over mesh dimensions.

A dimension is a product of factors, outermost first, as ``view`` merges and splits them: heads
times head size, of which the heads are cut. A stacked parameter (fused q, k and v) has several
such products one after another. So a literal size is never matched by its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxboundary.mesh import MeshSpec
from fxboundary.placements import Layout, chunk_bounds, nests


class Unclear(Exception):
    """How a dimension stems from others cannot be told."""


@dataclass(frozen=True)
class Factor:
    """A part of a dimension; ``mesh_dims`` cut it, outermost first."""

    size: Any
    mesh_dims: tuple[int, ...] = ()


Part = tuple[Factor, ...]


@dataclass(frozen=True)
class Dim:
    """Products of factors, concatenated."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> Any:
        return sum(_product(part) for part in self.parts)

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """Those that cut it, in the order of nesting."""
        found = [m for part in self.parts for factor in part for m in factor.mesh_dims]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Place:
    """The rank whose sizes are meant."""

    mesh: MeshSpec
    coordinate: tuple[int, ...]

    def size(self, dim: Dim, mesh_dims: Sequence[int] | None = None) -> Any:
        """Local size of a dimension; with ``mesh_dims``, as if only those cut it."""
        return sum(
            _product(tuple(Factor(self._cut(f, mesh_dims)) for f in part)) for part in dim.parts
        )

    def shape(self, dims: Sequence[Dim], mesh_dims: Sequence[int] | None = None) -> list[Any]:
        return [self.size(dim, mesh_dims) for dim in dims]

    def ranks(self, mesh_dims: Sequence[int]) -> int:
        return math.prod(self.mesh.sizes[m] for m in mesh_dims)

    def joined(self, dims: Sequence[Dim]) -> Dim:
        """One dimension for several of which this rank holds the same entries.

        Raises:
            Unclear: it holds others of one than of another.
        """
        first, *others = dims
        if not all(self.same_entries(first, other) for other in others):
            raise Unclear(f"dimensions of {first.size} that meet are cut in different places")
        return self._plain(first) if others else first

    def same_entries(self, a: Dim, b: Dim) -> bool:
        """Whether two dimensions are of one size and every rank holds the same entries of both."""
        return _same_parts(a, b) or _same_parts(self._plain(a), self._plain(b))

    def is_shard(self, dim: Dim) -> bool:
        """Whether it is cut as ``Shard`` cuts: in one piece, at its outermost factor."""
        return self.same_entries(dim, Dim(((Factor(dim.size, dim.mesh_dims),),)))

    def _plain(self, dim: Dim) -> Dim:
        """The same cuts in as few factors as tell them."""
        if not dim.mesh_dims:
            return whole(dim.size)
        parts = [self._merged(part) for part in dim.parts]
        if len(parts) > 1 and all(_same_part(part, parts[0]) for part in parts):
            parts = [self._merged((Factor(len(parts)), *parts[0]))]
        return Dim(tuple(parts))

    def _merged(self, part: Part) -> Part:
        found: list[Factor] = []
        for factor in part:
            outer = found[-1] if found else None
            if outer is not None and not factor.mesh_dims and self._is_even(outer):
                found[-1] = Factor(outer.size * factor.size, outer.mesh_dims)
            elif outer is not None and _same(outer.size, 1) and not outer.mesh_dims:
                found[-1] = factor
            else:
                found.append(factor)
        return tuple(found)

    def _is_even(self, factor: Factor) -> bool:
        """Whether ranks hold equal shares; dynamic sizes are taken to divide."""
        return not isinstance(factor.size, int) or factor.size % self.ranks(factor.mesh_dims) == 0

    def _cut(self, factor: Factor, mesh_dims: Sequence[int] | None) -> Any:
        size = factor.size
        for m in factor.mesh_dims:
            if mesh_dims is not None and m not in mesh_dims:
                continue
            n = self.mesh.sizes[m]
            size = (
                chunk_bounds(size, n, self.coordinate[m])[1] if isinstance(size, int) else size // n
            )
        return size


def whole(size: Any) -> Dim:
    return Dim(((Factor(size),),))


def dims_of(shape: Sequence[Any], layout: Layout, sizes: Sequence[int]) -> tuple[Dim, ...]:
    """A global shape cut as a layout says; mesh dimensions of size 1 cut nothing."""
    cuts = nests(layout)
    return tuple(
        Dim(((Factor(size, tuple(m for m in cuts.get(d, ()) if sizes[m] > 1)),),))
        for d, size in enumerate(shape)
    )


def stacked(dims: tuple[Dim, ...], dim: int, parts: Sequence[int]) -> tuple[Dim, ...]:
    """``dims`` whose ``dim`` holds parts, each of them cut by itself."""
    cut = dims[dim].mesh_dims
    return (*dims[:dim], Dim(tuple((Factor(p, cut),) for p in parts)), *dims[dim + 1 :])


def regroup(dims: Sequence[Dim], shape: Sequence[Any], place: Place) -> tuple[Dim, ...]:
    """The dimensions of a row-major view of global ``shape``.

    Raises:
        Unclear: a cut falls inside of a new dimension's factor.
    """
    if not any(dim.mesh_dims for dim in dims):
        return tuple(whole(size) for size in shape)
    if len(dims) == len(shape) and all(_same(d.size, s) for d, s in zip(dims, shape, strict=True)):
        return tuple(dims)
    rest = _Rest(dims, place)
    found = [rest.take(size) for size in shape]
    rest.finish()
    return tuple(found)


class _Rest:
    """Factors that a view has not used up, a dimension at a time."""

    def __init__(self, dims: Sequence[Dim], place: Place) -> None:
        self._dims = [dim for dim in dims if not _same(dim.size, 1)]
        self._factors: list[Factor] = []
        self._place = place

    def take(self, size: Any) -> Dim:
        if _same(size, 1):
            return whole(size)
        if not self._factors and self._dims and _same(self._dims[0].size, size):
            return self._dims.pop(0)
        taken: list[Factor] = []
        while not _same(_product(taken), size):
            taken.append(self._part(_quotient(size, _product(taken))))
        return Dim((tuple(taken),))

    def finish(self) -> None:
        if self._factors or self._dims:
            raise Unclear("it has other elements than its input")

    def _part(self, needed: Any) -> Factor:
        """The next factor, or as much of it as is needed."""
        if not self._factors:
            if not self._dims:
                raise Unclear("it has other elements than its input")
            self._factors = list(_factors(self._dims.pop(0)))
        factor = self._factors.pop(0)
        if _same(factor.size, needed) or _divides(factor.size, needed):
            return factor
        if not _divides(needed, factor.size):
            raise Unclear(f"{factor.size} elements do not make up {needed}")
        n = self._place.ranks(factor.mesh_dims)
        if needed % n:
            raise Unclear(f"a dimension of {needed}, which is cut over {n} ranks, does not divide")
        self._factors.insert(0, Factor(factor.size // needed))
        return Factor(needed, factor.mesh_dims)


def _factors(dim: Dim) -> Part:
    """The factors of a dimension that is to be split or merged."""
    if len(dim.parts) == 1:
        return dim.parts[0]
    if not all(_same_part(part, dim.parts[0]) for part in dim.parts):
        raise Unclear(f"a dimension of {dim.size} holds unequal parts, each of them cut")
    return (Factor(len(dim.parts)), *dim.parts[0])


def chunks(dim: Dim, sizes: Sequence[Any]) -> list[Dim]:
    """A dimension split one after another into global ``sizes``.

    Raises:
        Unclear: a border inside of what is cut.
    """
    if not dim.mesh_dims:
        return [whole(size) for size in sizes]
    parts, found = list(_unstacked(dim)), []
    for size in sizes:
        taken: list[Part] = []
        while not _same(sum(map(_product, taken)), size):
            if not parts or sum(map(_product, taken)) > size:
                raise Unclear(f"a piece of {size} ends inside of what is cut")
            taken.append(parts.pop(0))
        found.append(Dim(tuple(taken)))
    return found


def _unstacked(dim: Dim) -> tuple[Part, ...]:
    """The finest pieces between which a dimension may be split."""
    if (
        len(dim.parts) == 1
        and not dim.parts[0][0].mesh_dims
        and isinstance(dim.parts[0][0].size, int)
    ):
        return (dim.parts[0][1:],) * dim.parts[0][0].size
    return dim.parts


def _same_parts(a: Dim, b: Dim) -> bool:
    return len(a.parts) == len(b.parts) and all(map(_same_part, a.parts, b.parts))


def _same_part(a: Part, b: Part) -> bool:
    return len(a) == len(b) and all(
        x.mesh_dims == y.mesh_dims and _same(x.size, y.size) for x, y in zip(a, b, strict=True)
    )


def _product(part: Sequence[Factor]) -> Any:
    return math.prod(factor.size for factor in part)


def _same(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return (
        bool(a == b) if isinstance(a, int) and isinstance(b, int) else statically_known_true(a == b)
    )


def _divides(a: Any, b: Any) -> bool:
    """Whether ``a`` divides ``b``."""
    return isinstance(a, int) and isinstance(b, int) and a != 0 and b % a == 0


def _quotient(a: Any, b: Any) -> Any:
    if isinstance(b, int) and isinstance(a, int):
        if a % b:
            raise Unclear(f"a dimension of {a} is made of parts of {b}")
        return a // b
    return a // b
