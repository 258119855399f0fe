"""Peer memory: values, sizes, groups, and what is left of it."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peer_memory import BOTH, Delays, held, peer_memory
from ranks import Ranks

from fxboundary.peer.host import HostPeerGroup

pytestmark = pytest.mark.distributed
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.bool)


def _value(rank: int, step: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Differs between ranks, steps and elements."""
    return ((torch.arange(numel) * 7 + step * 13 + rank * 5) % 101).to(dtype)


def _steps(cpp: bool, steps: int, seed: int = 0) -> None:
    """Every value of every peer is the one of this step, whichever rank is late, at any point."""
    rank, size = dist.get_rank(), dist.get_world_size()
    late = Delays(seed * size + rank)
    with peer_memory(cpp) as memory:
        assert (memory.rank, memory.size) == (rank, size)
        for step in range(steps):
            dtype, numel = DTYPES[step % len(DTYPES)], 1 + step * 37 % 500
            x = _value(rank, step, dtype, numel)
            late()
            mine = memory.publish(x, numel * dtype.itemsize)
            late()
            theirs = memory.peers(mine)
            assert torch.equal(mine, x)
            for peer, value in enumerate(theirs):
                assert torch.equal(value, _value(peer, step, dtype, numel)), (step, peer)
            late()


@pytest.mark.parametrize("cpp", BOTH)
def test_two_ranks_read_every_step_of_a_long_run(ranks2: Ranks, cpp: bool) -> None:
    """With one slot instead of two a late rank reads the next step's values."""
    ranks2.run(_steps, cpp, 3000)


@pytest.mark.parametrize("cpp", BOTH)
def test_four_ranks_that_outnumber_the_processors(ranks4: Ranks, cpp: bool) -> None:
    ranks4.run(_steps, cpp, 2000)


def _like_gloo(cpp: bool) -> None:
    sent, summed, gathered = [], [], []
    with peer_memory(cpp) as memory:
        for step in range(200):
            x = torch.randn(1 + step % 9, 33) + memory.rank
            theirs = memory.peers(memory.publish(x, 9 * 33 * 4))
            sent.append(x)
            summed.append(sum(theirs[1:], theirs[0]))
            gathered.append(torch.cat(theirs))
    for x, total, whole in zip(sent, summed, gathered, strict=True):
        expected = x.clone()
        dist.all_reduce(expected)
        torch.testing.assert_close(total, expected)
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, x)
        assert torch.equal(whole, torch.cat(shards))


@pytest.mark.parametrize("cpp", BOTH)
def test_sum_and_cat_are_all_reduce_and_all_gather(ranks4: Ranks, cpp: bool) -> None:
    ranks4.run(_like_gloo, cpp)


def _shapes_and_sizes(cpp: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with peer_memory(cpp) as memory:
        # Uneven shards, one of them empty; a value that is not contiguous; a number.
        shapes = [(peer * 2, 3) for peer in range(size)]
        x = torch.arange(rank * 6.0).view(3, rank * 2).t() + rank
        theirs = memory.peers(memory.publish(x, size * 2 * 3 * 4), shapes)
        for peer, value in enumerate(theirs):
            expected = torch.arange(peer * 6.0).view(3, peer * 2).t() + peer
            assert value.is_contiguous()
            assert torch.equal(value, expected)
        for peer, value in enumerate(memory.peers(memory.publish(torch.tensor(rank), 8))):
            assert value.dim() == 0
            assert value.item() == peer
        nothing = memory.publish(torch.empty(0, 4), 0)
        assert [value.shape for value in memory.peers(nothing)] == [(0, 4)] * size

        # Larger than the memory, again and again; then small again.
        before = memory.publish(torch.full((4,), rank), 32)
        for power in (10, 15, 18, 20, 4):
            numel = 2**power
            mine = memory.publish(_value(rank, power, torch.float32, numel), 4 * numel)
            for peer, value in enumerate(memory.peers(mine)):
                assert torch.equal(value, _value(peer, power, torch.float32, numel))
        with pytest.raises(RuntimeError, match="not one of the last two"):
            memory.peers(before)


@pytest.mark.parametrize("cpp", BOTH)
def test_uneven_strided_empty_and_growing(ranks4: Ranks, cpp: bool) -> None:
    ranks4.run(_shapes_and_sizes, cpp)


def _grown_memory_is_given_back() -> tuple[int, int]:
    with peer_memory(True) as memory:
        own = memory._peers[memory.rank].memory
        for power in range(16, 24):
            memory.publish(torch.ones(2**power, dtype=torch.uint8), 2**power)
        return os.fstat(own.fd).st_blocks * 512, memory._capacity


def test_growing_keeps_only_the_last_ring(ranks2: Ranks) -> None:
    for used, capacity in ranks2.run(_grown_memory_is_given_back):
        assert used <= 2 * capacity + (1 << 16)


def _inference_mode_then_not(cpp: bool) -> None:
    with peer_memory(cpp) as memory:
        with torch.inference_mode():
            memory.publish(torch.ones(3), 12)
            memory.publish(torch.ones(3), 12)
        for _ in range(2):
            mine = memory.publish(torch.full((3,), 2.0).t(), 12)
            assert memory.peers(mine)[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("cpp", BOTH)
def test_memory_made_in_inference_mode_is_used_outside_of_it(ranks2: Ranks, cpp: bool) -> None:
    ranks2.run(_inference_mode_then_not, cpp)


def _rows_and_columns(cpp: bool) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ((0, 1), (2, 3), (0, 2), (1, 3))]
    row, column = groups[rank // 2], groups[2 + rank % 2]
    late = Delays(rank)
    with peer_memory(cpp, row) as rows, peer_memory(cpp, column) as columns:
        for step in range(500):
            x = _value(rank, step, torch.float32, 50)
            of_row = rows.publish(x, 200)
            late()
            of_column = columns.publish(x + 1, 200)
            late()
            for index, value in enumerate(rows.peers(of_row)):
                peer = rank // 2 * 2 + index
                assert torch.equal(value, _value(peer, step, torch.float32, 50))
            for index, value in enumerate(columns.peers(of_column)):
                peer = rank % 2 + 2 * index
                assert torch.equal(value, _value(peer, step, torch.float32, 50) + 1)
    for group in (row, column):
        dist.destroy_process_group(group)


@pytest.mark.parametrize("cpp", BOTH)
def test_two_groups_of_a_mesh_at_once(ranks4: Ranks, cpp: bool) -> None:
    ranks4.run(_rows_and_columns, cpp)


def _counts_wrap_around(cpp: bool) -> None:
    with peer_memory(cpp) as memory:
        memory.publish(torch.ones(3), 12)
        dist.barrier()
        memory._number = 2**32 - 6
        memory._headers[memory.rank].arrived = memory._number
        dist.barrier()
        for step in range(20):
            mine = memory.publish(_value(memory.rank, step, torch.float32, 9), 36)
            for peer, value in enumerate(memory.peers(mine)):
                assert torch.equal(value, _value(peer, step, torch.float32, 9))


@pytest.mark.parametrize("cpp", BOTH)
def test_barriers_are_counted_past_32_bits(ranks2: Ranks, cpp: bool) -> None:
    ranks2.run(_counts_wrap_around, cpp)


def _nothing_is_left(cpp: bool) -> None:
    before = held()
    for _ in range(3):
        with peer_memory(cpp) as memory:
            mine = memory.publish(torch.ones(5), 20)
            during = held()
            assert during[:2] > before[:2]
            assert during[2] == before[2]
            memory.publish(torch.ones(1 << 18), 1 << 20)
            memory.close()
            with pytest.raises(RuntimeError, match="closed"):
                memory.publish(torch.ones(5), 20)
            assert mine.tolist() in ([1.0] * 5, [0.0] * 5)  # readable, if no longer of use
        del mine
        assert held() == before


@pytest.mark.parametrize("cpp", BOTH)
def test_close_leaves_no_files_mappings_or_names(ranks2: Ranks, cpp: bool) -> None:
    ranks2.run(_nothing_is_left, cpp)


def _only_this_user() -> None:
    with peer_memory(True) as memory:
        fd = memory._peers[memory.rank].memory.fd
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
        assert not os.get_inheritable(fd)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if os.getuid() == 0:
            path = f"/proc/{os.getpid()}/fd/{fd}"
            nobody = {"user": 65534, "group": 65534, "extra_groups": []}
            other = subprocess.run(["cat", path], capture_output=True, timeout=20, **nobody)
            assert b"Permission denied" in other.stderr


def test_no_other_user_can_open_it_and_nobody_can_cut_it_short(ranks2: Ranks) -> None:
    ranks2.run(_only_this_user)


def _no_compiler(folder: str) -> None:
    from fxboundary.peer import native

    native._loaded.cache_clear()
    path, cxx = os.environ["PATH"], os.environ.pop("CXX", None)
    os.environ["PATH"], os.environ["FXBOUNDARY_PEER_CPP"] = folder, "1"
    try:
        # Only rank 1 is without: all ranks use the barrier that all have.
        if dist.get_rank() == 0:
            os.environ["PATH"] = path
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        memory = HostPeerGroup(dist.group.WORLD)
        assert not memory.is_native
        theirs = memory.peers(memory.publish(torch.tensor([memory.rank]), 8))
        assert torch.cat(theirs).tolist() == list(range(memory.size))
        memory.close()
    finally:
        native._loaded.cache_clear()
        os.environ["PATH"] = path
        if cxx is not None:
            os.environ["CXX"] = cxx


def test_a_rank_without_a_compiler_makes_all_use_python(compile_cache: str, tmp_path: Any) -> None:
    pool = Ranks(2, compile_cache)
    try:
        pool.run(_no_compiler, str(tmp_path))
    finally:
        pool.close()


def test_two_jobs_of_one_user_at_once(ranks2: Ranks, compile_cache: str) -> None:
    other = Ranks(2, compile_cache)
    try:
        thread = threading.Thread(target=other.run, args=(_steps, True, 500, 1))
        failures: list[Any] = []
        threading.excepthook, hook = failures.append, threading.excepthook
        try:
            thread.start()
            ranks2.run(_steps, True, 500, 2)
            thread.join(60)
        finally:
            threading.excepthook = hook
        assert not thread.is_alive()
        assert not failures
    finally:
        other.close()


def _build(folder: str, start: Any, results: Any) -> None:
    from fxboundary.peer import native

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    start.wait(30)
    results.put(native.library() is not None)


def test_processes_that_start_together_build_once(tmp_path: Any) -> None:
    """They all find what the first has built; nothing half built is left."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    children = [
        context.Process(target=_build, args=(str(tmp_path), start, results)) for _ in range(3)
    ]
    for child in children:
        child.start()
    try:
        start.set()
        assert [results.get(timeout=60) for _ in children] == [True] * 3
    finally:
        for child in children:
            child.join(10)
            child.kill()
    names = [path.name for path in (tmp_path / "fxboundary-peer").iterdir()]
    assert sorted(name.rpartition(".")[2] for name in names) == ["lock", "so"]
