"""Hugging Face's Llama with a contract for each projection: what simplifying makes of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from models import llama, llama_contracts, mesh_of
from ranks import fake_world

import fxboundary as fb
from fxboundary.graph.find import find_ports
from fxboundary.static import capture

COLUMN = {"params": {"weight": {"tp": "S(0)"}}}
ROW = {"params": {"weight": {"tp": "S(1)"}}, "out_src": {"tp": "P"}}


def by_projection(sequence_parallel):
    """As ``llama_contracts``, but each linear layer is contracted by itself where it can be."""
    outside = {"tp": "S(1)" if sequence_parallel else "R"}
    column = COLUMN | {"in_src": {"input": outside}, "in_dst": {"input": {"tp": "R"}}}
    row = ROW | {"out_dst": outside}
    contracts = llama_contracts(sequence_parallel)
    del contracts["model.layers.*.mlp"]
    contracts["model.layers.*.mlp.gate_proj"] = contracts["model.layers.*.mlp.up_proj"] = column
    contracts["model.layers.*.mlp.down_proj"] = row
    if not sequence_parallel:  # under it attention reads the length of the sequence, gathered
        del contracts["model.layers.*.self_attn"]
        contracts["model.layers.*.self_attn.[qkv]_proj"] = column
        contracts["model.layers.*.self_attn.o_proj"] = row
    return contracts


def counts(gm):
    kinds = {"forward": Counter(), "backward": Counter()}
    for port in find_ports(gm):
        for direction, found in kinds.items():
            steps = getattr(port.transition, direction)
            found.update(step.kind for step in steps if step.is_collective)
    return "; ".join(
        f"{direction}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()))
        for direction, found in kinds.items()
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_contract_for_each_projection_costs_no_more_than_one_for_the_block(sequence_parallel):
    with fake_world(4):
        ids = torch.zeros(1, 16, dtype=torch.int64)
        plan = fb.Plan(mesh_of(tp=4), by_projection(sequence_parallel))
        (gm,) = capture(llama(), plan, {"input_ids": ids})
        simple = fb.simplify(gm)
        (block,) = capture(
            llama(), fb.Plan(mesh_of(tp=4), llama_contracts(sequence_parallel)), {"input_ids": ids}
        )
    passes = dict(Counter(change.name for change in simple.changes))
    found = f"{passes}\n{counts(gm)}\n{counts(simple.graph_module)}"
    assert counts(simple.graph_module) == counts(fb.simplify(block).graph_module)
    if sequence_parallel:
        assert_expected_inline(
            found,
            """\
{'share': 2}
forward: 8 all_gather, 4 reduce_scatter; backward: 5 all_gather, 5 all_reduce, 7 reduce_scatter
forward: 6 all_gather, 4 reduce_scatter; backward: 5 all_gather, 5 all_reduce, 5 reduce_scatter""",
        )
    else:
        assert_expected_inline(
            found,
            """\
{'share': 4}
forward: 1 all_gather, 4 all_reduce; backward: 11 all_reduce
forward: 1 all_gather, 4 all_reduce; backward: 5 all_reduce""",
        )
