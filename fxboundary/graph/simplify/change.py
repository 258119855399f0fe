"""What a pass did: one change to the ports of a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """``ports`` of a graph became ``port``; an empty one means that nothing was left to do."""

    name: str
    ports: tuple[str, ...]
    port: str

    def __str__(self) -> str:
        """``share: q:in.x, k:in.x -> q:in.x,k:in.x``."""
        return f"{self.name}: {', '.join(self.ports)} -> {self.port or 'nothing'}"


def join_names(first: str, second: str, sign: str) -> str:
    """The name of a port that does the work of two; what they have in common is said once.

    ``,`` shares a value, ``>`` composes, ``+`` adds first.

    >>> join_names("layers.0.attn.q:in.x", "layers.0.attn.k:in.x", ",")
    'layers.0.attn.q:in.x,k:in.x'
    >>> join_names("layers.0.mlp:out", "layers.1.attn:in.x", ">")
    'layers.0.mlp:out>layers.1.attn:in.x'
    """
    module, other = first.partition(":")[0].split("."), second.partition(":")[0].split(".")
    common = 0
    while common < min(len(module), len(other)) - 1 and module[common] == other[common]:
        common += 1
    if common < len(other) and other[common].isdigit():
        common = 0  # a number alone does not tell of which list it is
    return first + sign + ".".join(second.split(".")[common:])
