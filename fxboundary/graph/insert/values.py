"""What a node of a graph holds on this rank: fake tensors, and what their dimensions are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxboundary.graph.insert.dims import Dim, whole


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: ``local`` is a fake one of this rank's size, ``dims`` tell the global sizes.

    ``free``: made of nothing that is trained, so that cutting it needs no gradient.
    """

    local: torch.Tensor
    dims: tuple[Dim, ...]
    free: bool

    @property
    def is_cut(self) -> bool:
        return any(dim.mesh_dims for dim in self.dims)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Global sizes."""
        return tuple(dim.size for dim in self.dims)


@dataclass(frozen=True)
class Number:
    """A size that was read from a tensor which is cut: its global and its local value."""

    whole: Any
    local: Any


def uncut(value: Any, free: bool) -> Any:
    """A captured value, whole on every rank; containers are kept."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return Value(leaf, tuple(whole(size) for size in leaf.shape), free)

    return map_leaves(value, convert)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with its leaves changed: those of tuples, lists, dicts and slices."""
    if isinstance(value, (tuple, list)):
        found = [map_leaves(entry, change) for entry in value]
        if type(value) is tuple or type(value) is list or not isinstance(value, tuple):
            return tuple(found) if isinstance(value, tuple) else found
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        return {key: map_leaves(entry, change) for key, entry in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(x, change) for x in (value.start, value.stop, value.step)))
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    found: list[Any] = []
    map_leaves(value, found.append)
    return iter(found)


def tensors(value: Any) -> list[Value]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Value)]


def is_cut(value: Any) -> bool:
    """Whether anything in ``value`` has another size on this rank."""
    return any(
        leaf.is_cut if isinstance(leaf, Value) else isinstance(leaf, Number)
        for leaf in leaves(value)
    )


def localized(value: Any) -> Any:
    """``value`` as this rank has it."""
    return map_leaves(value, lambda leaf: leaf.local if isinstance(leaf, (Value, Number)) else leaf)
