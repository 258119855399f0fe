"""What layouts mean, written without the package: cut a whole tensor, put shards together."""

from __future__ import annotations

import itertools
import math

import torch


def chunk(tensor, n, index, dim):
    chunks = torch.chunk(tensor, n, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def cut(whole, layout, sizes, coordinate):
    """The shard at ``coordinate``: cut by cut, in the mesh's order or in the declared one."""
    cuts = [m for m, placement in enumerate(layout) if placement.is_shard()]
    for m in sorted(cuts, key=lambda m: getattr(layout[m], "order", m)):
        whole = chunk(whole, sizes[m], coordinate[m], layout[m].dim)
    return whole


REDUCE = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0, dtype=x.dtype),
}


def assemble(locals_by_coordinate, layout, sizes, shape):
    """The global tensor: every shard at its place, replicas equal, then reductions."""
    place = torch.arange(math.prod(shape)).reshape(shape)
    pending = [m for m, placement in enumerate(layout) if placement.is_partial()]
    terms = {}
    for coordinate, local in locals_by_coordinate.items():
        found = terms.setdefault(tuple(coordinate[m] for m in pending), {})
        index = cut(place, layout, sizes, coordinate)
        assert index.shape == local.shape, f"{layout}: {local.shape}, not {index.shape}"
        shard = found.setdefault((local.shape, tuple(index.flatten().tolist())), local)
        assert torch.equal(shard, local), "replicas differ"
    wholes = {}
    for key, found in terms.items():
        whole = torch.empty(math.prod(shape), dtype=local.dtype)
        for (_, index), shard in found.items():
            whole[torch.tensor(index, dtype=torch.long)] = shard.flatten()
        wholes[key] = whole.reshape(shape)
    for m in reversed(pending):
        reduce = REDUCE[layout[m].reduce_op]
        keys = dict.fromkeys(key[:-1] for key in wholes)
        wholes = {
            key: reduce(torch.stack([wholes[(*key, i)] for i in range(sizes[m])])) for key in keys
        }
    return wholes[()]


def make_locals(layout, sizes, shape, dtype, seed, low=-8, high=9):
    """Every rank's local tensor, random but for what the layout says is equal.

    Values are small integers: sums are exact in every dtype, and the order of sums cannot matter.
    """
    found = {}
    for coordinate in itertools.product(*map(range, sizes)):
        parts = [i for p, i in zip(layout, coordinate, strict=True) if p.is_partial()]
        generator = torch.Generator().manual_seed(
            seed * 100 + sum(10**k * i for k, i in enumerate(parts))
        )
        whole = torch.randint(low, high, shape, generator=generator).to(dtype)
        found[coordinate] = cut(whole, layout, sizes, coordinate).contiguous()
    return found
