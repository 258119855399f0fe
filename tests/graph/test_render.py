"""Snapshots: the text of boundaries in captured graphs, and the collectives they become."""

from __future__ import annotations

import torch
import torch.nn as nn
from expecttest import TestCase
from models import Stack, llama, llama_contracts, mesh_of, mlp_contracts
from ranks import fake_world
from torch._inductor.custom_graph_pass import CustomGraphPass

import fxboundary as fb
from fxboundary.graph.collectives import find_collectives


class Recorder(CustomGraphPass):
    """Collectives of each post-grad graph, forward first, as text."""

    def __init__(self):
        self.texts = []

    def __call__(self, graph):
        found = find_collectives(graph.owning_module)
        self.texts.append("\n".join(f"{c.kind:<14} {c.bytes:>6} B  {c.port}" for c in found))

    def uuid(self):
        return None  # a cached graph would pass us by


def llama_layer(sequence_parallel):
    """Ports of one Hugging Face decoder layer, embedding to head left out."""
    model = llama(layers=1).float()
    contracts = llama_contracts(sequence_parallel)
    fb.apply(model, fb.Plan(mesh_of(tp=4), contracts))
    return model


def compile_step(model, ids):
    recorder = Recorder()
    backend = fb.backend(post_grad_custom_pre_pass=recorder)
    torch._dynamo.reset()
    logits = torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids).logits
    logits.sum().backward()
    (graph,) = backend.graphs
    return graph.text, recorder.texts


class TestLlamaSnapshots(TestCase):
    maxDiff = None

    def test_tensor_parallel(self):
        with fake_world(4):
            text, (forward, backward) = compile_step(
                llama_layer(False), torch.zeros(2, 16, dtype=int)
            )
        self.assertExpectedInline(
            text,
            """\
model.layers.0.self_attn:in.hidden_states  f32[2, 16, 64] -> [2, 16, 64]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
model.layers.0.self_attn:out  f32[2, 16, 64] -> [2, 16, 64]  tp: P->R
    all_reduce(tp=4)  |  grad R: nothing
model.layers.0.mlp:in.x  f32[2, 16, 64] -> [2, 16, 64]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
model.layers.0.mlp:out  f32[2, 16, 64] -> [2, 16, 64]  tp: P->R
    all_reduce(tp=4)  |  grad R: nothing
lm_head:in.input  f32[2, 16, 64] -> [2, 16, 64]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
lm_head:out  f32[2, 16, 16] -> [2, 16, 64]  tp: S(2)->R
    all_gather(dim=2, tp=4)  |  grad R: slice(dim=2, tp=4)""",
        )
        self.assertExpectedInline(
            forward,
            """\
all_reduce       8192 B  model.layers.0.self_attn:out
all_reduce       8192 B  model.layers.0.mlp:out
all_gather       8192 B  lm_head:out""",
        )
        self.assertExpectedInline(
            backward,
            """\
all_reduce       8192 B  lm_head:in.input
all_reduce       8192 B  model.layers.0.mlp:in.x
all_reduce       8192 B  model.layers.0.self_attn:in.hidden_states""",
        )

    def test_tensor_and_sequence_parallel(self):
        with fake_world(4):
            text, (forward, backward) = compile_step(
                llama_layer(True), torch.zeros(2, 16, dtype=int)
            )
        self.assertExpectedInline(
            text,
            """\
model.layers.0:in.hidden_states  f32[2, 16, 64] -> [2, 4, 64]  tp: R->S(1)
    slice(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)
model.layers.0.input_layernorm:param.weight  f32[64] -> [64]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
model.layers.0.self_attn:in.hidden_states  f32[2, 4, 64] -> [2, 16, 64]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad tp: P: reduce_scatter(dim=1, tp=4)
model.layers.0.self_attn:out  f32[2, 16, 64] -> [2, 4, 64]  tp: P->S(1)
    reduce_scatter(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)
model.layers.0.post_attention_layernorm:param.weight  f32[64] -> [64]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
model.layers.0.mlp:in.x  f32[2, 4, 64] -> [2, 16, 64]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad tp: P: reduce_scatter(dim=1, tp=4)
model.layers.0.mlp:out  f32[2, 16, 64] -> [2, 4, 64]  tp: P->S(1)
    reduce_scatter(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)
model.norm:param.weight  f32[64] -> [64]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
lm_head:in.input  f32[2, 4, 64] -> [2, 16, 64]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad tp: P: reduce_scatter(dim=1, tp=4)
lm_head:out  f32[2, 16, 16] -> [2, 16, 64]  tp: S(2)->R
    all_gather(dim=2, tp=4)  |  grad R: slice(dim=2, tp=4)""",
        )
        self.assertExpectedInline(
            forward,
            """\
all_gather       8192 B  model.layers.0.self_attn:in.hidden_states
reduce_scatter   8192 B  model.layers.0.self_attn:out
all_gather       8192 B  model.layers.0.mlp:in.x
reduce_scatter   8192 B  model.layers.0.mlp:out
all_gather       8192 B  lm_head:in.input
all_gather       8192 B  lm_head:out""",
        )
        self.assertExpectedInline(
            backward,
            """\
reduce_scatter   8192 B  lm_head:in.input
all_reduce        256 B  model.norm:param.weight
all_gather       8192 B  model.layers.0.mlp:out
reduce_scatter   8192 B  model.layers.0.mlp:in.x
all_reduce        256 B  model.layers.0.post_attention_layernorm:param.weight
all_gather       8192 B  model.layers.0.self_attn:out
reduce_scatter   8192 B  model.layers.0.self_attn:in.hidden_states
all_reduce        256 B  model.layers.0.input_layernorm:param.weight
all_gather       8192 B  model.layers.0:in.hidden_states""",
        )


class TestRender(TestCase):
    maxDiff = None

    def test_the_text_is_the_same_on_every_rank(self):
        texts = []
        for rank in range(4):
            with fake_world(4, rank):
                model = Stack(layers=1)
                contracts = mlp_contracts(True)
                contracts["layers.0"] = {"in_src": {"x": {}}, "in_dst": {"x": {"tp": "S(1)"}}}
                fb.apply(model, fb.Plan(mesh_of(tp=4), contracts))
                program = torch.export.export(model, (torch.zeros(1, 8, 8),))
                texts.append(fb.render(program.graph_module))
        assert len(set(texts)) == 1
        self.assertExpectedInline(
            texts[0],
            """\
layers.0:in.x  f32[1, 8, 8] -> [1, 2, 8]  tp: R->S(1)
    slice(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)
layers.0.norm:param.weight  f32[8] -> [8]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
layers.0.mlp:in.x  f32[1, 2, 8] -> [1, 8, 8]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad tp: P: reduce_scatter(dim=1, tp=4)
layers.0.mlp.down:param.bias  f32[8] -> [8]  tp: R->P
    keep_first(tp=4)  |  grad R: nothing
layers.0.mlp:out  f32[1, 8, 8] -> [1, 2, 8]  tp: P->S(1)
    reduce_scatter(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)""",
        )

    def test_several_mesh_dimensions_and_gradients(self):
        with fake_world(8):
            model = nn.Sequential(nn.Identity())
            contract = fb.Contract(
                in_src={"input": {"dp": "S(0)", "tp": "S(-1)"}},
                in_dst={"input": {"dp": "S(0)"}},
                in_grad={"input": {"tp": "P(avg)"}},
                out_src={"dp": "P(avg)", "tp": "P"},
                out_dst={"tp": "S(1)"},
            )
            fb.apply(model, fb.Plan(mesh_of(dp=2, tp=4), {"0": contract}))
            program = torch.export.export(model, (torch.zeros(2, 4),))
        self.assertExpectedInline(
            fb.render(program.graph_module),
            """\
0:in.input  f32[2, 4] -> [2, 16]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad dp: S(0), tp: P(avg): reduce_scatter(dim=1, avg, tp=4)
0:out  f32[2, 16] -> [2, 4]  dp: P(avg)->R, tp: P->S(1)
    reduce_scatter(dim=1, tp=4), all_reduce(avg, dp=2)  |  grad tp: S(1): all_gather(dim=1, tp=4), scale(0.5)""",
        )

    def test_a_graph_without_shapes_or_ports(self):
        with fake_world(2):
            model = nn.Sequential(nn.Identity())
            contract = {"out_src": {"tp": "S(-1)"}, "out_dst": {"tp": "R"}}
            fb.apply(model, fb.Plan(mesh_of(tp=2), {"": contract}))
            traced = torch.fx.symbolic_trace(model)
        self.assertExpectedInline(
            fb.render(traced),
            """\
:out  [?]  S(-1)->R
    shape unknown  |  grad R""",
        )
        assert fb.render(torch.fx.symbolic_trace(nn.Identity())) == ""
