"""How the ranks of a process group find each other's memory.

Every rank says where it runs and which of its open files is its memory, then opens those of the
others. Whatever is wrong anywhere, all ranks raise, and with one text.
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fxboundary.errors import PeerError
from fxboundary.peer import native
from fxboundary.peer.barrier import PythonBarrier
from fxboundary.peer.header import BYTES, TOKEN
from fxboundary.peer.memory import Memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A rank as it describes itself; ``rank`` counts in the whole job."""

    rank: int
    pid: int
    place: str
    fd: int
    token: bytes
    native: bool
    problem: str = ""


@dataclass(frozen=True)
class Peer:
    """A rank, its memory and a handle of its process, which no later process can take over."""

    rank: int
    pid: int
    memory: Memory
    process: int

    def close(self) -> None:
        self.memory.close()
        os.close(self.process)


@dataclass(frozen=True)
class Meeting:
    """All ranks in the order of the group; ``native``: all of them have the C++ barrier."""

    peers: tuple[Peer, ...]
    index: int
    native: bool


def meet(group: ProcessGroup) -> Meeting:
    """Exchange memory with the other ranks; collective.

    Raises:
        PeerError: the same on all ranks: they run on several hosts, or as several users, or the
            system lacks what this needs.
    """
    import torch.distributed as dist

    index = dist.get_rank(group)
    memory, member = _describe(dist.get_global_rank(group, index))
    members = _exchange(group, member)
    peers: list[Peer] = []
    try:
        _agree([found.problem for found in members], members)
        _agree(_places(members), members)
        problem = _join(members, index, memory, peers)
        _agree(_exchange(group, problem), members)
    except PeerError:
        for peer in peers:
            peer.close()
        if memory is not None:
            memory.close()
        raise
    return Meeting(tuple(peers), index, all(found.native for found in members))


def _exchange(group: ProcessGroup, value: T) -> list[T]:
    import torch.distributed as dist

    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _agree(problems: list[str], members: list[Member]) -> None:
    for problem, member in zip(problems, members, strict=True):
        if problem:
            text = f"no peer memory: rank {member.rank} (pid {member.pid}): {problem}"
            raise PeerError(text, member.rank, member.pid)


def _describe(rank: int) -> tuple[Memory | None, Member]:
    """This rank's memory, one header long, and what the others need to open it."""
    pid, token = os.getpid(), secrets.token_bytes(TOKEN.stop - TOKEN.start)
    memory: Memory | None = None
    try:
        if sys.platform != "linux" or not PythonBarrier.supported():
            raise PeerError("it needs Linux on x86-64, AArch64 or RISC-V")
        place, memory = _place(), Memory.create()
        memory.extend(BYTES)
        memory.map(0, BYTES)[TOKEN] = token
    except (OSError, PeerError) as error:
        if memory is not None:
            memory.close()
        return None, Member(rank, pid, "", -1, token, False, str(error))
    return memory, Member(rank, pid, place, memory.fd, token, native.library() is not None)


def _place() -> str:
    """Where a process number means one process: a running system and a space of numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _places(members: list[Member]) -> list[str]:
    first = members[0]
    return [
        "" if member.place == first.place else f"it shares no host with rank {first.rank}"
        for member in members
    ]


def _join(members: list[Member], index: int, own: Memory | None, peers: list[Peer]) -> str:
    """Open every rank's memory; what went wrong."""
    assert own is not None
    for number, member in enumerate(members):
        try:
            # The process first: if it ended, and another has its number, the memory is missing.
            process = os.pidfd_open(member.pid)
        except OSError as error:
            return f"the process of rank {member.rank} cannot be watched: {error.strerror}"
        try:
            memory = own if number == index else Memory.open(member.pid, member.fd)
        except OSError as error:
            os.close(process)
            return f"the memory of rank {member.rank} cannot be opened: {error.strerror}"
        peers.append(Peer(member.rank, member.pid, memory, process))
        status = os.fstat(memory.fd)
        if status.st_uid != os.getuid() or memory.map(0, BYTES)[TOKEN] != member.token:
            return f"what rank {member.rank} has open is not its memory"
    return ""
