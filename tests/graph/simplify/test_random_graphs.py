"""Random graphs with random ports: simplified, they compute the same and send no more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import assert_close, mesh_of
from programs import PROGRAMS, build, run
from ranks import fake_world
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxboundary as fb
from fxboundary.graph.find import find_ports
from fxboundary.graph.simplify.ports import Spent, spent

MESHES = [{"tp": 4}, {"dp": 2, "tp": 2}]
TOLERANCE = {False: 1e-12, True: 1e-5}  # in float64, and with casts to float32 between


def total(gm):
    return sum((spent(port.transition, 2) for port in find_ports(gm)), Spent())


def structure(gm):
    """What a rank runs, in order, without what is its own."""
    return [(port.name, str(port.transition), port.shape_in, port.dtype) for port in find_ports(gm)]


def check(programs, sizes):
    """On one rank: values and gradients before and after, of each program."""
    mesh = mesh_of(**sizes)
    structures = []
    for program in programs:
        gm = build(mesh, program)
        simple = fb.simplify(gm)
        casts = any(name in ("cast", "narrowed move") for name, *_ in program)
        for found, right in zip(run(simple.graph_module, mesh), run(gm, mesh), strict=True):
            what = f"{program}: {simple}"
            # Terms are of order 1, and may add up to nothing.
            assert_close(found, right, what, TOLERANCE[casts], scale=1.0)
        structures.append(structure(simple.graph_module))
    return structures


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", MESHES, ids=["tp4", "dp2tp2"])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs=st.lists(PROGRAMS, min_size=8, max_size=8))
def test_values_and_gradients_stay(ranks4, sizes, programs):
    first, *others = ranks4.run(check, programs, sizes)
    assert all(other == first for other in others)


@pytest.mark.parametrize("sizes", MESHES, ids=["tp4", "dp2tp2"])
@settings(max_examples=150, deadline=None)
@given(program=PROGRAMS)
def test_never_more_and_well_formed(sizes, program):
    with fake_world(4):
        gm = build(mesh_of(**sizes), program)
        before, code = total(gm), gm.code
        simple = fb.simplify(gm)
        assert total(simple.graph_module).at_most(before)
        assert gm.code == code, "the input was modified"
        simple.graph_module.graph.lint()
        assert fb.simplify(simple.graph_module).changes == ()
        assert_values_are_what_runs(simple.graph_module)


def assert_values_are_what_runs(gm):
    """The fake values that passes left on the nodes are those that a new propagation finds."""
    recorded = {n.name: n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"}
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    real = [torch.ones(tuple(v.shape), dtype=v.dtype) for v in inputs]
    FakeTensorProp(gm, FakeTensorMode()).propagate(*real)
    for node in gm.graph.nodes:
        if node.name in recorded:
            new, old = node.meta["val"], recorded[node.name]
            assert (new.shape, new.dtype) == (old.shape, old.dtype), node
