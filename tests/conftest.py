"""Fixtures: spawned gloo ranks for values, fake process groups for structure."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from ranks import Ranks


@pytest.fixture(scope="session")
def compile_cache() -> Iterator[str]:
    """One folder for what the ranks compile: identical graphs compile once."""
    folder = tempfile.mkdtemp(prefix="fxboundary-inductor-")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ranks2(compile_cache: str) -> Iterator[Ranks]:
    pool = Ranks(2, compile_cache)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4(compile_cache: str) -> Iterator[Ranks]:
    pool = Ranks(4, compile_cache)
    yield pool
    pool.close()


@pytest.fixture
def fake_world(compile_cache: str) -> Iterator[Callable[[int], None]]:
    """``fake_world(4)``: a fake process group of 4 ranks in this process, this one rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compile_cache

    def start(world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
