"""Contracts: what is read, what is refused, and where a gradient arrives when nothing is said."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import fxboundary as fb

R, P = Replicate(), Partial()


def test_placements_and_text_make_equal_contracts():
    written = fb.Contract(
        in_src={"x": {"tp": "shard(1)"}}, in_dst={"x": {"tp": "replicate"}}, out_src={"tp": "p"}
    )
    built = fb.Contract(
        in_src={"x": {"tp": Shard(1)}}, in_dst={"x": {"tp": R}}, out_src={"output": {"tp": P}}
    )
    assert written == built
    assert written.key == built.key


def test_a_bare_output_layout_means_the_one_output():
    contract = fb.Contract(out_src={"tp": "P"}, out_dst={"tp": "R"}, out_grad={"tp": "R"})
    assert contract.out_src == {"output": {"tp": P}}
    assert contract.out_dst == {"output": {"tp": R}}
    assert contract.out_grad == {"output": {"tp": R}}
    assert contract.output_names() == ["output"]
    assert fb.Contract(out_src={}, out_dst={}).output_names() == []


def test_outputs_need_both_sides():
    assert fb.Contract(out_dst={"tp": "R"}).output_names() == []
    assert fb.Contract(out_src={"tp": "P"}).output_names() == []
    assert fb.Contract(out_src={"tp": "P"}, out_dst={}).output_names() == ["output"]


def test_inputs_of_either_side_are_sorted():
    contract = fb.Contract(in_src={"z": {}, "b": {}}, in_dst={"a": {}, "z": {}})
    assert contract.input_names() == ["a", "b", "z"]
    assert fb.Contract().input_names() == []


def test_parameters_are_stored_and_used():
    contract = fb.Contract(
        params={
            "same": {"tp": "S(0)"},
            "arrow": {"tp": "R -> P"},
            "sign": {"dp": "S(0)→R"},
            "pair": {"tp": (Shard(1), R)},
        }
    )
    assert contract.params == {
        "same": {"tp": (Shard(0), Shard(0))},
        "arrow": {"tp": (R, P)},
        "sign": {"dp": (Shard(0), R)},
        "pair": {"tp": (Shard(1), R)},
    }
    assert contract.to_dict()["params"] == {
        "same": {"tp": "S(0)"},
        "arrow": {"tp": "R -> P"},
        "sign": {"dp": "S(0) -> R"},
        "pair": {"tp": "S(1) -> R"},
    }


FULL = fb.Contract(
    in_src={"x": {"dp": "S(0)", "tp": "S(1)"}, "mask": {}},
    in_dst={"x": {"dp": "S(0)"}},
    out_src={"h": {"tp": "P(avg)"}, "aux": {}},
    out_dst={"h": {"tp": "S(-1)"}, "aux": {}},
    out_names={"h": 1, "aux": 0},
    params={"w": {"tp": "S(0)"}, "*.bias": {"tp": "R -> P"}},
    in_grad={"x": {"tp": "P"}},
    out_grad={"h": {"tp": "S(-1)"}},
    param_grad={"w": {"dp": "P"}},
    in_sizes={"x": {1: 5}},
    out_sizes={"h": {-1: 50257}},
    stacked={"qkv": 3, "gate_up": [4, 2]},
    param_units={"w": 64},
)


def test_the_plain_form_is_read_back():
    assert fb.Contract.from_dict(FULL.to_dict()) == FULL
    assert fb.Contract.from_dict({}) == fb.Contract()
    assert fb.Contract().to_dict() == {}


def test_given_fields_override_whole_fields():
    later = fb.Contract(in_dst={"x": {"tp": "S(2)"}}, params={})
    merged = FULL.overridden_by(later)
    assert merged.in_dst == {"x": {"tp": Shard(2)}}
    assert merged.params == {}
    assert merged.in_src == FULL.in_src
    assert merged.out_names == FULL.out_names


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"in_dst": {"x": {"tp": "shrd(1)"}}}, "in_dst.x.tp: cannot parse 'shrd(1)': write "),
        ({"in_src": {"x": {"tp": None}}}, "in_src.x.tp: cannot parse None (NoneType): write "),
        ({"in_src": {"x": "S(0)"}}, "in_src.x: expected a layout such as {tp: S(1)}, found 'S(0)'"),
        ({"in_src": "x"}, "in_src: expected layouts by port name, found 'x'"),
        ({"out_dst": {"tp": "T"}}, "out_dst.tp: cannot parse 'T': write "),
        ({"out_dst": {"tp": "R", "h": {}}}, "out_dst.tp: expected a layout such as {tp: S(1)}, "),
        ({"out_dst": ["h"]}, "out_dst: expected layouts by port name, found ['h']"),
        ({"params": {"w": {"tp": "P"}}}, "params.w.tp: a parameter cannot be stored partial: "),
        ({"params": {"w": {"tp": "S(0) ->"}}}, "params.w.tp: cannot parse '': write "),
        ({"params": {"w": "S(0)"}}, "params.w: expected a layout such as {tp: S(0)}"),
        ({"params": ["w"]}, "params: expected layouts by parameter name, found ['w']"),
        ({"out_names": "h"}, "out_names: expected a list of names or {name: index}, found 'h'"),
        ({"out_names": {"h": -1}}, "out_names.h: -1 is not an output's index"),
        ({"out_names": {"h": "0"}}, "out_names.h: '0' is not an output's index"),
        ({"out_names": {"h": True}}, "out_names.h: True is not an output's index"),
        ({"in_sizes": {"x": 5}}, "in_sizes.x: expected {dimension: global size}, found 5"),
        ({"in_sizes": {"x": {"a": 5}}}, "in_sizes.x: expected {dimension: global size}, found {"),
        ({"out_sizes": 5}, "out_sizes: expected global sizes by port name, found 5"),
        ({"stacked": {"w": 0}}, "stacked.w: expected a count or sizes of parts, found 0"),
        ({"stacked": {"w": "3"}}, "stacked.w: expected a count or sizes of parts, found '3'"),
        ({"stacked": 3}, "stacked: expected parts by parameter name, found 3"),
        ({"param_units": {"w": 0}}, "param_units.w: expected a positive size, found 0"),
        ({"param_units": 4}, "param_units: expected sizes by parameter name, found 4"),
        ({"in_dts": {}}, "in_dts: unknown field (did you mean 'in_dst' or "),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_path(fields, problem):
    with pytest.raises(fb.ContractError) as raised:
        fb.Contract.from_dict(fields)
    assert len(raised.value.problems) == 1
    assert raised.value.problems[0].startswith(problem)


def test_all_problems_are_reported_together():
    with pytest.raises(fb.ContractError) as raised:
        fb.Contract.from_dict(
            {
                "in_dts": {},
                "in_src": {"x": {"tp": "Q", "dp": "S"}},
                "params": {"w": {"tp": "P"}},
                "out_names": 3,
            }
        )
    paths = [problem.split(":")[0] for problem in raised.value.problems]
    assert paths == ["in_dts", "in_src.x.tp", "in_src.x.dp", "out_names", "params.w.tp"]
    assert str(raised.value).startswith("5 problems:\n  in_dts: ")


def test_out_names_must_name_every_declared_output():
    sides = {"out_src": {"logits": {"tp": "P"}}, "out_dst": {"logits": {}}}
    assert fb.Contract(**sides, out_names=["aux", "logits"]).out_names == {"aux": 0, "logits": 1}
    with pytest.raises(fb.ContractError) as raised:
        fb.Contract(**sides, out_names=["aux", "logit"])
    assert str(raised.value) == (
        "out_names: does not name the output 'logits' (did you mean 'logit'?); it names aux, logit"
    )
    with pytest.raises(fb.ContractError, match="does not name the output 'output'; it names y"):
        fb.Contract(out_src={"tp": "P"}, out_dst={"tp": "R"}, out_names=["y"])


class TestDefaultGradients:
    def of_input(self, names=("tp",), **fields):
        contract = fb.Contract(in_dst={"x": {}}, **fields)
        return contract.input_layouts("x", names)[2]

    def test_is_replicated_where_the_region_repeats_its_work(self):
        assert self.of_input() == (R,)
        assert self.of_input(params={"w": {"tp": "R"}}) == (R,)

    def test_is_partial_where_a_parameter_is_sharded(self):
        assert self.of_input(params={"w": {"tp": "S(0)"}}) == (P,)
        assert self.of_input(params={"w": {"tp": "S(0) -> R"}}) == (P,)
        assert self.of_input(params={"b": {"tp": "R -> P"}}) == (P,)

    def test_is_partial_only_on_the_mesh_dimensions_that_share(self):
        found = self.of_input(("dp", "tp"), params={"w": {"dp": "R", "tp": "S(0)"}})
        assert found == (R, P)

    def test_is_partial_where_another_inside_port_is_sharded(self):
        contract = fb.Contract(in_dst={"x": {}, "cache": {"tp": "S(1)"}})
        assert contract.input_layouts("x", ("tp",))[2] == (P,)
        assert contract.input_layouts("cache", ("tp",))[2] == (Shard(1),)
        assert self.of_input(out_src={"tp": "S(2)"}, out_dst={}) == (P,)

    def test_of_an_embedding_whose_output_is_cut_stays_replicated(self):
        contract = fb.Contract(
            in_dst={"ids": {}}, out_src={"tp": "R"}, out_dst={"tp": "S(1)"}, params={"w": {}}
        )
        assert contract.input_layouts("ids", ("tp",))[2] == (R,)
        assert contract.shared_dims() == frozenset()

    def test_of_a_partial_value_is_replicated(self):
        contract = fb.Contract(in_dst={"x": {"tp": "P"}}, params={"w": {"tp": "S(0)"}})
        assert contract.input_layouts("x", ("tp",))[2] == (R,)

    def test_gives_way_to_what_is_declared(self):
        shared = {"params": {"w": {"dp": "S(0)", "tp": "S(0)"}}}
        assert self.of_input(("dp", "tp"), in_grad={"x": {"tp": "R"}}, **shared) == (P, R)
        assert self.of_input(in_grad={"x": {"tp": "P"}}) == (P,)

    def test_of_an_output_is_replicated_unless_declared(self):
        sides = {"out_src": {"tp": "P"}, "out_dst": {"tp": "R"}, "params": {"w": {"tp": "S(1)"}}}
        assert fb.Contract(**sides).output_layouts("output", ("tp",))[2] == (R,)
        declared = fb.Contract(**sides, out_grad={"tp": "P"})
        assert declared.output_layouts("output", ("tp",))[2] == (P,)


def test_a_reduction_dtype_is_read_and_written():
    contract = fb.Contract(reduce_dtype=torch.float32)
    assert contract == fb.Contract(reduce_dtype="float32") == fb.Contract(reduce_dtype="float")
    assert contract.to_dict() == {"reduce_dtype": "float32"}
    for bad in ("int8", "flot32", "float8_e4m3fn", 32):
        with pytest.raises(fb.ContractError, match="reduce_dtype: expected a floating-point dtype"):
            fb.Contract(reduce_dtype=bad)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"out_names": {"y": 0, "z": 0}}, "out_names: two outputs have one name or one index"),
        ({"out_names": ["y", "y"]}, "out_names: two outputs have one name or one index"),
        ({"in_sizes": {"x": {"--1": 3}}}, "in_sizes.x: expected {dimension: global size}"),
        ({"in_sizes": {"x": {True: 3}}}, "in_sizes.x: expected {dimension: global size}"),
        ({"in_sizes": {"x": {0: 3, "0": 4}}}, "in_sizes.x: a dimension is given twice"),
        ({"stacked": {"w": True}}, "stacked.w: expected a count or sizes of parts"),
        ({"stacked": {"w": [-1, 2]}}, "stacked.w: expected a count or sizes of parts"),
        ({"in_src": {"x": {}}, "in_backward": {"x": "keep"}}, "in_backward.x: 'keep' is neither"),
        ({"in_src": {"x": {}}, "in_backward": {"y": "save"}}, "in_backward.y: no layout is decl"),
        ({"param_backward": "save"}, "param_backward: expected save or recompute by name"),
        ({"param_units": {"w": True}}, "param_units.w: expected a positive size"),
        ({"in_dst": {"x": {"tp": "S(99999999999999999999)"}}}, "in_dst.x.tp: cannot parse"),
    ],
)
def test_values_that_look_right_are_refused(fields, problem):
    with pytest.raises(fb.ContractError) as raised:
        fb.Contract(**fields)
    assert any(line.startswith(problem) for line in raised.value.problems)
