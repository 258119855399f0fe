"""Peer memory of processes on one host."""

from __future__ import annotations

import math
import mmap
import os
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from fxboundary.errors import PeerError
from fxboundary.peer import native
from fxboundary.peer.barrier import ALL, Barrier, PythonBarrier
from fxboundary.peer.header import BYTES, CLOSED, FAILED, OPEN, Header
from fxboundary.peer.native import NativeBarrier
from fxboundary.peer.rendezvous import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Publish k + 1 writes the other slot, and its barrier proves that every rank has come there, so
# has read what publish k put in place: publish k + 2 may write over that.
_SLOTS = 2
_LEAST_CAPACITY = 1 << 16  # bytes; also what a mapping starts at a multiple of, on any system
_SPIN = 50e-6  # seconds: about what sleeping and being woken costs
_GLANCE = 0.1  # seconds between looks at whether the peers are still there
_VIEWS = 1024  # made once and kept: making them anew costs as much as the barrier
_TIMEOUT = 1800.0  # seconds, as torch's own groups have


class HostPeerGroup:
    """``PeerGroup`` over shared memory; making one is collective.

    ``timeout`` (seconds) is how long a rank that is alive may take to come; one that has died is
    noticed within a fraction of a second.

    Raises:
        PeerError: the same on all ranks: they are not processes of one user on one host.
    """

    def __init__(self, group: ProcessGroup, timeout: float = _TIMEOUT) -> None:
        meeting = meet(group)
        self._peers, self._index, self._timeout = meeting.peers, meeting.index, timeout
        self._headers = [Header(peer.memory.map(0, BYTES)) for peer in self._peers]
        self._barrier: Barrier | None = self._make_barrier(meeting.native)
        self._pid, self._number, self._capacity = os.getpid(), 0, 0
        self._ring: mmap.mmap | None = None
        # By slot, then rank; the last one is this rank's, to write.
        self._slots: list[list[torch.Tensor]] = []
        self._views: dict[tuple[int, int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        self._processes = select.poll()
        for peer in self._peers:
            self._processes.register(peer.process, select.POLLIN)

    @property
    def rank(self) -> int:
        return self._index

    @property
    def size(self) -> int:
        return len(self._peers)

    @property
    def is_native(self) -> bool:
        """Whether the barrier is the one in C++."""
        return isinstance(self._barrier, NativeBarrier)

    def publish(self, x: torch.Tensor, capacity: int) -> torch.Tensor:
        self._open()
        if x.nbytes > capacity:
            self._fail(f"{x.nbytes} bytes to publish are more than the capacity of {capacity}")
        if capacity > self._capacity or not self._slots:
            self._grow(capacity)
        published = self._view((self._number + 1) % _SLOTS, self.size, x.dtype, x.shape)
        self._arrive(_word(capacity, _PUBLISHES), published, x)
        return published

    def peers(
        self, published: torch.Tensor, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        slot = self._slot_of(published)
        if shapes is None:
            shapes = [published.shape] * self.size
        dtype, ranks = published.dtype, range(self.size)
        return [
            self._view(slot, index, dtype, shape)
            for index, shape in zip(ranks, shapes, strict=True)
        ]

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self._arrive(_word(0, _WAITS))

    def close(self) -> None:
        self._end(CLOSED)

    def _make_barrier(self, in_cpp: bool) -> Barrier:
        # Ranks that outnumber the processors must not spin for one that they keep from running.
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.distributed.get_world_size())
        spin = _SPIN if local <= len(os.sched_getaffinity(0)) else 0.0
        library = native.library() if in_cpp else None
        if library is None:
            return PythonBarrier(self._headers, self._index, spin)
        return NativeBarrier(library, self._headers, self._index, spin)

    def _slot_of(self, published: torch.Tensor) -> int:
        """The slot that a tensor is in, the last one first: an empty tensor has no address."""
        self._open()
        at = published.data_ptr()
        for slot in (self._number % _SLOTS, (self._number + 1) % _SLOTS):
            if not at or at == self._slots[slot][self._index].data_ptr():
                return slot
        raise PeerError("this tensor is not one of the last two that publish gave")

    def _view(
        self, slot: int, index: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        key = (slot, index, dtype, tuple(shape))
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            nbytes = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):
                view = self._slots[slot][index][:nbytes].view(dtype).view(shape)
            self._views[key] = view
        return view

    def _open(self) -> Barrier:
        if self._barrier is None:
            raise PeerError("this rank's peer memory is closed")
        return self._barrier

    def _grow(self, capacity: int) -> None:
        """Give every rank a ring of larger slots; each has got the same ``capacity``."""
        size = _LEAST_CAPACITY
        while size < capacity:
            size *= 2
        own = self._peers[self._index].memory
        start = own.bytes
        try:
            own.extend(_SLOTS * size)
        except PeerError as error:
            self._arrive(_word(size, _LACKS))
            self._fail(str(error))  # no rank has any
        # Here ranks that do not grow, or not alike, are found out.
        self._arrive(_word(size, _GROWS))
        try:
            rings = [peer.memory.map(start, _SLOTS * size) for peer in self._peers]
        except OSError as error:
            self._fail(f"{_SLOTS * size} bytes cannot be mapped: {error.strerror}")
        # Slots made in inference mode could not be written outside of it.
        # An operator must not return what it was given: what is read here is no view, for torch,
        # of what was published here.
        with torch.inference_mode(False):
            whole = [torch.frombuffer(r, dtype=torch.uint8) for r in (*rings, rings[self._index])]
        self._slots = [[ring[k * size : (k + 1) * size] for ring in whole] for k in range(_SLOTS)]
        self._views.clear()
        if self._ring is not None:  # all ranks came here, so have read what is in it
            self._ring.madvise(mmap.MADV_REMOVE)
        self._ring, self._capacity = rings[self._index], size

    def _arrive(
        self, word: int, to: torch.Tensor | None = None, x: torch.Tensor | None = None
    ) -> None:
        barrier = self._open()
        self._number = number = (self._number + 1) % 2**32
        result = barrier.arrive(number, word, to, x, _GLANCE)
        if result != ALL:
            self._wait(barrier, number, result)

    def _wait(self, barrier: Barrier, number: int, result: int) -> None:
        until = time.monotonic() + self._timeout
        while result != ALL:
            if result >= self.size:
                self._fail_over_words(number, result - self.size)
            self._look(number)
            if time.monotonic() > until:
                at = self._name(result)
                self._fail(f"{at} has not come within {self._timeout:g} s", result)
            result = barrier.wait(number, _GLANCE)

    def _look(self, number: int) -> None:
        """Fail over a rank that will never come, first of all over one that has died."""
        ended = {process for process, _ in self._processes.poll(0)}
        states = [header.state for header in self._headers]
        missing = [i for i, h in enumerate(self._headers) if not h.has_reached(number)]
        for index in missing:
            if self._peers[index].process in ended:
                self._fail(f"{self._name(index)} has ended while its peers wait for it", index)
        for index in missing:
            if states[index] != OPEN:
                what = "has closed its peer memory" if states[index] == CLOSED else "has failed"
                self._fail(f"{self._name(index)} {what} while its peers wait for it", index)

    def _fail_over_words(self, number: int, index: int) -> NoReturn:
        words = [header.word(number) for header in self._headers]
        for lacking, word in enumerate(words):
            if word % 4 == _LACKS:
                text = f"{self._name(lacking)} lacks {_SLOTS * (word // 4)} bytes of shared memory"
                self._fail(text, lacking)
        self._fail(
            f"{self._name(index)} {_told(words[index])} where this rank {_told(words[self.rank])}: "
            f"all ranks publish in one order, each with the capacity that the largest needs",
            index,
        )

    def _name(self, index: int) -> str:
        peer = self._peers[index]
        return f"rank {peer.rank} (pid {peer.pid})"

    def _fail(self, text: str, index: int | None = None) -> NoReturn:
        """Raise, and let the peers raise too: they would wait for a rank that is out of step."""
        peer = self._peers[self._index if index is None else index]
        self._end(FAILED)
        raise PeerError(f"peer memory: {text}", peer.rank, peer.pid)

    def _end(self, state: int) -> None:
        if self._barrier is None:
            return
        if os.getpid() == self._pid:  # a forked child has the header, and must not touch it
            self._headers[self._index].state = state
        # What maps memory is dropped, not unmapped: a view that is still held stays readable.
        self._barrier, self._headers, self._slots, self._ring = None, [], [], None
        self._views.clear()
        for peer in self._peers:
            self._processes.unregister(peer.process)
            peer.close()


# What a rank does at a barrier, in the last two bits of its word; the others are a size in bytes.
_PUBLISHES, _GROWS, _LACKS, _WAITS = range(4)


def _word(nbytes: int, what: int) -> int:
    return nbytes * 4 + what


def _told(word: int) -> str:
    size = word // 4
    return (
        f"publishes up to {size} bytes",
        f"makes room for {size} bytes",
        f"lacks {_SLOTS * size} bytes of shared memory",
        "waits for its peers",
    )[word % 4]
