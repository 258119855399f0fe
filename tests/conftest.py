"""Fixtures: spawned gloo ranks for values, fake process groups for structure."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import ranks
from ranks import Ranks

import pytest_fxboundary

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Our own plugin, also where this checkout is on the path and not installed."""
    if not pluginmanager.has_plugin("fxboundary"):
        pluginmanager.register(pytest_fxboundary, "fxboundary")


@pytest.fixture(scope="session")
def compile_cache() -> Iterator[str]:
    """One folder for all that this session compiles, on every rank: equal graphs compile once.

    A ``TORCHINDUCTOR_CACHE_DIR`` that is set already is used and kept.
    """
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="fxboundary-inductor-") as folder:
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _compile_into_cache(compile_cache: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", compile_cache)
        yield


@pytest.fixture(scope="session")
def ranks2(compile_cache: str) -> Iterator[Ranks]:
    """Two gloo ranks, started by the first ``ranks2.run(function, ...)``."""
    pool = Ranks(2, compile_cache)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4(compile_cache: str) -> Iterator[Ranks]:
    """Four gloo ranks, started by the first ``ranks4.run(function, ...)``."""
    pool = Ranks(4, compile_cache)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks8(compile_cache: str) -> Iterator[Ranks]:
    """Eight gloo ranks, started by the first ``ranks8.run(function, ...)``."""
    pool = Ranks(8, compile_cache)
    yield pool
    pool.close()


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """``fake_world(4)``: a fake process group of 4 ranks until the test ends, this one rank 0.

    For a group that ends earlier use ``with ranks.fake_world(4):``.
    """
    with contextlib.ExitStack() as stack:
        yield lambda size, rank=0: stack.enter_context(ranks.fake_world(size, rank))
