"""ContractError: every problem is kept, and those of equal layers are said once."""

import fxboundary as fb
from fxboundary.errors import ContractError


def test_problems_of_equal_layers_are_said_once():
    problems = [f"layers.{i}.mlp.params.up: no such parameter" for i in range(3)]
    error = ContractError([*problems, "layers.0.attn: matches no module"])
    assert str(error) == (
        "4 problems:\n"
        "  layers.0.mlp.params.up: no such parameter (and 2 more like it)\n"
        "  layers.0.attn: matches no module"
    )
    assert error.problems == [*problems, "layers.0.attn: matches no module"]


def test_one_problem_is_one_line():
    assert str(ContractError("mesh.tp: 0 is not a positive size")).startswith("mesh.tp")


def test_every_error_is_also_a_builtin_that_people_catch():
    assert issubclass(fb.ContractError, ValueError)
    assert issubclass(fb.PlacementMismatchError, ValueError)
    assert issubclass(fb.UnsupportedTransitionError, NotImplementedError)
    assert issubclass(fb.RankMismatchError, RuntimeError)
