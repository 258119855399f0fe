"""The three runs: unsharded, tensor parallel, tensor and sequence parallel compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fxboundary.apply import apply
from fxboundary.backend import Backend, backend
from fxboundary.demo.examples import example_path
from fxboundary.demo.model import Batch, batch_loss, build_model, build_plan, read_batches
from fxboundary.demo.progress import Progress
from fxboundary.demo.settings import Settings
from fxboundary.demo.traffic import Traffic, observe

if TYPE_CHECKING:
    pass

_LEARNING_RATE = 2e-3
# AdamW divides by the size of the gradient: where a gradient is all rounding error, a small
# epsilon would turn it into a full step and the runs would drift apart.
_EPSILON = 1e-5


@dataclass
class Run:
    """One variant: a loss and a time in seconds per step, and what one step was seen to do.

    ``reference`` is the unsharded run that its losses are compared with.
    """

    name: str
    reference: Run | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    graphs: int | None = None
    boundary_nodes: int | None = None

    @property
    def step_seconds(self) -> float:
        """Median, without the first steps, which compile and warm up."""
        return median(self.seconds[2:] or self.seconds[-1:])

    @property
    def differences(self) -> list[float]:
        """Per step, how far the loss is from the reference's, relative."""
        expected = self.losses if self.reference is None else self.reference.losses
        pairs = zip(self.losses, expected, strict=True)
        return [abs(loss - other) / abs(other) for loss, other in pairs]


def train_all(settings: Settings, device: torch.device, progress: Progress) -> list[Run]:
    """The runs in order; every rank must call it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (settings.ranks,), mesh_dim_names=("tp",))
    batches = read_batches(settings, device)
    sequence_parallel = settings.plan or example_path("plans/llama_tp_sp.yaml")
    name = "TP + SP, compiled" if settings.plan is None else "--plan, compiled"
    # Plans first: what is wrong with one is said before anything is trained.
    plans = [
        build_plan(path, mesh, settings)
        for path in (example_path("plans/llama_tp.yaml"), sequence_parallel)
    ]
    models = [build_model(settings, device) for _ in plans]
    for model, plan in zip(models, plans, strict=True):
        apply(model, plan)
    eager = _unsharded(Run("unsharded"), settings, device, batches, progress)
    runs = [eager, _train(Run("TP, eager", eager), models[0], batches, progress, settings)]
    reference = eager
    if settings.compiles_reference:
        reference = _unsharded(
            Run("unsharded, compiled"), settings, device, batches, progress, compiles=True
        )
        runs.append(reference)
    runs.append(_compiled(Run(name, reference), models[1], batches, progress, settings))
    return runs


def _unsharded(
    run: Run,
    settings: Settings,
    device: torch.device,
    batches: list[Batch],
    progress: Progress,
    *,
    compiles: bool = False,
) -> Run:
    """Rank 0 trains the unsharded model by itself; the others wait for its losses."""
    trainer = None
    if dist.get_rank() == 0:
        model = build_model(settings, device)
        trainer = _Trainer(model, _compile(model)[0] if compiles else None)
    progress.start(run.name, "compiling" if compiles else "")
    for batch in batches:
        value = torch.zeros((), dtype=torch.float64, device=device)
        began = time.perf_counter()
        if trainer is not None:
            value.fill_(trainer.step(batch))
        run.seconds.append(time.perf_counter() - began)
        dist.broadcast(value, 0)
        run.losses.append(value.item())
        progress.advance(run.losses[-1])
    return run


def _compiled(
    run: Run, model: torch.nn.Module, batches: list[Batch], progress: Progress, settings: Settings
) -> Run:
    compiled, compiler = _compile(model)
    _train(run, model, batches, progress, settings, compiled)
    run.graphs = len(compiler.graphs)
    run.boundary_nodes = sum(len(graph.ports) for graph in compiler.graphs)
    return run


def _compile(model: torch.nn.Module) -> tuple[Callable[..., Any], Backend]:
    """The same as ``backend="fxboundary"``, with the reports of its graphs at hand."""
    compiler = backend()
    torch._dynamo.reset()
    return torch.compile(model, backend=compiler, fullgraph=True), compiler


def _train(
    run: Run,
    model: torch.nn.Module,
    batches: list[Batch],
    progress: Progress,
    settings: Settings,
    compiled: Callable[..., Any] | None = None,
) -> Run:
    trainer = _Trainer(model, compiled)
    progress.start(run.name, "compiling" if compiled is not None else "")
    for batch in batches:
        began = time.perf_counter()
        run.losses.append(trainer.step(batch))
        run.seconds.append(time.perf_counter() - began)
        progress.advance(run.losses[-1])
    run.traffic = observe(lambda: batch_loss(trainer.call, batches[-1]).backward(), settings.ranks)
    return run


class _Trainer:
    def __init__(self, model: torch.nn.Module, call: Callable[..., Any] | None = None) -> None:
        self.call = model if call is None else call
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, eps=_EPSILON)

    def step(self, batch: Batch) -> float:
        self._optimizer.zero_grad()
        loss = batch_loss(self.call, batch)
        loss.backward()
        self._optimizer.step()
        return loss.item()
