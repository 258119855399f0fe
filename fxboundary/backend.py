"""The ``torch.compile`` backend: find the ports, simplify them, hand over to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, cast

import torch
from torch.fx import GraphModule

from fxboundary.errors import ContractError, FxBoundaryError
from fxboundary.graph.find import Port, clean_path, find_ports, graph_modules
from fxboundary.graph.insert.rewrite import insert_boundaries
from fxboundary.graph.prepare import name_ports, remove_dead_ports
from fxboundary.graph.render import render
from fxboundary.graph.simplify.change import Change
from fxboundary.graph.simplify.simplify import simplify_ports
from fxboundary.logs import LOG, log_captured, log_prepared
from fxboundary.patterns import matches
from fxboundary.placements import near
from fxboundary.plan import Plan
from fxboundary.state import BOUND

LOWERINGS = ("auto", "functional", "peer")
AGGRESSIVE = "aggressive"
# Options of Inductor that bring collectives into an order of their own, or put several into one.
_SCHEDULES = (
    "aten_distributed_optimizations.enable_overlap_scheduling",
    "reorder_for_compute_comm_overlap",
    "bucket_all_gathers_fx",
    "bucket_reduce_scatters_fx",
    "bucket_all_reduces_fx",
)


@dataclass(frozen=True)
class Options:
    """``lowering``: what programs become. ``functional``: torch's functional collectives;
    ``peer``: reads of the peers' memory, fused with their neighbours, between processes of one
    host. ``auto`` is ``functional`` so far.

    ``simplify``: share, compose and merge ports first; ``"aggressive"`` splits by tokens what
    ranks do alike, too. ``overlap``: issue collectives early and wait for them late.
    """

    lowering: str = "auto"
    simplify: bool | str = True
    overlap: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.simplify, bool) or self.simplify == AGGRESSIVE):
            raise FxBoundaryError(
                f'simplify={self.simplify!r}: write True, False or "{AGGRESSIVE}"'
            )
        if not isinstance(self.overlap, bool):
            raise FxBoundaryError(f"overlap={self.overlap!r}: write True or False")
        if self.lowering not in LOWERINGS:
            hint = near(str(self.lowering), LOWERINGS)
            raise FxBoundaryError(
                f"lowering={self.lowering!r}: no such lowering{hint}; "
                f"there are {', '.join(LOWERINGS)}"
            )


@dataclass(frozen=True)
class GraphReport:
    """What the backend made of one captured graph: its ports, their text, what was simplified."""

    ports: tuple[Port, ...]
    text: str
    changes: tuple[Change, ...] = ()


class Backend:
    """A ``torch.compile`` backend; :attr:`graphs` reports each graph it was given."""

    def __init__(self, plan: Plan | None = None, **options: Any) -> None:
        self._plan, self._options = plan, options
        _split_options(options)
        self.graphs: list[GraphReport] = []

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one captured graph; called by Dynamo."""
        own, inductor = _split_options({**self._options, **(options or {})})
        log_captured(gm)
        if self._plan is not None:
            if _is_split(gm):
                _check_applied(gm, self._plan)
            else:
                insert_boundaries(gm, self._plan)
        remove_dead_ports(gm)
        name_ports(gm)
        aggressive = own.simplify == AGGRESSIVE
        changes = simplify_ports(gm, aggressive) if own.simplify else ()
        ports = find_ports(gm)
        self.graphs.append(GraphReport(tuple(ports), render(gm), changes))
        log_prepared(gm, self.graphs[-1].text, changes)
        if not ports:
            _say_no_ports()
        patches = {**_mode_options(mode), **inductor}
        return _inductor(gm, example_inputs, ports, patches, own)


def backend(plan: Plan | None = None, **options: Any) -> Backend:
    """A backend with options of its own: ``torch.compile(model, backend=fb.backend(...))``.

    With a ``plan``, a model that was not split is split while it is compiled: it keeps whole
    parameters, takes whole inputs and gives the outputs and gradients of the unsplit model, on
    every rank. Of a model that was split by :func:`fxboundary.apply` the ports are found.
    ``options`` are :class:`Options`' fields, and Inductor's own.

    Raises:
        FxBoundaryError: an unknown option or value.
    """
    return Backend(plan, **options)


def fxboundary(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The registered backend, ``torch.compile(model, backend="fxboundary", options={...})``."""
    return Backend()(gm, example_inputs, **kwargs)


def _split_options(options: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Our options, and those that are Inductor's.

    Raises:
        FxBoundaryError: a name that neither knows.
    """
    own = {name: value for name, value in options.items() if name in Options.__annotations__}
    rest = {name: value for name, value in options.items() if name not in own}
    if rest:
        from torch._inductor import config

        known = [*Options.__annotations__, *config.get_config_copy()]
        for name in rest:
            if name.replace("-", "_") not in known:
                raise FxBoundaryError(
                    f"option {name!r}: unknown to fxboundary "
                    f"({', '.join(Options.__annotations__)}) and to Inductor{near(name, known)}"
                )
    return Options(**own), {name.replace("-", "_"): value for name, value in rest.items()}


def _mode_options(mode: str | None) -> dict[str, Any]:
    # Dynamo hands mode= to a custom backend and applies it to Inductor's own only.
    if mode is None or mode == "default":
        return {}
    return dict(torch._inductor.list_mode_options(mode))


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    ports: Sequence[Port],
    patches: dict[str, Any],
    own: Options,
) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    from fxboundary.graph.overlap import OverlapCollectives
    from fxboundary.graph.partition import MarkForBackward, declared_backward
    from fxboundary.graph.verify import NoteEqualCollectives, VerifyPorts, expected_collectives

    def users(name: str) -> Any:
        return patches[name] if name in patches else attrgetter(name)(config)

    marks = MarkForBackward(declared_backward(ports), users("joint_custom_post_pass"))
    noted = NoteEqualCollectives(marks)
    verify = VerifyPorts(expected_collectives(ports), noted, users("post_grad_custom_pre_pass"))
    patches |= {"joint_custom_post_pass": noted, "post_grad_custom_pre_pass": verify}
    last = "post_grad_custom_post_pass"
    if own.lowering == "peer":
        from fxboundary.peer.backend import LowerToPeers

        patches[last] = LowerToPeers(users(last))
    elif own.overlap and not any(_enabled(users(name)) for name in _SCHEDULES):
        patches[last] = OverlapCollectives(users(last))
    return cast("Callable[..., Any]", compile_fx(gm, list(example_inputs), config_patches=patches))


def _enabled(option: Any) -> bool:
    return bool(option) and option != "none"


def _is_split(gm: GraphModule) -> bool:
    """Whether a plan was applied to the model, or to a part of it."""
    return bool(find_ports(gm)) or any(
        hasattr(cls, BOUND)
        for module in graph_modules(gm)
        for node in module.graph.nodes
        for _, cls in (node.meta.get("nn_module_stack") or {}).values()
    )


def _check_applied(gm: GraphModule, plan: Plan) -> None:
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            for path, cls in (node.meta.get("nn_module_stack") or {}).values():
                name = clean_path(path)
                if any(matches(p, name) for p in plan.contracts) and not hasattr(cls, BOUND):
                    raise ContractError(
                        f"{name or '<root>'}: the plan contracts it, but it has no ports: call "
                        f"fxboundary.apply(model, plan) before compiling"
                    )


@cache
def _say_no_ports() -> None:
    LOG.debug("a graph without ports: compiled as Inductor does (said once)")
