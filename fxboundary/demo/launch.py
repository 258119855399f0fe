"""Running the demo's ranks: spawned here, or started by torchrun."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing as mp
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fxboundary.demo.settings import Settings
from fxboundary.errors import FxBoundaryError

DISAGREE, ERROR, INTERRUPTED = 1, 2, 130
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a rank may compile while the others wait
_GRACE = 5.0  # seconds that ranks get to end by themselves once one has failed


def run_demo(settings: Settings) -> int:
    """Train, report, and return the exit status: 1 if the losses disagree.

    Spawns ``settings.ranks`` processes, unless torchrun started this one as a rank.

    Raises:
        FxBoundaryError: settings that cannot run, and whatever a plan's faults are.
    """
    _check(settings)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        return _torchrun_rank(replace(settings, ranks=ranks), rank)
    return _spawn(settings)


def _check(settings: Settings) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise FxBoundaryError("the demo trains a Hugging Face model: pip install fxboundary[hf]")
    for name in ("ranks", "steps"):
        if getattr(settings, name) < 1:
            raise FxBoundaryError(f"--{name} {getattr(settings, name)}: must be at least 1")
    if settings.device == "cuda":
        import torch

        found = torch.cuda.device_count()
        if settings.ranks > found:
            raise FxBoundaryError(
                f"--ranks {settings.ranks} --device cuda: {found} GPUs are visible; each rank "
                f"needs one"
            )


def _torchrun_rank(settings: Settings, rank: int) -> int:
    try:
        return _rank(settings, rank, store=None)
    except FxBoundaryError:
        if rank == 0:
            raise
        return ERROR  # the same fault on every rank: rank 0 says it


def _spawn(settings: Settings) -> int:
    context = mp.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="fxboundary-demo-")
    processes, pipes = [], []
    try:
        for rank in range(settings.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve,
                args=(settings, rank, str(Path(folder) / "store"), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        answers = _collect(processes, pipes)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _end(processes)
        shutil.rmtree(folder, ignore_errors=True)
    return _judge(answers)


def _collect(processes: list[Any], pipes: list[Connection]) -> dict[int, tuple[int, str]]:
    """Exit status and message of each rank. Once one has failed, the others, which may wait
    for it in a collective, get a short while."""
    answers: dict[int, tuple[int, str]] = {}
    deadline = None
    while len(answers) < len(processes) and (deadline is None or time.monotonic() < deadline):
        waiting = [rank for rank in range(len(pipes)) if rank not in answers]
        ready = wait([pipes[rank] for rank in waiting], timeout=0.5)
        for rank in (rank for rank in waiting if pipes[rank] in ready):
            try:
                answers[rank] = pipes[rank].recv()
            except EOFError:
                processes[rank].join(_GRACE)
                answers[rank] = (
                    ERROR,
                    f"rank {rank} died (exit status {processes[rank].exitcode})",
                )
            if answers[rank][1] and deadline is None:
                deadline = time.monotonic() + _GRACE
    return answers


def _judge(answers: dict[int, tuple[int, str]]) -> int:
    faults = [text for _, (_, text) in sorted(answers.items()) if text]
    if faults:
        # Of several, a death or a rank's own error comes before what it made of the others.
        faults.sort(key=lambda text: "Traceback" in text and "Connection" in text)
        raise FxBoundaryError(faults[0])
    return max(status for status, _ in answers.values())


def _end(processes: list[Any]) -> None:
    """Wait for the ranks, and kill by process id those that do not end."""
    for process in processes:
        process.join(0 if sys.exc_info()[0] is KeyboardInterrupt else 1)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join(_GRACE)


def _serve(settings: Settings, rank: int, store: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the ranks
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        answer = (_rank(settings, rank, store), "")
    except FxBoundaryError as error:
        answer = (ERROR, str(error))
    except BaseException:
        answer = (ERROR, f"rank {rank} failed\n{traceback.format_exc()}")
    sys.stdout.flush()
    pipe.send(answer)
    pipe.close()


def _rank(settings: Settings, rank: int, store: str | None) -> int:
    """One rank's part; the exit status of all."""
    _silence()
    import torch
    import torch.distributed as dist

    on_gpu = settings.device == "cuda"
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.ranks))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, settings.ranks) if store else None,  # type: ignore[attr-defined]
        rank=rank,
        world_size=settings.ranks,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    try:
        return _train_and_report(settings, device, _console() if rank == 0 else None)
    finally:
        dist.destroy_process_group()


def _train_and_report(settings: Settings, device: Any, console: Any) -> int:
    import torch
    import torch.distributed as dist

    from fxboundary.demo.progress import Progress
    from fxboundary.demo.report import print_report
    from fxboundary.demo.training import train_all

    if console is not None:
        size = settings.size
        console.print(
            f"Training LlamaForCausalLM ({size.layers} layers, {size.hidden} wide, bytes) on the "
            f"Psalms: {settings.steps} steps of {size.batch} × {size.sequence} bytes, "
            f"{settings.dtype}, {settings.ranks_text} on {settings.device}",
            highlight=False,
            soft_wrap=True,
        )
    with Progress(console, settings.steps) as progress:
        runs = train_all(settings, device, progress)
    worst = torch.tensor([max(run.differences) for run in runs], dtype=torch.float64, device=device)
    worst = worst.nan_to_num(nan=float("inf"))  # a loss that is not a number agrees with nothing
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if console is not None:
        print_report(console, runs, worst.tolist(), settings)
    return 0 if worst.max().item() <= settings.tolerance else DISAGREE


def _console() -> Any:
    """Standard output; a log has lines of 100 columns."""
    from rich.console import Console

    sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if sized else 100)


def _silence() -> None:
    """Neither torch nor transformers has anything to say to a person who watches the demo."""
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.utils.cpp_extension", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
