"""Peer memory: what a rank publishes, the other ranks of its group read in place.

A redistribution is then ordinary tensor code over the peers' memory (``sum(peers)`` is
``P → R``, ``cat(peers, d)`` is ``S(d) → R``), which a compiler fuses with what follows.
``ops`` has the operators, ``inductor`` their lowerings; both are imported where they are used.
"""

from fxboundary.peer.interface import PeerGroup
from fxboundary.peer.registry import close_all, peer_group

__all__ = ["PeerGroup", "close_all", "peer_group"]
