"""Plan: contracts by module-name pattern on one mesh, from Python, YAML or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn as nn

from fxboundary.contract import Contract, layout_pair
from fxboundary.errors import (
    ContractError,
    PlacementMismatchError,
    UnsupportedTransitionError,
)
from fxboundary.mesh import LiveMesh, MeshLike, MeshSpec, mesh_spec, parse_mesh, register_mesh
from fxboundary.patterns import is_pattern, matches
from fxboundary.placements import (
    Layout,
    near,
    normalize_dims,
    reduce_op,
    replicate,
    shard_dim,
    shard_dims,
    shard_order,
    smallest_rank,
    unknown_mesh_dim,
)
from fxboundary.transition.gradient import default_gradient
from fxboundary.transition.transition import plan as plan_layouts

_LAYOUT_FIELDS = (
    "in_src",
    "in_dst",
    "in_grad",
    "out_src",
    "out_dst",
    "out_grad",
    "params",
    "param_grad",
)


class Plan:
    """Contracts for the modules of a model, by name pattern, on one mesh.

    ``mesh`` is a ``DeviceMesh``, or ``{"dp": 2, "tp": 4}`` for work that needs no processes.
    Patterns match module names (``*`` one level, ``**`` any depth, ``""`` the model itself);
    of several that match a module, a later one overrides an earlier one field by field.

    Raises:
        ContractError: contracts that cannot be read or name unknown mesh dimensions, and
            transitions without a meaning; all faults together, each with its path.
    """

    def __init__(
        self, mesh: MeshLike, contracts: Mapping[str, Contract | Mapping[str, Any]]
    ) -> None:
        self.mesh = mesh
        self.spec: MeshSpec = mesh_spec(mesh)
        self.live: LiveMesh | None = None
        self.contracts: dict[str, Contract] = {}
        problems: list[str] = []
        contract: Any
        for pattern, contract in contracts.items():
            if not isinstance(contract, (Contract, Mapping)):
                problems.append(f"{_at(pattern)}: expected a contract's fields, found {contract!r}")
                continue
            try:
                if not isinstance(contract, Contract):
                    contract = Contract.from_dict(contract)
                self.contracts[str(pattern)] = contract
                problems += [f"{_at(pattern)}.{p}" for p in _misfits(contract, self.spec)]
            except ContractError as error:
                problems += [f"{_at(pattern)}.{problem}" for problem in error.problems]
        if problems:
            raise ContractError(problems)
        if not isinstance(mesh, (Mapping, MeshSpec)):
            self.live = register_mesh(mesh)

    @classmethod
    def from_yaml(cls, path_or_text: str | Path, mesh: MeshLike | None = None) -> Plan:
        """Read a plan from a YAML or JSON file, or from its text.

        ``mesh`` overrides the file's own ``mesh:`` entry. The schema is in docs/contracts.md.

        Raises:
            ContractError: with the file's name and the path of each offending key.
            FileNotFoundError: a path to no file.
        """
        import yaml

        source, text = _source(path_or_text)
        prefix = f"{source}: " if source else ""
        try:
            data = yaml.load(text, Loader=_unique_keys(yaml.SafeLoader))
        except yaml.YAMLError as error:
            raise ContractError(f"{prefix}not YAML: {error}") from None
        if not isinstance(data, Mapping) or not isinstance(data.get("modules"), Mapping):
            raise ContractError(f"{prefix}expected the key 'modules' with contracts by pattern")
        unknown = [key for key in data if key not in ("mesh", "modules")]
        if unknown:
            raise ContractError(
                f"{prefix}{unknown[0]}: unknown key{near(str(unknown[0]), ('mesh', 'modules'))}; "
                f"a plan has mesh and modules"
            )
        mesh = data.get("mesh") if mesh is None else mesh
        if mesh is None:
            raise ContractError(f"{prefix}no mesh: give one, or write 'mesh: {{tp: 2}}'")
        try:
            mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
            modules = data["modules"].items()
            contracts = {str(key): {} if value is None else value for key, value in modules}
            return cls(mesh, contracts)
        except ContractError as error:
            raise ContractError([f"{prefix}{problem}" for problem in error.problems]) from None

    def to_yaml(self) -> str:
        """The plan as YAML text that :meth:`from_yaml` reads back."""
        import yaml

        data = {
            "mesh": dict(zip(self.spec.names, self.spec.sizes, strict=True)),
            "modules": {pattern: c.to_dict() for pattern, c in self.contracts.items()},
        }
        return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)

    def match(self, model: nn.Module) -> dict[str, Contract]:
        """The contract of each module that a pattern matches, by module name.

        Raises:
            ContractError: a pattern that matches no module (near misses are listed), and
                contracts that do not fit together where several match.
        """
        matched, problems = self.match_and_problems(model)
        if problems:
            raise ContractError(problems)
        return matched

    def match_and_problems(
        self, model: nn.Module, *, every_pattern: bool = True
    ) -> tuple[dict[str, Contract], list[str]]:
        """What :meth:`match` returns, and what it would raise.

        Without ``every_pattern``, ``model`` is a part of one: a pattern may match nothing.
        """
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        matched: dict[str, Contract] = {}
        problems: list[str] = []
        for pattern, contract in self.contracts.items():
            found = [name for name in names if matches(pattern, name)]
            if not found and every_pattern:
                problems.append(f"{_at(pattern)}: matches no module{_near_names(pattern, names)}")
            for name in found:
                earlier = matched.get(name)
                try:
                    matched[name] = earlier.overridden_by(contract) if earlier else contract
                except ContractError as error:
                    problems += [f"{name or '<root>'}.{problem}" for problem in error.problems]
        for name, contract in matched.items():
            problems += [
                f"{name or '<root>'}.{problem}"
                for problem in _misfits(contract, self.spec, merged=True)
            ]
        return {name: matched[name] for name in names if name in matched}, problems

    def __repr__(self) -> str:
        return f"Plan({self.spec}, {list(self.contracts)})"


def _at(pattern: object) -> str:
    return str(pattern) or '""'


def _near_names(pattern: str, names: list[str]) -> str:
    if not is_pattern(pattern):
        return near(pattern, names)
    shape = {".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names if n}
    return near(pattern, sorted(shape))


# YAML 1.1 takes on, off, yes and no for booleans.
_KEYS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int", "tag:yaml.org,2002:merge")


def _unique_keys(base: Any) -> Any:
    """A YAML loader that refuses a key given twice: the first would be lost without a word."""

    import yaml

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key_node, _ in node.value:
                if key_node.tag not in _KEYS:
                    kind = key_node.tag.rpartition(":")[2]
                    raise yaml.MarkedYAMLError(
                        problem=f"a key is read as a {kind}; put it into quotes",
                        problem_mark=key_node.start_mark,
                    )
                if key_node.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key_node.value!r} is given twice",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key_node.value)
            return super().construct_mapping(node, deep)

    return Loader


def _source(path_or_text: str | Path) -> tuple[str, str]:
    if isinstance(path_or_text, Path) or (
        "\n" not in path_or_text and path_or_text.endswith((".yaml", ".yml", ".json"))
    ):
        return str(path_or_text), Path(path_or_text).read_text()
    return "", path_or_text


def _misfits(contract: Contract, spec: MeshSpec, *, merged: bool = False) -> list[str]:
    """What in a contract does not fit the mesh, or has no meaning, with its path.

    Before contracts of several patterns are merged, one may speak of another's ports.
    """
    problems = _unknown_mesh_dims(contract, spec)
    inputs, outputs = contract.input_names(), contract.output_names()
    if not problems:
        for name in inputs:
            layouts = contract.input_layouts(name, spec.names)
            problems += _refusals(f"in_dst.{name}", layouts, spec)
        for name in outputs:
            layouts = contract.output_layouts(name, spec.names)
            problems += _refusals(f"out_dst.{name}", layouts, spec)
        for name, declared in (contract.params or {}).items():
            stored, used = layout_pair(declared, spec.names)
            rule, given = default_gradient(used), (contract.param_grad or {}).get(name, {})
            grad = tuple(given.get(n, g) for n, g in zip(spec.names, rule, strict=True))
            layouts = (stored, used, grad)
            problems += _refusals(f"params.{name}", layouts, spec)
        problems += _unequal_averages(contract, spec)
    for side, names in (("in", inputs), ("out", outputs)):
        for field in (f"{side}_grad", f"{side}_sizes") if names or merged else ():
            problems += [
                f"{field}.{name}: the contract has no such port{near(name, names)}"
                for name in getattr(contract, field) or {}
                if name not in names
            ]
    return problems


def _unequal_averages(contract: Contract, spec: MeshSpec) -> list[str]:
    """Averages over a mesh dimension that cuts an input unequally: each rank would count alike."""
    problems = []
    for port, sizes in (contract.in_sizes or {}).items():
        if port not in contract.input_names():
            continue
        _, inside, _ = contract.input_layouts(port, spec.names)
        for name, n, placement in zip(spec.names, spec.sizes, inside, strict=True):
            size = sizes.get(shard_dim(placement))
            if size is None or size % n == 0:
                continue
            problems += [
                f"{field}.{other}.{name}: P(avg) over shards of {port} that are unequal "
                f"({size} over {name}={n}); make it P, and divide each rank's sum by {size}"
                for field in ("out_src", "in_grad", "param_grad")
                for other, layout in (getattr(contract, field) or {}).items()
                if reduce_op(layout.get(name, replicate())) == "avg"
            ]
    return problems


def _unknown_mesh_dims(contract: Contract, spec: MeshSpec) -> list[str]:
    return [
        f"{field}.{port}.{name}: {unknown_mesh_dim(name, spec.names)}"
        for field in _LAYOUT_FIELDS
        for port, layout in (getattr(contract, field) or {}).items()
        for name in layout
        if name not in spec.names
    ]


def _refusals(where: str, layouts: tuple[Layout, Layout, Layout], spec: MeshSpec) -> list[str]:
    ndim = smallest_rank(*layouts)
    dims = shard_dims(*layouts)
    if min(dims, default=0) < 0 <= max(dims, default=0) and _are_numbered(layouts):
        return []  # which cuts are of one dimension depends on the tensor's rank
    try:
        plan_layouts(*(normalize_dims(layout, ndim) for layout in layouts), spec)
    except (ContractError, PlacementMismatchError, UnsupportedTransitionError) as error:
        return [f"{where}: {error}"]
    return []


def _are_numbered(layouts: tuple[Layout, ...]) -> bool:
    return any(shard_order(p) is not None for layout in layouts for p in layout)
