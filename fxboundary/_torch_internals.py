"""Private torch APIs, each with the versions it was read on.

Everything else in the package uses torch's public names only (and ``mesh.py`` its group
registry).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.fx import Graph, Node

from fxboundary.errors import FxBoundaryError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_READ_ON = "read on torch 2.13.0 and 2.14.1"


def _need(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise FxBoundaryError(
            f"torch {torch.__version__} has no {owner.__name__}.{name} ({_READ_ON})"
        )
    return getattr(owner, name)


_dispatch_modes = _need(torch._C, "_len_torch_dispatch_stack")
_function_modes = _need(torch._C, "_len_torch_function_stack")
_functorch_level = _need(torch._C._functorch, "maybe_current_level")
_saving_hooks = _need(torch._C._autograd, "_top_saved_tensors_default_hooks")
_need(forward_ad, "_current_level")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain_eager(x: Any) -> bool:
    """A plain tensor, and nothing that watches or transforms operations."""
    return (
        type(x) in _PLAIN
        and not torch.compiler.is_compiling()  # compiled autograd traces into a port's backward
        and not _dispatch_modes()
        and not _function_modes()
        and _functorch_level() is None
        and forward_ad._current_level < 0
    )


def in_transform() -> bool:
    """Inside ``torch.func`` or a forward-mode level, with no mode that must see operators.

    An autograd function has to be reached above the dispatcher there, not from an operator's
    composite body.
    """
    if torch.compiler.is_compiling():
        return False
    transformed = _functorch_level() is not None or forward_ad._current_level >= 0
    return transformed and not _dispatch_modes() and not _function_modes()


def saves_tensors_elsewhere() -> bool:
    """Whether hooks decide already what is kept for backward."""
    return _saving_hooks(True) is not None


def named_group(name: str) -> ProcessGroup:
    """The process group that functional collectives find by that name.

    Raises:
        FxBoundaryError: there is none in this process.
    """
    from torch._C import _distributed_c10d as c10d

    resolve: Any = _need(c10d, "_resolve_process_group")
    try:
        group: ProcessGroup = resolve(name)
    except RuntimeError as error:
        raise FxBoundaryError(f"no process group {name!r} in this process") from error
    return group


class GroupCalls:
    """Collectives of one process group through its own methods.

    A fifth of the cost of the functional operators, which make the same calls behind two
    dispatches and a wait registry. Results are complete (on a device: ordered in its current
    stream) when a method returns.
    """

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        for name in ("_allgather_base", "_reduce_scatter_base", "alltoall_base", "allreduce"):
            if not hasattr(group, name):
                raise FxBoundaryError(f"a process group has no {name} ({_READ_ON})")
        self._group = group
        self._n = group.size()
        self._ops = {
            "sum": dist.ReduceOp.SUM,
            "avg": dist.ReduceOp.AVG,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
            "product": dist.ReduceOp.PRODUCT,
        }
        self._scatter_options = {}
        for name, op in self._ops.items():
            self._scatter_options[name] = options = dist.ReduceScatterOptions()
            options.reduceOp = op

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        if op == "sum":
            self._group.allreduce([y]).wait()
        else:
            self._group.allreduce([y], self._ops[op]).wait()
        return y

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((self._n * x.shape[0], *x.shape[1:]))
        self._group._allgather_base(y, x).wait()
        return y

    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor:
        y = x.new_empty((x.shape[0] // self._n, *x.shape[1:]))
        self._group._reduce_scatter_base(y, x, self._scatter_options[op]).wait()
        return y

    def all_to_all(
        self, x: torch.Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> torch.Tensor:
        y = torch.empty_like(x) if received is None else x.new_empty(sum(received))
        self._group.alltoall_base(y, x, list(received or ()), list(sent or ())).wait()
        return y


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into the structured trace of ``TORCH_TRACE``, made only where one is written.

    A torch without this function writes no artifact; nothing else depends on it.
    """
    trace = getattr(torch._logging, "trace_structured", None)
    if trace is not None:
        metadata = {"name": name, "encoding": "string"}
        trace("artifact", metadata_fn=lambda: metadata, payload_fn=text)


def keep_order(graph: Graph, after: Mapping[Node, Sequence[Node]]) -> None:
    """Make Inductor run nodes of a post-grad graph after others that they do not depend on.

    Its scheduler sorts anew, by memory, what nothing ties.
    """
    from torch._inductor.fx_passes import control_dependencies

    preserve = _need(control_dependencies, "preserve_node_ordering")
    preserve(graph, {node: dict.fromkeys(others) for node, others in after.items()})
