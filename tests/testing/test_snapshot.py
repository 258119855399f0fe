"""Snapshots of models and of graphs: what is recorded, and what cannot be taken."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from models import Stack, mesh_of, mlp_contracts
from ranks import fake_world

import fxboundary as fb
from fxboundary.testing import SnapshotError, assert_collectives, snapshot


def stack(layers: int = 3) -> Stack:
    with torch.device("meta"):
        return Stack(layers)


def plan(sequence_parallel: bool = True, **sizes: int) -> fb.Plan:
    return fb.Plan(sizes or {"tp": 4}, mlp_contracts(sequence_parallel))


def test_a_model_on_512_ranks_needs_none_of_them():
    found = snapshot(stack(), plan(dp=8, tp=64), torch.zeros(2, 16, 8))
    assert not torch.distributed.is_initialized()
    assert_expected_inline(
        str(found),
        """\
layers.{0..2}.norm:param.weight  f32[8] -> [8]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=64) 63 B
layers.{0..2}.mlp:in.x  f32[2, 16, 8] -> [2, 1024, 8]  tp: S(1)->R
    all_gather(dim=1, tp=64) 63 KiB  |  grad tp: P: reduce_scatter(dim=1, tp=64) 63 KiB
layers.{0..2}.mlp.down:param.bias  f32[8] -> [8]  tp: R->P
    keep_first(tp=64)  |  grad R: nothing
layers.{0..2}.mlp:out  f32[2, 1024, 8] -> [2, 16, 8]  tp: P->S(1)
    reduce_scatter(dim=1, tp=64) 63 KiB  |  grad tp: S(1): all_gather(dim=1, tp=64) 63 KiB
total forward: 3 all_gather 189 KiB, 3 reduce_scatter 189 KiB, together 378 KiB
total backward: 3 all_gather 189 KiB, 3 reduce_scatter 189 KiB, 3 all_reduce 189 B, together 387261 B""",  # noqa: E501
    )
    assert found.totals("forward")["all_gather"].count == 3
    found.assert_collectives({"all_reduce": 0}, bytes_at_most="378 KiB", direction="forward")


def test_bytes_are_the_programs():
    found = snapshot(stack(1), plan(), torch.zeros(2, 16, 8))
    program = fb.plan_transition({"tp": "S(1)"}, {}, {"tp": 4}, (2, 64, 8))
    assert found.totals("forward")["all_gather"].bytes == program.bytes


def test_a_graph_a_program_and_a_backend_have_the_models_ports(monkeypatch):
    # The backend's report is what is read; Inductor would take its time.
    monkeypatch.setattr(sys.modules["fxboundary.backend"], "_inductor", lambda gm, *_: gm.forward)
    whole = str(snapshot(stack(), plan(False), torch.zeros(2, 4, 8)))
    with fake_world(4):
        model = Stack(3)
        fb.apply(model, fb.Plan(mesh_of(tp=4), mlp_contracts(False)))
        program = torch.export.export(model, (torch.zeros(2, 4, 8),))
        backend = fb.backend()
        torch._dynamo.reset()
        torch.compile(model, backend=backend)(torch.zeros(2, 4, 8))
    for graph in (program, program.graph_module, backend, [program]):
        assert str(snapshot(graph)) == whole
    assert len(snapshot([program, program]).graphs) == 2


def identity(src: str) -> nn.Module:
    model = nn.Sequential(nn.Identity())
    contract = {"out_src": {"tp": src}, "out_dst": {"tp": "R"}}
    fb.apply(model, fb.Plan(mesh_of(tp=2), {"": contract}))
    return model


def test_shapes_that_are_not_known():
    rows = torch.export.Dim("rows", min=4)
    with fake_world(2):
        traced = torch.fx.symbolic_trace(identity("S(-1)"))
        shapes = {"input": {0: rows}}
        program = torch.export.export(identity("P"), (torch.zeros(4, 8),), dynamic_shapes=shapes)
    assert "shape unknown" in str(snapshot(traced))
    assert "f32[s0, 8] -> [s0, 8]" in str(snapshot(program))
    assert "all_reduce(tp=2) ? B" in str(snapshot(program))


def test_keywords_are_one_mapping():
    found = snapshot(stack(1), plan(), {"x": torch.zeros(2, 16, 8)})
    assert len(found.ports) == 4


def test_assert_collectives_takes_what_a_snapshot_takes():
    with pytest.raises(AssertionError, match="2 all_reduce, at most 0 allowed"):
        assert_collectives(stack(1), plan(False), torch.zeros(2, 4, 8), at_most={"all_reduce": 0})


def test_what_is_no_snapshot():
    graph = torch.fx.symbolic_trace(nn.Identity())
    assert str(snapshot(graph)) == "total forward: nothing\ntotal backward: nothing"
    for given, message in [
        ((3,), "no snapshot of int: give a module with a plan"),
        ((stack(1),), "a model needs a plan"),
        ((stack(1), plan()), "a model needs example inputs"),
        ((graph, plan()), "a graph is taken as it is"),
        (([graph, 3],), "no snapshot of list"),
        ((fb.backend(),), "this backend has compiled no graph"),
    ]:
        with pytest.raises(SnapshotError, match=message):
            snapshot(*given)
