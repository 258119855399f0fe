"""Capturing a split model on the meta device, with neither processes nor weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import fxboundary as fb
from fxboundary.static import capture, fake_mesh


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).relu())
        torch._dynamo.graph_break()
        return y + self.down(self.up(x))


CONTRACT = fb.Contract(
    in_src={"x": {"tp": "S(0)"}},
    in_dst={"x": {"tp": "R"}},
    out_src={"output": {"tp": "R"}},
    out_dst={"output": {"tp": "S(0)"}},
)


def test_every_graph_of_a_model_is_captured_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Pair())
    plan = fb.Plan({"tp": 64}, {"0": CONTRACT})
    texts = [fb.render(gm) for gm in capture(model, plan, torch.zeros(2, 8))]
    ports = [line.split("  ")[0] for text in texts for line in text.splitlines()[::2]]
    assert ports == ["0:in.x", "0:out"]
    assert not torch.distributed.is_initialized()


def test_a_fake_mesh_beside_a_process_group_is_refused() -> None:
    spec = fb.Plan({"tp": 2}, {}).spec
    with (
        fake_mesh(spec),
        pytest.raises(fb.FxBoundaryError, match="there is a process group already"),
        fake_mesh(spec),
    ):
        pass


def test_a_forward_that_fails_is_named() -> None:
    plan = fb.Plan({"tp": 2}, {"0": CONTRACT})
    with pytest.raises(fb.FxBoundaryError, match="forward failed while it was captured"):
        capture(nn.Sequential(Pair()), plan, torch.zeros(2, 9))
