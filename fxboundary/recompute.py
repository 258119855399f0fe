"""Ports that move their value anew for backward, in eager execution.

What a port gave knows how it came about; while a contracted module runs, whatever wants to keep it
for backward keeps that instead. In a compiled graph the partitioner does this
(``graph/partition.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxboundary._torch_internals import saves_tensors_elsewhere
from fxboundary.errors import FxBoundaryError

_ORIGIN = "_fxboundary_origin"


class Origin:
    """Where a moved value came from: enough to move it again.

    Several uses keep one value, and backward moves it once for all of them: the value stays
    until each has been given it.
    """

    def __init__(
        self, source: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor], port: str
    ) -> None:
        self._source, self._move, self._port = source.detach(), move, port
        self._version = source._version
        self._uses = self._pending = 0
        self._value: torch.Tensor | None = None

    def keep(self) -> None:
        self._uses += 1

    def give(self) -> torch.Tensor:
        """The value again.

        Raises:
            FxBoundaryError: what it was made from has been written to since.
        """
        if self._source._version != self._version:
            raise FxBoundaryError(
                f"{self._port}: backward is to recompute this value, but what it was moved from "
                f"was modified in place after forward; write {self._port.rpartition('.')[2]}: save "
                f"in the contract, or do not modify it"
            )
        if self._value is None:
            self._value, self._pending = self._move(self._source), self._uses
        value = self._value
        self._pending -= 1
        if self._pending <= 0:
            self._value = None
        return value


class _Kept:
    """What is kept in place of a tensor: its origin, and which part of that it is."""

    def __init__(self, origin: Origin, tensor: torch.Tensor) -> None:
        origin.keep()
        self._origin = origin
        self._view = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def again(self) -> torch.Tensor:
        return self._origin.give().as_strided(*self._view)


def remember_origin(
    value: torch.Tensor,
    source: torch.Tensor,
    move: Callable[[torch.Tensor], torch.Tensor],
    port: str,
) -> None:
    """Let ``value``, which is ``move(source)``, be kept for backward as its source."""
    setattr(value, _ORIGIN, (value._version, Origin(source, move, port)))


def keeping_origins() -> AbstractContextManager[Any]:
    """While it is entered, moved values that remember their origin are kept as that.

    Whoever decides already what is kept, as ``torch.utils.checkpoint`` does, goes on deciding.
    """
    if not torch.is_grad_enabled() or saves_tensors_elsewhere():
        return nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> Any:
    whole = tensor if tensor._base is None else tensor._base
    version, origin = getattr(whole, _ORIGIN, (None, None))
    # A value that was written to since is no longer what its origin gives.
    if origin is None or tensor._version != version or tensor.dtype != whole.dtype:
        return tensor
    return _Kept(origin, tensor)


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Kept):
        return kept.again()
    assert isinstance(kept, torch.Tensor)
    return kept
