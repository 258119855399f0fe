"""Operators that work element by element: which they are, and operands that must be cut to fit.

A mask, a position or another constant that is whole meets a value that is cut: this rank needs
its part of the constant. What is trained is never cut here: that is a contract's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from fxboundary.graph.insert.dims import Dim, Place, Unclear
from fxboundary.graph.insert.values import Value

_NAMES = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "true_divide",
        "floordiv",
        "floor_divide",
        "mod",
        "remainder",
        "fmod",
        "pow",
        "radd",
        "rsub",
        "rmul",
        "rtruediv",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "xor",
        "iand",
        "ior",
        "ixor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "logical_and",
        "logical_or",
        "logical_xor",
        "where",
        "masked_fill",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "lerp",
        "addcmul",
        "addcdiv",
        "atan2",
        "copysign",
        "clamp",
        "copy",
        "divide",
        "dropout",
        "isclose",
        "multiply",
        "subtract",
        # Element by element, then reduced.
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    ]
)


def is_elementwise(name: str, target: Any) -> bool:
    """By the operator's own tag, or by the name that Python and torch share for it."""
    plain = name.strip("_")
    tags = getattr(target, "tags", ())
    return plain in _NAMES or torch.Tag.pointwise in tags or _is_tagged(plain)


@cache
def _is_tagged(name: str) -> bool:
    """Whether the operator that a function or method of this name calls is element by element."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def is_in_place(name: str) -> bool:
    """``add_`` and ``iadd``: what the operator writes to is its first operand."""
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("i") and name[1:] in _NAMES
    )


def broadcast_operands(
    name: str, target: Any, node: Node, arguments: Mapping[str, Any], env: Mapping[Node, Any]
) -> list[tuple[Any, Value]]:
    """The operands of a node that are broadcast against each other; none where it does not.

    Those of attention are its mask and the scores, which have no node of their own.
    """
    if name == "scaled_dot_product_attention":
        mask = arguments.get("attn_mask")
        query, key = arguments["query"], arguments["key"]
        if not isinstance(mask, Node):
            return []
        scores = (*env[query].dims[:-1], env[key].dims[-2])
        return [(mask, env[mask]), ("scores", Value(env[query].local, scores, False))]
    if not is_elementwise(name, target):
        return []
    return [(n, env[n]) for n in node.all_input_nodes if isinstance(env[n], Value)]


def cuts_needed(operands: Sequence[tuple[Any, Value]], place: Place) -> list[tuple[Any, int, Dim]]:
    """Operands (any key, value) to be cut: the key, the dimension, and how it is to be cut.

    Raises:
        Unclear: operands are cut differently; one that is trained would have to be cut.
    """
    found = []
    rank = max((len(value.dims) for _, value in operands), default=0)
    for i in range(1, rank + 1):
        wide = [(key, v, v.dims[-i]) for key, v in operands if len(v.dims) >= i]
        wide = [
            (key, v, dim)
            for key, v, dim in wide
            if not (isinstance(dim.size, int) and dim.size == 1)
        ]
        cut = [dim for _, _, dim in wide if dim.mesh_dims]
        if not cut:
            continue
        if len({dim.mesh_dims for dim in cut}) > 1:
            raise Unclear(f"its operands are cut differently along dimension -{i}")
        joined = place.joined(cut)
        for key, value, dim in wide:
            if dim.mesh_dims:
                continue
            at = len(value.dims) - i
            if not value.free:
                raise Unclear(
                    f"its operand {_name(key)} is whole along dimension {at}, where another is cut"
                )
            if not place.is_shard(joined):
                raise Unclear(
                    f"its operand {_name(key)} is whole along dimension {at}, where another is cut "
                    f"in several places"
                )
            found.append((key, at, joined))
    return found


def _name(key: Any) -> str:
    return key.name if isinstance(key, Node) else str(key)
