"""Modules of torch that compute past the ``forward`` of their children, and what to do about it.

Read on torch 2.13.0 and 2.14.1. A port that its parent never calls would be a skipped collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from torch.nn.modules.batchnorm import _NormBase

from fxboundary.contract import Contract
from fxboundary.params import ParamPort
from fxboundary.placements import shard_dim

# The inference fast paths hand all weights to one fused operator; with these attributes at these
# values torch itself declines them.
_FAST_PATHS: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def without_fast_path(cls: type) -> dict[str, property]:
    """What a subclass of ``cls`` needs so that its children's ``forward`` always run."""
    return {
        name: property(lambda _, value=value: value)  # type: ignore[misc]
        for base, (name, value) in _FAST_PATHS.items()
        if issubclass(cls, base)
    }


def bypass_problems(
    model: nn.Module,
    matched: Mapping[str, Contract],
    ports: Mapping[tuple[str, str], ParamPort],
) -> list[str]:
    """Ports that would never run, with what to write instead."""
    problems = []
    for name, contract in matched.items():
        parent, _, child = name.rpartition(".")
        if (
            child == "out_proj"
            and isinstance(model.get_submodule(parent), nn.MultiheadAttention)
            and (contract.input_names() or contract.output_names())
        ):
            problems.append(
                f"{name}: nn.MultiheadAttention reads the weights of its out_proj and never calls "
                f"it, so its ports would not run; contract {parent or 'the root'} itself"
            )
    for (owner, name), port in ports.items():
        problems += [
            f"{owner}.{name}: {problem}" for problem in _misread(model.get_submodule(owner), port)
        ]
        if port.changes_at_use and isinstance(model.get_submodule(owner), nn.RNNBase):
            problems.append(
                f"{owner}.{name}: recurrent modules read their weights past the module's "
                f"attributes; store and use it alike, with gradient R"
            )
    return problems


def _misread(module: nn.Module, port: ParamPort) -> list[str]:
    """What a module of torch would take a shard for."""
    problems = []
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if any(p.is_shard() and shard_dim(p) == 0 for p in port.used):
            problems.append(
                "an embedding looks up rows by their number, and a shard of rows starts at 0; "
                "write S(0) -> R, or shard dimension 1"
            )
        if module.max_norm is not None and (port.is_sharded or port.changes_at_use):
            problems.append("max_norm rescales whole rows of the stored weight; leave it R")
    statistics = isinstance(module, _NormBase) and module.track_running_stats
    if statistics and any(p.is_shard() for p in port.used):
        problems.append(
            "running statistics are buffers, which are not cut with the parameters; leave them "
            "whole, or set track_running_stats=False"
        )
    return problems
