"""Module-name patterns."""

from __future__ import annotations

import pytest

from fxboundary.patterns import is_pattern, matches

NAMES = ["", "mlp", "layers.0.mlp", "layers.1.mlp", "layers.1.mlp.up", "layers.10.attn.q_proj"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", [""]),
        ("mlp", ["mlp"]),
        ("layers.0.mlp", ["layers.0.mlp"]),
        ("*", ["mlp"]),
        ("*.mlp", []),
        ("layers.*", []),
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.[01].mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.1?.*.*_proj", ["layers.10.attn.q_proj"]),
        ("**", NAMES),
        ("**.mlp", ["mlp", "layers.0.mlp", "layers.1.mlp"]),
        ("layers.**", NAMES[2:]),
        ("layers.**.up", ["layers.1.mlp.up"]),
        ("**.1.**", ["layers.1.mlp", "layers.1.mlp.up"]),
    ],
)
def test_a_star_is_one_level_and_two_stars_any_number(pattern, found):
    assert [name for name in NAMES if matches(pattern, name)] == found


def test_case_counts():
    assert not matches("MLP", "mlp")


def test_names_and_patterns_are_told_apart():
    assert not is_pattern("layers.0.mlp")
    assert all(map(is_pattern, ("layers.*", "**", "layer?", "layers.[01]")))
