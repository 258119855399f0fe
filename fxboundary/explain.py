"""What a plan does, as a table: ports, collectives, bytes. No GPUs, no processes.

Without a model there is one row per port of a pattern, and bytes are fractions of the whole
tensor's. With one, the plan is applied to it on the meta device, on a fake process group; with
example inputs its forward runs there, and the shapes at each port are seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxboundary.contract import OUTPUT, Contract, gradient_layout, layout_pair
from fxboundary.errors import FxBoundaryError
from fxboundary.mesh import MeshSpec, parse_mesh
from fxboundary.patterns import matches
from fxboundary.placements import (
    Layout,
    global_shape,
    normalize_dims,
    placement_text,
    shard,
    shard_dim,
    shard_order,
)
from fxboundary.plan import Plan
from fxboundary.transition.cost import traffic
from fxboundary.transition.program import bytes_text
from fxboundary.transition.steps import Step
from fxboundary.transition.transition import plan as plan_layouts

if TYPE_CHECKING:
    from rich.table import Table

Shape = tuple[int, ...]
Layouts = tuple[Layout, Layout, Layout]  # src, dst and the gradient's at dst


@dataclass(frozen=True)
class Tensors:
    """What crosses a port on rank 0: local shapes before and after; bytes held there, in all."""

    before: Shape
    after: Shape
    dtype: torch.dtype
    stored: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        sides = [str(list(self.before))]
        if self.before != self.after:
            sides.append(str(list(self.after)))
        return f"{_dtype_text(self.dtype)}{' → '.join(sides)}"


def _dtype_text(dtype: torch.dtype) -> str:
    """``f32``, ``bf16``, ``i64``."""
    text = str(dtype).removeprefix("torch.")
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        text = text.replace(long, short)
    return text


@dataclass(frozen=True)
class Way:
    """One direction of a port. ``sent`` are a rank's bytes, or a fraction of the whole tensor."""

    steps: str
    collectives: int
    sent: int | Fraction | None


@dataclass(frozen=True)
class Row:
    """A port of a module (or pattern), or ``count`` equal ones of numbered modules.

    ``backward`` is the way of its gradient.
    """

    module: str
    port: str
    layouts: str
    gradient: str
    forward: Way
    backward: Way
    tensors: Tensors | None = None
    count: int = 1


def print_explanation(path: str, mesh: str | None, model: str | None) -> None:
    """Print the table of a plan file; ``mesh`` is ``dp=2,tp=4``, ``model`` ``module:factory``.

    Raises:
        FxBoundaryError: a file, a factory or a contract that does not fit, all faults together.
    """
    from rich.console import Console

    try:
        plan = Plan.from_yaml(Path(path), parse_mesh(mesh) if mesh else None)
    except OSError as error:
        raise FxBoundaryError(f"{path}: {error.strerror}") from None
    rows = explain(plan, model)
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if fixed else 100, highlight=False)
    console.print(_table(rows, f"{Path(path).name} on {plan.spec}"))
    console.print(_legend(rows, model), style="dim")


def explain(plan: Plan, model: str | None = None) -> list[Row]:
    """The rows of a plan on a static mesh; with a model, equal ones of its layers are one row."""
    if model is None:
        return [
            port_row(pattern, port, layouts, plan.spec)
            for pattern, contract in plan.contracts.items()
            for port, layouts in (
                *contract_ports(contract, plan.spec),
                *_params(pattern, contract, plan),
            )
        ]
    from fxboundary.explain_model import model_rows

    return _merged(model_rows(plan, model))


def contract_ports(contract: Contract, spec: MeshSpec) -> Iterator[tuple[str, Layouts]]:
    """Label and layouts of each input and output that the contract declares."""
    for name in contract.input_names():
        yield f"in.{name}", contract.input_layouts(name, spec.names)
    for name in contract.output_names():
        label = "out" if name == OUTPUT else f"out.{name}"
        yield label, contract.output_layouts(name, spec.names)


def _params(pattern: str, contract: Contract, plan: Plan) -> Iterator[tuple[str, Layouts]]:
    """Declared parameters; all of the module's, where it declares none but shares its work.

    Not so where other patterns lie inside this one: the parameters there are theirs.
    """
    declared: Mapping[str, Any] = contract.params or {}
    if not declared and contract.shared_dims():
        others = (other for other in plan.contracts if other != pattern)
        declared = {} if any(_is_inside(other, pattern) for other in others) else {"*": {}}
    for name, pairs in declared.items():
        stored, used = layout_pair(pairs, plan.spec.names)
        given = (contract.param_grad or {}).get(name, {})
        grad = gradient_layout(used, given, contract.shared_dims(), plan.spec.names)
        yield f"param.{name}", (stored, used, grad)


def _is_inside(pattern: str, outer: str) -> bool:
    parts = pattern.split(".") if pattern else []
    prefixes = (".".join(parts[:length]) for length in range(len(parts)))
    return any(matches(prefix, outer) or matches(outer, prefix) for prefix in prefixes)


def port_row(
    module: str, port: str, layouts: Layouts, spec: MeshSpec, tensors: Tensors | None = None
) -> Row:
    """The row of one port; without its tensors, bytes are fractions."""
    ways = _ways(layouts, spec, tensors)
    src, dst, grad = layouts
    return Row(module, port, _arrows(src, dst, spec), _arrows(grad, grad, spec), *ways, tensors)


def _arrows(src: Layout, dst: Layout, spec: MeshSpec) -> str:
    """``dp: S(0), tp: S(1)→R``: the mesh dimensions that are not R on both sides."""
    texts = [
        f"{name}: {placement_text(s)}" + (f"→{placement_text(d)}" if s != d else "")
        for name, s, d in zip(spec.names, src, dst, strict=True)
        if not (s.is_replicate() and d.is_replicate())
    ]
    return ", ".join(texts) or "R"


def _ways(layouts: Layouts, spec: MeshSpec, tensors: Tensors | None) -> tuple[Way, Way]:
    dims = [p.dim for layout in layouts for p in layout if p.is_shard()]  # type: ignore[attr-defined]
    from_right = bool(dims) and max(dims) < 0
    if tensors is None and min(dims, default=0) < 0 <= max(dims, default=0):
        unknown = Way("depends on the tensor's rank", 0, None)
        return unknown, unknown
    ndim = max((dim + 1 if dim >= 0 else -dim for dim in dims), default=1)
    ndim = len(tensors.before) if tensors is not None else ndim
    src, dst, grad = (normalize_dims(layout, ndim) for layout in layouts)
    transition = plan_layouts(src, dst, grad, spec)

    def way(steps: tuple[Step, ...], layout: Layout, seen: Shape | None) -> Way:
        collectives = sum(step.is_collective for step in steps)
        # A dimension counted from the right stays so, where the rank is not known.
        shown = [_from_right(s, ndim) for s in steps] if from_right and tensors is None else steps
        return Way(
            transition.steps_text(shown),
            collectives,
            _sent(steps, layout, spec, seen, tensors, ndim),
        )

    before, after = (tensors.before, tensors.after) if tensors is not None else (None, None)
    backward = way(transition.backward, grad, after)
    if not transition.differentiable:
        backward = replace(backward, steps="no gradient")
    return way(transition.forward, src, before), backward


def _from_right(step: Step, ndim: int) -> Step:
    def moved(layout: Layout) -> Layout:
        return tuple(
            p if (d := shard_dim(p)) is None else shard(d - ndim, shard_order(p)) for p in layout
        )

    dim, to_dim = (None if d is None else d - ndim for d in (step.dim, step.to_dim))
    return replace(step, dim=dim, to_dim=to_dim, src=moved(step.src), dst=moved(step.dst))


def _sent(
    steps: tuple[Step, ...],
    layout: Layout,
    spec: MeshSpec,
    local: Shape | None,
    tensors: Tensors | None,
    ndim: int,
) -> int | Fraction:
    first = (0,) * len(spec.sizes)
    if local is not None and tensors is not None:
        shape = global_shape(local, layout, spec.sizes)
        return sum(traffic(steps, layout, shape, tensors.dtype.itemsize, spec.sizes, first))
    whole = (prod(spec.sizes) ** 2,) * ndim  # divisible however it is cut
    return Fraction(sum(traffic(steps, layout, whole, 1, spec.sizes, first)), prod(whole))


def _merged(rows: list[Row]) -> list[Row]:
    """Rows that differ in the numbers of their modules only become one, where the first is."""
    groups: dict[Row, list[str]] = {}
    for row in rows:
        groups.setdefault(replace(row, module=_numberless(row.module)), []).append(row.module)
    return [
        replace(row, module=names[0] if len(names) == 1 else row.module, count=len(names))
        for row, names in groups.items()
    ]


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _table(rows: list[Row], title: str) -> Table:
    from rich.box import HORIZONTALS
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=HORIZONTALS,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("port", overflow="fold")
    table.add_column("layout", overflow="fold")
    table.add_column("→ forward, ← backward", overflow="fold")
    table.add_column("sent", justify="right", no_wrap=True)
    for module, group in groupby(rows, key=lambda row: row.module):
        table.add_row(f"[bold]{_escape(module) or '<root>'}[/bold]")
        for row in group:
            _add(table, row)
        table.add_section()
    _add_totals(table, rows)
    return table


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _add(table: Table, row: Row) -> None:
    """Two lines: the port's way forward, and its gradient's way back."""
    name = f"  [cyan]{_escape(row.port)}[/cyan]" + (f" × {row.count}" if row.count > 1 else "")
    shapes = "" if row.tensors is None else f"  [dim]{_escape(str(row.tensors))}[/dim]"
    table.add_row(name, row.layouts, f"→ {row.forward.steps}", _sent_text(row.forward))
    table.add_row(
        shapes,
        f"[dim]grad[/dim] {row.gradient}",
        f"← {row.backward.steps}",
        _sent_text(row.backward),
    )


def _sent_text(way: Way) -> str:
    if not way.collectives:
        return ""
    if isinstance(way.sent, int):
        return bytes_text(way.sent)
    return f"{way.sent} tensor"


def _add_totals(table: Table, rows: list[Row]) -> None:
    held = sum(r.tensors.stored[0] * r.count for r in rows if r.tensors is not None)
    full = sum(r.tensors.stored[1] * r.count for r in rows if r.tensors is not None)
    ways = {"→": [row.forward for row in rows], "←": [row.backward for row in rows]}
    labels = ["[bold]total[/bold]"]
    labels.append(f"  parameters {bytes_text(held)} of {bytes_text(full)}" if full else "")
    for label, (arrow, way) in zip(labels, ways.items(), strict=True):
        pairs = list(zip(way, rows, strict=True))
        count = sum(w.collectives * row.count for w, row in pairs)
        sent = [w.sent * row.count for w, row in pairs if isinstance(w.sent, int)]
        known = all(isinstance(w.sent, int) for w in way if w.collectives)
        table.add_row(
            label, "", f"{arrow} {_plural(count)}", bytes_text(sum(sent)) if known else ""
        )


def _plural(count: int) -> str:
    return f"{count} collective{'' if count == 1 else 's'}"


def _legend(rows: list[Row], model: str | None) -> str:
    text = "grad: the layout in which the gradient arrives. sent: by one rank, ring algorithms"
    if model is None:
        return f"{text}, as a part of the whole tensor. Collectives: of one matching module."
    text += "; shapes are rank 0's, before → after the port."
    if any(row.forward.collectives and not isinstance(row.forward.sent, int) for row in rows):
        text += (
            " Where the factory returns no example inputs, or a port did not run, bytes are a "
            "part of the whole tensor."
        )
    return text
