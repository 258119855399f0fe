"""Placements as text, layouts by name, and the shapes that layouts give."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fxboundary as fb
from fxboundary.placements import (
    REDUCE_OPS,
    global_shape,
    layout_text,
    local_shape_and_offset,
    named_layout_text,
    normalize_dims,
    parse_layout,
    placement_text,
)

FORMS = "write S(dim), R, P or P(op) with op one of sum, avg, max, min, product"


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("S(0)", Shard(0)),
        ("s(1)", Shard(1)),
        (" S ( 12 ) ", Shard(12)),
        ("S(-1)", Shard(-1)),
        ("Shard(2)", Shard(2)),
        ("SHARD(-2)", Shard(-2)),
        ("R", Replicate()),
        ("r", Replicate()),
        (" replicate\t", Replicate()),
        ("P", Partial("sum")),
        ("p", Partial("sum")),
        ("Partial", Partial("sum")),
        ("partial( AVG )", Partial("avg")),
        *((f"P({op})", Partial(op)) for op in REDUCE_OPS),
        *((f"partial({op})", Partial(op)) for op in REDUCE_OPS),
    ],
)
def test_every_text_form_is_read(text, placement):
    assert fb.parse_placement(text) == placement


@pytest.mark.parametrize("placement", [Shard(3), Replicate(), Partial("min")])
def test_a_torch_placement_is_returned_as_it_is(placement):
    assert fb.parse_placement(placement) is placement


@pytest.mark.parametrize(
    "text",
    [
        "",
        "S",
        "S()",
        "S(x)",
        "S(1",
        "S(1.5)",
        "S(1)(2)",
        "shrd(1)",
        "R()",
        "R(0)",
        "replicated",
        "P()",
        "P(mean)",
        "P(0)",
        "Q",
        "S(0) R",
        "S(0)->R",
        "None",
    ],
)
def test_unreadable_text_is_refused_with_the_forms(text):
    with pytest.raises(fb.ContractError) as raised:
        fb.parse_placement(text)
    assert str(raised.value) == f"cannot parse {text!r}: {FORMS}"


@pytest.mark.parametrize("value", [None, 1, ["S(0)"], Shard])
def test_what_is_no_placement_is_refused_with_its_type(value):
    with pytest.raises(fb.ContractError) as raised:
        fb.parse_placement(value)
    assert str(raised.value) == f"cannot parse {value!r} ({type(value).__name__}): {FORMS}"


def test_placements_that_have_no_text_are_refused():
    for placement in (_StridedShard(0, split_factor=2), Partial("band")):
        with pytest.raises(fb.ContractError, match="cannot parse"):
            fb.parse_placement(placement)


placements = st.one_of(
    st.integers(-8, 8).map(Shard), st.just(Replicate()), st.sampled_from(REDUCE_OPS).map(Partial)
)


@given(st.lists(placements, min_size=1, max_size=4).map(tuple))
def test_printed_layouts_are_read_back(layout):
    assert parse_layout(layout_text(layout)) == layout
    assert tuple(fb.parse_placement(placement_text(p)) for p in layout) == layout


def test_layouts_are_printed_short():
    layout = (Shard(-1), Replicate(), Partial(), Partial("avg"))
    assert layout_text(layout) == "S(-1),R,P,P(avg)"
    names = ("pp", "dp", "cp", "tp")
    assert named_layout_text(layout, names) == "pp: S(-1), cp: P, tp: P(avg)"
    assert named_layout_text((Replicate(),), ("tp",)) == "R"


def test_layouts_by_name_follow_the_mesh_order():
    named = {"tp": "P", "dp": Shard(1)}
    assert fb.resolve_placements(named, ("dp", "cp", "tp")) == (Shard(1), Replicate(), Partial())
    assert fb.resolve_placements({}, ("tp",)) == (Replicate(),)
    assert fb.resolve_placements(None, ("dp", "tp")) == (Replicate(), Replicate())


def test_an_unknown_mesh_dimension_names_the_existing_ones():
    with pytest.raises(fb.ContractError) as raised:
        fb.resolve_placements({"tpp": "R"}, ("dp", "tp"))
    expected = "no mesh dimension 'tpp'; the mesh has dp, tp (did you mean 'tp'?)"
    assert str(raised.value) == expected
    with pytest.raises(fb.ContractError, match=r"no mesh dimension 'x'; the mesh has none$"):
        fb.resolve_placements({"x": "R"}, ())


def test_negative_dimensions_are_normalised_by_rank():
    layout = (Shard(-1), Replicate(), Shard(0), Partial())
    assert normalize_dims(layout, 3) == (Shard(2), Replicate(), Shard(0), Partial())


@pytest.mark.parametrize(("dim", "ndim"), [(2, 2), (-3, 2), (0, 0), (-1, 0)])
def test_a_dimension_that_the_tensor_lacks_is_refused(dim, ndim):
    with pytest.raises(fb.PlacementMismatchError) as raised:
        normalize_dims((Shard(dim),), ndim)
    expected = f"S({dim}) shards a dimension that a tensor of {ndim} dimensions does not have"
    assert str(raised.value) == expected


def chunk(tensor, n, index, dim):
    """``torch.chunk``, with empty chunks where it returns fewer than ``n``."""
    chunks = torch.chunk(tensor, n, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 2)), min_size=1, max_size=3),
)
def test_local_shapes_are_those_of_nested_chunks(shape, dims):
    sizes = [n for n, _ in dims]
    layout = tuple(Shard(d) if 0 <= d < len(shape) else Replicate() for _, d in dims)
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    for coordinate in itertools.product(*map(range, sizes)):
        expected = whole
        for placement, n, index in zip(layout, sizes, coordinate, strict=True):
            if placement.is_shard():
                expected = chunk(expected, n, index, placement.dim)
        local, offset = local_shape_and_offset(shape, layout, sizes, coordinate)
        found = whole
        for dim, (start, length) in enumerate(zip(offset, local, strict=True)):
            found = found.narrow(dim, start, length)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-2, 1)), min_size=1, max_size=3),
)
def test_global_shape_undoes_even_sharding(local, dims):
    layout = tuple(Shard(d) for _, d in dims)
    sizes = [n for n, _ in dims]
    shape = global_shape(local, layout, sizes)
    for coordinate in itertools.product(*map(range, sizes)):
        assert local_shape_and_offset(shape, layout, sizes, coordinate)[0] == tuple(local)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("S(0)[1],S(0)[0]", "S(0)[1],S(0)[0]"),
        ("S(0)[1],S(0)", "S(0)[1],S(0)[0]"),
        ("S(-2)[1],S(0)", "S(0)[1],S(0)[0]"),
        ("S(0),S(0)[0]", "S(0)[1],S(0)[0]"),
        ("S(0)[0],S(0)[1]", "S(0),S(0)"),
        ("S(0)[1],S(1)[1]", "S(0),S(1)"),
        ("S(0)[7],S(0)", "S(0)[1],S(0)[0]"),
        ("S(0)[2],S(0),S(0)[0]", "S(0)[2],S(0)[1],S(0)[0]"),
    ],
)
def test_cuts_have_a_canonical_order(layout, expected):
    assert layout_text(normalize_dims(parse_layout(layout), 2)) == expected


def test_two_cuts_with_one_number_are_refused():
    with pytest.raises(fb.PlacementMismatchError, match="two cuts of dimension 0 have the same"):
        normalize_dims(parse_layout("S(0)[1],S(0)[1]"), 2)


def test_ordered_shards_cut_in_their_order():
    layout, sizes = parse_layout("S(0)[1],S(0)[0]"), (2, 2)
    offsets = [
        local_shape_and_offset((5, 3), layout, sizes, (i, j)) for i in (0, 1) for j in (0, 1)
    ]
    assert offsets == [((2, 3), (0, 0)), ((1, 3), (3, 0)), ((1, 3), (2, 0)), ((1, 3), (4, 0))]


def test_an_ordered_shard_is_another_placement_and_survives_copies():
    ordered = fb.parse_placement("S(0)[1]")
    assert ordered != Shard(0)
    assert Shard(0) != ordered
    assert ordered == fb.parse_placement("shard(0)[1]")
    assert placement_text(ordered) == "S(0)[1]"
    assert pickle.loads(pickle.dumps(ordered)) == copy.deepcopy(ordered) == ordered
    for bad in ("R[0]", "P[1]", "S(0)[]", "S(0)[-1]"):
        with pytest.raises(fb.ContractError, match="cannot parse"):
            fb.parse_placement(bad)
