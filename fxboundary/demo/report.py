"""What the demo found, as tables a person wants to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxboundary.demo.settings import Settings
from fxboundary.demo.traffic import Traffic
from fxboundary.demo.training import Run
from fxboundary.transition.program import bytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_report(
    console: Console, runs: Sequence[Run], worst: Sequence[float], settings: Settings
) -> None:
    """``worst`` is the largest relative difference of each run, over all steps and ranks."""
    console.print()
    console.print(_losses(runs))
    console.print()
    console.print(_properties(runs, worst))
    console.print(_notes(runs, settings), style="dim", highlight=False)
    console.print()
    difference, tolerance = max(worst), settings.tolerance
    if difference <= tolerance:
        console.print(
            f"[bold green]agree[/bold green]: at every one of {settings.steps} steps the losses "
            f"are within {difference:.1e} of the unsharded model's; the tolerance for "
            f"{settings.dtype} is {tolerance:.0e}"
        )
    else:
        console.print(
            f"[bold red]DISAGREE[/bold red]: a loss is {difference:.1e} away from the unsharded "
            f"model's; the tolerance for {settings.dtype} is {tolerance:.0e}"
        )


def _notes(runs: Sequence[Run], settings: Settings) -> str:
    text = (
        f"{settings.ranks_text}, {settings.device}, {settings.dtype}. Step time: median on rank "
        f"0. Collectives: one step, forward and backward, as observed on rank 0; bytes are those "
        f"it sends with ring algorithms. Differences are relative to the unsharded losses."
    )
    if settings.compiles_reference:
        pairs = zip(runs[0].losses, runs[2].losses, strict=True)
        apart = max(abs(a - b) / abs(a) for a, b in pairs)
        text += (
            f" Compiled losses are compared with the unsharded model compiled: the model's norms "
            f"are float32 in any dtype and are rounded elsewhere when compiled (the unsharded "
            f"model, eager and compiled: {apart:.1e})."
        )
    return text


def _losses(runs: Sequence[Run]) -> Table:
    from rich.table import Table

    differences = [run.differences for run in runs]
    table = Table(title="loss", title_justify="left", title_style="bold")
    table.add_column("step", justify="right")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_column("largest difference", justify="right")
    for step in _shown_steps(len(runs[0].losses)):
        table.add_row(
            str(step + 1),
            *(f"{run.losses[step]:.6f}" for run in runs),
            f"{max(d[step] for d in differences):.1e}",
        )
    return table


def _shown_steps(steps: int) -> list[int]:
    return sorted({0, 1 % steps, *(steps * i // 4 for i in (1, 2, 3)), steps - 1})


def _properties(runs: Sequence[Run], worst: Sequence[float]) -> Table:
    from rich.table import Table

    table = Table(title="one training step", title_justify="left", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_row("step time", *(f"{run.step_seconds * 1e3:.0f} ms" for run in runs))
    table.add_row(
        "largest difference",
        *(
            "reference" if run.reference is None else f"{value:.1e}"
            for run, value in zip(runs, worst, strict=True)
        ),
    )
    kinds = sorted({kind for run in runs for kind in run.traffic})
    for kind in kinds:
        table.add_row(kind, *(_traffic_text(run.traffic.get(kind)) for run in runs))
    table.add_row("all collectives", *(_traffic_text(_total(run)) for run in runs))
    table.add_row("graphs", *(_count_text(run.graphs) for run in runs))
    table.add_row("boundary nodes", *(_count_text(run.boundary_nodes) for run in runs))
    return table


def _total(run: Run) -> Traffic | None:
    parts = run.traffic.values()
    return Traffic(sum(t.count for t in parts), sum(t.bytes for t in parts)) if parts else None


def _traffic_text(traffic: Traffic | None) -> str:
    return "–" if traffic is None else f"{traffic.count} × · {bytes_text(traffic.bytes)}"


def _count_text(count: int | None) -> str:
    return "–" if count is None else str(count)
