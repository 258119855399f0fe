"""The modules and parameters that a graph tells of, as a tree of modules that a plan can match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn as nn


def skeleton(paths: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Empty modules at ``paths``, with parameters on the meta device.

    Names of one tensor are tied in the result as well.
    """
    root = nn.Module()
    for path in paths:
        _module_at(root, path)
    made: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        _module_at(root, owner).register_parameter(leaf, made[id(tensor)])
    return root


def _module_at(root: nn.Module, path: str) -> nn.Module:
    module = root
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, nn.Module())
        child = module._modules[part]
        assert child is not None
        module = child
    return module
