"""Snapshots of graphs, and of models that are captured for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.fx import GraphModule

from fxboundary.backend import Backend
from fxboundary.graph.find import Port, find_ports
from fxboundary.graph.render import describe_shapes
from fxboundary.placements import Layout, global_shape, named_layout_text
from fxboundary.plan import Plan
from fxboundary.static import capture
from fxboundary.testing.errors import SnapshotError
from fxboundary.testing.record import Direction, PortRecord, StepRecord
from fxboundary.testing.snapshot import Snapshot
from fxboundary.transition.cost import traffic
from fxboundary.transition.steps import Step
from fxboundary.transition.transition import Transition


def snapshot(model_or_graph: Any, plan: Plan | None = None, *inputs: Any) -> Snapshot:
    """The boundaries of a model under a plan, or of graphs that were captured already.

    A model needs a plan and example inputs: one call's positions, or one mapping of keywords. It
    must be new, the plan is applied to it for good; it may be on the meta device, and the plan's
    mesh of any size, ``{"dp": 8, "tp": 64}``: Dynamo captures it as rank 0 of a fake process
    group, and its ports are simplified as the backend does it. A ``GraphModule``, an
    ``ExportedProgram``, a backend that has compiled, or a list of these, is taken as it is.

    Raises:
        SnapshotError: there is nothing to take a snapshot of, or too much.
        FxBoundaryError: the plan does not fit the model, or its forward fails.
    """
    graphs = _graphs(model_or_graph)
    if graphs is not None:
        if plan is not None or inputs:
            raise SnapshotError("a graph is taken as it is: give neither a plan nor inputs with it")
        return snapshot_of(graphs)
    if not isinstance(model_or_graph, nn.Module):
        raise SnapshotError(
            f"no snapshot of {type(model_or_graph).__name__}: give a module with a plan and "
            f"inputs, a GraphModule, an ExportedProgram or a backend that has compiled"
        )
    if not isinstance(plan, Plan):
        raise SnapshotError("a model needs a plan: snapshot(model, plan, *inputs)")
    if not inputs:
        raise SnapshotError("a model needs example inputs: snapshot(model, plan, *inputs)")
    one = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Mapping) else inputs
    return snapshot_of_call(model_or_graph, plan, one)


def snapshot_of_call(model: nn.Module, plan: Plan, inputs: Any) -> Snapshot:
    """The snapshot of one call of a model; a mapping of inputs is keywords."""
    return snapshot_of(map(find_ports, capture(model, plan, inputs, simplify=True)))


def assert_collectives(
    model_or_graph: Any,
    plan: Plan | None = None,
    *inputs: Any,
    at_most: Mapping[str, int] | None = None,
    bytes_at_most: str | int | None = None,
    direction: Direction | None = None,
) -> None:
    """Fail where a model or a graph has more collectives, or sends more bytes, than allowed.

    :func:`snapshot` and :meth:`Snapshot.assert_collectives` in one.
    """
    found = snapshot(model_or_graph, plan, *inputs)
    found.assert_collectives(at_most, bytes_at_most=bytes_at_most, direction=direction)


def snapshot_of(graphs: Iterable[Sequence[Port]]) -> Snapshot:
    """The snapshot of graphs' ports; graphs without any are left out."""
    found = []
    for ports in graphs:
        symbols: dict[str, str] = {}
        found.append(tuple(_record(port, symbols) for port in ports))
    return Snapshot(tuple(filter(None, found)))


def _graphs(given: Any) -> list[Sequence[Port]] | None:
    """The ports of what is a graph or has graphs; ``None`` for anything else."""
    if isinstance(given, GraphModule):
        return [find_ports(given)]
    if isinstance(given, torch.export.ExportedProgram):
        return [find_ports(given.graph_module)]
    if isinstance(given, Backend):
        if not given.graphs:
            raise SnapshotError("this backend has compiled no graph: call the compiled model first")
        return [report.ports for report in given.graphs]
    if isinstance(given, (list, tuple)):
        parts = [_graphs(part) for part in given]
        known = [part for part in parts if part is not None]
        return [ports for part in known for ports in part] if len(known) == len(parts) else None
    return None


def _record(port: Port, symbols: dict[str, str]) -> PortRecord:
    move = port.transition
    if move is None:
        src, dst, grad = port.node.args[2:5]
        return PortRecord(port.name, "[?]", f"{src}->{dst}", str(grad), None, None)
    forward = _steps(move.forward, move, move.src, port.shape_in, port.dtype)
    backward = _steps(move.backward, move, move.grad, port.shape_out, port.dtype)
    return PortRecord(
        port.name,
        describe_shapes(port, symbols),
        move.arrow(),
        named_layout_text(move.grad, move.mesh.names),
        forward,
        (*(forward if port.recomputes else ()), *backward) if move.differentiable else None,
    )


def _steps(
    steps: Sequence[Step],
    move: Transition,
    start: Layout,
    local: tuple[Any, ...] | None,
    dtype: torch.dtype | None,
) -> tuple[StepRecord, ...]:
    """Steps from a layout, with the bytes that one rank sends, where its local shape is known."""
    sent: Iterable[int | None] = [None] * len(steps)
    if local is not None and dtype is not None and all(type(size) is int for size in local):
        sizes = move.mesh.sizes
        whole = global_shape(local, start, sizes)
        sent = traffic(steps, start, whole, dtype.itemsize, sizes, (0,) * len(sizes))
    return tuple(
        StepRecord(move.steps_text([step]), size if step.is_collective else None)
        for step, size in zip(steps, sent, strict=True)
    )
