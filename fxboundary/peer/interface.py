"""What peer memory offers, whatever the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class PeerGroup(Protocol):
    """The memory that the ranks of one process group share.

    All ranks call ``publish`` in the same order, and ``publish`` is collective: it returns once
    every rank has published. What it and ``peers`` return is memory that is written again by the
    second ``publish`` from then on: read it before the next one, and never write to it.
    """

    @property
    def rank(self) -> int:
        """This rank within the group."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def publish(self, x: torch.Tensor, capacity: int) -> torch.Tensor:
        """Copy ``x`` to where the peers read it; the copy.

        ``capacity`` (bytes) is what the largest rank publishes, the same on all ranks: by it
        all of them enlarge their memory together.

        Raises:
            PeerError: a rank has died, has failed, or does not come; the ranks' capacities
                differ; or there is no memory.
        """

    def peers(
        self, published: torch.Tensor, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """What each rank published when this rank got ``published``, in rank order.

        ``shapes`` has one shape per rank where they differ. All have one dtype.
        """

    def close(self) -> None:
        """Release the memory; views that are still held stay readable."""
