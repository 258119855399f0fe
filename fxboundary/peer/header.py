"""The first page of every rank's memory: how far the rank is, as its peers see it.

The offsets are those of ``barrier.cpp``.
"""

from __future__ import annotations

import mmap

import torch

BYTES = mmap.ALLOCATIONGRANULARITY
TOKEN = slice(1024, 1040)  # random bytes: what tells this memory from any other
OPEN, CLOSED, FAILED = 0, 1, 2


class Header:
    """One rank's header, mapped into this process. Only its owner sets anything in it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words32, self._words64 = memoryview(memory).cast("I"), memoryview(memory).cast("Q")
        self.address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    @property
    def arrived(self) -> int:
        """The number of the last barrier that the rank has reached, in 32 bits."""
        return self._words32[0]

    @arrived.setter
    def arrived(self, number: int) -> None:
        self._words32[0] = number

    def has_reached(self, number: int) -> bool:
        """Counts wrap around: their difference says which is later."""
        return (self.arrived - number) % 2**32 < 2**31

    @property
    def state(self) -> int:
        return self._words32[1]

    @state.setter
    def state(self, state: int) -> None:
        self._words32[1] = state

    def word(self, number: int) -> int:
        """What the rank brought to barrier ``number``.

        Two words in turn: a peer is at most one barrier ahead.
        """
        return self._words64[1 + number % 2]

    def set_word(self, number: int, word: int) -> None:
        self._words64[1 + number % 2] = word
