"""``fxboundary snapshot`` and ``fxboundary diff``: output, files and exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from models import Stack
from records import gather, reduce, snapshot_of

from fxboundary.cli import main

PLAN = """
mesh: {tp: 2}
modules:
  layers.*.mlp:
    in_src: {x: {tp: S(1)}}
    in_dst: {x: {tp: R}}
    out_src: {tp: P}
    out_dst: {tp: S(1)}
    params: {up.*: {tp: S(0)}, down.weight: {tp: S(1)}, down.bias: {tp: R -> P}}
"""
MODEL = ("--model", "test_commands:stack_and_input")


def stack_and_input():
    return Stack(), torch.randn(2, 8, 8)


def stack():
    return Stack()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """``run(*arguments)`` in a folder with ``plan.yaml``: exit status, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Path("plan.yaml").write_text(PLAN)

    def call(*arguments):
        status = main(list(arguments))
        return status, *capsys.readouterr()

    return call


def test_a_snapshot_is_printed_written_and_checked(run):
    status, out, _ = run("snapshot", "plan.yaml", *MODEL)
    assert status == 0
    assert_expected_inline(
        out,
        """\
layers.{0..1}.mlp:in.x  f32[2, 8, 8] -> [2, 16, 8]  tp: S(1)->R
    all_gather(dim=1, tp=2) 512 B  |  grad tp: P: reduce_scatter(dim=1, tp=2) 512 B
layers.{0..1}.mlp.down:param.bias  f32[8] -> [8]  tp: R->P
    keep_first(tp=2)  |  grad R: nothing
layers.{0..1}.mlp:out  f32[2, 16, 8] -> [2, 8, 8]  tp: P->S(1)
    reduce_scatter(dim=1, tp=2) 512 B  |  grad tp: S(1): all_gather(dim=1, tp=2) 512 B
total forward: 2 all_gather 1 KiB, 2 reduce_scatter 1 KiB, together 2 KiB
total backward: 2 all_gather 1 KiB, 2 reduce_scatter 1 KiB, together 2 KiB
""",
    )
    assert run("snapshot", "plan.yaml", *MODEL, "-o", "a.txt")[:2] == (0, "a.txt: 6 ports\n")
    assert Path("a.txt").read_text() == out
    check = ("snapshot", "plan.yaml", *MODEL, "--check", "a.txt")
    assert run(*check)[:2] == (0, "a.txt: the same\n")
    status, out, _ = run(*check, "--mesh", "tp=4")
    assert status == 1
    assert "shapes f32[2, 8, 8] -> [2, 16, 8], now f32[2, 8, 8] -> [2, 32, 8] at" in out


def test_a_difference_of_two_files(run):
    Path("a.txt").write_text(f"{snapshot_of(gather('a:x'), reduce('b:out'))}\n")
    Path("b.txt").write_text(str(snapshot_of(gather("a:x"))))
    assert run("diff", "a.txt", "a.txt")[:2] == (0, "the same\n")
    status, out, _ = run("diff", "a.txt", "b.txt")
    assert status == 1
    assert_expected_inline(
        out,
        """\
-1 all_reduce 384 B at b:out (forward)
lost port at b:out: f32[1, 8, 8] -> [1, 8, 8]  tp: P->R
total forward: all_reduce 1 -> 0, 576 B -> 192 B
total backward: unchanged
""",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.txt", "absent.txt: No such file or directory"),
        (".", ".: Is a directory"),
        ("binary.txt", "binary.txt: not a snapshot: it is no text"),
        ("empty.txt", "empty.txt: not a snapshot of boundaries: the last two lines are to be"),
        ("plan.yaml", "plan.yaml: not a snapshot of boundaries"),
        ("cut.txt", "cut.txt: line 1: 'a:x' does not begin a port"),
    ],
)
@pytest.mark.parametrize(
    "command", [("diff", "good.txt"), ("diff",), ("snapshot", "plan.yaml", *MODEL, "--check")]
)
def test_files_that_are_no_snapshots(run, command, name, message):
    Path("good.txt").write_text(str(snapshot_of(gather("a:x"))))
    Path("binary.txt").write_bytes(b"\x80\xff\0")
    Path("empty.txt").write_text("")
    Path("cut.txt").write_text("a:x\ntotal forward: nothing\ntotal backward: nothing\n")
    arguments = (*command, name) if len(command) != 1 else (*command, name, "good.txt")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_other_errors_are_one_line_too(run):
    for arguments, message in [
        (("absent.yaml", *MODEL), "absent.yaml: No such file"),
        (("plan.yaml", "--model", "test_commands:stack"), "a snapshot needs inputs"),
        (("plan.yaml", *MODEL, "-o", "."), ".: Is a directory"),
        (("plan.yaml", *MODEL, "-o", "absent/a.txt"), "absent/a.txt: No such file"),
    ]:
        status, out, err = run("snapshot", *arguments)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_the_exit_statuses_are_in_the_help(capsys):
    for command in ("snapshot", "diff"):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        assert "1: different; 2: error" in " ".join(capsys.readouterr().out.split())


def test_the_status_is_the_processes(tmp_path):
    (tmp_path / "a.txt").write_text(str(snapshot_of(gather("a:x"))))
    (tmp_path / "b.txt").write_text(str(snapshot_of(gather("b:x"))))
    command = [sys.executable, "-m", "fxboundary", "diff", "a.txt", "b.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "lost port at a:x" in done.stdout
