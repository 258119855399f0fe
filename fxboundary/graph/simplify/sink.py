"""Sink: what all ranks do alike to all tokens, each does to its own: sequence parallelism.

Between the all_reduce after one block and the all_reduce of gradients before the next, plain
tensor parallelism repeats norms and residual additions on every rank. Where that is done token by
token, the former becomes a reduce_scatter over the tokens and the latter an all_gather behind the
work. An all_reduce is worth both, so no more is sent, and each rank keeps its part of the
activations only (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models").
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from fxboundary.errors import UnsupportedTransitionError
from fxboundary.graph.find import graph_modules, node_tensor
from fxboundary.graph.simplify.change import Change
from fxboundary.graph.simplify.ports import Spent, spent
from fxboundary.graph.simplify.regions import Ordered, Region, regions
from fxboundary.graph.simplify.splitting import (
    NotSplit,
    Split,
    apply_split,
    split_ports,
    split_values,
)
from fxboundary.logs import LOG
from fxboundary.transition.transition import Transition


def sink(gm: GraphModule) -> list[Change]:
    """Split the tokens of what ranks do alike where no more bytes are sent for it, in place.

    Bytes of both directions count together, where there is a gradient. What the work uses for all
    tokens alike, as the weight of a norm, gets its gradient from all ranks then: that does not
    count.
    """
    return [change for module in graph_modules(gm) for change in _sink(module)]


def _sink(gm: GraphModule) -> list[Change]:
    graph = Ordered.of(gm)
    found = (_split(graph, region) for region in regions(graph))
    return [change for change in found if change is not None]


def _split(graph: Ordered, region: Region) -> Change | None:
    try:
        split = split_ports(graph, region)
        _check_bytes(region, split)
        values = split_values(region, split)
    except (NotSplit, UnsupportedTransitionError) as error:
        first, over = region.entries[0].name, region.over.name
        LOG.info("the work after %s is not split by tokens over %s: %s", first, over, error)
        return None
    apply_split(graph, region, split, values)
    ports = tuple(port.old.name for port in split.ports if port.old is not None)
    return Change("sink", ports, f"{region.over.name}: split by tokens")


def _check_bytes(region: Region, split: Split) -> None:
    before, after = _bytes(region, split)
    if after > before:
        raise NotSplit(f"{after / before:.3f} times the bytes would be sent")


def _bytes(region: Region, split: Split) -> tuple[float, float]:
    """What the ports send before and after, relative to each other only."""
    values = [node_tensor(port.node) for port in region.entries]
    trains = any(value is not None and value.requires_grad for value in values)
    ndim = max(value.dim() for value in values if value is not None)

    def total(ports: Iterable[tuple[Node, Transition | None]]) -> float:
        return sum(_weight(x) * _counted(spent(t, ndim), trains) for x, t in ports if t is not None)

    ports = [port for port in split.ports if not port.for_gradient]
    before = total((port.x, port.old.transition) for port in ports if port.old is not None)
    return before, total((port.x, port.transition) for port in ports)


def _counted(spent: Spent, trains: bool) -> int:
    forward, backward = spent.bytes
    return forward + backward if trains else forward


def _weight(x: Node) -> float:
    """Bytes for each token, which are the same on all ranks; dynamic sizes count as one."""
    value = node_tensor(x)
    assert value is not None
    features = value.shape[-1]
    return value.dtype.itemsize * (features if isinstance(features, int) else 1)
