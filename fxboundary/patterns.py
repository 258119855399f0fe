"""Module-name patterns: ``*`` is one level (or part of one), ``**`` any number of levels."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name matches.

    >>> matches("layers.*.mlp", "layers.0.mlp"), matches("layers.*", "layers.0.mlp")
    (True, False)
    >>> matches("**.mlp", "mlp"), matches("**", ""), matches("", "")
    (True, True, True)
    """
    return _matches(_parts(pattern), _parts(name))


def is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[")


def _parts(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")) if name else ()


@cache
def _matches(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(pattern[1:], name[1:])
