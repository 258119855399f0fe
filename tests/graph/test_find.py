"""Names of ports: from the label and the module stack of a node."""

from __future__ import annotations

import pytest
import torch
from models import Stack, mesh_of, mlp_contracts

import fxboundary as fb
from fxboundary.graph.find import clean_path, find_ports, full_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0.mlp", "layers.0.mlp"),
        ("L['self']._modules['layers'][0]", "layers.0"),
        ("L['model'].layers[3].mlp", "layers.3.mlp"),
        ("L['args'][0].model.layers.0", "model.layers.0"),
        ("L['self']._orig_mod.layers.0", "layers.0"),
        ("layers.0", "layers.0"),
        ("", ""),
    ],
)
def test_paths_of_every_capture_become_module_names(path, name):
    assert clean_path(path) == name


@pytest.mark.parametrize(
    ("label", "path", "name"),
    [
        ("mlp:in.x", "layers.0.mlp", "layers.0.mlp:in.x"),
        ("layers.*:in.x", "model.layers.3", "model.layers.3:in.x"),
        ("layers.*:out", "model.layers.3.mlp", "model.layers.3:out"),
        ("<root>:in.x", "", ":in.x"),
        ("out_proj:param.weight", "layers.0.attn", "layers.0.attn.out_proj:param.weight"),
        ("mlp:in.x", "", "mlp:in.x"),
        ("layers.*:in.x", "", "layers.*:in.x"),
    ],
)
def test_a_label_gets_its_full_name_from_the_stack(label, path, name):
    assert full_name(label, path) == name


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_keep_their_ports_and_names(fake_world, strict):
    fake_world(4)
    model = Stack(layers=1)
    fb.apply(model, fb.Plan(mesh_of(tp=4), mlp_contracts(True)))
    program = torch.export.export(model, (torch.zeros(1, 2, 8),), strict=strict)
    ports = find_ports(program.graph_module)
    assert [port.name for port in ports] == [
        "layers.0.norm:param.weight",
        "layers.0.mlp:in.x",
        "layers.0.mlp.down:param.bias",
        "layers.0.mlp:out",
    ]
    assert ports[1].shape_in == (1, 2, 8)
    assert ports[1].shape_out == (1, 8, 8)
    assert ports[1].dtype == torch.float32


def test_symbolic_trace_keeps_the_ports(fake_world):
    fake_world(4)
    model = Stack(layers=1)
    fb.apply(model, fb.Plan(mesh_of(tp=4), mlp_contracts(True)))
    ports = find_ports(torch.fx.symbolic_trace(model))
    assert [port.name for port in ports] == ["layers.0.mlp:in.x", "layers.0.mlp:out"]
