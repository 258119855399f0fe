"""Peer memory as operators, for graphs: ``publish``, ``peers``, ``release``.

A graph reads peers so, and in this order::

    mine = publish(x, group, capacity)
    theirs = peers(mine, group, n, [])
    total = theirs[0] + theirs[1]
    release([total], theirs, group)

``parts`` gives what of each rank's tensor is this rank's, which one it is being told to no graph.
``publish`` with a capacity of 0 takes as much as ``x`` has, where that is the same on all ranks.
``release`` does nothing when it runs; it says where reading has ended. Everything that is
computed from ``theirs`` and used afterwards is passed to it. The next ``publish`` comes after it.

They belong into a graph that autograd has been through already: they have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx.node import has_side_effect

from fxboundary.peer.registry import peer_group

_LIB = torch.library.Library("fxboundary_peer", "DEF")
# Any layout of what goes in will do: what comes out is contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_LIB.define("publish(Tensor x, str group, SymInt capacity) -> Tensor", tags=_TAGS)
_LIB.define("peers(Tensor published, str group, int n, SymInt[] sizes) -> Tensor[]", tags=_TAGS)
_LIB.define("parts(Tensor published, str group, int n, int dim) -> Tensor[]", tags=_TAGS)
_LIB.define("release(Tensor[] read, Tensor[] peers, str group) -> ()", tags=_TAGS)


def _shapes(like: torch.Tensor, n: int, sizes: Sequence[int]) -> list[Sequence[int]] | None:
    """``sizes`` has the shapes of all ranks, one after the other; nothing if they are alike."""
    ndim = like.dim()
    return [sizes[i * ndim : (i + 1) * ndim] for i in range(n)] if sizes else None


def _publish(x: torch.Tensor, group: str, capacity: int) -> torch.Tensor:
    return peer_group(group).publish(x, capacity or x.nbytes)


def _peers(published: torch.Tensor, group: str, n: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    return peer_group(group).peers(published, _shapes(published, n, sizes))


def _parts(published: torch.Tensor, group: str, n: int, dim: int) -> list[torch.Tensor]:
    """This rank's part of what each rank published: one of ``n`` equal ones along ``dim``."""
    peers, length = peer_group(group), published.shape[dim] // n
    return [peer.narrow(dim, peers.rank * length, length) for peer in peers.peers(published)]


def _release(read: Sequence[torch.Tensor], peers: Sequence[torch.Tensor], group: str) -> None:
    return None


def _publish_meta(x: torch.Tensor, group: str, capacity: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _peers_meta(
    published: torch.Tensor, group: str, n: int, sizes: Sequence[int]
) -> list[torch.Tensor]:
    shapes = _shapes(published, n, sizes) or [published.shape] * n
    return [published.new_empty(shape) for shape in shapes]


def _parts_meta(published: torch.Tensor, group: str, n: int, dim: int) -> list[torch.Tensor]:
    part = published.narrow(dim, 0, published.shape[dim] // n)
    return [published.new_empty_strided(part.shape, part.stride()) for _ in range(n)]


for _name, _cpu, _meta in (
    ("publish", _publish, _publish_meta),
    ("peers", _peers, _peers_meta),
    ("parts", _parts, _parts_meta),
    ("release", _release, _release),
):
    _LIB.impl(_name, _cpu, "CPU")
    _LIB.impl(_name, _meta, "Meta")

OPS = torch.ops.fxboundary_peer
# Peers wait for a publish whose result nobody here uses, and a release has no result.
has_side_effect(OPS.publish.default)
has_side_effect(OPS.release.default)
