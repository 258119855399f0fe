"""Ranks that die, fail, do not come or do something else: the others raise and say which."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peer_memory import BOTH, held, peer_memory
from ranks import RankFailure, Ranks

from fxboundary import FxBoundaryError
from fxboundary.errors import PeerError
from fxboundary.peer import PeerGroup, rendezvous
from fxboundary.peer.host import HostPeerGroup
from fxboundary.peer.memory import Memory

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def doomed(compile_cache: str) -> Iterator[Ranks]:
    """Three ranks; where one dies the next test gets new ones."""
    pool = Ranks(3, compile_cache)
    yield pool
    pool.close()


def _error(fn: Callable[..., Any], *args: Any) -> PeerError:
    """What it raises, without the frames: they hold views of the memory."""
    with pytest.raises(PeerError) as raised:
        fn(*args)
    return raised.value.with_traceback(None)


def _raised(failure: RankFailure, rank: int) -> str:
    """What a rank raised, without the traceback."""
    return failure.failures[rank].rstrip().rpartition("PeerError: ")[2]


def _dies(cpp: bool, victim: int, sleeping: bool) -> None:
    before, started = held(), 0.0

    def publish_for_ever(memory: PeerGroup) -> None:
        nonlocal started
        for step in itertools.count():
            if memory.rank == victim and step == 500:
                if sleeping:  # the peers sleep by then
                    time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            started = time.monotonic()
            memory.publish(torch.ones(100), 400)

    with peer_memory(cpp) as memory:
        error = _error(publish_for_ever, memory)
    assert time.monotonic() - started < 5
    assert error.rank == victim
    assert held() == before
    raise error


@pytest.mark.parametrize(("cpp", "sleeping"), [(True, False), (True, True), (False, True)])
def test_a_killed_rank_is_named_on_all_others(doomed: Ranks, cpp: bool, sleeping: bool) -> None:
    """And nothing of it stays: no open file, no mapping, no name in shared memory."""
    with pytest.raises(RankFailure) as failed:
        doomed.run(_dies, cpp, 1, sleeping)
    assert not failed.value.silent
    assert "exit code -9" in failed.value.failures[1]
    for rank in (0, 2):
        assert re.match(r"peer memory: rank 1 \(pid \d+\) has ended", _raised(failed.value, rank))
    assert held()[2] == 0


def _is_late(cpp: bool) -> str:
    with peer_memory(cpp, timeout=0.5) as memory:
        memory.publish(torch.ones(3), 12)
        if memory.rank == 1:
            time.sleep(1.5)
            memory.publish(torch.ones(3), 12)  # the others have been here
        error = _error(memory.publish, torch.ones(3), 12)
    dist.barrier()
    return str(error)


@pytest.mark.parametrize("cpp", BOTH)
def test_a_rank_that_does_not_come_in_time_is_named(doomed: Ranks, cpp: bool) -> None:
    texts = doomed.run(_is_late, cpp)
    for rank in (0, 2):
        assert re.search(r"rank 1 \(pid \d+\) has not come within 0.5 s", texts[rank])
    assert re.search(r"rank 0 \(pid \d+\) has failed", texts[1])


def _closes_early(cpp: bool) -> None:
    with peer_memory(cpp) as memory:
        memory.publish(torch.ones(3), 12)
        if memory.rank == 2:
            memory.close()
        else:
            with pytest.raises(PeerError, match=r"rank 2 \(pid \d+\) has closed"):
                memory.publish(torch.ones(3), 12)
    dist.barrier()


@pytest.mark.parametrize("cpp", BOTH)
def test_a_rank_that_has_closed_is_not_waited_for(doomed: Ranks, cpp: bool) -> None:
    doomed.run(_closes_early, cpp)


def _disagree(cpp: bool, sizes: list[int], capacities: list[int]) -> str:
    """What each rank is told when it publishes this many bytes and gives that capacity."""
    with peer_memory(cpp) as memory:
        memory.publish(torch.ones(3), 12)
        x = torch.ones(sizes[memory.rank], dtype=torch.uint8)
        with pytest.raises(PeerError) as raised:
            memory.publish(x, capacities[memory.rank])
        with pytest.raises(PeerError, match="closed"):
            memory.publish(x, 12)
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize("cpp", BOTH)
def test_ranks_that_disagree_all_raise(doomed: Ranks, cpp: bool) -> None:
    for rank, text in enumerate(doomed.run(_disagree, cpp, [12] * 3, [12, 16, 12])):
        assert "publishes up to 16 bytes" in text
        assert "publishes up to 12 bytes" in text
        assert rank == 1 or "rank 1" in text
    for text in doomed.run(_disagree, cpp, [12] * 3, [1 << 20, 12, 1 << 20]):
        assert "makes room for 1048576 bytes" in text
        assert "publishes up to 12 bytes" in text
    texts = doomed.run(_disagree, cpp, [12, 16, 12], [12] * 3)
    assert "16 bytes to publish are more than the capacity of 12" in texts[1]
    for rank in (0, 2):
        assert re.search(r"rank 1 \(pid \d+\) has failed", texts[rank])


def _no_memory() -> str:
    extend = Memory.extend
    with peer_memory(True) as memory:
        memory.publish(torch.ones(3), 12)
        if memory.rank == 1:
            Memory.extend = _refuse  # type: ignore[method-assign]
        error = _error(memory.publish, torch.ones(3), 1 << 20)
    Memory.extend = extend  # type: ignore[method-assign]
    assert memory.rank != 1 or "No space left" in str(error.__context__)
    dist.barrier()
    return str(error)


def _refuse(self: Memory, nbytes: int) -> int:
    raise PeerError(f"no {nbytes} bytes of shared memory: No space left on device")


def test_a_rank_without_memory_makes_all_raise(doomed: Ranks) -> None:
    for text in doomed.run(_no_memory):
        assert re.search(r"rank 1 \(pid \d+\) lacks 2097152 bytes of shared memory", text)


def test_memory_that_the_host_has_not_is_an_error_with_sizes() -> None:
    memory = Memory.create()
    with pytest.raises(PeerError, match=rf"no {1 << 50} bytes .* \d+ are available"):
        memory.extend(1 << 50)
    memory.close()
    memory.close()


def _no_meeting(what: str) -> str:
    before, memfd, place = held(), os.memfd_create, rendezvous._place
    if dist.get_rank() == 1:
        if what == "host":
            rendezvous._place = lambda: "elsewhere"
        else:
            os.memfd_create = _no_files  # type: ignore[assignment]
    error = _error(HostPeerGroup, dist.group.WORLD)
    os.memfd_create, rendezvous._place = memfd, place
    assert error.rank == 1
    assert isinstance(error, FxBoundaryError)
    assert held() == before
    return str(error)


def _no_files(name: str, flags: int) -> int:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize(
    ("what", "reason"),
    [("system", "Function not implemented"), ("host", "it shares no host with rank 0")],
)
def test_where_memory_cannot_be_shared_all_ranks_say_why(
    doomed: Ranks, what: str, reason: str
) -> None:
    texts = set(doomed.run(_no_meeting, what))
    assert len(texts) == 1
    assert re.fullmatch(rf"no peer memory: rank 1 \(pid \d+\): .*{reason}", texts.pop())


def _child_closes() -> None:
    with peer_memory(True) as memory:
        memory.publish(torch.ones(3), 12)
        child = os.fork()
        if child == 0:
            memory.close()
            os._exit(0)
        os.waitpid(child, 0)
        for _ in range(10):
            memory.publish(torch.ones(3), 12)


def test_a_forked_child_closes_nothing_of_its_parent(doomed: Ranks) -> None:
    doomed.run(_child_closes)


def _ends() -> None:
    with peer_memory(True) as memory:
        for step in range(10):
            mine = memory.publish(torch.tensor([float(memory.rank), step]), 8)
        if memory.rank == 0:
            os._exit(0)  # with the last barrier behind it
        time.sleep(0.5)
        assert memory.peers(mine)[0].tolist() == [0.0, 9.0]
        with pytest.raises(PeerError, match=r"rank 0 \(pid \d+\) has ended"):
            memory.barrier()


def test_what_a_rank_published_last_outlives_it(doomed: Ranks) -> None:
    with pytest.raises(RankFailure) as failed:
        doomed.run(_ends)
    assert set(failed.value.failures) == {0}
