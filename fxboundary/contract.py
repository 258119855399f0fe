"""Contract: what one module promises about the layouts of its ports, parameters and gradients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from fxboundary.errors import ContractError
from fxboundary.placements import (
    Layout,
    Placement,
    near,
    parse_placement,
    placement_text,
    reduction_dtype,
    replicate,
    resolve_placements,
)
from fxboundary.transition.gradient import adjoint_layout

NamedLayout: TypeAlias = Mapping[str, "str | Placement"]
OUTPUT = "output"  # the name of the one output in the short form out_dst={"tp": "R"}


@dataclass(frozen=True)
class Contract:
    """Layouts at the boundary of a module; a mesh dimension that is not named is ``R``.

    ``in_src``, ``in_dst``: layout of each input as it arrives, and as the module wants it.
    ``out_src``, ``out_dst``: of each output as the module makes it, and as it leaves.
    ``out_names``: positions of outputs, a sequence of names or ``{name: index}``.
    ``params``: ``A`` (stored and used so) or ``A -> B`` (stored A, used B) per mesh dimension;
    names are relative to the module and may hold ``*`` and ``**``.
    ``in_grad``, ``out_grad``, ``param_grad``: the layout in which a gradient arrives at
    ``in_dst``, at ``out_dst``, at the parameter as used. Where they say nothing, an input's or
    a parameter's is ``P`` on the mesh dimensions over which the region shares its work
    (:meth:`shared_dims`), an output's is ``R``.
    ``in_sizes``, ``out_sizes``: global sizes of dimensions that are sharded unevenly.
    ``stacked``: parameters that stack several along their shard dimension: a count of equal
    parts, or their sizes; each part is sharded by itself.
    ``param_units``: a shard holds whole units of so many elements, as a head's.
    ``in_backward``, ``param_backward``: what backward needs of an input or a parameter as the
    module uses it: ``save`` it, or ``recompute`` it from what arrived or is stored.
    ``reduce_dtype``: sums and averages at all ports, forward and backward, are taken in this
    dtype, as ``"float32"``, and cast back; without it in the tensor's own.

    Raises:
        ContractError: anything that cannot be read, each with its path, all together.

    >>> Contract(in_src={"x": {"tp": "S(1)"}}, out_src={"tp": "P"}, out_dst={"tp": "S(1)"}).out_src
    {'output': {'tp': Partial(sum)}}
    """

    in_src: Any = None
    in_dst: Any = None
    out_src: Any = None
    out_dst: Any = None
    out_names: Any = None
    params: Any = None
    in_grad: Any = None
    out_grad: Any = None
    param_grad: Any = None
    in_sizes: Any = None
    out_sizes: Any = None
    stacked: Any = None
    param_units: Any = None
    in_backward: Any = None
    param_backward: Any = None
    reduce_dtype: Any = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                read = _READERS[field.name]
                object.__setattr__(self, field.name, read(value, field.name, problems))
        problems += self._unnamed_outputs() + self._unknown_inputs()
        if problems:
            raise ContractError(problems)

    def _unnamed_outputs(self) -> list[str]:
        """Declared outputs whose position ``out_names`` leaves open."""
        if self.out_names is None:
            return []
        known = list(self.out_names)
        heads = dict.fromkeys(name.split(".")[0] for name in self.output_names())
        return [
            f"out_names: does not name the output {name!r}{near(name, known)}; "
            f"it names {', '.join(known) or 'none'}"
            for name in heads
            if name not in known
        ]

    def _unknown_inputs(self) -> list[str]:
        known = self.input_names()
        return [
            f"in_backward.{name}: no layout is declared for this input{near(name, known)}; "
            f"declare it in in_src and in_dst"
            for name in self.in_backward or {}
            if name not in known
        ]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contract:
        """Read a contract as YAML and JSON hold it.

        Raises:
            ContractError: an unknown field, or one that cannot be read.
        """
        known = [field.name for field in fields(cls)]
        problems = [
            f"{key}: unknown field{near(str(key), known)}; a contract has {', '.join(known)}"
            for key in data
            if key not in known
        ]
        contract = None
        try:
            contract = cls(**{key: value for key, value in data.items() if key in known})
        except ContractError as error:
            problems += error.problems
        if problems or contract is None:
            raise ContractError(problems)
        return contract

    def to_dict(self) -> dict[str, Any]:
        """The contract as YAML and JSON hold it: placements as text, absent fields left out."""
        return {
            field.name: _plain(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }

    @property
    def key(self) -> str:
        """Canonical text: equal contracts have equal keys."""
        return json.dumps(self.to_dict())

    def overridden_by(self, later: Contract) -> Contract:
        """This contract with the fields that ``later`` gives."""
        given = {f.name: v for f in fields(later) if (v := getattr(later, f.name)) is not None}
        return replace(self, **given)

    def shared_dims(self) -> frozenset[str]:
        """Mesh dimensions over which the region shares its work.

        Those on which a parameter (as stored or as used) or a port on the module's own side
        (``in_dst``, ``out_src``) is not replicated. A shard outside (``in_src``, ``out_dst``)
        says nothing about the work inside: an embedding whose output is cut for sequence
        parallelism still repeats its work on each rank.
        """
        inside = [*(self.in_dst or {}).values(), *(self.out_src or {}).values()]
        names = {n for layout in inside for n, p in layout.items() if not p.is_replicate()}
        for layout in (self.params or {}).values():
            names |= {n for n, pair in layout.items() if any(not p.is_replicate() for p in pair)}
        return frozenset(names)

    def mentioned_dims(self) -> frozenset[str]:
        """Mesh dimensions that any layout of the contract names."""
        layouts = [
            layout
            for field in ("in_src", "in_dst", "out_src", "out_dst", "params")
            for layout in (getattr(self, field) or {}).values()
        ]
        return frozenset(name for layout in layouts for name in layout)

    @property
    def recomputes(self) -> bool:
        """Whether backward is to move anything anew."""
        decisions = (*(self.in_backward or {}).values(), *(self.param_backward or {}).values())
        return "recompute" in decisions

    def input_names(self) -> list[str]:
        return sorted({*(self.in_src or {}), *(self.in_dst or {})})

    def output_names(self) -> list[str]:
        """Outputs that change layout: none unless both sides are given."""
        if self.out_src is None or self.out_dst is None:
            return []
        return list(dict.fromkeys((*self.out_src, *self.out_dst)))

    def input_layouts(self, name: str, mesh_names: Sequence[str]) -> tuple[Layout, Layout, Layout]:
        """src, dst and gradient layout of an input."""
        src = resolve_placements((self.in_src or {}).get(name), mesh_names)
        dst = resolve_placements((self.in_dst or {}).get(name), mesh_names)
        declared = (self.in_grad or {}).get(name, {})
        return src, dst, gradient_layout(dst, declared, self.shared_dims(), mesh_names)

    def output_layouts(self, name: str, mesh_names: Sequence[str]) -> tuple[Layout, Layout, Layout]:
        """src, dst and gradient layout of an output."""
        src = resolve_placements((self.out_src or {}).get(name), mesh_names)
        dst = resolve_placements((self.out_dst or {}).get(name), mesh_names)
        declared = (self.out_grad or {}).get(name, {})
        return src, dst, gradient_layout(dst, declared, frozenset(), mesh_names)


def gradient_layout(
    dst: Layout, declared: NamedLayout, shared: frozenset[str], mesh_names: Sequence[str]
) -> Layout:
    """The gradient's layout at ``dst``: as declared, else by the rule of :class:`Contract`."""
    resolved = resolve_placements(declared, mesh_names)
    rule = adjoint_layout(dst)
    partial = parse_placement("P")
    return tuple(
        resolved[i]
        if name in declared
        else (partial if name in shared and placement.is_replicate() else rule[i])
        for i, (name, placement) in enumerate(zip(mesh_names, dst, strict=True))
    )


def _layout(value: Any, path: str, problems: list[str]) -> dict[str, Placement]:
    read: dict[str, Placement] = {}
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected a layout such as {{tp: S(1)}}, found {value!r}")
        return read
    for name, placement in value.items():
        try:
            read[str(name)] = parse_placement(placement)
        except ContractError as error:
            problems.append(f"{path}.{name}: {error}")
    return read


def _ports(value: Any, path: str, problems: list[str]) -> dict[str, dict[str, Placement]]:
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected layouts by port name, found {value!r}")
        return {}
    return {str(name): _layout(v, f"{path}.{name}", problems) for name, v in value.items()}


def _outputs(value: Any, path: str, problems: list[str]) -> dict[str, dict[str, Placement]]:
    if isinstance(value, Mapping) and value and not _holds_layouts(value):
        return {OUTPUT: _layout(value, path, problems)}
    return _ports(value, path, problems)


def _holds_layouts(value: Mapping[str, Any]) -> bool:
    return any(isinstance(v, Mapping) for v in value.values())


def _params(
    value: Any, path: str, problems: list[str]
) -> dict[str, dict[str, tuple[Placement, Placement]]]:
    read: dict[str, dict[str, tuple[Placement, Placement]]] = {}
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected layouts by parameter name, found {value!r}")
        return read
    for param, layout in value.items():
        read[str(param)] = entry = {}
        if not isinstance(layout, Mapping):
            problems.append(f"{path}.{param}: expected a layout such as {{tp: S(0)}}")
            continue
        for name, text in layout.items():
            try:
                entry[str(name)] = _stored_and_used(text)
            except ContractError as error:
                problems.append(f"{path}.{param}.{name}: {error}")
    return read


def _stored_and_used(text: Any) -> tuple[Placement, Placement]:
    pair: tuple[Any, ...]
    if isinstance(text, tuple) and len(text) == 2:
        pair = text
    elif isinstance(text, str) and ("->" in text or "→" in text):
        pair = tuple(text.replace("→", "->").split("->", 1))
    else:
        pair = (text, text)
    stored, used = map(parse_placement, pair)
    if stored.is_partial():
        raise ContractError("a parameter cannot be stored partial: write R -> P")
    return stored, used


def _names(value: Any, path: str, problems: list[str]) -> dict[str, int]:
    if isinstance(value, Mapping):
        pairs = {str(name): index for name, index in value.items()}
    elif isinstance(value, Sequence) and not isinstance(value, str):
        pairs = {str(name): index for index, name in enumerate(value)}
    else:
        problems.append(f"{path}: expected a list of names or {{name: index}}, found {value!r}")
        return {}
    for name, index in pairs.items():
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            problems.append(f"{path}.{name}: {index!r} is not an output's index")
    if len(set(pairs.values())) < len(value):
        problems.append(f"{path}: two outputs have one name or one index, in {value!r}")
    return pairs


def _sizes(value: Any, path: str, problems: list[str]) -> dict[str, dict[int, int]]:
    read: dict[str, dict[int, int]] = {}
    for name, sizes in value.items() if isinstance(value, Mapping) else ():
        if isinstance(sizes, Mapping) and all(_is_size(d, s) for d, s in sizes.items()):
            read[str(name)] = {int(dim): int(size) for dim, size in sizes.items()}
            if len(read[str(name)]) < len(sizes):
                problems.append(f"{path}.{name}: a dimension is given twice in {sizes!r}")
        else:
            problems.append(f"{path}.{name}: expected {{dimension: global size}}, found {sizes!r}")
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected global sizes by port name, found {value!r}")
    return read


def _is_size(dim: Any, size: Any) -> bool:
    return _is_int(dim) and _is_int(size) and int(size) >= 0


def _is_int(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (
        isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value) is not None
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _stacked(value: Any, path: str, problems: list[str]) -> dict[str, int | tuple[int, ...]]:
    read: dict[str, int | tuple[int, ...]] = {}
    for name, parts in value.items() if isinstance(value, Mapping) else ():
        if _is_count(parts):
            read[str(name)] = parts
        elif isinstance(parts, Sequence) and parts and all(map(_is_count, parts)):
            read[str(name)] = tuple(parts)
        else:
            problems.append(f"{path}.{name}: expected a count or sizes of parts, found {parts!r}")
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected parts by parameter name, found {value!r}")
    return read


def _units(value: Any, path: str, problems: list[str]) -> dict[str, int]:
    read: dict[str, int] = {}
    for name, unit in value.items() if isinstance(value, Mapping) else ():
        if _is_count(unit):
            read[str(name)] = unit
        else:
            problems.append(f"{path}.{name}: expected a positive size, found {unit!r}")
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected sizes by parameter name, found {value!r}")
    return read


def _backward(value: Any, path: str, problems: list[str]) -> dict[str, str]:
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected save or recompute by name, found {value!r}")
        return {}
    problems += [
        f"{path}.{name}: {decision!r} is neither save nor recompute"
        for name, decision in value.items()
        if decision not in ("save", "recompute")
    ]
    return {str(name): decision for name, decision in value.items()}


def _dtype(value: Any, path: str, problems: list[str]) -> str:
    try:
        return reduction_dtype(value)
    except ContractError as error:
        problems.append(f"{path}: {error}")
        return ""


_READERS: dict[str, Callable[[Any, str, list[str]], Any]] = {
    "in_src": _ports,
    "in_dst": _ports,
    "in_grad": _ports,
    "out_src": _outputs,
    "out_dst": _outputs,
    "out_grad": _outputs,
    "out_names": _names,
    "params": _params,
    "param_grad": _ports,
    "in_sizes": _sizes,
    "out_sizes": _sizes,
    "stacked": _stacked,
    "param_units": _units,
    "in_backward": _backward,
    "param_backward": _backward,
    "reduce_dtype": _dtype,
}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, tuple) and value and all(isinstance(v, int) for v in value):
        return list(value)
    if isinstance(value, tuple):
        stored, used = map(placement_text, value)
        return stored if stored == used else f"{stored} -> {used}"
    return value if isinstance(value, (int, str)) else placement_text(value)


def layout_pair(
    declared: Mapping[str, tuple[Placement, Placement]], mesh_names: Sequence[str]
) -> tuple[Layout, Layout]:
    """Stored and used layout of a parameter, mesh dimensions that are not named R."""
    pairs = [declared.get(name, (replicate(), replicate())) for name in mesh_names]
    return tuple(stored for stored, _ in pairs), tuple(used for _, used in pairs)
