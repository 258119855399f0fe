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
from fxboundary.transition.cost import DEFAULT_MODEL, cost, least_bytes, traffic
from fxboundary.transition.gradient import adjoint_layout
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
    """One direction of a port.

    ``sent`` are a rank's bytes, ``least`` those that the busiest rank receives in any program;
    both may be fractions of the whole tensor. ``seconds`` are the cost model's, ``memory`` the
    bytes that the program needs besides its input.
    """

    steps: str
    collectives: int
    sent: int | Fraction | None
    least: int | Fraction | None = None
    seconds: float | None = None
    memory: int = 0


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

    def way(steps: tuple[Step, ...], start: Layout, goal: Layout, seen: Shape | None) -> Way:
        collectives = sum(step.is_collective for step in steps)
        # A dimension counted from the right stays so, where the rank is not known.
        shown = [_from_right(s, ndim) for s in steps] if from_right and tensors is None else steps
        first = (0,) * len(spec.sizes)
        whole, itemsize = (prod(spec.sizes) ** 2,) * ndim, 1  # divisible however it is cut
        if seen is not None and tensors is not None:
            whole, itemsize = global_shape(seen, start, spec.sizes), tensors.dtype.itemsize
        sent = sum(traffic(steps, start, whole, itemsize, spec.sizes, first))
        least = least_bytes(start, goal, whole, itemsize, spec)
        text = transition.steps_text(shown)
        if tensors is None:
            elements = prod(whole)
            return Way(text, collectives, Fraction(sent, elements), Fraction(least, elements))
        seconds, memory = cost(steps, start, whole, itemsize, spec, DEFAULT_MODEL)
        return Way(text, collectives, sent, least, seconds, memory)

    before, after = (tensors.before, tensors.after) if tensors is not None else (None, None)
    backward = way(transition.backward, grad, adjoint_layout(src), after)
    if not transition.differentiable:
        backward = Way("no gradient", 0, None)
    return way(transition.forward, src, dst, before), backward


def _from_right(step: Step, ndim: int) -> Step:
    def moved(layout: Layout) -> Layout:
        return tuple(
            p if (d := shard_dim(p)) is None else shard(d - ndim, shard_order(p)) for p in layout
        )

    dim, to_dim = (None if d is None else d - ndim for d in (step.dim, step.to_dim))
    return replace(step, dim=dim, to_dim=to_dim, src=moved(step.src), dst=moved(step.dst))


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
    above = _above_least(rows)
    if above:
        table.add_column("at least", justify="right", no_wrap=True)
    if any(row.tensors is not None for row in rows):
        table.add_column("time", justify="right", no_wrap=True)
    for module, group in groupby(rows, key=lambda row: row.module):
        table.add_row(f"[bold]{_escape(module) or '<root>'}[/bold]")
        for row in group:
            _add(table, row, above)
        table.add_section()
    _add_totals(table, rows, above)
    return table


def _above_least(rows: list[Row]) -> bool:
    """Whether some program sends more than the least that any could."""
    ways = [way for row in rows for way in (row.forward, row.backward) if way.collectives]
    return any((way.sent or 0) > (way.least or 0) for way in ways)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _add(table: Table, row: Row, above: bool) -> None:
    """Two lines: the port's way forward, and its gradient's way back."""
    name = f"  [cyan]{_escape(row.port)}[/cyan]" + (f" × {row.count}" if row.count > 1 else "")
    shapes = "" if row.tensors is None else f"  [dim]{_escape(str(row.tensors))}[/dim]"
    table.add_row(name, row.layouts, f"→ {row.forward.steps}", *_numbers(row.forward, above))
    table.add_row(
        shapes,
        f"[dim]grad[/dim] {row.gradient}",
        f"← {row.backward.steps}",
        *_numbers(row.backward, above),
    )


def _numbers(way: Way, above: bool) -> list[str]:
    if not way.collectives:
        return []
    least = [_size_text(way.least)] if above else []
    time = [] if way.seconds is None else [_time_text(way.seconds)]
    return [_size_text(way.sent), *least, *time]


def _size_text(size: int | Fraction | None) -> str:
    return bytes_text(size) if isinstance(size, int) else f"{size} tensor"


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def _add_totals(table: Table, rows: list[Row], above: bool) -> None:
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
        numbers = [bytes_text(sum(sent))] if known else []
        if known and sent:
            least = sum(int(w.least or 0) * row.count for w, row in pairs)
            numbers += [bytes_text(least)] if above else []
            numbers.append(_time_text(sum((w.seconds or 0) * row.count for w, row in pairs)))
        table.add_row(label, "", f"{arrow} {_plural(count)}", *numbers)


def _plural(count: int) -> str:
    return f"{count} collective{'' if count == 1 else 's'}"


def _legend(rows: list[Row], model: str | None) -> str:
    text = "grad: the layout in which the gradient arrives. sent: by one rank, ring algorithms"
    bound = "at least: by the busiest rank in any program." if _above_least(rows) else ""
    bound = bound or "No program sends less."
    if model is None:
        return (
            f"{text}, as a part of the whole tensor. {bound} Collectives: of one matching module."
        )
    ways = [way for row in rows for way in (row.forward, row.backward)]
    memory = max((way.memory for way in ways), default=0)
    text += (
        f". {bound} time: by the cost model, links inside and across nodes of 8. Most memory that "
        f"a program needs besides its input: {bytes_text(memory)}. Shapes are rank 0's, before → "
        f"after the port."
    )
    if any(row.forward.collectives and not isinstance(row.forward.sent, int) for row in rows):
        text += (
            " Where the factory returns no example inputs, or a port did not run, bytes are a "
            "part of the whole tensor."
        )
    return text
