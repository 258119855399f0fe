"""The pytest plugin, in test files of its own: pass, fail, update, create, parameters."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from models import Stack, mlp_contracts

import fxboundary as fb
from fxboundary.testing import snapshot

ROOT = Path(__file__).parents[2]
HEAD = """
import pytest
import torch
from expecttest import Expect
from models import Stack, mlp_contracts
import fxboundary as fb

def model(layers=2):
    with torch.device("meta"):
        return Stack(layers)

def plan(sequence_parallel=False):
    return fb.Plan({"tp": 4}, mlp_contracts(sequence_parallel))

x = torch.zeros(2, 4, 8)
"""
TEXT = """\\
layers.{0..1}.mlp:in.x  f32[2, 4, 8] -> [2, 4, 8]  tp: R->R
    nothing  |  grad tp: P: all_reduce(tp=4) 384 B
layers.{0..1}.mlp.down:param.bias  f32[8] -> [8]  tp: R->P
    keep_first(tp=4)  |  grad R: nothing
layers.{0..1}.mlp:out  f32[2, 4, 8] -> [2, 4, 8]  tp: P->R
    all_reduce(tp=4) 384 B  |  grad R: nothing
total forward: 2 all_reduce 768 B
total backward: 2 all_reduce 768 B"""


@pytest.fixture(scope="module")
def imported():
    """All that a capture imports: pytester forgets what a run of its imports, torch cannot."""
    import fxboundary.testing.fixture  # noqa: F401

    snapshot(Stack(1), fb.Plan({"tp": 2}, mlp_contracts(True)), torch.zeros(2, 4, 8))


@pytest.fixture
def run(imported, pytester, monkeypatch):
    """``run(test, *arguments)`` or ``run(None)`` for the file as it is now: pytest's result."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    pytester.makeconftest("")
    pytester.makeini("[pytest]\n")

    def call(test, *arguments):
        if test is not None:
            pytester.makepyfile(test_it=HEAD + test)
        options = ("-p", "pytest_fxboundary", "-p", "no:cacheprovider", "-q")
        return pytester.runpytest_inprocess(*options, *arguments)

    return call


def inline(text, more=""):
    return f'''
def test_it(boundary_snapshot):
    found = boundary_snapshot(
        model(), plan(), x,
        expected="""{text}""",
    )
    found.assert_collectives({{"all_reduce": 2}}, direction="forward")
{more}'''


def test_an_expected_text_passes(run):
    run(inline(TEXT)).assert_outcomes(passed=1)


def test_a_difference_fails_with_the_change_first(run):
    result = run(inline(TEXT).replace("plan()", "plan(True)"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: the boundaries are not those expected at test_it.py:*",
            "E*+1 all_gather 768 B at layers.{0..1}.mlp:in.x (forward), 2 ports",
            "E*total forward: all_gather 0 -> 2, reduce_scatter 0 -> 2, all_reduce 2 -> 0,*",
            "E*to accept them: pytest test_it.py --boundary-update",
            "E*expected:",
            "E*total backward: 2 all_reduce 768 B",
            "E*found:",
        ]
    )
    output = result.stdout.str()
    assert "fixture.py" not in output.partition("test_it.py")[2].partition("short test")[0]
    assert "torch.__trace" not in output


@pytest.mark.parametrize("how", ["option", "variable"])
@pytest.mark.parametrize("before", ["", "nonsense", TEXT.replace("384", "385")])
def test_an_update_rewrites_the_literal_and_nothing_else(run, pytester, monkeypatch, how, before):
    after = '    assert 1 == len([0]), "größe"\n'
    if how == "variable":
        monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    test = inline(before, after)
    run(test, *["--boundary-update"][: how == "option"]).assert_outcomes(passed=1)
    source = Path(pytester.path, "test_it.py").read_text("utf-8")
    assert source.strip() == (HEAD + inline(TEXT, after)).strip()
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    run(None).assert_outcomes(passed=1)


def test_an_update_follows_lines_that_earlier_updates_moved(run, pytester):
    test = """
def test_it(boundary_snapshot):
    boundary_snapshot(model(), plan(), x, expected="")
    boundary_snapshot(model(1), plan(True), x, expected='nothing'); assert True
"""
    run(test, "--boundary-update").assert_outcomes(passed=1)
    source = Path(pytester.path, "test_it.py").read_text()
    assert source.index("layers.{0..1}") < source.index("layers.0.norm:param.weight")
    assert "; assert True" in source
    run(None).assert_outcomes(passed=1)


def test_a_literal_for_two_parameters_is_refused(run):
    test = """
@pytest.mark.parametrize("layers", [1, 2])
def test_it(boundary_snapshot, layers):
    boundary_snapshot(model(layers), plan(), x, expected="")
"""
    result = run(test, "--boundary-update")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*one literal cannot hold two texts*"])


def test_parameters_bring_their_own_literals(run, pytester):
    test = '''
@pytest.mark.parametrize(("layers", "expected"), [
    (1, Expect("")),
    (2, Expect("""\\\\
a text
""")),
])
def test_it(boundary_snapshot, layers, expected):
    boundary_snapshot(model(layers), plan(), x, expected=expected)
'''
    run(test).assert_outcomes(failed=2)
    run(None, "--boundary-update").assert_outcomes(passed=2)
    source = Path(pytester.path, "test_it.py").read_text()
    assert source.index("layers.0.mlp:in.x") < source.index("layers.{0..1}.mlp:in.x")


def test_an_expected_text_that_is_no_literal_cannot_be_updated(run):
    test = """
text = "old"
def test_it(boundary_snapshot):
    boundary_snapshot(model(), plan(), x, expected=text)
"""
    result = run(test, "--boundary-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_it.py:*: no literal to write to*"])


FILE = """
def test_it(boundary_snapshot):
    boundary_snapshot(model(), plan(), x, file="texts/stack.txt")
"""


def test_a_file_is_created_on_demand_only_then_compared_and_updated(run, pytester):
    path = Path(pytester.path, "texts", "stack.txt")
    result = run(FILE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*texts/stack.txt: no such file",
            "E*to create it: pytest test_it.py --boundary-update",
        ]
    )
    assert not path.exists()
    run(None, "--boundary-update").assert_outcomes(passed=1)
    assert path.read_text() == TEXT.removeprefix("\\\n") + "\n"
    run(None).assert_outcomes(passed=1)

    path.write_text(path.read_text().replace("tp=4", "tp=2"))
    result = run(None)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*the boundaries are not those in texts/stack.txt",
            "E*steps all_reduce(tp=2) 384 B, now all_reduce(tp=4) 384 B at *(forward), 2 ports",
        ]
    )
    run(None, "--boundary-update").assert_outcomes(passed=1)
    run(None).assert_outcomes(passed=1)


def test_a_file_for_two_parameters_is_refused(run):
    test = """
@pytest.mark.parametrize("layers", [1, 2])
def test_it(boundary_snapshot, layers):
    boundary_snapshot(model(layers), plan(), x, file="stack.txt")
"""
    result = run(test, "--boundary-update")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*stack.txt: one file cannot hold two snapshots*"])


def test_a_budget_alone_and_a_call_with_both(run):
    test = """
def test_budget(boundary_snapshot):
    boundary_snapshot(model(), plan(), x).assert_collectives({"all_reduce": 0})

def test_both(boundary_snapshot):
    boundary_snapshot(model(), plan(), x, expected="", file="a.txt")
"""
    result = run(test)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*BudgetError: 4 all_reduce, at most 0 allowed:",
            "E*2 all_reduce of 384 B at layers.{0..1}.mlp:out (forward)",
            "*SnapshotError: give expected=... or file=..., not both",
        ]
    )


def test_the_plugin_starts_without_torch():
    code = "import sys, pytest_fxboundary; print([m for m in ('torch',) if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_plugin_is_declared_where_pytest_looks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"fxboundary": "pytest_fxboundary"}
