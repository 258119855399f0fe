"""A pool of spawned gloo ranks that many tests share, and fake process groups.

A test hands ``Ranks.run`` a module-level function; every rank runs it and the results come back
in rank order. A rank that raises, dies or hangs fails that one call: the pool ends its processes
and the next call starts new ones.

torch is imported where it is used: a rank sets its environment before that import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

START_TIMEOUT = 120.0
# Once a rank has failed, the others may wait for it in a collective forever: this many seconds
# are left to them to fail or to finish on their own.
GRACE = 5.0
_LOG_TAIL = 4000


class RankFailure(AssertionError):
    """Some ranks raised, died or did not answer.

    ``failures`` maps each failed rank to its traceback, or to how its process ended; ``silent``
    lists the ranks that had not answered when the pool gave up on them.
    """

    def __init__(self, message: str, failures: dict[int, str], silent: list[int]) -> None:
        super().__init__(message)
        self.failures, self.silent = failures, silent


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection
    log: Path


class Ranks:
    """``world_size`` processes in one gloo group, started by the first ``run``.

    ``cache_dir`` becomes the ranks' ``TORCHINDUCTOR_CACHE_DIR``: identical graphs, on other
    ranks or in later tests, then compile once. Without it they inherit this process's setting.
    """

    def __init__(self, world_size: int, cache_dir: str | None = None) -> None:
        self.world_size, self._cache_dir = world_size, cache_dir
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int | None]:
        """Process ids in rank order; empty while the pool is not running."""
        return [rank.process.pid for rank in self._ranks]

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` on every rank: the results in rank order.

        ``fn`` is pickled by reference, so it is a module-level function; arguments and results
        are pickled by value. On each rank torch is seeded with 0 and ``torch._dynamo`` is reset
        before the call. Starting the pool does not count towards ``timeout`` (seconds).

        Raises:
            RankFailure: with the traceback of every rank that raised, the exit code of every
                rank that died, and where each rank that has not answered was hanging.
        """
        job = pickle.dumps((fn, args, kwargs))
        if not self._ranks:
            self._start()
        try:
            logged = [rank.log.stat().st_size for rank in self._ranks]
            for rank in self._ranks:
                # A rank that has died since the last call is reported by _collect.
                with contextlib.suppress(BrokenPipeError):
                    rank.pipe.send_bytes(pickle.dumps((sys.path, job)))
            what = getattr(fn, "__qualname__", repr(fn))
            return self._collect(what, timeout, logged)
        except BaseException:  # KeyboardInterrupt and pytest's own time-out too
            self._kill()
            raise

    def close(self) -> None:
        """End the ranks, each after ``destroy_process_group``; kill those that do not end."""
        for rank in self._ranks:
            rank.pipe.close()
        deadline = time.monotonic() + 10
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="fxboundary-ranks-")
        store = str(Path(self._folder.name, "store"))
        try:
            for index in range(self.world_size):
                log = Path(self._folder.name, f"rank{index}.log")
                log.touch()
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(index, self.world_size, theirs, store, str(log), self._cache_dir),
                    name=f"rank {index} of {self.world_size}",
                    daemon=True,
                )
                process.start()
                theirs.close()  # so that a rank's death reads as the end of its pipe
                self._ranks.append(_Rank(process, ours, log))
            self._collect("starting", START_TIMEOUT, [0] * self.world_size)
        except BaseException:
            self._kill()
            raise

    def _collect(self, what: str, timeout: float, logged: list[int]) -> list[Any]:
        """One answer of each rank, or RankFailure. ``logged``: the sizes of the logs before."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {rank.pipe: index for index, rank in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                index = waiting.pop(pipe)
                try:
                    good, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    process = self._ranks[index].process
                    process.join(GRACE)
                    good, answer = False, f"the process died, exit code {process.exitcode}"
                if good:
                    results[index] = answer
                    continue
                failures[index] = answer
                deadline = min(deadline, time.monotonic() + GRACE)
        if not waiting and not failures:
            return [results[index] for index in range(self.world_size)]

        silent = sorted(waiting.values())
        self._dump_stacks(silent)
        lines = [f"{what} failed on {self.world_size} ranks"]
        if silent:
            why = f"{GRACE:g} s after another rank failed" if failures else f"after {timeout:g} s"
            lines.append(f"no answer from ranks {silent} {why}; killed")
        for index in sorted([*failures, *silent]):
            lines.append(f"---- rank {index}: {failures.get(index, 'no answer').rstrip()}")
            if printed := self._ranks[index].log.read_bytes()[logged[index] :]:
                lines.append(f"---- rank {index} printed:")
                lines.append(printed[-_LOG_TAIL:].decode(errors="replace").rstrip())
        raise RankFailure("\n".join(lines), failures, silent)

    def _dump_stacks(self, indices: list[int]) -> None:
        """Make these ranks write where they are into their logs."""
        for index in indices:
            pid = self._ranks[index].process.pid
            if pid is not None and self._ranks[index].process.is_alive():
                os.kill(pid, signal.SIGUSR1)
        if indices:
            time.sleep(0.3)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()  # this process, by its id
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A fake process group in this process: collectives return at once, with made-up values.

    It shows structure (graphs, counts, shapes) and costs; never values.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(
    rank: int, world_size: int, pipe: Connection, store: str, log: str, cache_dir: str | None
) -> None:
    """The life of a rank: join the group, then run what arrives until the pipe closes."""
    _redirect_output(log)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Compile in the rank itself: a pool of compiler processes each would outlive a kill.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if cache_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    if sys.platform == "linux":  # gloo looks the host's name up otherwise, which may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Torch's own warnings are not what these tests are about; those that fxboundary's modules
    # raise or cause are failures, as in pytest's process.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module="fxboundary")

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        pipe.send_bytes(pickle.dumps((True, None)))
        while True:
            path, job = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_answer(path, job))
    except (EOFError, ConnectionError):
        pass
    finally:
        # Torch 2.13 aborts a process that leaves without this.
        if dist.is_initialized():
            dist.destroy_process_group()


def _answer(path: list[str], job: bytes) -> bytes:
    """Run one job: the pickled pair (it went well, its result or the traceback)."""
    import torch

    try:
        # pytest adds to its path as it collects; this rank may have started before that.
        if new := [entry for entry in path if entry not in sys.path]:
            sys.path.extend(new)
            importlib.invalidate_caches()
        fn, args, kwargs = pickle.loads(job)
        if package := sys.modules.get("fxboundary"):  # as in pytest's own process
            warnings.filterwarnings("error", category=package.FxBoundaryWarning)
        torch.manual_seed(0)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        # Plain pickle: multiprocessing's would pass tensors through shared memory that ends
        # with this process.
        return pickle.dumps((True, fn(*args, **kwargs)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _redirect_output(log: str) -> None:
    """What a rank prints, from C++ too, goes to its log; a failure shows the end of it."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    # Ctrl-C reaches the whole terminal; the pool decides what happens to its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit_with_parent() -> None:
    """Leave as soon as the parent is gone, even out of a collective that hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # A rank that only waits for work sees its pipe end and leaves in order.
    time.sleep(GRACE)
    os._exit(1)
