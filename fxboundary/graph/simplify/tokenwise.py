"""Operators that treat each token by itself: what they make of a part is that part of the result.

Tokens lie along the second dimension from the right: ``(batch, sequence, features)`` and
``(tokens, features)`` alike, and broadcasting counts from the right too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxboundary.graph.find import node_tensor
from fxboundary.graph.insert.elementwise import is_elementwise, is_in_place

_CASTS = frozenset(
    ("to", "_to_copy", "type", "type_as", "float", "half", "bfloat16", "double", "clone", "detach")
)
_LAST_DIM = frozenset(
    (
        *("softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "mean", "sum"),
        *("amax", "amin", "var", "std", "norm", "vector_norm", "linalg_vector_norm", "normalize"),
    )
)
_NORMS = frozenset(("layer_norm", "rms_norm"))
_DIM_KEYWORDS = ("dim", "axis")
_RANDOM = frozenset(("dropout", "alpha_dropout", "bernoulli", "rrelu"))


def has_tokens(value: torch.Tensor | None) -> bool:
    """Whether a tensor has a dimension of tokens that is not broadcast."""
    return value is not None and value.dim() > 1 and not statically_known_true(value.shape[-2] == 1)


def tokens_of(node: Node) -> tuple[Node, ...]:
    """The operands whose tokens are those of a node's result; empty where it mixes tokens."""
    result = node_tensor(node)
    if node.op not in ("call_function", "call_method") or result is None or not has_tokens(result):
        return ()
    operands = _operands(node)
    values = [node_tensor(n) for n in operands]
    tokens = result.shape[-2]
    same = all(v is not None and statically_known_true(v.shape[-2] == tokens) for v in values)
    return operands if same else ()


def _operands(node: Node) -> tuple[Node, ...]:
    name = operator_name(node)
    if is_in_place(name) or "out" in node.kwargs or _is_random(node, name):
        return ()
    if name in _CASTS or is_elementwise(name, node.target):
        return tuple(n for n in node.all_input_nodes if has_tokens(node_tensor(n)))
    first = node.args[0] if node.args else None
    value, result = node_tensor(first), node_tensor(node)
    if not isinstance(first, Node) or value is None or result is None:
        return ()
    alone = (
        (name in _LAST_DIM and _along_last(node, value.dim()))
        or (name in _NORMS and _normalizes_last(node))
        or (name == "linear" and _narrows(node))
        or (name == "getitem" and _takes_all(node))
    )
    return (first,) if alone and value.dim() == result.dim() else ()


def operator_name(node: Node) -> str:
    """``add`` for ``operator.add``, ``Tensor.add``, ``torch.add`` and ``aten.add.Tensor``."""
    target: Any = node.target
    name = target if node.op == "call_method" else getattr(target, "__name__", "")
    return str(name).partition(".")[0]


def _is_random(node: Node, name: str) -> bool:
    """Whether ranks that hold other tokens would draw other numbers than one that has them all."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    if name not in _RANDOM and not name.endswith("dropout"):
        return False
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    return not (given.get("training", True) is False or given.get("p", 0.5) in (0, 0.0))


def _along_last(node: Node, ndim: int) -> bool:
    given = next((node.kwargs[k] for k in _DIM_KEYWORDS if k in node.kwargs), None)
    if given is None and len(node.args) > 1:
        given = node.args[2] if operator_name(node).endswith("norm") else node.args[1]
    dims = list(given) if isinstance(given, (list, tuple)) else [given]
    return all(isinstance(dim, int) and dim % ndim == ndim - 1 for dim in dims) and bool(dims)


def _normalizes_last(node: Node) -> bool:
    shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
    return isinstance(shape, (list, tuple)) and len(shape) == 1


def _takes_all(node: Node) -> bool:
    """``x[:, 0:, :]``: nothing is left out."""
    given = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(
        index is Ellipsis
        or (isinstance(index, slice) and index.start in (None, 0) and index.stop is None)
        for index in given
    ) and all(index.step in (None, 1) for index in given if isinstance(index, slice))


def _narrows(node: Node) -> bool:
    """A linear layer with fewer results than features, whose weight is the same on all ranks."""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    value = node_tensor(weight)
    if not isinstance(weight, Node) or value is None or value.dim() != 2:
        return False
    if weight.op not in ("placeholder", "get_attr"):
        return False
    return bool(statically_known_true(value.shape[0] < value.shape[1]))
