"""All ranks of a mesh in one process: a thread each, collectives by a common board."""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from definition import REDUCE

from fxboundary.mesh import LiveMesh, MeshSpec, group_dims
from fxboundary.transition.execution import run_steps
from fxboundary.transition.site import Site, bind_steps


class Board:
    """What every rank shows the others in one step of a program."""

    def __init__(self, ranks: int) -> None:
        self._shown: dict[tuple[int, ...], object] = {}
        self._barrier = threading.Barrier(ranks, timeout=20)

    def exchange(self, coordinate, value, members):
        self._shown[coordinate] = value
        self._barrier.wait()
        found = [self._shown[member] for member in members]
        self._barrier.wait()
        return found

    def abort(self):
        self._barrier.abort()


class SimulatedCalls:
    """The collectives of one group, written from their definitions."""

    def __init__(self, board, coordinate, sizes, dims):
        self._board, self._me = board, coordinate
        self._members = []
        for index in itertools.product(*(range(sizes[d]) for d in dims)):
            member = list(coordinate)
            for d, i in zip(dims, index, strict=True):
                member[d] = i
            self._members.append(tuple(member))
        self._rank = self._members.index(coordinate)

    def _exchange(self, value):
        return self._board.exchange(self._me, value, self._members)

    def all_reduce(self, x, op):
        return REDUCE[op](torch.stack(self._exchange(x)))

    def all_gather(self, x):
        assert x.is_contiguous()
        return torch.cat(self._exchange(x))

    def reduce_scatter(self, x, op):
        assert x.is_contiguous()
        whole = REDUCE[op](torch.stack(self._exchange(x)))
        rows = len(x) // len(self._members)
        return whole[self._rank * rows : (self._rank + 1) * rows].clone()

    def all_to_all(self, x, received, sent):
        assert x.is_contiguous()
        n = len(self._members)
        sent = [len(x) // n] * n if sent is None else sent
        parts = self._exchange(torch.split(x, sent))
        assert received is None or [len(p[self._rank]) for p in parts] == received
        return torch.cat([p[self._rank] for p in parts])


def run_everywhere(steps, locals_by_coordinate, spec: MeshSpec, shape):
    """The outputs of a program on every rank, by coordinate."""
    board = Board(math.prod(spec.sizes))

    def run(coordinate):
        calls = {
            dims: SimulatedCalls(board, coordinate, spec.sizes, dims) for dims in group_dims(spec)
        }
        mesh = LiveMesh(str(spec), spec, None, {}, coordinate, native_avg=True)
        site = Site(mesh, coordinate, dict(enumerate(shape)), "simulated")
        try:
            return run_steps(bind_steps(steps, site, calls), locals_by_coordinate[coordinate])
        except BaseException:
            board.abort()
            raise

    with ThreadPoolExecutor(len(locals_by_coordinate)) as pool:
        futures = {c: pool.submit(run, c) for c in locals_by_coordinate}
        errors = [f.exception() for f in futures.values() if f.exception() is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return {c: f.result() for c, f in futures.items()}
