"""The peer groups of this process, by the name of their process group."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fxboundary._torch_internals import named_group
from fxboundary.peer.host import HostPeerGroup
from fxboundary.peer.interface import PeerGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GROUPS: dict[str, tuple[ProcessGroup, PeerGroup]] = {}
_LOCK = threading.Lock()  # backward runs in threads of its own


def peer_group(name: str) -> PeerGroup:
    """The peer memory of a process group; made, collectively, when it is first asked for.

    Compiled code asks by name: it may come from a cache, with nothing prepared in this process.

    Raises:
        PeerError: the ranks cannot share memory; the same on all of them.
        FxBoundaryError: there is no process group of that name.
    """
    process_group = named_group(name)
    entry = _GROUPS.get(name)
    if entry is not None and entry[0] is process_group:
        return entry[1]
    with _LOCK:
        entry = _GROUPS.get(name)
        if entry is None or entry[0] is not process_group:
            if entry is not None:  # of a process group that was destroyed since
                entry[1].close()
            entry = _GROUPS[name] = process_group, HostPeerGroup(process_group)
        return entry[1]


def close_all() -> None:
    """Release all peer memory of this process. What runs later makes it anew, collectively.

    Nothing has to be released at exit: the memory has no name and ends with its processes.
    """
    for _, group in _GROUPS.values():
        group.close()
    _GROUPS.clear()
