"""What the tests of peer memory share."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fxboundary.peer.host import HostPeerGroup

BOTH = (True, False)  # the barrier in C++, and the one in Python


@contextmanager
def peer_memory(cpp: bool, group: Any = None, timeout: float = 30.0) -> Iterator[HostPeerGroup]:
    """Peer memory of a process group, with the barrier that is asked for."""
    os.environ["FXBOUNDARY_PEER_CPP"] = str(int(cpp))
    memory = HostPeerGroup(dist.group.WORLD if group is None else group, timeout)
    try:
        assert memory.is_native == cpp
        yield memory
    finally:
        memory.close()


class Delays:
    """Now and then a rank is late: by a while that spinning covers, or that it does not."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> None:
        chance = self._random.random()
        if chance < 0.02:
            time.sleep(0.002 * self._random.random())
        elif chance < 0.2:
            until = time.perf_counter() + 100e-6 * self._random.random()
            while time.perf_counter() < until:
                pass


def held() -> tuple[int, int, int]:
    """Open files of peer memory, its mappings, and its names on this host."""
    gc.collect()  # an exception and its frames, which hold views, refer to each other
    links = [link for link in map(_link, os.listdir("/proc/self/fd")) if link]
    files = sum("memfd:fxboundary-peer" in link or "pidfd" in link for link in links)
    maps = Path("/proc/self/maps").read_text().count("memfd:fxboundary-peer")
    return files, maps, sum("fxboundary" in name for name in os.listdir("/dev/shm"))


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # what listed them
        return ""
