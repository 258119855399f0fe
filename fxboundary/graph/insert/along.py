"""Operators that a rank cannot do on its part of a dimension: they need the rest of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fxboundary.graph.insert.dims import Unclear
from fxboundary.graph.insert.literals import Call
from fxboundary.graph.insert.values import Value, leaves

# Where the dimension stands among the arguments, and its default; None is all dimensions.
_DIM: Mapping[str, tuple[int, Any]] = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), (1, None)),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp"), (1, None)),
    **dict.fromkeys(("softmin", "_safe_softmax", "logcumsumexp", "mode"), (1, -1)),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "norm", "median"), (1, None)),
    **dict.fromkeys(("std_mean", "var_mean", "nanmedian"), (1, None)),
    **dict.fromkeys(("quantile", "nanquantile"), (2, None)),
    **dict.fromkeys(("multinomial", "unfold"), (1, -1)),
    "normalize": (2, 1),
    "cosine_similarity": (2, 1),
    **dict.fromkeys(("index_select", "gather", "take_along_dim", "scatter"), (1, 0)),
    **dict.fromkeys(("scatter_add", "scatter_reduce", "index_add", "index_copy"), (1, 0)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("flip",), (1, None)),
    **dict.fromkeys(("topk", "diff"), (2, -1)),
    "glu": (1, -1),
    "roll": (2, None),
    **dict.fromkeys(("kthvalue", "vector_norm", "linalg_vector_norm"), (2, None)),
}
_WINDOWS = ("conv", "max_pool", "avg_pool", "adaptive_", "interpolate", "upsample_")
_KEYWORDS = ("dim", "dims", "axis")


def refuse_partial_work(call: Call) -> None:
    """Raise Unclear where a cut dimension is one along which the operator works as a whole."""
    name = call.name.rstrip("_") if not call.name.startswith("_") else call.name
    special = _SPECIAL.get(name)
    if special is None and name.startswith(_WINDOWS):
        special = _window
    if special is not None:
        special(call)
    elif name in _DIM and isinstance(_operand(call), Value):
        _refuse(call, _dims(call, *_DIM[name]))


def _operand(call: Call) -> Any:
    return call.args[0] if call.args else next(iter(call.kwargs.values()), None)


def _dims(call: Call, index: int, default: Any) -> Iterable[int]:
    ndim = len(call.first.dims)
    given = next((call.kwargs[k] for k in _KEYWORDS if k in call.kwargs), None)
    if given is None:
        given = call.args[index] if len(call.args) > index else default
    if given is None or isinstance(given, float):
        return range(ndim)
    return [int(d) % ndim for d in (given if isinstance(given, (list, tuple)) else (given,))]


def _refuse(call: Call, dims: Iterable[int], value: Value | None = None) -> None:
    value = call.first if value is None else value
    for dim in dims:
        if -len(value.dims) <= dim < len(value.dims) and value.dims[dim].mesh_dims:
            names = [call.place.mesh.names[m] for m in value.dims[dim].mesh_dims]
            raise Unclear(
                f"it works along dimension {dim % len(value.dims)} as a whole, which is cut over "
                f"{', '.join(names)}"
            )


def _normalized(call: Call) -> None:
    """layer_norm, rms_norm: the last dimensions, as many as normalized_shape has."""
    shape = call.argument(1, "normalized_shape")
    _refuse(call, [-1 - i for i in range(len(shape))])


def _embedding(call: Call) -> None:
    for value in (leaf for leaf in leaves([call.args, call.kwargs]) if isinstance(leaf, Value)):
        if value.local.is_floating_point():
            _refuse(call, [0], value)


def _attention(call: Call) -> None:
    query, key, value = (call.argument(i, n) for i, n in enumerate(("query", "key", "value")))
    _refuse(call, [-2], key)
    _refuse(call, [-2], value)
    for value in (query, key):
        _refuse(call, [-1], value)
    if call.argument(5, "is_causal", False):
        _refuse(call, [-2], query)


def _padded(call: Call) -> None:
    """Sizes of the padding, two of each dimension, from the last one on."""
    widths = call.argument(1, "pad")
    _refuse(call, [-1 - i // 2 for i, width in enumerate(widths) if width != 0])


def _window(call: Call) -> None:
    """Convolution and pooling, 1d to 3d: the last dimensions, as many."""
    digits = [int(c) for c in call.name if c.isdigit()]
    _refuse(call, [-1 - i for i in range(digits[0] if digits else len(call.first.dims) - 2)])


def _classes(call: Call) -> None:
    _refuse(call, [1] if len(call.first.dims) > 1 else [0])


def _looked_up(call: Call) -> None:
    x, indices = call.first, call.argument(1, "indices")
    _refuse(call, [i for i, index in enumerate(indices) if isinstance(index, Value)], x)


def _last_two(call: Call) -> None:
    _refuse(call, [-1, -2])


def _everything(call: Call) -> None:
    _refuse(call, range(len(call.first.dims)))


_SPECIAL: Mapping[str, Callable[[Call], None]] = {
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _normalized
    ),
    **dict.fromkeys(("group_norm", "native_group_norm", "batch_norm"), _everything),
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("cross_entropy", "nll_loss", "cross_entropy_loss"), _classes),
    **dict.fromkeys(("index", "index_put"), _looked_up),
    **dict.fromkeys(("tril", "triu"), _last_two),
    **dict.fromkeys(
        ("as_strided", "nonzero", "masked_select", "unique", "take", "put"), _everything
    ),
    **dict.fromkeys(("diagonal", "diag", "trace", "diag_embed", "rot90"), _everything),
    **dict.fromkeys(("fliplr", "flipud", "instance_norm", "bincount", "histc"), _everything),
    **dict.fromkeys(("pad", "constant_pad_nd"), _padded),
}
