"""Progress of the runs: a bar on a terminal, plain lines in a log, nothing on other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """Follows runs of ``steps`` steps on ``console``; without a console it is silent."""

    def __init__(self, console: Console | None, steps: int) -> None:
        self._console, self._steps = console, steps
        self._bars: Any = None
        self._name, self._done = "", 0
        if console is not None and console.is_terminal:
            self._bars = _bars(console)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, name: str, doing: str = "") -> None:
        """A run begins; ``doing`` says what its first step is busy with."""
        self._name, self._done = name, 0
        if self._bars is not None:
            self._task = self._bars.add_task(name, total=self._steps, note=doing)
        elif self._console is not None and doing:
            self._line(doing)

    def advance(self, loss: float) -> None:
        """A step is done."""
        self._done += 1
        note = f"loss {loss:.4f}"
        if self._bars is not None:
            self._bars.update(self._task, advance=1, note=note)
        elif self._console is not None and self._is_told():
            self._line(f"step {self._done}/{self._steps}  {note}")

    def _is_told(self) -> bool:
        every = max(1, self._steps // 5)
        return self._done in (1, self._steps) or self._done % every == 0

    def _line(self, text: str) -> None:
        assert self._console is not None
        self._console.print(f"{self._name}: {text}", soft_wrap=True, highlight=False)


def _bars(console: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
    )
