"""Sequence parallelism found in the graph of a plain tensor-parallel model."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import (
    MLP,
    MLP_PARAMS,
    WIDTH,
    assert_close,
    assert_gradients,
    full_gradients,
    llama,
    llama_contracts,
    mesh_of,
)
from ranks import fake_world
from test_llama_counts import counts

import fxboundary as fb
from fxboundary.graph.find import find_ports
from fxboundary.graph.simplify.ports import Spent, spent
from fxboundary.graph.simplify.sink import sink
from fxboundary.static import capture

TOKENS = 8
STEPS = (
    *("block", "block", "norm", "layer norm", "residual", "residual", "scale", "bend", "softmax"),
    *("positions", "gate", "narrow", "cast", "centre", "flip", "mean", "slice"),
)
STEP_LISTS = st.lists(st.sampled_from(STEPS), min_size=1, max_size=8)


class Steps(nn.Module):
    """A residual stream between tensor-parallel blocks, of work on tokens that is given."""

    def __init__(self, *steps: str, tokens: int = TOKENS, dropout: float = 0.0) -> None:
        super().__init__()
        self.steps = steps
        self.blocks = nn.ModuleList(MLP() for _ in range(1 + steps.count("block")))
        self.norm, self.layer_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.positions = nn.Parameter(torch.randn(tokens, WIDTH))
        self.gate, self.narrow = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH // 2)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.dropout = dropout

    def forward(self, x):
        blocks = iter(self.blocks)
        first = x = next(blocks)(x)
        for step in self.steps:
            x = self.step(step, x, first, blocks)
        return self.head(self.norm(x))

    def step(self, step: str, x: Any, first: Any, blocks: Any) -> Any:
        if step == "block":
            return x + next(blocks)(self.norm(x))
        if step == "narrow":
            return x * self.narrow(x).sum(-1, keepdim=True)
        if step == "drop":
            return F.dropout(x, self.dropout)
        if step == "write":
            return x.mul_(2.0)
        work = {
            "norm": lambda: self.norm(x),
            "layer norm": lambda: self.layer_norm(x),
            "residual": lambda: x + first,
            "scale": lambda: -x * 0.5,
            "bend": lambda: F.gelu(x),
            "softmax": lambda: x.softmax(-1),
            "positions": lambda: x + self.positions,
            "gate": lambda: x * self.gate(x).sigmoid(),
            "cast": lambda: x.float().to(x.dtype),
            "centre": lambda: x - x.mean(-1, keepdim=True),
            "flip": lambda: x.flip(1),
            "mean": lambda: x - x.mean(1, keepdim=True),
            "slice": lambda: x[:, 0:],
        }
        return work[step]()


IN = {"in_src": {"x": {"tp": "R"}}, "in_dst": {"x": {"tp": "R"}}}
BLOCK = IN | {"out_src": {"tp": "P"}, "out_dst": {"tp": "R"}, "params": MLP_PARAMS}
HEAD = {
    "in_dst": {"input": {"tp": "R"}},
    "out_src": {"tp": "S(-1)"},
    "out_dst": {"tp": "R"},
    "params": {"weight": {"tp": "S(0)"}},
}
CONTRACTS: dict[str, Any] = {"blocks.*": BLOCK, "head": HEAD}


def sent(gm):
    """What all ports send, but for those whose gradient is that of no token."""
    ports = [port for port in find_ports(gm) if not port.name.endswith(":sink.grad")]
    return sum((spent(port.transition, 3) for port in ports), Spent())


def lines(*parts):
    """One thing said a line, where a text would be long."""
    return "\n".join(str(part).replace("; ", "\n").replace(" -> ", "\n-> ") for part in parts)


def captured(model, contracts=CONTRACTS, x=None, **sizes):
    x = torch.zeros(2, TOKENS, WIDTH, requires_grad=True) if x is None else x
    (gm,) = capture(model, fb.Plan(mesh_of(**sizes or {"tp": 4}), contracts), x)
    return gm


def found(model, *args, **kwargs):
    with fake_world(4):
        return fb.simplify(captured(model, *args, **kwargs), aggressive=True)


def is_split(simple):
    return "sink" in [change.name for change in simple.changes]


def check(lists, sizes):
    """On one rank: values and gradients of the simplified graph against the unsharded model."""
    mesh = mesh_of(**sizes)
    told = []
    for steps in lists:
        torch.manual_seed(0)
        reference = Steps(*steps).double()
        x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(2, TOKENS, 16, dtype=torch.float64)
        right = reference(x)
        (right * weights).sum().backward()
        model = copy.deepcopy(reference)
        for param in model.parameters():
            param.grad = None
        fb.apply(model, fb.Plan(mesh, CONTRACTS))

        def simplified(gm, _):
            simple = fb.simplify(gm, aggressive=True)
            told.append(str(simple))
            return simple.graph_module.forward

        torch._dynamo.reset()
        leaf = x.detach().requires_grad_()
        y = torch.compile(model, backend=simplified, fullgraph=True)(leaf)
        (y * weights).sum().backward()
        tolerance = 1e-5 if "cast" in steps else 1e-9
        assert_close(y, right, f"output after {steps}", tolerance)
        assert_close(leaf.grad, x.grad, f"gradient of x after {steps}", tolerance)
        used = [name for name, p in reference.named_parameters() if p.grad is not None]
        gradients = full_gradients_of(model, used)
        for name in used:
            right_gradient = reference.get_parameter(name).grad
            assert_close(
                gradients[name], right_gradient, f"{name} after {steps}", tolerance, scale=1.0
            )
    return told


def full_gradients_of(model, names):
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    found = full_gradients(model)
    return {name: found[name] for name in names}


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=["tp4", "dp2tp2"])
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate],
)
@given(lists=st.lists(STEP_LISTS, min_size=6, max_size=6))
def test_values_and_gradients_are_those_of_the_unsharded_model(ranks4, sizes, lists):
    first, *others = ranks4.run(check, lists, sizes)
    assert all(other == first for other in others)


@settings(max_examples=60, deadline=None)
@given(steps=STEP_LISTS)
def test_no_more_is_sent(steps):
    with fake_world(4):
        gm = captured(Steps(*steps))
        before, code = sent(gm), gm.code
        simple = fb.simplify(gm, aggressive=True)
        assert gm.code == code, "the input was modified"
        simple.graph_module.graph.lint()
        assert sum(sent(simple.graph_module).bytes) <= sum(before.bytes)
        assert fb.simplify(simple.graph_module, aggressive=True).changes == ()
        for node in simple.graph_module.graph.nodes:
            assert node.op == "output" or "example_value" in node.meta, node


@pytest.mark.parametrize(
    ("steps", "split"),
    [
        ((), True),
        (("block", "norm", "block"), True),
        (("layer norm", "residual", "scale", "bend", "softmax", "centre", "slice", "cast"), True),
        (("block", "gate"), True),
        (("block", "flip"), False),
        (("block", "mean"), False),
        (("block", "positions"), False),  # its gradient would be gathered
        (("block", "narrow"), True),
    ],
)
def test_what_is_work_on_tokens(steps, split):
    simple = found(Steps(*steps))
    assert is_split(simple) is split, simple


def test_all_of_a_blocks_collectives_are_split():
    with fake_world(4):
        gm = captured(Steps("block", "block"))
        simple = fb.simplify(gm, aggressive=True)
    assert_expected_inline(
        lines(counts(gm), counts(simple.graph_module), simple),
        """\
forward: 1 all_gather, 3 all_reduce
backward: 4 all_reduce
forward: 4 all_gather, 3 reduce_scatter
backward: 3 all_gather, 2 all_reduce, 3 reduce_scatter
sink: blocks.0:out, blocks.1:out, blocks.2:out, blocks.1:in.x, blocks.2:in.x, head:in.input
-> tp: split by tokens""",
    )
    assert_expected_inline(
        fb.render(simple.graph_module),
        """\
blocks.0:in.x  f32[2, 8, 8] -> [2, 8, 8]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
blocks.0.down:param.bias  f32[8] -> [8]  tp: R->P
    keep_first(tp=4)  |  grad R: nothing
blocks.0:out  f32[2, 8, 8] -> [2, 2, 8]  tp: P->S(1)
    reduce_scatter(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)
norm:sink.grad  f32[8] -> [8]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4)
blocks.1:in.x  f32[2, 2, 8] -> [2, 8, 8]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad tp: P: reduce_scatter(dim=1, tp=4)
blocks.1.down:param.bias  f32[8] -> [8]  tp: R->P
    keep_first(tp=4)  |  grad R: nothing
blocks.1:out  f32[2, 8, 8] -> [2, 2, 8]  tp: P->S(1)
    reduce_scatter(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)
blocks.2:in.x  f32[2, 2, 8] -> [2, 8, 8]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad tp: P: reduce_scatter(dim=1, tp=4)
blocks.2.down:param.bias  f32[8] -> [8]  tp: R->P
    keep_first(tp=4)  |  grad R: nothing
blocks.2:out  f32[2, 8, 8] -> [2, 2, 8]  tp: P->S(1)
    reduce_scatter(dim=1, tp=4)  |  grad tp: S(1): all_gather(dim=1, tp=4)
head:in.input  f32[2, 2, 8] -> [2, 8, 8]  tp: S(1)->R
    all_gather(dim=1, tp=4)  |  grad tp: P: reduce_scatter(dim=1, tp=4)
head:out  f32[2, 8, 4] -> [2, 8, 16]  tp: S(2)->R
    all_gather(dim=2, tp=4)  |  grad R: slice(dim=2, tp=4)""",
    )


def embedding_cut():
    cut = {"params": {"weight": {"tp": "S(1)"}}, "out_src": {"tp": "S(2)"}, "out_dst": {"tp": "R"}}
    return llama_contracts(False) | {"model.embed_tokens": cut}


def test_llama_has_the_collectives_of_a_plan_with_sequence_parallelism():
    ids = {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}
    with fake_world(4):
        (gm,) = capture(llama(), fb.Plan(mesh_of(tp=4), embedding_cut()), ids)
        simple = fb.simplify(gm, aggressive=True)
    assert [change.name for change in simple.changes] == ["sink"]
    assert_expected_inline(
        lines(counts(gm), counts(simple.graph_module)),
        """\
forward: 2 all_gather, 4 all_reduce
backward: 5 all_reduce
forward: 6 all_gather, 1 all_to_all, 4 reduce_scatter
backward: 4 all_gather, 5 all_reduce, 1 all_to_all, 5 reduce_scatter""",
    )


def llama_steps():
    torch._dynamo.reset()
    reference = llama()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    right = reference(input_ids=ids, labels=ids)
    right.loss.backward()
    model = llama()
    fb.apply(model, fb.Plan(mesh_of(tp=4), embedding_cut()))
    backend = fb.backend(simplify="aggressive")
    out = torch.compile(model, backend=backend)(input_ids=ids, labels=ids)
    out.loss.backward()
    assert_close(out.logits, right.logits, "logits", 1e-5)  # its norms are float32
    assert_gradients(full_gradients(model), reference, 1e-5)
    return [change.name for change in backend.graphs[0].changes]


@pytest.mark.distributed
def test_llama_compiled_gives_the_gradients_of_the_unsharded_one(ranks4):
    assert ranks4.run(llama_steps, timeout=300) == [["sink"]] * 4


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_what_draws_random_numbers_is_not_split(p, caplog):
    caplog.set_level(logging.INFO, "fxboundary")
    assert is_split(found(Steps("block", "drop", dropout=p))) is (p == 0.0)
    told = "the work after blocks.0:out is not split by tokens over tp: 1.167 times the bytes"
    assert (told in caplog.text) is (p == 0.5)


def test_what_is_written_to_is_not_split():
    assert not is_split(found(Steps("write", "block")))


@pytest.mark.parametrize("tokens", [1, 6, 8])
def test_tokens_must_divide(tokens):
    x = torch.zeros(2, tokens, WIDTH, requires_grad=True)
    assert is_split(found(Steps("block", tokens=tokens), x=x)) is (tokens == 8)


def test_tokens_that_another_mesh_dimension_splits_stay():
    split = {"dp": "S(1)", "tp": "R"}
    block = BLOCK | {"in_src": {"x": split}, "in_dst": {"x": split}}
    block |= {"out_src": {"dp": "S(1)", "tp": "P"}, "out_dst": split}
    contracts = {"blocks.*": block, "head": HEAD}
    assert not is_split(found(Steps("block"), contracts, dp=2, tp=2))


def test_a_batch_that_another_mesh_dimension_splits_does_not_matter():
    split = {"dp": "S(0)", "tp": "R"}
    block = BLOCK | {"in_src": {"x": split}, "in_dst": {"x": split}}
    block |= {"out_src": {"dp": "S(0)", "tp": "P"}, "out_dst": split}
    contracts = {"blocks.*": block, "head": HEAD}
    assert is_split(found(Steps("block"), contracts, dp=2, tp=2))


def test_inference_counts_what_is_sent_forward():
    """Without a gradient, whole tokens from elsewhere are sliced for nothing."""
    with torch.no_grad():
        assert is_split(found(Steps("block", "positions"), x=torch.zeros(2, TOKENS, WIDTH)))


def test_not_by_default():
    with fake_world(4):
        assert not is_split(fb.simplify(captured(Steps("block"))))


def test_graphs_without_values_stay():
    with fake_world(4):
        gm = captured(Steps("block"))
        for node in gm.graph.nodes:
            node.meta.pop("example_value", None)
        assert sink(gm) == []
