"""What a pass did: one change to the ports of a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """``ports`` of a graph became ``port``; an empty one means that nothing was left to do.

    Of ``sink``, ``port`` is how the work between the ports is split.
    """

    name: str
    ports: tuple[str, ...]
    port: str

    def __str__(self) -> str:
        """``share: q:in.x, k:in.x -> q:in.x,k:in.x``."""
        return f"{self.name}: {', '.join(self.ports)} -> {self.port or 'nothing'}"


def join_names(sign: str, first: str, *others: str) -> str:
    """The name of a port that does the work of several; what they have in common is said once.

    ``,`` shares a value, ``>`` composes, ``+`` adds first.

    >>> join_names(",", "layers.0.attn.q:in.x", "layers.0.attn.k:in.x", "layers.0.attn.v:in.x")
    'layers.0.attn.q:in.x,k:in.x,v:in.x'
    >>> join_names(">", "layers.0.mlp:out", "layers.1.attn:in.x")
    'layers.0.mlp:out>layers.1.attn:in.x'
    """
    module = first.partition(":")[0].split(".")
    return sign.join([first, *(_without_common(module, other) for other in others)])


def _without_common(module: list[str], name: str) -> str:
    """A port's name without the modules that it shares with another one's."""
    own = name.partition(":")[0].split(".")
    common = 0
    while common < min(len(module), len(own)) - 1 and module[common] == own[common]:
        common += 1
    if common < len(own) and own[common].isdigit():
        common = 0  # a number alone does not tell of which list it is
    return ".".join(name.split(".")[common:])
