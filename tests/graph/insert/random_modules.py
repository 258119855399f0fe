"""Random modules that reshape, split and join a tensor by literal sizes, many of them equal.

Instructions are small integers; on an example they become steps with the literal sizes that a
person would write. A step that does not fit the shapes at hand is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import strategies as st

Step = Callable[[list[torch.Tensor]], torch.Tensor]
numbers = st.integers(0, 11)


class Numbers:
    """Choices that an instruction makes, from its integers."""

    def __init__(self, given: tuple[int, ...]) -> None:
        self._left = list(given)

    def of(self, choices: Any) -> Any:
        choices = list(choices)
        return choices[self._left.pop(0) % len(choices)] if choices else None

    def below(self, n: int) -> int:
        return int(self.of(range(n)))


def backwards(pieces, n):
    """Taken one by one, as a tracer can."""
    return [pieces[i] for i in range(n - 1, -1, -1)]


def merge(x, pick):
    at = pick.below(max(x.dim() - 1, 1))
    end = min(at + 1, x.dim() - 1)
    shape = [*x.shape[:at], math.prod(x.shape[at : at + 2]), *x.shape[at + 2 :]]
    if pick.below(3) == 0:
        return lambda v: torch.flatten(v, at, end)
    if pick.below(2):
        shape[pick.below(len(shape))] = -1
    return lambda v: v.reshape(shape)


def divide(x, pick):
    at = pick.below(x.dim())
    size = x.shape[at]
    factor = pick.of(k for k in range(1, size + 1) if size % k == 0)
    parts = [factor, size // factor]
    if pick.below(3) == 0:
        parts[pick.below(2)] = -1
    if pick.below(3) == 0:
        return lambda v: v.unflatten(at, parts)
    shape = [*x.shape[:at], *parts, *x.shape[at + 1 :]]
    return lambda v: v.contiguous().view(*shape)


def reshape(x, pick):
    """To any shape of as many elements."""
    left, shape = x.numel(), []
    for _ in range(1 + pick.below(3)):
        shape.append(pick.of(k for k in range(1, left + 1) if left % k == 0))
        left //= shape[-1]
    shape.append(left)
    return lambda v: torch.reshape(v, shape)


def transpose(x, pick):
    a, b = pick.below(x.dim()), pick.below(x.dim())
    return lambda v: v.transpose(a, b)


def permute(x, pick):
    order = list(range(x.dim()))
    order = [order.pop(pick.below(len(order))) for _ in range(x.dim())]
    return lambda v: v.permute(*order)


def expand(x, pick):
    at, size = pick.below(x.dim() + 1), pick.of([2, 4])
    shape = [*x.shape[:at], size, *x.shape[at:]]
    return lambda v: v.unsqueeze(at).expand(shape)


def split(x, pick):
    at = pick.below(x.dim())
    size = pick.of(range(1, x.shape[at] + 1))
    last = -(-x.shape[at] // size) - 1
    which, back = pick.below(last + 1), pick.below(2)
    if back:
        return lambda v: torch.cat(backwards(v.split(size, at), last + 1), at)
    return lambda v: v.split(size, at)[which]


def chunk(x, pick):
    at, n = pick.below(x.dim()), pick.of([2, 3, 4])
    count = len(x.chunk(n, at))
    which = pick.below(count)
    if pick.below(2):
        return lambda v: torch.cat(backwards(v.chunk(n, at), count), (at + 1) % x.dim())
    return lambda v: v.chunk(n, at)[which]


def piece(x, pick):
    at = pick.below(x.dim())
    start = pick.below(x.shape[at] + 1)
    stop = start + pick.below(x.shape[at] - start + 1)
    index = (*[slice(None)] * at, slice(start, stop, 1 + pick.below(2)))
    how = pick.below(3)
    if how == 0:
        return lambda v: v.narrow(at, start, stop - start)
    if how == 1 and x.shape[at]:
        return lambda v: v.select(at, min(start, x.shape[at] - 1))
    return lambda v: v[index]


def positions(x, pick):
    at = pick.below(x.dim())
    size = x.shape[at]
    shape = [1] * at + [size] + [1] * (x.dim() - at - 1)
    if pick.below(2):
        return lambda v: v + torch.arange(size, dtype=v.dtype).view(shape)
    return lambda v: v.masked_fill(torch.arange(size).view(shape) < size // 2, 0.5)


def constants(x, pick):
    at, shape = pick.below(x.dim()), list(x.shape)
    how = pick.below(4)
    if how == 0:
        return lambda v: torch.cat([v, torch.zeros(shape, dtype=v.dtype)], at)
    if how == 1:
        return lambda v: v + torch.arange(x.numel(), dtype=v.dtype).reshape(shape)
    if how == 2 and x.dim() > 1:
        mask = shape[-2:]
        return lambda v: v * torch.ones(mask, dtype=v.dtype).tril()
    return lambda v: torch.cat([v, v * 2], at)


def twice(x, pick):
    at = pick.below(x.dim())
    how = pick.below(4)
    if how == 0:
        counts = [1] * at + [2] + [1] * (x.dim() - at - 1)
        return lambda v: v.repeat(*counts)
    if how == 1:
        return lambda v: v.repeat_interleave(2, at)
    if how == 2:
        return lambda v: torch.stack([v, -v], at)
    return lambda v: torch.stack(backwards(v.unbind(at), x.shape[at]), at)


def along(x, pick):
    """Work along one dimension."""
    at = pick.below(x.dim())
    how = pick.below(8)
    return [
        lambda v: v.softmax(at),
        lambda v: v.cumsum(at),
        lambda v: v.flip(at),
        lambda v: v.roll(1, at),
        lambda v: F.normalize(v, dim=at),
        lambda v: v - v.sort(at).values,
        lambda v: torch.gather(v, at, torch.zeros(x.shape, dtype=torch.int64)),
        lambda v: v.index_select(at, torch.arange(x.shape[at] - 1, -1, -1)),
    ][how]


def pad(x, pick):
    at = pick.below(x.dim())
    if pick.below(2):
        return lambda v: F.pad(v, [0, 0] * at + [1, 1])
    return lambda v: F.pad(v, [0, 0] * at + [1, -1])


ONE: list[Callable[..., Any]] = [
    merge,
    merge,
    divide,
    divide,
    reshape,
    transpose,
    transpose,
    permute,
    expand,
    split,
    chunk,
    piece,
    positions,
    constants,
    twice,
    along,
    pad,
]


def joined(values, pick):
    """One value with another."""
    i, j = len(values) - 1, pick.below(len(values))
    how, at = pick.below(4), pick.below(max(values[i].dim(), 1))
    return [
        lambda v: v[i] + 2 * v[j],
        lambda v: v[i] * v[j].unsqueeze(at),
        lambda v: torch.cat([v[i], v[j]], at),
        lambda v: v[i] + v[j].transpose(-1, -2),
    ][how]


def contracted(values, pick):
    """One value with another, over a dimension."""
    i, j = len(values) - 1, pick.below(len(values))
    return [
        lambda v: v[i] @ v[j],
        lambda v: v[i] @ v[j].transpose(-1, -2),
        lambda v: torch.einsum("...ij,...kj->...ik", v[i], v[j]),
        lambda v: F.scaled_dot_product_attention(v[i], v[j], v[j]),
    ][pick.below(4)]


def of_last(step, index):
    return lambda values: step(values[index])


class Random(nn.Module):
    """Runs the steps that instructions become on an example."""

    def __init__(self, instructions: Any, example: torch.Tensor) -> None:
        super().__init__()
        self.steps: list[Step] = []
        values = [example]
        for kind, at, given in instructions:
            pick = Numbers((*given, *given))
            if kind == "one":
                whole = of_last(ONE[at](values[-1], pick), len(values) - 1)
            elif kind == "join":
                whole = joined(values, pick)
            else:
                whole = contracted(values, pick)
            try:
                found = whole(values)
            except (RuntimeError, IndexError, ValueError):
                continue
            if 0 < found.numel() <= 512 and 0 < found.dim() <= 5:
                values.append(found)
                self.steps.append(whole)

    def forward(self, x):
        values = [x]
        for step in self.steps:
            values.append(step(values))
        return values[-1]


class Around(nn.Module):
    """The module that a contract is for, in one that has none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * 1.5) + 1


given = st.tuples(*[numbers] * 6)
one = st.tuples(st.just("one"), st.integers(0, len(ONE) - 1), given)
join = st.tuples(st.just("join"), st.just(0), given)
last = st.tuples(st.just("contract"), st.just(0), given)
INSTRUCTIONS = st.tuples(
    st.lists(st.one_of(one, one, one, join), min_size=1, max_size=5), st.lists(last, max_size=1)
).map(lambda pair: [*pair[0], *pair[1]])
