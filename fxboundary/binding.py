"""Names of inputs and outputs → where a call carries them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxboundary.containers import split_path
from fxboundary.contract import Contract
from fxboundary.placements import near


@dataclass(frozen=True)
class BoundInput:
    """Where a call carries an input: a position, a keyword, a way inside the argument."""

    index: int | None
    keyword: str
    path: tuple[str, ...] = ()

    @property
    def key_and_path(self) -> tuple[str, tuple[str, ...]]:
        return self.keyword, self.path


def output_indices(spec: Contract) -> dict[str, int]:
    """Position of each declared output: from ``out_names``, else the key order of ``out_src``."""
    heads = {name: split_path(name)[0] for name in spec.output_names()}
    positions = spec.out_names
    if positions is None:
        positions = _positions(heads.values())
    return {name: positions[head] for name, head in heads.items()}


def _positions(heads: Iterable[str]) -> dict[str, int]:
    return {head: index for index, head in enumerate(dict.fromkeys(heads))}


def bind_inputs(names: Sequence[str], signature: inspect.Signature | None) -> dict[str, BoundInput]:
    """Bind input names to a forward's signature; names that it lacks are left to the caller.

    ``args.0`` is the first of ``*args``, ``kwargs.x`` the keyword ``x`` of ``**kwargs``, and
    ``batch.ids`` the entry ``ids`` of the argument ``batch``. The one input of a contract whose
    name is not in the signature is the first parameter, unless it looks like another's name.
    """
    if signature is None:
        paths = {name: split_path(name) for name in names}
        positions = _positions(head for head, _ in paths.values())
        return {n: BoundInput(positions[head], head, path) for n, (head, path) in paths.items()}
    bound: dict[str, BoundInput] = {}
    parameters = list(signature.parameters.values())
    for name in names:
        head, path = split_path(name)
        found = _bind(head, path, parameters)
        if found is None and len(names) == 1 and not _misspelt(head, parameters):
            found = _bind_first(path, parameters)
        if found is not None:
            bound[name] = found
    return bound


def _misspelt(head: str, parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a name looks like that of a parameter other than the first."""
    hint = near(head, [parameter.name for parameter in parameters])
    return bool(hint) and repr(parameters[0].name) not in hint


def _bind_first(
    path: tuple[str, ...], parameters: Sequence[inspect.Parameter]
) -> BoundInput | None:
    if not parameters or parameters[0].kind is inspect.Parameter.VAR_KEYWORD:
        return None
    first = parameters[0]
    if path and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None  # the entry of another **kwargs, more likely than of the first parameter
    if first.kind is inspect.Parameter.VAR_POSITIONAL and not (path and path[0].isdigit()):
        path = ("0", *path)
    return _bind(first.name, path, parameters[:1])


def _bind(
    head: str, path: tuple[str, ...], parameters: Sequence[inspect.Parameter]
) -> BoundInput | None:
    for index, parameter in enumerate(parameters):
        if parameter.name != head:
            continue
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            return BoundInput(index, head, path)
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            return BoundInput(index, f"{head}/", path)  # a keyword of that name is another's
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            return BoundInput(None, head, path)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and path and path[0].isdigit():
            return BoundInput(index + int(path[0]), f"*{head}", path[1:])
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and path:
            return BoundInput(None, path[0], path[1:])
    return None
