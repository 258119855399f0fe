"""A pool of spawned gloo ranks that many tests share.

Each rank is a process of its own with one torch thread. Test functions are module-level, pickled
by reference, and run on every rank; a rank that fails or hangs fails the call, not the session.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_START_TIMEOUT = 120.0


class RankFailure(AssertionError):
    """A function failed on some ranks, or did not come back in time."""


class Ranks:
    """``world_size`` processes in one gloo group, started at first use."""

    def __init__(self, world_size: int, cache_dir: str) -> None:
        self.world_size, self._cache_dir = world_size, cache_dir
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Results of ``fn(*args, **kwargs)`` in rank order.

        Raises:
            RankFailure: with the traceback of every rank that failed, and the ranks that had
                not answered after ``timeout`` seconds; the processes are killed then, and
                started anew by the next call.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        answers = self._collect(timeout)
        failures = [f"rank {rank}: {a[1]}" for rank, a in sorted(answers.items()) if not a[0]]
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        if failures or silent:
            self.close()
            if silent:
                failures.append(f"no answer within {timeout:g} s from ranks {silent}")
            raise RankFailure("\n".join(failures))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="fxboundary-ranks-")
        context = mp.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, theirs, self._folder, self._cache_dir, sys.path),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        if len(self._collect(_START_TIMEOUT)) != self.world_size:
            self.close()
            raise RankFailure("the ranks did not start")

    def _collect(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Answers by rank. Once a rank has failed the others get a short while: they may be
        waiting for it in a collective."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank, pipe in enumerate(self._pipes):
                if rank in answers or not pipe.poll(0.01):
                    continue
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5)
        return answers

    def close(self) -> None:
        """End the processes: by closing their pipes, and after a while by process id."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join(10)
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _serve(
    rank: int, world_size: int, pipe: Connection, folder: str, cache_dir: str, path: list[str]
) -> None:
    sys.path[:] = path
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pipe.send((True, None))
    try:
        while True:
            fn, args, kwargs = pipe.recv()
            try:
                answer = (True, fn(*args, **kwargs))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    except (EOFError, BrokenPipeError, OSError):
        dist.destroy_process_group()
