"""The fake values that a capture recorded, or that are computed for one that recorded none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from fxboundary.errors import ContractError
from fxboundary.graph.insert.regions import node_value
from fxboundary.graph.insert.values import leaves


def fake_mode(gm: GraphModule) -> Any:
    """The mode of the captured values: Dynamo makes another one for what comes after it."""
    # Read on torch 2.13.0 and 2.14.1.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for node in gm.graph.nodes:
        for leaf in leaves(node_value(node)):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def record_values(gm: GraphModule, example_inputs: Sequence[Any] | None) -> None:
    """Fake values for a graph whose capture recorded none.

    Raises:
        ContractError: there are no example inputs to compute them from.
    """
    lacking = [
        node
        for node in gm.graph.nodes
        if node.op in ("placeholder", "call_function", "call_method")
        and node_value(node) is None
        and not {"val", "example_value"} & node.meta.keys()
    ]
    if not lacking:
        return
    if example_inputs is None:
        raise ContractError(
            f"the capture recorded no value of {lacking[0].name}: give example_inputs, a tuple of "
            f"the graph's inputs"
        )
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(gm, mode).propagate(*example_inputs)
