"""Counting the collectives that really run: torch's execution trace of one step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from fxboundary.transition.cost import sent_bytes
from fxboundary.transition.steps import Kind

# What reaches a process group, from eager code and from compiled code alike: functional
# collectives call these too. With each, the position of its input among its arguments.
_OPERATORS: dict[str, tuple[Kind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
}
_ITEMSIZE = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "long int": 8,
    "unsigned char": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step; ``bytes`` are sent by this rank, ring algorithms."""

    count: int
    bytes: int


def observe(step: Callable[[], Any], ranks: int) -> dict[str, Traffic]:
    """Run a step and count its collectives, by kind. Every rank must run it."""
    with tempfile.TemporaryDirectory(prefix="fxboundary-") as folder:
        path = Path(folder) / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver()
        with _without_stderr():  # it announces itself as a warning
            observer.register_callback(str(path))
            observer.start()
        try:
            step()
        finally:
            with _without_stderr():
                observer.stop()
                observer.unregister_callback()
        return _count(json.loads(path.read_text())["nodes"], ranks)


def _count(nodes: list[Mapping[str, Any]], ranks: int) -> dict[str, Traffic]:
    found: dict[str, Traffic] = {}
    for node in nodes:
        namespace, _, name = node["name"].partition("::")
        if namespace != "c10d" or name not in _OPERATORS:
            continue
        kind, position = _OPERATORS[name]
        size = _bytes(node["inputs"]["shapes"][position], node["inputs"]["types"][position])
        before = found.get(kind, Traffic(0, 0))
        sent = sent_bytes(kind, size, ranks)
        found[kind] = Traffic(before.count + 1, before.bytes + sent)
    return found


def _bytes(shapes: list[Any], types: str) -> int:
    """Bytes of a tensor ``[4, 8]``, ``Tensor(float)``, or of a list ``[[4, 8]]`` of them."""
    element = types.rpartition("Tensor(")[2].rstrip(")]")
    tensors = shapes if types.startswith("GenericList") else [shapes]
    elements: int = sum(prod(shape) for shape in tensors)
    return elements * _ITEMSIZE[element.split(",")[0].rstrip(")")]


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Without what C++ writes to the file descriptor itself."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
