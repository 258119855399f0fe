"""Plans: contracts by pattern, YAML and JSON, and every refusal with its path."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn as nn
import yaml
from torch.distributed.tensor import Partial, Shard

import fxboundary as fb
from fxboundary.mesh import MeshSpec
from fxboundary.params import resolve_params

MESH = {"dp": 2, "tp": 4}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": MLP()}) for _ in range(2))


def problems_of(build, *args, **kwargs):
    with pytest.raises(fb.ContractError) as raised:
        build(*args, **kwargs)
    return raised.value.problems


def param_ports(contracts, mesh=MESH):
    """Parameter ports and problems of ``Model`` under contracts by exact module name."""
    spec = MeshSpec(tuple(mesh), tuple(mesh.values()))
    matched = {name: fb.Contract(**fields) for name, fields in contracts.items()}
    return resolve_params(Model(), matched, spec, local_params=False)


class TestMatching:
    def test_gives_contracts_by_module_name_in_model_order(self):
        plan = fb.Plan(MESH, {"layers.*.mlp": {"in_dst": {"x": {}}}, "embed": {}})
        assert list(plan.match(Model())) == ["embed", "layers.0.mlp", "layers.1.mlp"]

    def test_later_entries_override_earlier_ones_field_by_field(self):
        plan = fb.Plan(
            MESH,
            {
                "layers.*.mlp": {"in_dst": {"x": {"tp": "R"}}, "params": {"up.*": {"tp": "S(0)"}}},
                "layers.1.mlp": {"in_dst": {"x": {"tp": "S(1)"}}},
            },
        )
        matched = plan.match(Model())
        assert matched["layers.0.mlp"].in_dst["x"]["tp"].is_replicate()
        assert matched["layers.1.mlp"].in_dst["x"]["tp"] == Shard(1)
        assert matched["layers.1.mlp"].params == matched["layers.0.mlp"].params

    def test_a_later_entry_may_speak_of_an_earlier_ones_ports(self):
        plan = fb.Plan(
            MESH,
            {
                "layers.*.mlp": {"in_dst": {"x": {}}, "out_src": {"y": {}}, "out_dst": {"y": {}}},
                "layers.1.mlp": {"in_grad": {"x": {"tp": "P"}}, "out_names": {"y": 1}},
            },
        )
        matched = plan.match(Model())["layers.1.mlp"]
        assert matched.input_layouts("x", ("tp",))[2] == (Partial(),)
        assert matched.out_names == {"y": 1}

    def test_contracts_that_do_not_fit_together_are_refused(self):
        plan = fb.Plan(
            MESH,
            {
                "**.mlp": {"out_src": {"tp": "P"}, "in_dst": {"x": {}}},
                "layers.0.mlp": {"out_dst": {"tp": "P(max)"}},
                "layers.1.mlp": {"out_dst": {}, "out_names": ["y"], "in_grad": {"z": {}}},
            },
        )
        assert problems_of(plan.match, Model()) == [
            "layers.1.mlp.out_names: does not name the output 'output'; it names y",
            "layers.0.mlp.out_dst.output: tp: P → P(max) has no meaning; "
            "reduce to R or S(dim) first",
        ]
        plan = fb.Plan(MESH, {"**.mlp": {"in_grad": {"z": {}}}})
        assert problems_of(plan.match, Model()) == [
            f"layers.{i}.mlp.in_grad.z: the contract has no such port" for i in range(2)
        ]

    def test_patterns_that_match_nothing_list_near_misses_all_together(self):
        plan = fb.Plan(MESH, {"embd": {}, "layer.*.mlp": {}, "layers.*.mlp": {}, "**.attn": {}})
        assert problems_of(plan.match, Model()) == [
            "embd: matches no module (did you mean 'embed'?)",
            "layer.*.mlp: matches no module (did you mean 'layers.*.mlp' or 'layers.*.mlp.up' "
            "or 'layers.*.mlp.down'?)",
            "**.attn: matches no module",
        ]

    def test_the_empty_pattern_is_the_model_itself(self):
        assert list(fb.Plan(MESH, {"": {}}).match(Model())) == [""]


class TestRefusals:
    def test_carry_the_path_and_come_all_together(self):
        problems = problems_of(
            fb.Plan,
            MESH,
            {
                "a.*": {"in_dst": {"x": {"tp": "shrd(1)"}}, "in_dts": {}},
                "b": {"in_src": {"x": {"tpp": "R"}}, "params": {"w": {"pp": "R"}}},
                "": {"out_src": {"tp": "P"}, "out_dst": {"tp": "P(max)"}},
            },
        )
        assert [problem.split(": ")[0] for problem in problems] == [
            "a.*.in_dts",
            "a.*.in_dst.x.tp",
            "b.in_src.x.tpp",
            "b.params.w.pp",
            '"".out_dst.output',
        ]
        assert problems[1].startswith("a.*.in_dst.x.tp: cannot parse 'shrd(1)': write S(dim), ")
        assert problems[2].endswith(
            "no mesh dimension 'tpp'; the mesh has dp, tp (did you mean 'tp'?)"
        )

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            (
                {"in_src": {"x": {"tp": "P"}}, "in_dst": {"x": {"tp": "P(max)"}}},
                "in_dst.x: tp: P → P(max) has no meaning; reduce to R or S(dim) first",
            ),
            (
                {"in_src": {"x": {"tp": "P"}}, "in_dst": {"x": {"tp": "P(min)"}}},
                "in_dst.x: tp: P → P(min) has no meaning; reduce to R or S(dim) first",
            ),
            (
                {"out_src": {"tp": "P(max)"}, "out_dst": {"tp": "P"}},
                "out_dst.output: tp: P(max) → P has no meaning; reduce to R or S(dim) first",
            ),
            (
                {"in_src": {"x": {"dp": "P(max)", "tp": "P"}}},
                "in_dst.x: dp: P(max), tp: P: max and sum give another value in another order; "
                "reduce one of them first",
            ),
            (
                {"in_dst": {"x": {"tp": "S(0)"}}, "in_grad": {"x": {"tp": "P"}}},
                "in_dst.x: tp: the gradient of a value placed S(0) cannot arrive as P; write S(0)",
            ),
            (
                {"in_dst": {"x": {"tp": "P"}}, "in_grad": {"x": {"tp": "P"}}},
                "in_dst.x: tp: the gradient of a value placed P cannot arrive as P; write R",
            ),
            (
                {"in_dst": {"x": {}}, "in_grad": {"x": {"tp": "S(1)"}}},
                "in_dst.x: tp: the gradient of a value placed R cannot arrive as S(1); "
                "write P or P(avg) or R",
            ),
            (
                {"in_dst": {"hidden": {}}, "in_grad": {"hiden": {}}},
                "in_grad.hiden: the contract has no such port (did you mean 'hidden'?)",
            ),
            (
                {"in_dst": {"hidden": {}}, "in_sizes": {"hiden": {1: 5}}},
                "in_sizes.hiden: the contract has no such port (did you mean 'hidden'?)",
            ),
            (
                {"out_src": {}, "out_dst": {"tp": "R"}, "out_grad": {"y": {"tp": "R"}}},
                "out_grad.y: the contract has no such port",
            ),
            (
                {"out_src": {}, "out_dst": {"tp": "R"}, "out_sizes": {"y": {0: 3}}},
                "out_sizes.y: the contract has no such port",
            ),
        ],
    )
    def test_meaningless_contracts_when_the_plan_is_built(self, fields, problem):
        assert problems_of(fb.Plan, MESH, {"a": fields}) == [f"a.{problem}"]

    @pytest.mark.parametrize(
        ("mesh", "problem"),
        [
            ({"tp": 0}, "mesh.tp: 0 is not a positive size"),
            ({"tp": "2"}, "mesh.tp: '2' is not a positive size"),
            ({"tp": True}, "mesh.tp: True is not a positive size"),
            (3, "mesh: expected names and sizes, as in tp: 2, found 3"),
        ],
    )
    def test_of_a_mesh_name_what_was_found(self, mesh, problem):
        assert problems_of(fb.Plan, mesh, {}) == [problem]

    def test_something_that_is_no_contract(self):
        problems = problems_of(fb.Plan, MESH, {"a": "R", "b": {"in_dst": {"x": {"tp": "?"}}}})
        assert problems[0] == "a: expected a contract's fields, found 'R'"
        assert problems[1].startswith("b.in_dst.x.tp: cannot parse '?'")


class TestParameters:
    def test_that_do_not_exist_list_near_misses(self):
        _, problems = param_ports(
            {"layers.0.mlp": {"params": {"up.wieght": {"tp": "S(0)"}}, "stacked": {"qkv": 3}}}
        )
        assert problems == [
            "layers.0.mlp.params.up.wieght: no such parameter "
            "(did you mean 'up.weight' or 'down.weight'?)",
            "layers.0.mlp.stacked.qkv: no such parameter",
        ]

    def test_sharded_on_a_dimension_they_lack_are_refused_by_exact_name(self):
        _, problems = param_ports(
            {"layers.0.mlp": {"params": {"scale": {"tp": "S(0)"}, "up.bias": {"tp": "S(1)"}}}}
        )
        assert problems == [
            "layers.0.mlp.params.scale: "
            "S(0) shards a dimension that a tensor of 0 dimensions does not have",
            "layers.0.mlp.params.up.bias: "
            "S(1) shards a dimension that a tensor of 1 dimensions does not have",
        ]

    def test_lacking_the_dimension_stay_whole_under_a_pattern(self):
        ports, problems = param_ports({"layers.0.mlp": {"params": {"**": {"tp": "S(0)"}}}})
        assert problems == []
        assert not ports["layers.0.mlp", "scale"].is_sharded
        assert ports["layers.0.mlp.up", "bias"].is_sharded
        assert ports["layers.0.mlp.up", "weight"].is_sharded

    def test_not_named_are_whole_with_a_partial_gradient_where_work_is_shared(self):
        ports, _ = param_ports({"layers.0.mlp": {"params": {"up.*": {"tp": "S(0)"}}}})
        scale = ports["layers.0.mlp", "scale"]
        assert [p.is_replicate() for p in scale.used] == [True, True]
        assert [p.is_partial() for p in scale.grad] == [False, True]

    def test_of_an_embedding_whose_output_is_cut_have_replicated_gradients(self):
        ports, _ = param_ports({"embed": {"out_src": {}, "out_dst": {"tp": "S(1)"}}})
        assert not any(p.is_partial() for p in ports["embed", "weight"].grad)

    def test_gathered_at_use_get_a_partial_gradient_on_that_dimension(self):
        ports, _ = param_ports({"embed": {"params": {"weight": {"dp": "S(0) -> R"}}}})
        assert [p.is_partial() for p in ports["embed", "weight"].grad] == [True, False]


CONTRACTS = {
    "layers.*.mlp": {
        "in_src": {"x": {"tp": "S(1)"}},
        "in_dst": {"x": {"tp": "R"}},
        "out_src": {"tp": "P"},
        "out_dst": {"tp": "S(1)"},
        "params": {"up.*": {"tp": "S(0)"}, "down.bias": {"tp": "R -> P"}},
        "in_sizes": {"x": {1: 5}},
        "stacked": {"up.weight": [6, 2]},
    },
    "embed": {},
}


class TestFiles:
    def test_yaml_is_read_back(self):
        plan = fb.Plan(MESH, CONTRACTS)
        again = fb.Plan.from_yaml(plan.to_yaml())
        assert again.contracts == plan.contracts
        assert again.spec == plan.spec
        assert again.to_yaml() == plan.to_yaml()

    def test_json_has_the_same_schema(self, tmp_path):
        path = tmp_path / "plan.json"
        text = json.dumps({"mesh": MESH, "modules": CONTRACTS}, indent=1)
        path.write_text(text)
        plan = fb.Plan(MESH, CONTRACTS)
        assert fb.Plan.from_yaml(path).to_yaml() == plan.to_yaml()
        assert fb.Plan.from_yaml(str(path)).to_yaml() == plan.to_yaml()
        assert fb.Plan.from_yaml(text).to_yaml() == plan.to_yaml()

    def test_a_given_mesh_overrides_the_files(self):
        text = yaml.safe_dump({"mesh": {"tp": 2}, "modules": CONTRACTS})
        assert str(fb.Plan.from_yaml(text).spec) == "tp=2"
        assert str(fb.Plan.from_yaml(text, mesh={"tp": 8}).spec) == "tp=8"
        assert str(fb.Plan.from_yaml("mesh: dp=2,tp=4\nmodules: {}\n").spec) == "dp=2,tp=4"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (
                "mesh: {tp: 2}\nmodules:\n  layers.*.mlp: {in_dst: {x: {tp: shrd(1)}}}\n",
                "layers.*.mlp.in_dst.x.tp: cannot parse 'shrd(1)': write ",
            ),
            ("mesh: {tp: 2}\nmodules: [a]\n", "expected the key 'modules' with contracts by "),
            ("- a\n", "expected the key 'modules' with contracts by pattern"),
            ("mesh: {tp: 2}\nmodules: {a: [1]}\n", "a: expected a contract's fields"),
            (
                "mesh: {tp: 2}\nmodules: {}\nmodule: {}\n",
                "module: unknown key (did you mean 'modules'?); a plan has mesh and modules",
            ),
            ("modules: {}\n", "no mesh: give one, or write 'mesh: {tp: 2}'"),
            ("mesh: [2]\nmodules: {}\n", "mesh: expected names and sizes, as in tp: 2, found [2]"),
            ("mesh: {tp: -1}\nmodules: {}\n", "mesh.tp: -1 is not a positive size"),
            ("mesh: tp\nmodules: {}\n", "mesh 'tp': write name=size, as in dp=2,tp=4"),
            ("mesh: {tp: 2\n", "not YAML: "),
            (
                "mesh: {tp: 2}\nmodules:\n  a: {in_dst: {}}\n  a: {in_src: {}}\n",
                "not YAML: the key 'a' is given twice",
            ),
        ],
    )
    def test_problems_carry_the_files_name(self, tmp_path, text, problem):
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        (from_file,) = problems_of(fb.Plan.from_yaml, path)
        assert from_file.startswith(f"{path}: {problem}")
        (from_text,) = problems_of(fb.Plan.from_yaml, text)
        assert from_text.startswith(problem)

    def test_a_path_to_no_file_is_no_text(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            fb.Plan.from_yaml(str(tmp_path / "absent.yaml"))


def test_averages_of_unequal_shards_are_refused():
    """Case C13, pytorch#162692: an average of averages."""
    contract = {
        "in_src": {"x": {"tp": "S(0)"}},
        "in_dst": {"x": {"tp": "S(0)"}},
        "out_src": {"tp": "P(avg)"},
        "out_dst": {"tp": "R"},
    }
    for size in (3, 5):
        (problem,) = problems_of(
            fb.Plan, {"tp": 2}, {"pool": {**contract, "in_sizes": {"x": {0: size}}}}
        )
        assert problem == (
            f"pool.out_src.output.tp: P(avg) over shards of x that are unequal ({size} over tp=2); "
            f"make it P, and divide each rank's sum by {size}"
        )
    fb.Plan({"tp": 2}, {"pool": {**contract, "in_sizes": {"x": {0: 4}}}})


def test_numbered_cuts_of_two_dimensions_that_look_like_one():
    layout = {"x": {"dp": "S(0)[0]", "tp": "S(-1)[0]"}}
    fb.Plan({"dp": 2, "tp": 2}, {"m": {"in_src": layout, "in_dst": layout}})
    twice = {"x": {"dp": "S(0)[1]", "tp": "S(0)[1]"}}
    (problem,) = problems_of(fb.Plan, {"dp": 2, "tp": 2}, {"m": {"in_src": twice}})
    assert problem == "m.in_dst.x: S(0)[1],S(0)[1]: two cuts of dimension 0 have the same number"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("modules: {a: []}", "a: expected a contract's fields, found []"),
        ("modules: {a: false}", "a: expected a contract's fields, found False"),
        ("modules: {a: {in_dst: {no: {tp: R}}}}", "a key is read as a bool; put it into quotes"),
        ("modules:\n  ? [a, b]\n  : {}", "a key is read as a seq; put it into quotes"),
    ],
)
def test_yaml_that_means_something_else_is_refused(text, problem):
    (found,) = problems_of(fb.Plan.from_yaml, f"mesh: {{tp: 2}}\n{text}\n")
    assert problem in found


@pytest.mark.parametrize("name", ["", "a,b", "tp=x", "tp;sum", "t#p"])
def test_names_that_a_mesh_cannot_be_told_by_are_refused(name):
    (problem,) = problems_of(fb.Plan, {name: 2}, {})
    assert problem.startswith(f"mesh: {name!r} is no name for a mesh dimension")


def test_a_parameters_gradient_without_a_meaning_is_refused_when_the_plan_is_built():
    contract = {"params": {"w": {"tp": "S(0)"}}, "param_grad": {"w": {"tp": "R"}}}
    (problem,) = problems_of(fb.Plan, {"tp": 2}, {"m": contract})
    assert problem == (
        "m.params.w: tp: the gradient of a value placed S(0) cannot arrive as R; write S(0)"
    )
