"""The registry of live meshes, and meshes as text."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxboundary as fb
from fxboundary.mesh import MeshSpec, live_mesh, mesh_spec, parse_mesh, register_mesh


def mesh_of(**sizes):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def test_the_same_mesh_twice_is_one_entry(fake_world):
    fake_world(4)
    mesh = mesh_of(dp=2, tp=2)
    entry = register_mesh(mesh)
    assert register_mesh(mesh) is entry
    assert entry.name == "dp=2,tp=2"
    assert entry.coordinate == (0, 0)
    assert live_mesh("dp=2,tp=2") is entry
    assert fb.Plan(mesh, {}).live is entry


def test_a_second_mesh_of_equal_shape_gets_another_name(fake_world):
    fake_world(4)
    first = register_mesh(mesh_of(tp=4))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",), backend_override={"tp": "fake"})
    assert other.get_group(0) is not first.groups[0,].group
    second = register_mesh(other)
    assert (first.name, second.name) == ("tp=4", "tp=4#2")
    assert live_mesh("tp=4") is first
    assert live_mesh("tp=4#2") is second
    assert first.groups[0,].name != second.groups[0,].name


def test_a_name_is_free_again_after_its_groups_are_destroyed(fake_world):
    fake_world(4)
    first = register_mesh(mesh_of(tp=4))
    dist.destroy_process_group()
    fake_world(4)
    second = register_mesh(mesh_of(tp=4))
    assert second.name == first.name == "tp=4"
    assert second is not first
    assert live_mesh("tp=4") is second


def test_an_unknown_mesh_says_to_build_the_plan_first():
    with pytest.raises(fb.FxBoundaryError) as raised:
        live_mesh("nowhere=3")
    assert str(raised.value).startswith(
        "no mesh 'nowhere=3' in this process: build the plan on the mesh first "
        "(fxboundary.Plan(mesh, ...)); known: "
    )


def test_a_rank_outside_the_mesh_is_refused(fake_world):
    from torch.distributed.device_mesh import DeviceMesh

    fake_world(4)
    mesh = DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))
    with pytest.raises(fb.RankMismatchError, match="this rank is not part of the mesh tp=2"):
        register_mesh(mesh)


def test_unnamed_dimensions_are_numbered(fake_world):
    fake_world(4)
    spec = mesh_spec(init_device_mesh("cpu", (2, 2)))
    assert spec == MeshSpec(("dim_0", "dim_1"), (2, 2))
    assert str(mesh_spec({"dp": 2, "tp": 8})) == "dp=2,tp=8"


def test_mesh_text_is_read():
    assert parse_mesh("dp=2, tp = 4") == {"dp": 2, "tp": 4}
    assert parse_mesh("tp=1") == {"tp": 1}


@pytest.mark.parametrize("text", ["", "tp", "tp=", "=2", "tp=0", "tp=-1", "tp=x", "dp=2,,tp=4"])
def test_mesh_text_of_another_form_is_refused(text):
    with pytest.raises(fb.ContractError) as raised:
        parse_mesh(text)
    assert str(raised.value) == f"mesh {text!r}: write name=size, as in dp=2,tp=4"


def test_a_mesh_dimension_given_twice_is_refused():
    with pytest.raises(fb.ContractError, match="tp is given twice"):
        parse_mesh("tp=2,tp=4")
