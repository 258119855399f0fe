"""Memory that processes of one host share and that has no name.

It is an anonymous file (``memfd_create``): a peer opens it through its owner's open files, which
only the same user may, and it ends with the last process that uses it, however that one ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from fxboundary.errors import PeerError

_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL: some systems demand it, Linux before 6.3 does not know it


class Memory:
    """An anonymous file, this process's own or a peer's."""

    def __init__(self, fd: int) -> None:
        self.fd, self.bytes = fd, 0

    @classmethod
    def create(cls) -> Memory:
        """A file of 0 bytes that only this user can open and that nobody can shrink.

        Raises:
            OSError: the system has no such files.
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create("fxboundary-peer", flags | _NOEXEC_SEAL)
        except OSError:
            fd = os.memfd_create("fxboundary-peer", flags)
        try:
            os.fchmod(fd, 0o600)
            # A file cut short would end its readers with SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def open(cls, pid: int, fd: int) -> Memory:
        """The file that process ``pid`` has open as ``fd``.

        Raises:
            OSError: this process may not open it.
        """
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def extend(self, nbytes: int) -> int:
        """Add memory at the end: where it starts.

        Raises:
            PeerError: the host has not enough.
        """
        start, available = self.bytes, _available()
        # The system does not refuse what it has not: it ends a process to make room.
        if nbytes > available:
            raise PeerError(f"no {nbytes} bytes of shared memory: {available} are available")
        try:
            # Allocated now: a host that runs out of memory later would end a writer with SIGBUS.
            os.posix_fallocate(self.fd, start, nbytes)
        except OSError as error:
            raise PeerError(
                f"no {nbytes} bytes of shared memory: {error.strerror} ({available} are available)"
            ) from error
        self.bytes += nbytes
        return start

    def map(self, start: int, nbytes: int) -> mmap.mmap:
        return mmap.mmap(self.fd, nbytes, offset=start)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _available() -> int:
    """Bytes of memory on this host."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
