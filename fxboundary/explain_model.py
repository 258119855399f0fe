"""The ports of a plan on a real model: on the meta device, on a fake process group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxboundary.apply import apply
from fxboundary.explain import Row, Tensors, contract_ports, port_row
from fxboundary.graph.find import full_name
from fxboundary.mesh import MeshSpec
from fxboundary.ops import OP
from fxboundary.placements import local_shape
from fxboundary.plan import Plan
from fxboundary.state import BOUND
from fxboundary.static import arguments, explained, fake_mesh, make_model
from fxboundary.used_params import BoundModule


def model_rows(plan: Plan, where: str) -> list[Row]:
    """A row for each port of the model that ``module:factory`` makes, and for each parameter.

    Raises:
        FxBoundaryError: the factory, its model's forward, or the plan on the model fails.
    """
    model, inputs = make_model(where)
    with fake_mesh(plan.spec) as mesh:
        apply(model, Plan(mesh, plan.contracts))
        seen = {} if inputs is None else _run(model, inputs, where)
        bound = {
            name: (module, record)
            for name, module in model.named_modules()
            if (record := getattr(type(module), BOUND, None)) is not None
        }
        contracted = [name for name, (_, record) in bound.items() if record.contract]
        rows: list[Row] = []
        for name, (module, record) in bound.items():
            rows += _port_rows(name, record, plan.spec, seen)
            rows += _param_rows(_enclosing(name, contracted), name, module, record, plan.spec)
        return sorted(rows, key=lambda row: list(bound).index(row.module))


def _run(model: nn.Module, inputs: Any, where: str) -> dict[str, list[Tensors]]:
    """Run the forward once; the tensors at each port, by its full name."""
    # Fake tensors, on the meta device: models know them, and ask nothing about their values.
    # Read on torch 2.13.0 and 2.14.1.
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: fake.from_tensor(t.to("meta")), inputs)
    args, kwargs = arguments(inputs)
    recorder = _Recorder(model)
    failed = f"--model {where}: its forward failed on the meta device"
    with explained(failed), torch.no_grad(), fake, recorder:
        model(*args, **kwargs)
    return recorder.seen


class _Recorder(TorchFunctionMode):
    """Notes every call of the port operator, under the module whose forward makes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: dict[str, list[Tensors]] = defaultdict(list)
        self._stack: list[str] = [""]
        self._handles = [
            handle
            for name, module in model.named_modules()
            for handle in (
                module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            )
        ]

    def _leave(self) -> None:
        self._stack.pop()

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (OP, OP.default):
            x, label = args[0], args[5]
            tensors = Tensors(tuple(x.shape), tuple(result.shape), x.dtype)
            self.seen[full_name(label, self._stack[-1])].append(tensors)
        return result


def _enclosing(name: str, contracted: Sequence[str]) -> str:
    """The module whose contract speaks of the parameters of module ``name``."""
    return next(c for c in reversed(contracted) if c in ("", name) or name.startswith(f"{c}."))


def _port_rows(
    name: str, record: BoundModule, spec: MeshSpec, seen: Mapping[str, list[Tensors]]
) -> Iterator[Row]:
    for port, layouts in contract_ports(record.contract, spec) if record.contract else ():
        # A module that is called twice crosses its ports twice.
        for tensors in seen.get(f"{name}:{port}") or [None]:  # type: ignore[list-item]
            yield port_row(name, port, layouts, spec, tensors)


def _param_rows(
    contracted: str, owner: str, module: nn.Module, record: BoundModule, spec: MeshSpec
) -> Iterator[Row]:
    within = owner.removeprefix(contracted).lstrip(".")
    for port in record.params:
        param = module._parameters[port.name]
        assert param is not None
        used = local_shape(port.shape, port.used, spec.sizes, (0,) * len(spec.sizes))
        if port.stored == port.used:
            used = tuple(param.shape)
        size = param.dtype.itemsize
        stored = (param.numel() * size, prod(port.shape) * size)
        tensors = Tensors(tuple(param.shape), used, param.dtype, stored)
        label = ".".join(filter(None, ("param", within, port.name)))
        yield port_row(contracted, label, (port.stored, port.used, port.grad), spec, tensors)
