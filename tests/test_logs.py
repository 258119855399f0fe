"""What the backend logs, and the artifacts that it leaves for tlparse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxboundary import _torch_internals

SCRIPT = """
import sys, torch
import fxboundary as fb
from models import Stack, mesh_of, mlp_contracts
from ranks import fake_world

with fake_world(2):
    model = Stack(1)
    fb.apply(model, fb.Plan(mesh_of(tp=2), mlp_contracts(False)))
    sys.modules["fxboundary.backend"]._inductor = lambda gm, *_: gm.forward
    torch.compile(model, backend="fxboundary")(torch.zeros(2, 4, 8))
"""


def run(**environment: str) -> str:
    """What the script writes to its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Standard error and structured trace of one compilation with both switched on."""
    folder = tmp_path_factory.mktemp("trace")
    errors = run(TORCH_LOGS="+fxboundary", TORCH_TRACE=str(folder))
    return errors, "".join(path.read_text() for path in folder.iterdir())


def test_the_structured_trace_has_the_graph_before_and_after_and_its_boundaries(traced):
    _, trace = traced
    for name in ("fxboundary_captured", "fxboundary_prepared", "fxboundary_boundaries"):
        assert f'"artifact": {{"name": "{name}", "encoding": "string"}}' in trace
    assert "\tlayers.0.mlp:out  f32[2, 4, 8] -> [2, 4, 8]  tp: P->R" in trace


def test_torch_logs_shows_boundaries(traced):
    errors, _ = traced
    assert "boundaries of a captured graph:" in errors
    assert "layers.0.mlp:out  f32[2, 4, 8] -> [2, 4, 8]  tp: P->R" in errors


def test_a_torch_without_a_structured_trace_is_no_error(monkeypatch):
    monkeypatch.delattr(_torch_internals.torch._logging, "trace_structured")
    _torch_internals.trace_artifact("name", lambda: pytest.fail("made for nothing"))
