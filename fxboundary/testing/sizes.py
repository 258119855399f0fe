"""Numbers of bytes as text that reads back as the same number."""

from __future__ import annotations

import re
from fractions import Fraction

from fxboundary.placements import near
from fxboundary.testing.errors import SnapshotError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(count: int | None) -> str:
    """The largest unit in which a number has at most three decimals; ``? B`` for ``None``.

    >>> size_text(8 * 1024 * 1024), size_text(1920), size_text(1001), size_text(None)
    ('8 MiB', '1.875 KiB', '1001 B', '? B')
    """
    if count is None:
        return "? B"
    for exponent in range(len(UNITS) - 1, 0, -1):
        thousandths, rest = divmod(count * 1000, 1024**exponent)
        if thousandths >= 1000 and not rest:
            whole, part = divmod(thousandths, 1000)
            return f"{whole}.{part:03d}".rstrip("0").rstrip(".") + f" {UNITS[exponent]}"
    return f"{count} B"


def parse_size(size: str | int) -> int:
    """Bytes of a number, or of ``64 MiB``, ``1.5KiB``, ``512 B``.

    Raises:
        SnapshotError: another unit, a negative number, or no whole number of bytes.

    >>> parse_size("64 MiB"), parse_size("1.5KiB"), parse_size(3)
    (67108864, 1536, 3)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", str(size), re.ASCII)
    if found is None or isinstance(size, bool):
        raise SnapshotError(f"size {size!r}: write a number of bytes, or as in '64 MiB'")
    number, unit = found.groups()
    if unit not in UNITS:
        hint = near(unit, UNITS)
        raise SnapshotError(f"size {size!r}: no unit {unit!r}{hint}; there are {', '.join(UNITS)}")
    count = Fraction(number) * 1024 ** UNITS.index(unit)
    if count.denominator != 1:
        raise SnapshotError(f"size {size!r}: not a whole number of bytes")
    return int(count)
