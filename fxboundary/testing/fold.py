"""Lines of equal numbered modules as one line: ``layers.{0..31}.mlp:in.x``.

Neighbouring lines that begin with the same ``layers.{0..31}`` are one block: all of them for
layer 0, then all for layer 1. So the order of the ports is kept. Blocks nest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

from fxboundary.testing.errors import SnapshotError

T = TypeVar("T")
Tokens = tuple["str | range", ...]

_TOKEN = re.compile(r"\{[0-9]+\.\.[0-9]+\}|[.:#]|[^.:#{}]+")
_NUMBER = re.compile(r"0|[1-9][0-9]*")
# What a name may hold and need not be escaped, besides letters, digits and _.-~
_SAFE = ":#*<>/+@=,()[]'"


@dataclass(frozen=True)
class Line(Generic[T]):
    """A name in tokens, in which a ``range`` stands for a number, and what belongs to it."""

    tokens: Tokens
    value: T

    def at(self, position: int, token: str | range) -> Line[T]:
        tokens = (*self.tokens[:position], token, *self.tokens[position + 1 :])
        return Line(tokens, self.value)


@dataclass(frozen=True)
class Block(Generic[T]):
    """One line as it is (``opening`` is ``None``), or the lines that repeat over a range.

    ``source`` are the lines that ``lines`` stand for.
    """

    opening: Tokens | None
    lines: list[Line[T]]
    source: Sequence[Line[T]]


def name_line(name: str, value: T) -> Line[T]:
    """The line of a port's name; what would not be plain text in it is escaped, as in URLs."""
    return Line(tuple(_TOKEN.findall(quote(name, safe=_SAFE))), value)


def line_name(line: Line[T]) -> str:
    """The name of a line without ranges."""
    return unquote("".join(map(str, line.tokens)))


def line_text(line: Line[T]) -> str:
    """``layers.{0..31}.mlp:in.x``."""
    return "".join(
        token if isinstance(token, str) else f"{{{token.start}..{token.stop - 1}}}"
        for token in line.tokens
    )


def parse_line(text: str, value: T) -> Line[T]:
    """Read what :func:`line_text` wrote.

    Raises:
        SnapshotError: a brace that is no range, or a range without numbers.
    """
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise SnapshotError(f"name {text!r}: braces are for ranges, as in layers.{{0..31}}")
    return Line(tuple(_range(token) if token[0] == "{" else token for token in tokens), value)


def _range(token: str) -> range:
    first, last = map(int, token.strip("{}").split(".."))
    if first > last:
        raise SnapshotError(f"range {token}: the first number is above the last")
    return range(first, last + 1)


def fold(lines: Sequence[Line[T]]) -> list[list[Line[T]]]:
    """Folded lines, in paragraphs: lines of different paragraphs are never one block."""
    paragraphs: list[list[Line[T]]] = [[]]
    before: Tokens | None = None
    for block in _blocks(lines):
        if block.opening is not None and block.opening == before:
            paragraphs.append([])
        paragraphs[-1] += block.lines
        before = block.opening
    return paragraphs


def _blocks(lines: Sequence[Line[T]]) -> Iterator[Block[T]]:
    ends: dict[int, int] = {}
    i = 0
    while i < len(lines):
        block, i = _repeated(lines, i, ends) or (_single(lines[i]), i + 1)
        yield block


def _repeated(
    lines: Sequence[Line[T]], start: int, ends: dict[int, int]
) -> tuple[Block[T], int] | None:
    """The block that starts at a line, over its leftmost number that counts up, and its end."""
    tokens = lines[start].tokens
    for position, token in enumerate(tokens):
        if not isinstance(token, str) or not _NUMBER.fullmatch(token):
            continue
        if ends.get(position, 0) <= start:
            ends[position] = _run_end(lines, start, position)
        body, end, first = lines[start : ends[position]], ends[position], int(token)
        number = first + 1
        while _follows(lines, end, body, position, number):
            end, number = end + len(body), number + 1
        if number > first + 1:
            numbers = range(first, number)
            inner = [line.at(position, numbers) for line in body]
            opening = (*tokens[:position], numbers)
            return Block(opening, _unambiguous(inner), lines[start:end]), end
    return None


def _single(line: Line[T]) -> Block[T]:
    return Block(None, [line], [line])


def _run_end(lines: Sequence[Line[T]], start: int, position: int) -> int:
    """The end of the lines that are equal up to and with a position."""
    prefix, end = lines[start].tokens[: position + 1], start + 1
    while end < len(lines) and lines[end].tokens[: position + 1] == prefix:
        end += 1
    return end


def _follows(
    lines: Sequence[Line[T]], start: int, body: Sequence[Line[T]], position: int, number: int
) -> bool:
    """Whether the lines of the next number are just those of the first."""
    end = start + len(body)
    return (
        end <= len(lines)
        and all(
            line == one.at(position, str(number))
            for line, one in zip(lines[start:end], body, strict=True)
        )
        and _run_end(lines, start, position) == end
    )


def _unambiguous(lines: Sequence[Line[T]]) -> list[Line[T]]:
    """A block's lines, folded in turn; there are no paragraphs here, so some stay as they are."""
    folded: list[Line[T]] = []
    before: Tokens | None = None
    for block in _blocks(lines):
        apart = block.opening is None or block.opening != before
        folded += block.lines if apart else block.source
        before = block.opening if apart else None
    return folded


def unfold(lines: Sequence[Line[T]]) -> Iterator[Line[T]]:
    """The lines that a paragraph of :func:`fold` stands for, in their order."""
    i = 0
    while i < len(lines):
        tokens = lines[i].tokens
        position = next((p for p, token in enumerate(tokens) if isinstance(token, range)), None)
        if position is None:
            yield lines[i]
            i += 1
            continue
        end, numbers = _run_end(lines, i, position), tokens[position]
        assert isinstance(numbers, range)
        for number in numbers:
            yield from unfold([line.at(position, str(number)) for line in lines[i:end]])
        i = end
