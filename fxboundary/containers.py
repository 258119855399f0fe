"""Reading and replacing one tensor inside a module's arguments or outputs.

Replacing never changes a container in place: the caller may still hold it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]


def split_path(name: str) -> tuple[str, Path]:
    """``"batch.ids.0"`` → the argument ``batch`` and the way ``("ids", "0")`` inside it."""
    head, *rest = name.split(".")
    return head, tuple(rest)


def replace_at(container: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """``container`` with ``change`` applied at ``path``; ``None`` on the way is left alone.

    Raises:
        KeyError: a segment that the container lacks.
    """
    if container is None:
        return None
    if not path:
        return change(container)
    key, rest = path[0], path[1:]
    return with_item(container, key, replace_at(item(container, key), rest, change))


def entry_at(container: Any, path: Path) -> Any:
    """What stands at ``path``; ``None`` where there is a ``None`` on the way.

    Raises:
        KeyError: a segment that a container lacks.
    """
    for key in path:
        if container is None:
            return None
        container = item(container, key)
    return container


def item(container: Any, key: str) -> Any:
    """The entry ``key`` of a mapping, a sequence or an object with fields."""
    if isinstance(container, Mapping) and key in container:
        return container[key]
    if isinstance(container, Sequence) and key.isdigit():
        return container[int(key)]
    if hasattr(container, key) and (
        not isinstance(container, _BUILTIN) or _has_field(container, key)
    ):
        return getattr(container, key)
    raise KeyError(key)


_BUILTIN = (dict, list, tuple)  # their methods are no entries


def _has_field(container: Any, key: str) -> bool:
    """A field of a named tuple, or of a ModelOutput, whose items lack those not set."""
    named = getattr(container, "_fields", ())
    return key in named or key in getattr(container, "__dataclass_fields__", ())


def with_item(container: Any, key: str, value: Any) -> Any:
    """A container of the same type whose entry ``key`` is ``value``."""
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return _with_field(container, key, value)
    if isinstance(container, Mapping):
        changed = {**container, key: value}
        if type(container) is OrderedDict:  # by name: Dynamo cannot call its type otherwise
            return OrderedDict(changed)
        return changed if type(container) is dict else _rebuilt(container, changed)
    if isinstance(container, Sequence):
        if key.isdigit():
            return with_index(container, int(key), value)
        return container._replace(**{key: value})  # type: ignore[attr-defined]
    changed = copy.copy(container)
    setattr(changed, key, value)
    return changed


def with_index(container: Sequence[Any], index: int, value: Any) -> Sequence[Any]:
    """A tuple, named tuple or list of the same type whose entry ``index`` is ``value``."""
    entries = list(container)
    entries[index] = value
    if type(container) is list:
        return entries
    if type(container) is tuple:
        return tuple(entries)
    if hasattr(container, "_fields"):
        return type(container)(*entries)
    return type(container)(entries)  # type: ignore[call-arg]


def _with_field(container: Any, key: str, value: Any) -> Any:
    if isinstance(container, Mapping):  # ModelOutput: its items are its fields that are set
        return type(container)(**{**container, key: value})
    return dataclasses.replace(container, **{key: value})


def _rebuilt(container: Mapping[str, Any], entries: dict[str, Any]) -> Any:
    changed = copy.copy(container)
    for key, value in entries.items():
        changed[key] = value  # type: ignore[index]
    return changed
