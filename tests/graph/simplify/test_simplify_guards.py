"""What keeps a pass from changing a graph: writes, modes, other users, other meanings."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from models import mesh_of
from ranks import fake_world
from test_simplify_passes import Small, text
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxboundary.graph.find import find_ports
from fxboundary.graph.simplify.casts import move_casts
from fxboundary.graph.simplify.compose import compose
from fxboundary.graph.simplify.merge import merge
from fxboundary.graph.simplify.share import share

GATHER = ("S(0)", "R", "P")


@pytest.fixture
def g():
    with fake_world(4):
        yield Small(mesh_of(tp=4))


def grad_off(g):
    g.call(torch._C._set_grad_enabled, False)


def set_options(node, **options):
    """Arguments of a port after its name: coordinate, sizes, reduce_dtype, backward."""
    at = {"sizes": 7, "reduce_dtype": 8, "backward": 9}
    args = list(node.args)
    for name, value in options.items():
        args[at[name]] = value
    node.args = tuple(args)
    return node


def stays(one, g, *outputs, **kwargs):
    gm = g.close(*outputs, **kwargs)
    before = text(gm)
    assert one(gm) == []
    assert text(gm) == before


# compose


def test_ports_of_a_value_that_is_written_to_stay(g):
    value = g.call(torch.mul, g.x, 2.0)
    second = g.move(g.move(value, "P", "S(0)"), "S(0)", "R")
    g.graph.call_method("zero_", (value,))
    stays(compose, g, second)


def test_ports_in_two_modes_stay(g):
    first = g.move(g.x, "P", "S(0)")
    grad_off(g)
    stays(compose, g, g.move(first, "S(0)", "R"))


def test_ports_that_declare_other_sizes_of_a_dimension_stay(g):
    first = set_options(g.move(g.x, "P", "S(0)"), sizes="0:8")
    second = set_options(g.move(first, "S(0)", "R"), sizes="0:7")
    stays(compose, g, second)


def test_declared_sizes_are_put_together(g):
    first = set_options(g.move(g.x, "S(0)", "S(1)"), sizes="0:31")
    gm = g.close(set_options(g.move(first, "S(1)", "R"), sizes="0:31,1:8"))
    assert len(compose(gm)) == 1
    (port,) = find_ports(gm)
    assert port.node.args[7] == "0:31,1:8"


@pytest.mark.parametrize(("first", "second", "stay"), [("save", "", True), ("save", "save", False)])
def test_what_backward_keeps_must_agree(g, first, second, stay):
    a = set_options(g.move(g.x, "P", "S(0)"), backward=first)
    b = set_options(g.move(a, "S(0)", "R"), backward=second)
    gm = g.close(b)
    assert len(compose(gm)) == (not stay)
    assert stay or find_ports(gm)[0].backward == "save"


# share


def test_ports_that_are_written_to_are_not_shared(g):
    first, second = g.move(g.x, *GATHER), g.move(g.x, *GATHER)
    g.graph.call_method("add_", (first, 1.0))
    stays(share, g, first, second)


def test_reads_of_one_attribute_are_one_value(g):
    reads = [g.graph.get_attr("weight") for _ in range(2)]
    ports = [g.move(read, *GATHER) for read in reads]
    g.graph.output(ports)
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))
    gm = GraphModule(root, g.graph)
    (change,) = share(gm)
    assert change.name == "share"
    assert len(find_ports(gm)) == 1


def test_an_attribute_that_is_written_to_is_not_one_value(g):
    first = g.graph.get_attr("weight")
    a = g.move(first, *GATHER)
    g.graph.call_method("mul_", (first, 2.0))
    b = g.move(g.graph.get_attr("weight"), *GATHER)
    g.graph.output((a, b))
    root = nn.Module()
    root.register_buffer("weight", torch.ones(8, 8, dtype=torch.float64))
    assert share(GraphModule(root, g.graph)) == []


def double(x):
    return x * 2


def writer(g, value, how):
    """A node that writes into a value, without an operator whose schema says so."""
    if how == "iadd":
        return g.call(operator.iadd, value, 1.0)
    if how == "setitem":
        return g.call(operator.setitem, value, 0, 1.0)
    if how == "functional":
        return g.call(F.relu, value, inplace=True)
    if how == "out":
        return g.call(torch.add, value, 1.0, out=value)
    assert how == "operator"
    return g.call(torch.ops.aten.mul_.Tensor, value, 2.0)


@pytest.mark.parametrize("how", ["iadd", "setitem", "functional", "out", "operator"])
def test_all_ways_of_writing_part_ports(g, how):
    value = g.call(double, g.x)
    first = g.move(value, *GATHER)
    writer(g, value, how)
    stays(share, g, first, g.move(value, *GATHER))


def test_a_module_that_works_in_place_parts_ports(g):
    value = g.call(torch.mul, g.x, 2.0)
    first = g.move(value, *GATHER)
    g.graph.call_module("relu", (value,))
    second = g.move(value, *GATHER)
    g.graph.output((first, second))
    root = nn.Module()
    root.relu = nn.ReLU(inplace=True)
    assert share(GraphModule(root, g.graph)) == []
    root.relu.inplace = False
    assert len(share(GraphModule(root, g.graph))) == 1


def subgraph(in_place):
    body = Graph()
    x = body.placeholder("x")
    body.output(body.call_method("mul_" if in_place else "mul", (x, 2.0)))
    return GraphModule(nn.Module(), body)


def run_body(body, x):
    return body(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_subgraph_that_writes_into_its_input_parts_ports(g, in_place):
    value = g.call(torch.mul, g.x, 2.0)
    first = g.move(value, *GATHER)
    body = g.graph.get_attr("body")
    g.call(run_body, body, value)
    g.graph.output((first, g.move(value, *GATHER)))
    root = nn.Module()
    root.body = subgraph(in_place)
    gm = GraphModule(root, g.graph)
    FakeTensorProp(gm, FakeTensorMode()).propagate(torch.ones(8, 8), torch.ones(()))
    assert len(share(gm)) == (not in_place)


# merge


def partial_pair(g):
    return [g.move(g.call(f, g.x), "P", "R") for f in (torch.sin, torch.cos)]


def test_a_factor_that_others_use_stays(g):
    a, b = partial_pair(g)
    half = g.call(torch.mul, a, 0.5)
    stays(merge, g, g.call(torch.add, half, b), half)


def test_a_source_that_is_written_to_stays(g):
    value = g.call(torch.sin, g.x)
    a, b = g.move(value, "P", "R"), g.move(g.call(torch.cos, g.x), "P", "R")
    g.graph.call_method("mul_", (value, 2.0))
    stays(merge, g, g.call(torch.add, a, b))


def test_a_sum_in_another_mode_stays(g):
    a, b = partial_pair(g)
    grad_off(g)
    stays(merge, g, g.call(torch.add, a, b))


def test_an_inner_sum_in_another_mode_stays(g):
    a, b = partial_pair(g)
    inner = g.call(torch.add, a, g.x)
    grad_off(g)
    stays(merge, g, g.call(torch.add, inner, b))


def test_a_term_that_is_added_to_itself_counts_twice(g):
    a, b = partial_pair(g)
    inner = g.call(torch.add, a, b)
    gm = g.close(g.call(torch.add, inner, inner))
    assert [len(merge(gm)) for _ in range(2)] == [2, 0]
    assert_expected_inline(
        text(gm),
        """\
sin = sin(x)
cos = cos(x)
add_2 = add(sin, cos)
add_3 = add(add_2, add_2)
redistribute_default_3 = P->R grad R (add_3)""",
    )


def test_a_sum_that_broadcasts_stays(g):
    row = g.call(torch.select, g.call(torch.sin, g.x), 0, 0)
    a, b = g.move(row, "P", "R"), g.move(g.call(torch.cos, g.x), "P", "R")
    stays(merge, g, g.call(torch.add, b, a))


def test_a_division_that_rounds_stays(g):
    a, b = partial_pair(g)
    rounded = g.call(torch.div, a, 3.0, rounding_mode="floor")
    stays(merge, g, g.call(torch.add, rounded, b))


def test_a_factor_that_is_a_tensor_stays(g):
    a, b = partial_pair(g)
    stays(merge, g, g.call(torch.add, g.call(torch.mul, a, g.x), b))


# casts


def narrowed(g, node):
    return g.graph.call_method("to", (node, torch.float32))


def test_a_cast_of_a_port_that_others_use_stays(g):
    gathered = g.move(g.x, *GATHER)
    stays(move_casts, g, narrowed(g, gathered), gathered)


def test_a_wide_value_that_others_use_stays(g):
    wide = g.graph.call_method("double", (g.x,))
    stays(move_casts, g, g.move(wide, "S(0)", "R", "R"), wide, dtype=torch.float32)


def test_casts_in_another_mode_stay(g):
    gathered = g.move(g.x, *GATHER)
    grad_off(g)
    stays(move_casts, g, narrowed(g, gathered))


def test_casts_of_a_source_that_is_written_to_stay(g):
    value = g.call(torch.mul, g.x, 2.0)
    cast = narrowed(g, g.move(value, *GATHER))
    g.graph.call_method("zero_", (value,))
    stays(move_casts, g, cast)


def test_a_change_to_whole_numbers_is_no_cast(g):
    gathered = g.move(g.x, *GATHER)
    stays(move_casts, g, g.graph.call_method("to", (gathered, torch.int32)))


def test_a_cast_behind_a_port_that_moves_nothing_forward_stays(g):
    stays(move_casts, g, narrowed(g, g.move(g.x, "R", "R", "P")))
