"""The harness itself: what the distributed tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import GRACE, RankFailure, Ranks, fake_world


@pytest.fixture(scope="module")
def pool(compile_cache: str) -> Iterator[Ranks]:
    """A pool of our own: the tests here break it on purpose."""
    pool = Ranks(2, compile_cache)
    yield pool
    pool.close()


def ended(pid: int | None) -> bool:
    """Whether the process is gone; a zombie, which nobody has asked for its exit code, is."""
    assert pid is not None
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def wait_until_ended(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ended(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return ended(pid)


def answer_late_on_rank_0(factor: int, *, offset: int) -> int:
    rank = dist.get_rank()
    time.sleep(0.5 if rank == 0 else 0)
    return rank * factor + offset


def all_reduce_of_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return value


def threads_and_process() -> tuple[int, int, int]:
    return torch.get_num_threads(), dist.get_world_size(), os.getpid()


def random_value() -> float:
    return torch.rand(()).item()


def raise_on(*ranks: int) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} objects")


def raise_on_rank_0_while_others_wait() -> None:
    if dist.get_rank() == 0:
        print("about to object")
        raise ValueError("rank 0 objects")
    dist.barrier()


def hang_on_rank_1() -> int:
    if dist.get_rank() == 1:
        time.sleep(3600)
    return dist.get_rank()


def hang_in_barrier() -> None:
    if dist.get_rank() == 1:
        dist.barrier()
    time.sleep(3600)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def return_a_function() -> object:
    return lambda: None


@pytest.mark.distributed
def test_results_come_in_rank_order(pool):
    assert pool.run(answer_late_on_rank_0, 10, offset=1) == [1, 11]


@pytest.mark.distributed
def test_all_reduce_sums_over_the_ranks(pool):
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for result in pool.run(all_reduce_of_ranks, value):
        torch.testing.assert_close(result, value * 3, rtol=0, atol=0)


@pytest.mark.distributed
def test_four_ranks_all_reduce(ranks4):
    for result in ranks4.run(all_reduce_of_ranks, torch.ones(3)):
        torch.testing.assert_close(result, torch.full((3,), 10.0), rtol=0, atol=0)


@pytest.mark.distributed
def test_ranks_are_processes_with_one_thread_and_stay_between_runs(pool):
    first = pool.run(threads_and_process)
    assert [(threads, world) for threads, world, _ in first] == [(1, 2), (1, 2)]
    assert [pid for _, _, pid in first] == pool.pids
    assert len({*pool.pids, os.getpid()}) == 3
    assert pool.run(threads_and_process) == first


@pytest.mark.distributed
def test_every_run_starts_from_the_same_seed_on_every_rank(pool):
    first = pool.run(random_value)
    assert first[0] == first[1]
    assert pool.run(random_value) == first


@pytest.mark.distributed
def test_exception_is_reported_with_its_rank(pool):
    with pytest.raises(RankFailure) as failure:
        pool.run(raise_on, 1)
    assert list(failure.value.failures) == [1]
    assert failure.value.silent == []
    text = str(failure.value)
    assert "rank 1: Traceback" in text
    assert "ValueError: rank 1 objects" in text
    assert "in raise_on" in text
    assert "rank 0" not in text
    assert pool.run(answer_late_on_rank_0, 10, offset=1) == [1, 11]


@pytest.mark.distributed
def test_every_failing_rank_is_reported(pool):
    with pytest.raises(RankFailure) as failure:
        pool.run(raise_on, 0, 1)
    assert sorted(failure.value.failures) == [0, 1]
    assert "rank 0 objects" in str(failure.value)
    assert "rank 1 objects" in str(failure.value)


@pytest.mark.distributed
def test_rank_that_waits_for_a_failed_one_is_not_waited_for(pool):
    pool.run(threads_and_process)  # the start of the pool is not what is timed
    begin = time.monotonic()
    with pytest.raises(RankFailure, match="rank 0 objects") as failure:
        pool.run(raise_on_rank_0_while_others_wait)
    assert time.monotonic() - begin < 4 * GRACE
    assert "about to object" in str(failure.value)
    # Rank 1 is either still in the barrier, or gloo has told it.
    assert failure.value.silent == [1] or 1 in failure.value.failures


@pytest.mark.distributed
def test_hang_is_killed_at_the_timeout_and_the_pool_works_afterwards(pool):
    pool.run(threads_and_process)
    pids = pool.pids
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"no answer from ranks \[1\] after 1 s") as failure:
        pool.run(hang_on_rank_1, timeout=1)
    assert 1 <= time.monotonic() - begin < 10
    assert failure.value.silent == [1]
    assert failure.value.failures == {}
    assert "in hang_on_rank_1" in str(failure.value), "the report says where it hung"
    assert all(ended(pid) for pid in pids)
    assert pool.run(answer_late_on_rank_0, 10, offset=1) == [1, 11]
    assert not set(pids) & set(pool.pids)


@pytest.mark.distributed
def test_rank_that_dies_is_reported_with_its_exit_code(pool):
    with pytest.raises(RankFailure, match="rank 1: the process died, exit code -9"):
        pool.run(die_on_rank_1)


@pytest.mark.distributed
def test_result_that_cannot_be_pickled_is_a_failure(pool):
    with pytest.raises(RankFailure, match=r"rank 0: (.|\n)*pickle"):
        pool.run(return_a_function)


@pytest.mark.distributed
def test_close_ends_the_ranks_in_order(compile_cache):
    pool = Ranks(2, compile_cache)
    pool.run(threads_and_process)
    pids, processes = pool.pids, [rank.process for rank in pool._ranks]
    pool.close()
    assert all(ended(pid) for pid in pids)
    assert [process.exitcode for process in processes] == [0, 0], "not killed, not aborted"


ORPHANS = """
import threading, time
from ranks import Ranks
from test_ranks import hang_in_barrier, threads_and_process

if __name__ == "__main__":
    pool = Ranks(2)
    pool.run(threads_and_process)
    print(*pool.pids, flush=True)
    pool.run(hang_in_barrier)
"""


@pytest.mark.distributed
def test_ranks_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)  # into the barrier
        assert not any(ended(pid) for pid in pids)
        parent.kill()
    assert all(wait_until_ended(pid, GRACE + 10) for pid in pids)


def test_pool_starts_no_process_before_its_first_run():
    assert Ranks(2).pids == []


def test_local_function_is_refused_before_anything_starts():
    pool = Ranks(2)
    with pytest.raises(Exception, match=r"local|pickle"):
        pool.run(lambda: None)
    assert pool.pids == []


def test_fake_world_has_the_size_asked_for_and_ends():
    with fake_world(8, rank=3):
        assert (dist.get_world_size(), dist.get_rank()) == (8, 3)
    assert not dist.is_initialized()


def test_fake_world_ends_after_a_failure():
    with pytest.raises(ValueError, match="inside"), fake_world(2):
        raise ValueError("inside")
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [2, 4])
def test_fake_world_fixture_ends_with_its_test(fake_world, size):
    assert not dist.is_initialized(), "left over from the test before"
    fake_world(size)
    assert dist.get_world_size() == size
