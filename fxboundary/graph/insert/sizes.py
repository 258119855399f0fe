"""The sizes of a graph on one rank, after ports were put into a graph of global sizes.

Nodes are run one after another on fake tensors of this rank's sizes. What each dimension is made
of is carried along, so that literal sizes are changed where they stem from a dimension that is cut,
and nowhere else; where that cannot be told the rewrite is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxboundary.errors import PlacementMismatchError
from fxboundary.graph.find import find_ports, module_path
from fxboundary.graph.insert.along import refuse_partial_work
from fxboundary.graph.insert.dims import Dim, Place, Unclear, dims_of, whole
from fxboundary.graph.insert.elementwise import broadcast_operands, cuts_needed, is_in_place
from fxboundary.graph.insert.literals import RULES, Call
from fxboundary.graph.insert.names import source_line
from fxboundary.graph.insert.pairing import refuse_unlike_cuts
from fxboundary.graph.insert.regions import attribute, node_value
from fxboundary.graph.insert.values import (
    Number,
    Value,
    is_cut,
    leaves,
    localized,
    map_leaves,
    tensors,
    uncut,
)
from fxboundary.mesh import LiveMesh
from fxboundary.ops import OP, PortOp, port_label
from fxboundary.placements import (
    Layout,
    named_layout_text,
    normalize_dims,
    parse_layout,
    replicate,
    shard,
)

_REMEDY = (
    "write the size with -1 or from a tensor's shape in forward, change the contract so that this "
    "dimension is not cut there, or split the model itself with fxboundary.apply"
)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class LocalSizes:
    """Runs graphs on this rank's sizes, and rewrites the literal sizes in them."""

    def __init__(self, mesh: LiveMesh, fake_mode: Any, held: Mapping[str, Sequence[Value]]) -> None:
        """``held`` are the parameters of modules that were not traced into, by name."""
        self._mesh, self._fake, self._held = mesh, fake_mode, held
        self._place = Place(mesh.spec, mesh.coordinate)

    def run(self, gm: GraphModule, given: Mapping[Node, Any]) -> Any:
        """What the graph returns; ``given`` are the values of its inputs and parameters.

        Raises:
            PlacementMismatchError: a size whose origin is unclear, a port at which a value arrives
                in another layout than it declares.
        """
        env: dict[Node, Any] = {}
        for node in list(gm.graph.nodes):
            if node.op == "output":
                return map_arg(node.args[0], lambda n: env[n])
            env[node] = given[node] if node in given else self._value(gm, node, env)
            self._record(node, env[node])
        raise AssertionError("a graph without an output")

    def _value(self, gm: GraphModule, node: Node, env: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return attribute(gm, str(node.target))
        args, kwargs = map_arg((list(node.args), dict(node.kwargs)), lambda n: env[n])
        if node.target is OP or node.target is OP.default:
            return self._port(node, *args)  # type: ignore[arg-type]
        if not is_cut([args, kwargs, self._holds(node)]) and not _cuts_inside(args, kwargs):
            return _constant(node, args, kwargs)
        call = Call(node, op_name(node), list(args), dict(kwargs), node_value(node), self._place)
        try:
            return self._computed(gm, call, env)
        except Unclear as error:
            raise _refusal(node, str(error)) from None

    def _holds(self, node: Node) -> Sequence[Value]:
        return self._held.get(str(node.target), ()) if node.op == "call_module" else ()

    def _computed(self, gm: GraphModule, call: Call, env: dict[Node, Any]) -> Any:
        subgraph = _subgraph(call)
        if subgraph is not None:
            return self._nested(call, subgraph)
        if not isinstance(call.args[0] if call.args else None, Value) and call.name == "getitem":
            return call.args[0][call.args[1]]
        refuse_partial_work(call)
        refuse_unlike_cuts(call)
        rule = RULES.get(call.name)
        dims = None
        if rule is not None and (rule is RULES["cat"] or isinstance(call.first, Value)):
            dims = rule(call)
        else:
            _refuse_sizes(call)
            self._cut_operands(call, env)
        local = self._execute(gm, call, localized)
        return self._structured(gm, call, local, dims)

    def _execute(self, gm: GraphModule, call: Call, here: Callable[[Any], Any]) -> Any:
        args, kwargs = here(call.args), here(call.kwargs)
        node = call.node
        try:
            with self._fake, torch.no_grad():
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                if node.op == "call_module":
                    return attribute(gm, str(node.target))(*args, **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:  # whatever an operator says of sizes that do not fit
            raise Unclear(f"does not run on this rank's sizes: {error}") from None

    def _structured(self, gm: GraphModule, call: Call, local: Any, dims: Any) -> Any:
        """The outputs with what their dimensions are made of."""
        inputs = tensors([call.args, call.kwargs, self._holds(call.node)])
        free = all(value.free for value in inputs)

        def pair(captured: Any, here: Any, known: Any) -> Any:
            if isinstance(here, (tuple, list)):
                listed = known if isinstance(known, list) else [None] * len(here)
                if len(captured) != len(here):
                    raise Unclear(f"gives {len(here)} values on this rank, not {len(captured)}")
                pairs = zip(captured, here, listed, strict=True)
                found = [pair(*three) for three in pairs]
                # torch.Size takes integers only.
                return tuple(found) if isinstance(here, torch.Size) else type(here)(found)
            if isinstance(here, torch.Tensor):
                origins = known if known is not None else self._origins(gm, call, captured, here)
                expected = self._place.shape(origins)
                if list(here.shape) != expected:
                    raise Unclear(f"gives {list(here.shape)} on this rank, not {expected}")
                self._refuse_diagonal(origins)
                return Value(here, tuple(origins), free)
            if isinstance(here, _NUMBERS) and not isinstance(here, bool):
                return Number(captured, here) if captured is not None else here
            return here

        return pair(call.captured, local, dims)

    def _refuse_diagonal(self, dims: Sequence[Dim]) -> None:
        """Two dimensions cut by one mesh dimension: ranks would hold the blocks of a diagonal."""
        cuts = [m for dim in dims for m in dim.mesh_dims]
        for m in set(cuts):
            if cuts.count(m) > 1:
                raise Unclear(f"two of its dimensions are cut over {self._mesh.spec.names[m]}")

    def _origins(
        self, gm: GraphModule, call: Call, captured: torch.Tensor, local: torch.Tensor
    ) -> tuple[Dim, ...]:
        """Which input dimension each of an output stems from, found by what changes its size."""
        values = tensors([call.args, call.kwargs, self._holds(call.node)])
        inputs = [dim for value in values for dim in value.dims if dim.mesh_dims]
        kinds = {dim.mesh_dims for dim in inputs}
        changed: dict[int, tuple[int, ...]] = {}
        if len(kinds) > 1:
            for kind in kinds:
                alone = self._execute(gm, call, self._cut_by(kind))
                for i, size in enumerate(alone.shape):
                    if size != captured.shape[i]:
                        changed[i] = kind
        found = []
        for i, (size, here) in enumerate(zip(captured.shape, local.shape, strict=True)):
            if _equal(size, here):
                found.append(whole(size))
                continue
            origins = [
                dim
                for dim in inputs
                if _equal(dim.size, size)
                and _equal(self._place.size(dim), here)
                and (len(kinds) == 1 or dim.mesh_dims == changed.get(i))
            ]
            if not origins:
                raise Unclear(f"dimension {i} of {size} becomes {here}: no input's does so")
            found.append(self._place.joined(origins))
        return tuple(found)

    def _cut_by(self, mesh_dims: tuple[int, ...]) -> Callable[[Any], Any]:
        """Values as if only these mesh dimensions cut them."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf.local if isinstance(leaf, Number) else leaf
            with self._fake:
                return leaf.local.new_empty(self._place.shape(leaf.dims, mesh_dims))

        return lambda value: map_leaves(value, change)

    def _cut_operands(self, call: Call, env: dict[Node, Any]) -> None:
        node = call.node
        named = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False))
        arguments = {**named, **node.kwargs}
        operands = broadcast_operands(call.name, node.target, node, arguments, env)
        for operand, at, dim in cuts_needed(operands, self._place):
            if operand is node.args[0] and is_in_place(call.name):
                raise Unclear(
                    f"it writes what is cut into {node.all_input_nodes[0]}, which is whole"
                )
            value = env[operand]
            layout = tuple(
                shard(at) if m in dim.mesh_dims else replicate()
                for m in range(len(self._mesh.spec.names))
            )
            path = module_path(node)
            op = PortOp(
                self._mesh,
                (replicate(),) * len(layout),
                layout,
                layout,
                f"{port_label(path.partition('#')[0])}:cut.{operand.name}",
                {at: dim.size} if _is_uneven(dim, self._place) else None,
            )
            with node.graph.inserting_before(node):
                port = node.graph.create_node("call_function", OP.default, (operand, *op.args))
            for key in ("nn_module_stack", "stack_trace"):
                if key in node.meta:
                    port.meta[key] = node.meta[key]
            env[port] = self._port(port, value, *op.args)
            self._record(port, env[port])
            node.replace_input_with(operand, port)
            args, kwargs = map_arg((list(node.args), dict(node.kwargs)), lambda n: env[n])
            call.args, call.kwargs = list(args), dict(kwargs)

    def _port(self, node: Node, x: Value, *rest: Any) -> Value:
        _, src_text, dst_text = rest[:3]
        try:
            src, dst = (normalize_dims(parse_layout(t), len(x.dims)) for t in (src_text, dst_text))
        except PlacementMismatchError as error:
            raise _refusal(node, str(error), "") from None
        self._check_arrival(node, x, src)
        dims = dims_of(x.shape, dst, self._mesh.spec.sizes)
        for dim in (*x.dims, *dims):
            # The first rank would hold all of it, and could not tell that it is cut.
            if dim.mesh_dims and isinstance(dim.size, int) and dim.size < 2:
                raise _refusal(node, f"a dimension of {dim.size} cannot be cut", "")
        with self._fake, torch.no_grad():
            local = OP(x.local, *rest)
        return Value(local, dims, x.free)

    def _check_arrival(self, node: Node, x: Value, src: Layout) -> None:
        expected = dims_of(x.shape, src, self._mesh.spec.sizes)
        if all(map(self._place.same_entries, expected, x.dims)):
            return
        names = self._mesh.spec.names
        cuts = [
            f"dimension {i} over {', '.join(names[m] for m in dim.mesh_dims)}"
            for i, dim in enumerate(x.dims)
            if dim.mesh_dims
        ]
        found = "cut in " + " and ".join(cuts) if cuts else "whole"
        raise _refusal(
            node,
            f"declared to be {named_layout_text(src, names)}, but what arrives is {found}",
            "declare the layout in which its producer leaves it",
        )

    def _nested(self, call: Call, subgraph: GraphModule) -> Any:
        """A call of a higher-order operator: its graph is run like this one."""
        operands = [leaf for leaf in leaves([call.args, call.kwargs]) if _is_operand(leaf)]
        inputs = [node for node in subgraph.graph.nodes if node.op == "placeholder"]
        if len(inputs) != len(operands):
            raise Unclear(f"calls a graph of {len(inputs)} inputs with {len(operands)} values")
        found = self.run(subgraph, dict(zip(inputs, operands, strict=True)))
        return found

    def _record(self, node: Node, value: Any) -> None:
        """This rank's value as the node's metadata."""
        captured = node_value(node)
        if not is_cut(value) and captured is not None:
            return
        key = "example_value" if "example_value" in node.meta else "val"
        if any(isinstance(leaf, (Value, Number)) for leaf in leaves(value)):
            node.meta[key] = localized(value)
            node.meta.pop("tensor_meta", None)


def op_name(node: Node) -> str:
    """``view`` for the method, the function and the overload alike; empty for a module."""
    if node.op == "call_module":
        return ""
    if node.op == "call_method":
        return str(node.target)
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return getattr(node.target, "__name__", str(node.target)).rpartition(".")[2]


def _constant(node: Node, args: Any, kwargs: Any) -> Any:
    """The value of a node none of whose inputs is cut: as captured."""
    inputs = tensors([args, kwargs])
    return uncut(node_value(node), all(value.free for value in inputs))


def _is_uneven(dim: Dim, place: Place) -> bool:
    return isinstance(dim.size, int) and dim.size % place.ranks(dim.mesh_dims) != 0


def _subgraph(call: Call) -> GraphModule | None:
    found = [leaf for leaf in leaves([call.args, call.kwargs]) if isinstance(leaf, GraphModule)]
    if len(found) > 1:
        raise Unclear("chooses between graphs; values that are cut must not enter it")
    return found[0] if found else None


def _cuts_inside(args: Any, kwargs: Any) -> bool:
    """Whether a nested graph has ports, which may cut what enters it whole."""
    graphs = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, GraphModule)]
    return any(find_ports(graph) for graph in graphs)


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, (Value, Number, torch.SymInt))


def _refuse_sizes(call: Call) -> None:
    """Sizes of this rank that enter a computation, as in ``x / x.shape[-1]``."""
    if call.name.startswith("new_") or not tensors([call.args, call.kwargs]):
        return
    for leaf in leaves([call.args, call.kwargs]):
        if isinstance(leaf, Number) and not _equal(leaf.whole, leaf.local):
            raise Unclear(f"computes with a size, which is {leaf.whole}, but {leaf.local} here")


def _equal(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def _refusal(node: Node, reason: str, remedy: str = _REMEDY) -> PlacementMismatchError:
    what = f"{module_path(node) or '<root>'}: node {node.name}{source_line(node)}"
    if node.target is OP.default:
        what = f"{module_path(node)}: port {node.args[5]}"
    return PlacementMismatchError(f"{what}: {reason}" + (f"; {remedy}" if remedy else ""))
