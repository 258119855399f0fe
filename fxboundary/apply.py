"""``apply``: shard a model's parameters in place and put its contracts around its modules.

A contracted module gets a subclass of its class whose ``forward`` holds the ports; a parameter
whose layout changes at use becomes a property of that class. Unlike hooks, both are part of the
frame that is captured, also of a compiled root module and of a parameter that a parent reads,
and cannot be skipped by calling ``forward`` directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn

from fxboundary.binding import bind_inputs
from fxboundary.boundary import PrecompiledBoundary
from fxboundary.bypasses import bypass_problems, without_fast_path
from fxboundary.contract import Contract
from fxboundary.errors import ContractError
from fxboundary.mesh import LiveMesh
from fxboundary.ops import port_label
from fxboundary.params import ParamPort, resolve_params
from fxboundary.placements import near, shard_dim
from fxboundary.plan import Plan
from fxboundary.recompute import keeping_origins
from fxboundary.state import (
    BOUND,
    change_params,
    check_shards,
    gather_tensor,
    shard_tensor,
    stored_param,
)
from fxboundary.used_params import BoundModule, used_params


class Handle:
    """A plan applied to a model; :meth:`remove` takes it off again."""

    def __init__(
        self,
        plan: Plan,
        classes: list[tuple[nn.Module, type]],
        params: dict[int, tuple[nn.Parameter, ParamPort]],
    ) -> None:
        self.plan = plan
        self._classes, self._params = classes, params

    def remove(self) -> None:
        """Restore the model: full parameters, its own classes.

        Parameters have the values they have now: every rank of the mesh must call it. Calling
        it again does nothing.
        """
        mesh = self.plan.live
        assert mesh is not None
        current = self._current_params()
        check_shards(current, mesh)
        change_params(current, lambda local, port: gather_tensor(local, port, mesh))
        for module, cls in self._classes:
            object.__setattr__(module, "__class__", cls)
        self._classes, self._params = [], {}

    def _current_params(self) -> dict[int, tuple[nn.Parameter, ParamPort]]:
        """The parameters as the modules hold them now: loading may have replaced them."""
        found = {}
        for module, _ in self._classes:
            for port in getattr(type(module), BOUND).params:
                if port.is_sharded and self._params:
                    param = stored_param(module, port)
                    found[id(param)] = (param, port)
        return found


def apply(model: nn.Module, plan: Plan, *, local_params: bool = False) -> Handle:
    """Split ``model`` as ``plan`` says, in place.

    Parameters are cut to this rank's shards (on the meta device as well), modules get their
    ports. ``local_params`` says that parameters are local shards already, evenly cut: they
    are left as they are.

    Every rank of the plan's mesh applies the same plan to a model of the same structure.

    Raises:
        ContractError: what does not fit the model: patterns, ports, parameters; a model that
            has a plan already; a plan without processes. All faults together, and before
            anything is changed.
    """
    if plan.live is None:
        raise ContractError(
            f"the plan's mesh ({plan.spec}) has no processes: build the plan on a DeviceMesh"
        )
    if torch.is_inference_mode_enabled():
        raise ContractError(
            "apply inside torch.inference_mode(): parameters cut there could never be trained; "
            "apply the plan outside of it"
        )
    bound = [n or "<root>" for n, m in model.named_modules() if hasattr(type(m), BOUND)]
    if bound:
        raise ContractError(
            f"a plan is applied to {bound[0]} already: call its handle's remove() first"
        )
    matched, problems = plan.match_and_problems(model)
    ports, unresolved = resolve_params(model, matched, plan.spec, local_params)
    contracts, shared = _contracts_by_module(model, matched)
    problems += unresolved + shared + _misfits(model, matched, ports, plan)
    problems += bypass_problems(model, matched, ports)
    if problems:
        raise ContractError(problems)
    return _install(model, plan, plan.live, contracts, ports, local_params)


def _contracts_by_module(
    model: nn.Module, matched: Mapping[str, Contract]
) -> tuple[dict[int, tuple[str, Contract]], list[str]]:
    """A module may have several names; its contracts must then be equal."""
    found: dict[int, tuple[str, Contract]] = {}
    problems = []
    for name, contract in matched.items():
        other, first = found.setdefault(id(model.get_submodule(name)), (name, contract))
        if first.key != contract.key:
            problems.append(f"{name} is the same module as {other}, with another contract")
    return found, problems


def _misfits(
    model: nn.Module,
    matched: Mapping[str, Contract],
    ports: Mapping[tuple[str, str], ParamPort],
    plan: Plan,
) -> list[str]:
    problems = []
    for name, contract in matched.items():
        module, where = model.get_submodule(name), name or "<root>"
        if contract.input_names() or contract.output_names():
            problems += [f"{where}.{p}" for p in _unbound_inputs(module, contract)]
            if "forward" in module.__dict__:
                problems.append(
                    f"{where}: its forward is replaced on the instance; apply the plan before "
                    f"whatever replaces it"
                )
        problems += [f"{where}.{p}" for p in _undeclared_sizes(name, contract, ports, plan)]
    return problems


def _unbound_inputs(module: nn.Module, contract: Contract) -> list[str]:
    if type(module).forward is nn.Module.forward:
        return [
            f"in_dst: {type(module).__name__} has no forward, so no ports; contract its children"
        ]
    signature = forward_signature(type(module))
    names = contract.input_names()
    bound = bind_inputs(names, signature)
    parameters = [p.name for p in signature.parameters.values()]
    catch_all = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    hint = (
        f"; for a keyword of **{catch_all[0].name} write {catch_all[0].name}.NAME"
        if catch_all
        else ""
    )
    return [
        f"in_dst.{name}: forward has no parameter {name!r}{near(name, parameters)}; "
        f"it has {', '.join(parameters)}{hint}"
        for name in names
        if name not in bound
    ]


def _undeclared_sizes(
    name: str, contract: Contract, ports: Mapping[tuple[str, str], ParamPort], plan: Plan
) -> list[str]:
    """Outputs that leave an uneven shard without saying how large the whole is."""
    problems = []
    uneven = [
        (owner, port)
        for (owner, _), port in ports.items()
        if port.is_uneven(plan.spec)
        and (owner == name or owner.startswith(f"{name}." if name else ""))
    ]
    for output in contract.output_names() if uneven else ():
        src, dst, _ = contract.output_layouts(output, plan.spec.names)
        declared = (contract.out_sizes or {}).get(output, {})
        for i, mesh_dim in enumerate(plan.spec.names):
            cut = [f"{o}.{p.name}".lstrip(".") for o, p in uneven if p.used[i].is_shard()]
            dim = shard_dim(src[i])
            if cut and dim is not None and src[i] != dst[i] and dim not in declared:
                problems.append(
                    f"out_src.{output}.{mesh_dim}: S({dim}) of a module whose {cut[0]} is cut "
                    f"unevenly: declare the global size, out_sizes={{{output!r}: {{{dim}: ...}}}}"
                )
    return problems


def _install(
    model: nn.Module,
    plan: Plan,
    mesh: LiveMesh,
    contracts: Mapping[int, tuple[str, Contract]],
    ports: Mapping[tuple[str, str], ParamPort],
    local_params: bool,
) -> Handle:
    by_module: dict[int, dict[str, ParamPort]] = {}
    params: dict[int, tuple[nn.Parameter, ParamPort]] = {}
    for (owner, name), port in ports.items():
        module = model.get_submodule(owner)
        by_module.setdefault(id(module), {})[name] = port
        if port.is_sharded and not local_params:
            param = module._parameters[name]
            assert param is not None
            params[id(param)] = (param, port)
    made: dict[Any, type] = {}
    changes: list[tuple[nn.Module, type]] = []
    for name, module in model.named_modules():
        _, contract = contracts.get(id(module), ("", None))
        module_ports = tuple(by_module.get(id(module), {}).values())
        bypassed = without_fast_path(type(module)) and any(
            id(child) in contracts for child in module.modules()
        )
        if contract is None and not module_ports and not bypassed:
            continue
        record = BoundModule(port_label(name), mesh, contract, module_ports)
        # Layers share a class where they can, so that each compiles to the same graph.
        key = (type(module), record.label, contract and contract.key, module_ports)
        if key not in made:
            made[key] = _bound_class(type(module), record)
        changes.append((module, made[key]))
    change_params(params, lambda full, port: shard_tensor(full, port, mesh))
    originals = [(module, type(module)) for module, _ in changes]
    for module, cls in changes:
        object.__setattr__(module, "__class__", cls)  # whatever the module's own __setattr__ does
    return Handle(plan, originals, params)


def forward_signature(cls: type[nn.Module]) -> inspect.Signature:
    """The signature of a module's forward, without ``self``."""
    signature = inspect.signature(cls.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _bound_class(cls: type[nn.Module], record: BoundModule) -> type:
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        BOUND: record,
        **without_fast_path(cls),
        **used_params(cls, record),
    }
    contract = record.contract
    if contract is not None and (contract.input_names() or contract.output_names()):
        boundary = PrecompiledBoundary(
            contract,
            record.mesh.mesh,
            record.mesh.spec.names,
            signature=forward_signature(cls),
            label=record.label,
        )
        namespace["forward"] = _with_ports(cls.forward, boundary)
    if contract is not None and contract.recomputes:
        namespace["forward"] = _keeping_origins(namespace.get("forward", cls.forward))
    return type(cls.__name__, (cls,), namespace)


def _with_ports(inner: Callable[..., Any], boundary: PrecompiledBoundary) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = boundary.redistribute_inputs(args, kwargs)
        return boundary.redistribute_outputs(inner(self, *args, **kwargs))

    return forward


def _keeping_origins(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the partitioner decides then, as ports tell it
            return inner(self, *args, **kwargs)
        with keeping_origins():
            return inner(self, *args, **kwargs)

    return forward
