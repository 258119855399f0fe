"""The pytest plugin of fxboundary: the fixture ``boundary_snapshot``, and ``--boundary-update``.

It is a module of its own beside the package: pytest imports every installed plugin at its start,
and importing anything of the package imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fxboundary.testing.fixture import BoundarySnapshot


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fxboundary").addoption(
        "--boundary-update",
        action="store_true",
        help="write what models communicate now into the tests and files that expect otherwise",
    )


@pytest.fixture
def boundary_snapshot(request: pytest.FixtureRequest) -> BoundarySnapshot:
    """``boundary_snapshot(model, plan, *inputs, expected=...)``: see docs/testing.md."""
    from fxboundary.testing.fixture import BoundarySnapshot

    return BoundarySnapshot(request.path, bool(request.config.getoption("--boundary-update")))
