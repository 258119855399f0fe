"""The barrier in C++, built when it is first needed and kept on disk.

The source needs no header of torch's, so that it compiles in a fraction of a second, with any
compiler and for every torch. Ranks that start together build it once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxboundary.logs import LOG
from fxboundary.peer.header import Header

_SOURCE = Path(__file__).with_name("barrier.cpp")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")
_BUILD_TIMEOUT = 120.0  # seconds


class NativeBarrier:
    """``barrier.Barrier`` in C++: spins for ``spin`` seconds, then sleeps in the kernel."""

    def __init__(
        self, library: ctypes.CDLL, headers: Sequence[Header], rank: int, spin: float
    ) -> None:
        pointers = (ctypes.c_void_p * len(headers))(*(header.address for header in headers))
        self._library, self._spin = library, int(spin * 1e9)
        self._who = (pointers, len(headers), rank)
        self._headers = list(headers)  # the addresses are theirs

    def arrive(
        self, number: int, word: int, to: torch.Tensor | None, x: torch.Tensor | None, limit: float
    ) -> int:
        target = source = nbytes = 0
        if to is not None and x is not None:
            if x.is_contiguous():
                target, source, nbytes = to.data_ptr(), x.data_ptr(), x.nbytes
            else:
                to.copy_(x)
        result: int = self._library.fxboundary_arrive(
            *self._who, number, word, target, source, nbytes, self._spin, int(limit * 1e9)
        )
        return result

    def wait(self, number: int, limit: float) -> int:
        result: int = self._library.fxboundary_wait(*self._who, number, 0, int(limit * 1e9))
        return result


def library() -> ctypes.CDLL | None:
    """The built source, or None: there is no compiler, or ``FXBOUNDARY_PEER_CPP`` is 0."""
    return None if os.environ.get("FXBOUNDARY_PEER_CPP", "1") == "0" else _loaded()


@cache
def _loaded() -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(_built()))
    except subprocess.CalledProcessError as error:
        LOG.warning("peer memory uses its slower barrier: %s", error.stderr.decode()[-2000:])
        return None
    except (OSError, subprocess.SubprocessError) as error:
        LOG.info("peer memory uses its slower barrier: %s", error)
        return None
    who: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint32)
    limits = (ctypes.c_int64, ctypes.c_int64)
    loaded.fxboundary_wait.argtypes = (*who, *limits)
    copy = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    loaded.fxboundary_arrive.argtypes = (*who, *copy, *limits)
    return loaded


def _built() -> Path:
    """The library's file, made unless it is there.

    Raises:
        OSError: no compiler, or no place to keep it.
        subprocess.SubprocessError: it does not compile.
    """
    compiler = _compiler()
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + repr((compiler, _FLAGS, platform.platform())).encode())
    folder = _cache_folder()
    target = folder / f"barrier-{key.hexdigest()[:16]}.so"
    with _locked(folder / "lock"):
        if not target.exists():
            half = folder / f"{target.name}.{os.getpid()}"
            command = [compiler, *_FLAGS, "-o", str(half), str(_SOURCE)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT)
                half.replace(target)
            finally:
                half.unlink(missing_ok=True)
    return target


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError("no C++ compiler")


def _cache_folder() -> Path:
    """Where Inductor keeps what it compiles, if that was said; else the user's cache.

    Raises:
        OSError: it cannot be made, or is another user's, who could put code of theirs there.
    """
    default = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default, "fxboundary-peer")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with its process, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
