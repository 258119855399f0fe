"""``fxboundary explain`` and the errors of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from models import Stack

import fxboundary.demo.launch as launch
from fxboundary.cli import main
from fxboundary.demo.examples import example_path

PLAN = """
mesh: {tp: 2}
modules:
  layers.0:
    in_src: {x: {tp: R}}
    in_dst: {x: {tp: S(1)}}
  layers.*.norm:
    in_src: {x: {tp: S(1)}}
    in_dst: {x: {tp: S(1)}}
  layers.*.mlp:
    in_src: {x: {tp: S(1)}}
    in_dst: {x: {tp: R}}
    out_src: {tp: P}
    out_dst: {tp: S(1)}
    params: {up.*: {tp: S(0)}, down.weight: {tp: S(1)}, down.bias: {tp: R -> P}}
"""


def stack():
    return Stack()


def stack_and_input():
    return Stack(), torch.randn(2, 8, 8)


def not_a_module():
    return 3


def fails():
    raise ValueError("no such checkpoint")


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Stack(layers=1).layers[0].mlp

    def forward(self, x, *, again):
        return self.mlp(self.mlp(x)) + again


def shared_and_kwargs():
    return Shared(), {"x": torch.randn(4, 8), "again": torch.zeros(4, 8)}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """``run("explain", PLAN text, *arguments)``: exit status, output, errors."""
    monkeypatch.setenv("COLUMNS", "92")
    monkeypatch.chdir(Path(__file__).parent)

    def call(command, plan, *arguments):
        path = tmp_path / "plan.yaml"
        path.write_text(plan)
        status = main([command, str(path), *arguments])
        out, err = capsys.readouterr()
        return status, "\n".join(line.rstrip() for line in out.splitlines()), err

    return call


def test_explain_shows_one_row_per_port_of_a_pattern_and_fractions(run):
    status, out, err = run("explain", PLAN, "--mesh", "dp=2,tp=4")
    assert (status, err) == (0, "")
    assert_expected_inline(
        out,
        """\
plan.yaml on dp=2,tp=4
 ─────────────────────────────────────────────────────────────────────────────
 port                 layout         → forward, ← backward                sent
 ─────────────────────────────────────────────────────────────────────────────
 layers.0
   in.x               tp: R→S(1)     → slice(dim=1, tp=4)
                      grad tp: S(1)  ← all_gather(dim=1, tp=4)      3/4 tensor
 ─────────────────────────────────────────────────────────────────────────────
 layers.*.norm
   in.x               tp: S(1)       → nothing
                      grad tp: S(1)  ← nothing
   param.*            R              → nothing
                      grad tp: P     ← all_reduce(tp=4)             3/2 tensor
 ─────────────────────────────────────────────────────────────────────────────
 layers.*.mlp
   in.x               tp: S(1)→R     → all_gather(dim=1, tp=4)      3/4 tensor
                      grad tp: P     ← reduce_scatter(dim=1, tp=4)  3/4 tensor
   out                tp: P→S(1)     → reduce_scatter(dim=1, tp=4)  3/4 tensor
                      grad tp: S(1)  ← all_gather(dim=1, tp=4)      3/4 tensor
   param.up.*         tp: S(0)       → nothing
                      grad tp: S(0)  ← nothing
   param.down.weight  tp: S(1)       → nothing
                      grad tp: S(1)  ← nothing
   param.down.bias    tp: R→P        → keep_first(tp=4)
                      grad R         ← nothing
 ─────────────────────────────────────────────────────────────────────────────
 total                               → 2 collectives
                                     ← 4 collectives
 ─────────────────────────────────────────────────────────────────────────────
grad: the layout in which the gradient arrives. sent: by one rank, ring algorithms, as a
part of the whole tensor. No program sends less. Collectives: of one matching module.""",
    )


def test_explain_with_a_model_shows_shapes_bytes_and_merged_layers(run):
    status, out, err = run("explain", PLAN, "--model", "test_cli:stack_and_input")
    assert (status, err) == (0, "")
    assert_expected_inline(
        out,
        """\
plan.yaml on tp=2
 ──────────────────────────────────────────────────────────────────────────────────────────
 port                           layout         → forward, ← backward            sent   time
 ──────────────────────────────────────────────────────────────────────────────────────────
 layers.0
   in.x                         tp: R→S(1)     → slice(dim=1, tp=2)
   f32[2, 8, 8] → [2, 4, 8]     grad tp: S(1)  ← all_gather(dim=1, tp=2)       256 B  10 µs
 ──────────────────────────────────────────────────────────────────────────────────────────
 layers.*.norm
   in.x × 2                     tp: S(1)       → nothing
                                grad tp: S(1)  ← nothing
   param.weight × 2             R              → nothing
   f32[8]                       grad tp: P     ← all_reduce(tp=2)               32 B  10 µs
 ──────────────────────────────────────────────────────────────────────────────────────────
 layers.*.mlp
   in.x × 2                     tp: S(1)→R     → all_gather(dim=1, tp=2)       256 B  10 µs
   f32[2, 4, 8] → [2, 8, 8]     grad tp: P     ← reduce_scatter(dim=1,         256 B  10 µs
                                               tp=2)
   out × 2                      tp: P→S(1)     → reduce_scatter(dim=1,         256 B  10 µs
                                               tp=2)
   f32[2, 8, 8] → [2, 4, 8]     grad tp: S(1)  ← all_gather(dim=1, tp=2)       256 B  10 µs
   param.up.weight × 2          tp: S(0)       → nothing
   f32[8, 8]                    grad tp: S(0)  ← nothing
   param.up.bias × 2            tp: S(0)       → nothing
   f32[8]                       grad tp: S(0)  ← nothing
   param.down.weight × 2        tp: S(1)       → nothing
   f32[8, 8]                    grad tp: S(1)  ← nothing
   param.down.bias × 2          tp: R→P        → keep_first(tp=2)
   f32[8]                       grad R         ← nothing
 ──────────────────────────────────────────────────────────────────────────────────────────
 total                                         → 4 collectives               1.0 KiB  40 µs
   parameters 1.2 KiB of 2.2                   ← 7 collectives               1.3 KiB  70 µs
 KiB
 ──────────────────────────────────────────────────────────────────────────────────────────
grad: the layout in which the gradient arrives. sent: by one rank, ring algorithms. No
program sends less. time: by the cost model, links inside and across nodes of 8. Most memory
that a program needs besides its input: 1.0 KiB. Shapes are rank 0's, before → after the
port.""",
    )
    assert not dist.is_initialized()


def test_explain_without_inputs_knows_parameters_only(run):
    _, out, _ = run("explain", PLAN, "--model", "test_cli:stack")
    assert "f32[8, 8]" in out
    assert "1/2 tensor" in out
    assert "returns no example inputs" in out


def test_a_module_that_is_called_twice_crosses_its_ports_twice(run):
    plan = """
modules:
  mlp:
    in_src: {x: {tp: S(0)}}
    in_dst: {x: {tp: R}}
    out_src: {tp: P}
    out_dst: {tp: S(0)}
    params: {up.*: {tp: S(0)}, down.weight: {tp: S(1)}, down.bias: {tp: R -> P}}
"""
    _, out, _ = run("explain", plan, "--mesh", "tp=2", "--model", "test_cli:shared_and_kwargs")
    assert "in.x × 2" in out
    assert "out × 2" in out
    assert "4 collectives" in out


def test_explain_of_a_dimension_counted_from_the_right_does_not_invent_a_rank(run):
    plan = "modules: {head: {out_src: {tp: S(-1)}, out_dst: {tp: R}}}"
    _, out, _ = run("explain", plan, "--mesh", "tp=4")
    assert "all_gather(dim=-1, tp=4)" in out


@pytest.mark.parametrize("name", ["llama_tp", "llama_tp_sp"])
def test_the_example_plans_fit_hugging_faces_llama(name, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(Path(__file__).parent)
    path = str(example_path(f"plans/{name}.yaml"))
    assert main(["explain", path, "--model", "models:llama"]) == 0
    assert "model.layers.*.self_attn" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "tp"), "error: mesh 'tp': write name=size, as in dp=2,tp=4\n"),
        (("--mesh", "dp=2"), "layers.0.in_src.x.tp: no mesh dimension 'tp'; the mesh has dp"),
        (("--model", "test_cli"), "error: --model test_cli: write module:factory\n"),
        (("--model", "test_cli:absent"), "has no attribute 'absent'"),
        (("--model", "no_such_module:f"), "No module named 'no_such_module'"),
        (("--model", "test_cli:not_a_module"), "returned int; return a module"),
        (
            ("--model", "test_cli:fails"),
            "the factory failed on the meta device: ValueError: no such checkpoint",
        ),
    ],
)
def test_explain_errors_are_one_message_without_a_traceback(run, arguments, message):
    status, out, err = run("explain", PLAN, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_explain_reports_what_does_not_fit_the_model_all_together(run):
    plan = PLAN.replace("down.bias", "down.bais").replace("layers.*.norm", "layers.*.nrom")
    status, _, err = run("explain", plan, "--model", "test_cli:stack")
    assert status == 2
    assert "layers.*.nrom: matches no module (did you mean 'layers.*.norm'" in err


def test_explain_of_an_absent_file(capsys):
    assert main(["explain", "absent.yaml"]) == 2
    assert capsys.readouterr().err == "error: absent.yaml: No such file or directory\n"


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["--steps", "0"]])
def test_demo_refuses_counts_below_one(arguments, capsys):
    assert main(["demo", *arguments]) == 2
    assert f"error: {' '.join(arguments)}: must be at least 1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_demo_on_cuda_without_a_gpu_says_so(capsys):
    assert main(["demo", "--device", "cuda"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err


def test_demo_without_transformers_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install fxboundary[hf]" in capsys.readouterr().err


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_command_line_imports_nothing_heavy():
    import subprocess

    code = (
        "import sys, fxboundary.cli; "
        "print([m for m in ('rich', 'transformers', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
