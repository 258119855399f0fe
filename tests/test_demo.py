"""The demo, in processes of its own: agreement, disagreement, and ranks that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxboundary.demo.examples import example_path
from fxboundary.demo.settings import ModelSize, Settings
from fxboundary.demo.traffic import Traffic, observe

pytest.importorskip("transformers")
TINY = ModelSize(layers=1, hidden=32, intermediate=64, heads=4, kv_heads=2, batch=2, sequence=16)
MAIN = """
import sys
from fxboundary.demo.launch import run_demo
from fxboundary.demo.settings import ModelSize, Settings
from fxboundary.errors import FxBoundaryError
try:
    sys.exit(run_demo({settings!r}))
except FxBoundaryError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def demo(compile_cache):
    """Run the demo on a tiny model; the finished process."""

    def run(prefix=(sys.executable,), ahead="", **settings):
        settings = Settings(size=TINY, **{"steps": 3, **settings})
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": compile_cache, "COLUMNS": "120"}
        return subprocess.run(
            [*prefix, "-c", ahead + MAIN.format(settings=settings)],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment,
            check=False,
        )

    return run


@pytest.mark.compiled
def test_the_runs_agree_in_float64_and_the_report_counts_one_graph(demo):
    done = demo(dtype="float64")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {
        cells[0]: cells[1:]
        for line in done.stdout.splitlines()
        if "│" in line and (cells := [cell.strip() for cell in line.strip("│").split("│")])
    }
    # One layer: attention and MLP, their norms, the last norm and the head. In float64 the
    # unsharded model is compiled too: columns are unsharded, TP, unsharded compiled, TP + SP.
    counts = {name: [cell.split(" ×")[0] for cell in cells] for name, cells in rows.items()}
    assert counts["all_reduce"] == ["–", "5", "–", "3"]
    assert counts["all_gather"] == ["–", "1", "–", "7"]
    assert counts["reduce_scatter"] == ["–", "–", "–", "5"]
    assert counts["graphs"] == ["–", "–", "–", "1"]
    assert counts["boundary nodes"] == ["–", "–", "–", "10"]
    assert "agree: at every one of 3 steps" in done.stdout
    assert "TP, eager: step 1/3" in done.stdout


@pytest.mark.compiled
def test_norm_gradients_without_their_all_reduce_are_a_disagreement(demo, tmp_path):
    text = example_path("plans/llama_tp_sp.yaml").read_text()
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace("&norm", "&norm\n    param_grad: {weight: {tp: R}}"))
    done = demo(plan=str(path), steps=4)
    assert done.returncode == 1
    assert "DISAGREE" in done.stdout


def test_heads_that_the_ranks_do_not_divide_are_refused_once(demo):
    done = demo(ranks=3)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "16 elements in units of 8 cannot be split over tp=3" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_file_that_is_not_there(demo):
    done = demo(plan="absent.yaml")
    assert done.returncode == 2
    assert "error: --plan absent.yaml: No such file or directory" in done.stderr


def test_a_rank_that_dies_ends_the_demo(demo, tmp_path):
    dying = tmp_path / "dying.py"
    dying.write_text(
        "import os, fxboundary.demo.launch as launch\n"
        "whole = launch._train_and_report\n"
        "def part(settings, device, console):\n"
        "    if console is None: os._exit(7)\n"
        "    return whole(settings, device, console)\n"
        "launch._train_and_report = part\n"
        "_serve = launch._serve\n"
        "def serve(*arguments): return _serve(*arguments)\n"
    )
    ahead = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import dying, fxboundary.demo.launch as launch\n"
        "launch._serve = dying.serve\n"
    )
    done = demo(ahead=ahead)
    assert done.returncode == 2
    assert "rank 1 died (exit status 7)" in done.stderr


def test_observed_traffic_is_what_a_rank_sends(ranks2):
    assert (
        ranks2.run(observe_some)
        == [
            {
                "all_reduce": Traffic(2, 2 * 2 * 32 // 2),
                "all_gather": Traffic(1, 32),
                "reduce_scatter": Traffic(1, 16),
            }
        ]
        * 2
    )


def observe_some():
    import torch.distributed as dist

    group, x = dist.group.WORLD, torch.ones(4, 2)
    functional = torch.ops._c10d_functional

    def step():
        group.allreduce([x.clone()]).wait()
        functional.wait_tensor(functional.all_reduce(x, "sum", group.group_name))
        functional.wait_tensor(functional.all_gather_into_tensor(x, 2, group.group_name))
        group._reduce_scatter_base(x.new_empty(2, 2), x, dist.ReduceScatterOptions()).wait()

    return observe(step, 2)


def test_examples_are_found_in_a_checkout():
    assert example_path("data/psalms.txt").is_file()
    assert Path(example_path("plans/llama_tp.yaml")).suffix == ".yaml"
