"""The barrier of a group, and an implementation in Python for where there is no compiler."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from fxboundary.peer.header import Header

ALL = -1
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # the system call's number
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1


class Barrier(Protocol):
    """Barriers are numbered from 1, in 32 bits; every rank brings a word to each.

    Both methods return ``ALL`` once all ranks have arrived with one and the same word, or the
    index of the first rank that has not within ``limit`` seconds, or ``size`` plus the index of
    the first rank with another word.
    """

    def arrive(
        self, number: int, word: int, to: torch.Tensor | None, x: torch.Tensor | None, limit: float
    ) -> int:
        """Copy ``x`` into ``to``, where they are given; then tell the peers and wait for them."""

    def wait(self, number: int, limit: float) -> int:
        """Go on waiting."""


class PythonBarrier:
    """Waits by yielding for ``spin`` seconds, then sleeps in the kernel."""

    def __init__(self, headers: Sequence[Header], rank: int, spin: float) -> None:
        self._headers, self._own, self._rank = list(headers), headers[rank], rank
        self._spin = spin
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._number = _FUTEX[platform.machine()]

    @staticmethod
    def supported() -> bool:
        return platform.machine() in _FUTEX

    def arrive(
        self, number: int, word: int, to: torch.Tensor | None, x: torch.Tensor | None, limit: float
    ) -> int:
        if to is not None and x is not None:
            to.copy_(x)
        self._own.set_word(number, word)
        # Python has no memory fence, the kernel's wake begins with one: what was written above
        # is seen before the count.
        self._wake()
        self._own.arrived = number
        self._wake()
        return self.wait(number, limit, self._spin)

    def wait(self, number: int, limit: float, spin: float = 0.0) -> int:
        until = time.monotonic() + limit
        for index, peer in enumerate(self._headers):
            if index != self._rank and not self._wait_for(peer, number, spin, until):
                return index
        self._wake()  # the fence again: what peers wrote is read after their counts
        word = self._own.word(number)
        for index, peer in enumerate(self._headers):
            if peer.word(number) != word:
                return len(self._headers) + index
        return ALL

    def _wait_for(self, peer: Header, number: int, spin: float, until: float) -> bool:
        if peer.has_reached(number):
            return True
        end = time.monotonic() + spin
        while time.monotonic() < end:
            os.sched_yield()
            if peer.has_reached(number):
                return True
        while True:
            seen = peer.arrived
            if peer.has_reached(number):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            limit = _Timespec(int(left), int(left % 1 * 1e9))
            self._futex(peer, _WAIT, seen, ctypes.byref(limit))

    def _wake(self) -> None:
        self._futex(self._own, _WAKE, _EVERYONE, None)

    def _futex(self, header: Header, operation: int, value: int, limit: object) -> None:
        # ctypes gives up the interpreter's lock during the call.
        at = ctypes.c_void_p(header.address)
        self._syscall(
            ctypes.c_long(self._number), at, operation, ctypes.c_uint32(value), limit, None, 0
        )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))
