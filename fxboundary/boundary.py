"""The eager boundary: one operation per port, planned once, run around a module's forward."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from fxboundary.binding import BoundInput, bind_inputs, output_indices
from fxboundary.containers import entry_at, item, replace_at, split_path, with_index, with_item
from fxboundary.contract import OUTPUT, Contract
from fxboundary.errors import ContractError, PlacementMismatchError, UnsupportedTransitionError
from fxboundary.mesh import register_mesh
from fxboundary.ops import PortOp
from fxboundary.placements import (
    Layout,
    Placement,
    layout_text,
    normalize_dims,
    parse_placement,
    shard_order,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FxBoundaryWarning(UserWarning):
    """A declaration that had no effect."""


class BoundaryExecutionOp(Protocol):
    """Changes the layout of a plain local tensor."""

    def __call__(self, tensor: torch.Tensor, /) -> torch.Tensor: ...


BoundaryOpLowerer: TypeAlias = Callable[[Layout, Layout], "BoundaryExecutionOp | None"]


def collective_type(src: Sequence[Placement], dst: Sequence[Placement]) -> str:
    """A label for profiles, from the mesh dimensions that differ; it selects nothing."""
    changes = [(s, d) for s, d in zip(src, dst, strict=True) if s != d]
    if not changes:
        return "identity"
    if any(s.is_partial() for s, _ in changes):
        if any(d.is_shard() for _, d in changes):
            return "reduce_scatter"
        if all(d.is_replicate() for _, d in changes):
            return "all_reduce"
    if any(s.is_shard() for s, _ in changes) and all(d.is_replicate() for _, d in changes):
        return "all_gather"
    return "redistribute"


@dataclass(frozen=True, eq=False)
class RedistOp:
    """The redistribution of one named tensor.

    With an ``execution_op`` that runs on the local tensor, else through DTensor; a validation
    run (``as_dtensor=True``) always goes through DTensor and returns one.
    Placements are torch's or text. ``grad_placements`` is the layout in which the gradient
    arrives at dst (DTensor path).
    """

    arg_name: str
    arg_index: int | None
    mesh: DeviceMesh
    src_placements: Layout
    dst_placements: Layout
    collective_type: str
    execution_op: BoundaryExecutionOp | None = None
    grad_placements: Layout | None = None

    def __post_init__(self) -> None:
        for field in ("src_placements", "dst_placements", "grad_placements"):
            if (layout := getattr(self, field)) is None:
                continue
            object.__setattr__(self, field, tuple(map(parse_placement, layout)))
            if len(layout) != self.mesh.ndim:
                raise ContractError(
                    f"{self.arg_name}: {field} has {len(layout)} placements for a mesh of "
                    f"{self.mesh.ndim} dimensions"
                )

    def execute(self, tensor: Any, *, as_dtensor: bool = False) -> Any:
        """Redistribute a local tensor, or a DTensor in the source layout.

        Returns a local tensor; with ``as_dtensor`` a DTensor. An identity returns a local
        tensor as the same object.
        """
        if self.execution_op is not None and not as_dtensor:
            return self.execution_op(self._local(tensor))
        if self.collective_type == "identity":
            return self._wrapped(tensor) if as_dtensor else self._local(tensor)
        moved = self._wrapped(tensor).redistribute(placements=self.dst_placements)
        return moved if as_dtensor else moved.to_local(grad_placements=self.grad_placements)

    def _wrapped(self, tensor: Any) -> Any:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor
        if any(shard_order(p) is not None for p in (*self.src_placements, *self.dst_placements)):
            raise UnsupportedTransitionError(
                f"{self.arg_name}: DTensor cuts in the mesh's order; shards in a declared order, "
                f"{layout_text(self.src_placements)} → {layout_text(self.dst_placements)}, need "
                f"an execution_op"
            )
        return DTensor.from_local(tensor, self.mesh, self.src_placements, run_check=False)

    def _local(self, tensor: Any) -> Any:
        if not is_dtensor(tensor):
            return tensor
        src, found = (
            normalize_dims(x, tensor.dim()) for x in (self.src_placements, tensor.placements)
        )
        if src != found:
            raise PlacementMismatchError(
                f"{self.arg_name}: declared {layout_text(src)}, but a DTensor placed "
                f"{layout_text(found)} arrived"
            )
        return tensor.to_local()


def is_dtensor(tensor: Any) -> bool:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


class PrecompiledBoundary:
    """The boundary of one module: every port's operation, ready before the first call.

    ``spec`` is the contract, ``mesh_dim_names`` the names its layouts use. ``signature`` is the
    forward's (without ``self``); without one, inputs are positional in sorted order of names.
    ``op_lowerer`` is asked first for every layout change: what it returns runs as it is, and
    where it returns ``None`` the built-in path runs. ``label`` names the module in ports.

    Raises:
        ContractError: layouts that do not fit the mesh.
        UnsupportedTransitionError: a change that has no meaning.
    """

    def __init__(
        self,
        spec: Contract,
        mesh: DeviceMesh,
        mesh_dim_names: Sequence[str],
        *,
        op_lowerer: BoundaryOpLowerer | None = None,
        signature: inspect.Signature | None = None,
        label: str = "",
    ) -> None:
        self._spec, self._mesh, self._names = spec, mesh, tuple(mesh_dim_names)
        if len(self._names) != mesh.ndim:
            raise ContractError(f"{mesh.ndim} mesh dimensions, but names {self._names}")
        self._live = register_mesh(mesh)
        self._lower, self._label = op_lowerer, label
        indices = bind_inputs(spec.input_names(), signature)
        self.in_plan = [self._input(name, indices[name]) for name in spec.input_names()]
        self.out_plan = [
            op
            for name, index in output_indices(spec).items()
            if (op := self._output(name, index)) is not None
        ]
        self._inputs = [
            (op.arg_index, *indices[op.arg_name].key_and_path, op.execution_op, op)
            for op in self.in_plan
        ]
        self._single = self._single_output()

    def _input(self, name: str, bound: BoundInput) -> RedistOp:
        layouts = self._spec.input_layouts(name, self._names)
        sizes = (self._spec.in_sizes or {}).get(name)
        backward = (self._spec.in_backward or {}).get(name, "")
        return self._op(name, bound.index, layouts, f"{self._label}:in.{name}", sizes, backward)

    def _output(self, name: str, index: int) -> RedistOp | None:
        layouts = self._spec.output_layouts(name, self._names)
        sizes = (self._spec.out_sizes or {}).get(name)
        port = f"{self._label}:out" if name == OUTPUT else f"{self._label}:out.{name}"
        op = self._op(name, index, layouts, port, sizes)
        identity = op.collective_type == "identity" and op.execution_op is None
        return None if identity else op

    def _op(
        self,
        name: str,
        index: int | None,
        layouts: tuple[Layout, Layout, Layout],
        port: str,
        sizes: Mapping[int, int] | None,
        backward: str = "",
    ) -> RedistOp:
        src, dst, grad = layouts
        label = collective_type(src, dst)
        execution: BoundaryExecutionOp | None = None
        if self._lower is not None and label != "identity":
            execution = self._lower(src, dst)
        if execution is None and (label != "identity" or any(g.is_partial() for g in grad)):
            options = self._spec.reduce_dtype or "", backward
            execution = PortOp(self._live, src, dst, grad, port, sizes, *options)
        return RedistOp(name, index, self._mesh, src, dst, label, execution, grad)

    def _single_output(self) -> BoundaryExecutionOp | None:
        """The operation of a module with one output, to be tried before anything general."""
        if len(self.out_plan) == 1 and self.out_plan[0].arg_index == 0:
            return self.out_plan[0].execution_op
        return None

    def redistribute_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, as_dtensor: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments in the module's layouts; a keyword goes before a position.

        An argument that is absent or ``None`` is skipped.
        """
        for index, key, path, run, op in self._inputs:
            by_key = key in kwargs
            if not by_key and (index is None or index >= len(args)):
                continue
            value = kwargs[key] if by_key else args[index]  # type: ignore[index]
            if value is None or (run is None and not as_dtensor and type(value) is torch.Tensor):
                continue
            if path:
                moved = self._execute_at(op, f"in.{op.arg_name}", value, path, as_dtensor)
            elif run is not None and not as_dtensor and type(value) is torch.Tensor:
                moved = run(value)
            else:
                moved = op.execute(value, as_dtensor=as_dtensor)
            if by_key:
                kwargs = {**kwargs, key: moved}
            else:
                args = [*args[:index], moved, *args[index + 1 :]]  # type: ignore[operator]
        return tuple(args), kwargs  # type: ignore[return-value]

    def redistribute_outputs(self, outputs: Any, *, as_dtensor_input: bool = False) -> Any:
        """Outputs as the contract lets them leave, in the structure they came in.

        A tensor, a tuple, list, mapping or dataclass; ``None`` is skipped. A declared output
        that is not there warns and is skipped.
        """
        if self._single is not None and type(outputs) is torch.Tensor and not as_dtensor_input:
            return self._single(outputs)
        for op in self.out_plan:
            outputs = self._redistribute_output(op, outputs, as_dtensor_input)
        return outputs

    def _redistribute_output(self, op: RedistOp, outputs: Any, as_dtensor: bool) -> Any:
        assert op.arg_index is not None
        name, path = split_path(op.arg_name)
        where = f"out.{op.arg_name}"
        if outputs is None:
            return None
        keys = _output_keys(outputs)
        if isinstance(outputs, (tuple, list)) and name not in keys:
            if op.arg_index >= len(outputs):
                return self._missing(op, outputs, f"index {op.arg_index} of {len(outputs)} outputs")
            value = outputs[op.arg_index]
            value = self._execute_at(op, where, value, path, as_dtensor)
            return with_index(outputs, op.arg_index, value)
        if keys or isinstance(outputs, Mapping):
            key = self._only_key(outputs, keys) if name == OUTPUT and name not in keys else name
            if key not in keys:
                found = f"the outputs are {', '.join(map(str, keys)) or 'none'}"
                return self._missing(op, outputs, found)
            value = self._execute_at(op, where, item(outputs, key), path, as_dtensor)
            return with_item(outputs, key, value)
        if op.arg_index > 0:
            return self._missing(op, outputs, f"index {op.arg_index} of 1 output")
        return self._execute_at(op, where, outputs, path, as_dtensor)

    def _execute_at(
        self, op: RedistOp, port: str, value: Any, path: tuple[str, ...], as_dtensor: bool
    ) -> Any:
        """Redistribute the tensor at ``path`` inside ``value``."""
        if not path:
            return None if value is None else op.execute(value, as_dtensor=as_dtensor)
        idle = op.execution_op is None and op.collective_type == "identity" and not as_dtensor
        try:
            if idle and not is_dtensor(entry_at(value, path)):
                return value  # the container itself, into which the module may write
            return replace_at(value, path, partial(op.execute, as_dtensor=as_dtensor))
        except (KeyError, IndexError) as error:
            raise PlacementMismatchError(
                f"{self._label}:{port}: no entry {'.'.join(path)!r} in a {type(value).__name__}"
            ) from error

    def _only_key(self, outputs: Any, keys: Sequence[Any]) -> Any:
        """The key of the one output that the short form means."""
        present = list(outputs) if isinstance(outputs, Mapping) else keys
        if len(present) > 1:
            raise PlacementMismatchError(
                f"{self._label}:out: the module returns {', '.join(map(str, present))}; name the "
                f"output: out_dst={{{present[0]!r}: {{...}}}}"
            )
        return next(iter(present), None)

    def _missing(self, op: RedistOp, outputs: Any, found: str) -> Any:
        if torch.compiler.is_compiling():
            return outputs  # a warning would break the graph
        warnings.warn(
            f"{self._label or 'module'}: declared output {op.arg_name!r} is not there ({found}); "
            f"it is skipped",
            FxBoundaryWarning,
            stacklevel=4,
        )
        return outputs


def _output_keys(outputs: Any) -> list[Any]:
    """Names of the outputs of a mapping, a dataclass or a named tuple, in their order."""
    # Looked up on the class: a tracer's proxy has every attribute.
    fields = getattr(type(outputs), "__dataclass_fields__", ())
    if isinstance(outputs, Mapping):
        return [*outputs, *(name for name in fields if name not in outputs)]
    return list(fields or getattr(type(outputs), "_fields", ()))
