"""Models on the meta device and fake process groups: what a plan does, without doing it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxboundary.apply import apply
from fxboundary.errors import FxBoundaryError
from fxboundary.graph.simplify.simplify import simplify_ports
from fxboundary.mesh import MeshSpec
from fxboundary.plan import Plan


def make_model(where: str) -> tuple[nn.Module, Any]:
    """What ``module:factory`` makes on the meta device: a model, and example inputs or ``None``.

    Raises:
        FxBoundaryError: there is no such factory, it fails, or it returns something else.
    """
    module_name, _, factory_name = where.partition(":")
    if not module_name or not factory_name:
        raise FxBoundaryError(f"--model {where}: write module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
        for part in factory_name.split("."):
            factory = getattr(factory, part)
    except Exception as error:  # whatever a user's module raises when it is imported
        raise FxBoundaryError(f"--model {where}: {error}") from None
    failed = f"--model {where}: the factory failed on the meta device"
    with explained(failed), torch.device("meta"):
        made = factory()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise FxBoundaryError(
            f"--model {where}: returned {type(made).__name__}; return a module, or "
            f"(module, example_inputs)"
        )
    return model.to("meta"), inputs


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of code that is not ours, as one of ours that says when it happened."""
    try:
        yield
    except FxBoundaryError:
        raise
    except Exception as error:
        raise FxBoundaryError(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def fake_mesh(spec: MeshSpec) -> Iterator[DeviceMesh]:
    """A mesh whose processes do nothing, until the block ends; this process is rank 0.

    Raises:
        FxBoundaryError: there is a process group already.
    """
    # Private to torch; read on torch 2.13.0 and 2.14.1.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise FxBoundaryError(
            f"a fake process group for {spec} is wanted, but there is a process group already; "
            f"build the plan on a mesh of that one, or destroy it first"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(spec.sizes))
    try:
        yield init_device_mesh("cpu", spec.sizes, mesh_dim_names=spec.names)
    finally:
        dist.destroy_process_group()


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as a call's: a mapping is keywords, a tuple or list positions, else one."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def capture(model: nn.Module, plan: Plan, inputs: Any, simplify: bool = False) -> list[GraphModule]:
    """The graphs that Dynamo captures of a model split by a plan, in the order in which they run.

    The model must be new: the plan is applied to it for good. Model and inputs may be on the meta
    device. A plan on a mesh without processes gets fake ones. With ``simplify`` ports are
    simplified as the backend does it.

    Raises:
        FxBoundaryError: the plan does not fit the model, or its forward fails.
    """
    if plan.live is None:
        with fake_mesh(plan.spec) as mesh:
            return capture(model, Plan(mesh, plan.contracts), inputs, simplify)
    apply(model, plan)
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _: Sequence[Any]) -> Any:
        if simplify:
            simplify_ports(gm)
        graphs.append(gm)
        return gm.forward

    args, kwargs = arguments(_on_device_of(model, inputs))
    torch._dynamo.reset()
    with explained("the model's forward failed while it was captured"):
        torch.compile(model, backend=keep)(*args, **kwargs)
    return graphs


def _on_device_of(model: nn.Module, inputs: Any) -> Any:
    device = next((p.device for p in model.parameters()), None)
    if device is None:
        return inputs
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), inputs)
