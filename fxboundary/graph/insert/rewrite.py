"""``rewrite``: a graph captured on one device becomes the program of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxboundary.contract import Contract
from fxboundary.errors import ContractError, PlacementMismatchError
from fxboundary.graph.find import find_ports, graph_modules
from fxboundary.graph.insert.copying import copied, remove_aliases
from fxboundary.graph.insert.dims import Place, dims_of
from fxboundary.graph.insert.parameters import (
    bind_leaves,
    full,
    insert_uses,
    shard_parameters,
    stored_value,
)
from fxboundary.graph.insert.ports import NewPort, insert, plan_ports, remove_idle
from fxboundary.graph.insert.record import fake_mode, record_values
from fxboundary.graph.insert.regions import (
    Region,
    attribute,
    find_regions,
    is_guard,
    node_value,
    tensor_names,
)
from fxboundary.graph.insert.sizes import LocalSizes
from fxboundary.graph.insert.skeleton import skeleton
from fxboundary.graph.insert.values import Value, tensors, uncut
from fxboundary.mesh import LiveMesh
from fxboundary.params import ParamPort, resolve_params
from fxboundary.placements import Layout, normalize_dims, parse_layout
from fxboundary.plan import Plan

SIZES = ("global", "local")


def rewrite(
    graph_module: Any,
    plan: Plan,
    example_inputs: Sequence[Any] | None = None,
    sizes: str = "global",
) -> GraphModule:
    """The graph with the ports of a plan in it, as one rank runs it.

    ``graph_module`` was captured without ports: by ``torch.fx.symbolic_trace`` or another tracer,
    by ``torch.export`` (a program or its ``module()``), by Dynamo. It is left as it is. The
    result shares its tensors, but holds this rank's shards of the parameters that the plan
    cuts. It takes whole inputs, except those that the contract of the module they go to declares
    to arrive cut.

    ``example_inputs`` are needed where the capture recorded no values, as ``symbolic_trace``
    does. ``sizes``: the sizes in the graph are those of the whole model (``"global"``: they are
    rewritten to this rank's) or this rank's already (``"local"``: parameters are shards, and no
    port may change a shape).

    Raises:
        ContractError: what does not fit the graph, all faults together: patterns, ports,
            parameters, names that could mean several values.
        PlacementMismatchError: a size whose origin is unclear, a value that does not arrive in
            the declared layout; names the node, its source line and the remedy.
    """
    if sizes not in SIZES:
        raise ContractError(f"sizes={sizes!r}: write 'global' or 'local'")
    if isinstance(graph_module, torch.export.ExportedProgram):
        graph_module = graph_module.module()
    if not isinstance(graph_module, GraphModule):
        raise ContractError(
            f"rewrite takes a GraphModule or an ExportedProgram, not a "
            f"{type(graph_module).__name__}; capture it first, or use fxboundary.apply"
        )
    gm = copied(graph_module)
    record_values(gm, example_inputs)
    _Rewrite(gm, plan, local=sizes == "local").run()
    return gm


def insert_boundaries(gm: GraphModule, plan: Plan) -> None:
    """Put the ports of a plan into Dynamo's graph of a model that was not split, in place.

    Parameters are inputs of such a graph, and whole: each use of a sharded one is cut.

    Raises:
        ContractError, PlacementMismatchError: as :func:`rewrite`; and where an output of the
            graph would be another one than the unsplit model's.
    """
    _Rewrite(gm, plan, lifted=True).run()


@dataclass
class _Rewrite:
    """One rewriting of one graph module and the graphs nested in it."""

    gm: GraphModule
    plan: Plan
    local: bool = False
    lifted: bool = False

    def run(self) -> None:
        mesh = self.plan.live
        if mesh is None:
            raise ContractError(
                f"the plan's mesh ({self.plan.spec}) has no processes: build the plan on a "
                f"DeviceMesh (of a fake process group, where nothing is to run)"
            )
        present = find_ports(self.gm)
        if present:
            raise ContractError(
                f"the graph has ports already ({present[0].name}, …): it was rewritten, or its "
                f"model was split by fxboundary.apply; a graph is rewritten once"
            )
        for module in graph_modules(self.gm):
            remove_aliases(module)
        graphs = {module: _Graph.of(module, root=module is self.gm) for module in _all(self.gm)}
        _name_nested(graphs)
        matched, ports = self._match(graphs)
        new = self._plan_ports(graphs, matched, mesh)
        inputs = {} if self.lifted else _input_layouts(new[self.gm])
        held: dict[str, list[tuple[str, ParamPort]]] = {}
        if not self.lifted:
            held = bind_leaves(self.gm, ports, mesh)  # copies, whose parameters may be replaced
        if not self.lifted and not self.local:
            shard_parameters(self.gm, ports, mesh)
        for module, graph in graphs.items():
            insert(new[module], [r for calls in graph.regions.values() for r in calls])
            insert_uses(
                self.gm, ports, graph.tensors, graph.regions, mesh, stored_whole=self.lifted
            )
        if self.local:
            self._check_local(mesh)
        else:
            self._localize(graphs[self.gm], ports, held, inputs, mesh)
        for module in graph_modules(self.gm):
            remove_idle(module)
            module.graph.lint()
            module.recompile()

    def _match(
        self, graphs: Mapping[GraphModule, _Graph]
    ) -> tuple[dict[str, Contract], dict[tuple[str, str], ParamPort]]:
        paths = {path for graph in graphs.values() for path in graph.regions}
        tree = skeleton(sorted(paths), self._parameters(graphs))
        matched, problems = self.plan.match_and_problems(tree, every_pattern=not self.lifted)
        absent = [n for n, c in matched.items() if n not in paths and _has_ports(c)]
        if self.lifted:
            matched = {name: c for name, c in matched.items() if name not in absent}
        else:
            problems += [
                f"{name or '<root>'}: no node of it is in the graph: it was not called, or all "
                f"that it made was eliminated"
                for name in absent
            ]
        ports, unresolved = resolve_params(tree, matched, self.plan.spec, self.local)
        if problems + unresolved:
            raise ContractError(problems + unresolved + self._unnamed(paths, unresolved))
        return matched, ports

    def _unnamed(self, paths: set[str], unresolved: Sequence[str]) -> list[str]:
        """What a capture left out without which a plan cannot be matched."""
        if self.lifted:
            return []
        if paths <= {""}:
            return [
                "the graph does not tell which module its nodes come from (no nn_module_stack), as "
                "those of make_fx and of AOTAutograd: capture with torch.export or symbolic_trace"
            ]
        if unresolved and next(self.gm.parameters(), None) is None:
            return [
                "the graph holds no parameters, they are its inputs: rewrite the ExportedProgram "
                "itself, or its module()"
            ]
        return []

    def _parameters(self, graphs: Mapping[GraphModule, _Graph]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if not self.lifted:
            found |= dict(self.gm.named_parameters(remove_duplicate=False))
        for node, name in graphs[self.gm].tensors.items():
            value = node_value(node)
            if name not in found and _is_parameter(node) and isinstance(value, torch.Tensor):
                found[name] = value
        return found

    def _plan_ports(
        self, graphs: Mapping[GraphModule, _Graph], matched: Mapping[str, Contract], mesh: LiveMesh
    ) -> dict[GraphModule, list[NewPort]]:
        new: dict[GraphModule, list[NewPort]] = {module: [] for module in graphs}
        problems: list[str] = []
        for module, graph in graphs.items():
            for path, contract in matched.items():
                problems += _inside_leaf(graph.regions, path, contract)
                calls = graph.regions.get(path, [])
                leaf = attribute(self.gm, path) if path else self.gm
                found, wrong = plan_ports(calls, contract, leaf, graph.tensors, mesh)
                new[module] += found
                problems += wrong
        if problems:
            raise ContractError(problems)
        return new

    def _localize(
        self,
        graph: _Graph,
        ports: Mapping[tuple[str, str], ParamPort],
        held: Mapping[str, Sequence[tuple[str, ParamPort]]],
        inputs: Mapping[Node, Layout],
        mesh: LiveMesh,
    ) -> None:
        fake = fake_mode(self.gm)
        stored = {full(*key): port for key, port in ports.items()}
        place = Place(mesh.spec, mesh.coordinate)
        given: dict[Node, Any] = {}
        with fake:
            for node in self.gm.graph.nodes:
                if node.op not in ("placeholder", "get_attr"):
                    continue
                value, name = node_value(node), graph.tensors.get(node)
                if not isinstance(value, torch.Tensor):
                    if node.op == "placeholder":
                        given[node] = value
                    continue
                port = None if self.lifted or name is None else stored.get(name)
                if port is not None:
                    given[node] = stored_value(port, mesh, value)
                elif node in inputs:
                    dims = dims_of(value.shape, inputs[node], mesh.spec.sizes)
                    local = value.new_empty(place.shape(dims))
                    given[node] = Value(local, dims, not value.is_floating_point())
                else:
                    given[node] = uncut(value, _is_free(node, name, value))
            values = {
                target: [stored_value(port, mesh, torch.empty(())) for _, port in found]
                for target, found in held.items()
            }
        if any(
            isinstance(value, Value) and value.is_cut
            for node, value in given.items()
            if node in inputs
        ):
            _remove_guards(self.gm)
        found = LocalSizes(mesh, fake, values).run(self.gm, given)
        if self.lifted:
            _check_outputs(found, mesh)

    def _check_local(self, mesh: LiveMesh) -> None:
        for port in find_ports(self.gm):
            move = port.transition
            before = None if move is None else [p if p.is_shard() else None for p in move.src]
            after = None if move is None else [p if p.is_shard() else None for p in move.dst]
            if before != after:
                raise PlacementMismatchError(
                    f"{port.name}: {'' if move is None else move.arrow()} changes the shape, so "
                    f"the graph cannot hold this rank's sizes on both sides; capture the model "
                    f"with global sizes (sizes='global'), or use fxboundary.apply"
                )
            value = node_value(port.node.args[0])  # type: ignore[arg-type]
            port.node.meta["val"] = value


@dataclass(frozen=True, eq=False)
class _Graph:
    """What was found in one graph: names of tensors by node, regions by module path."""

    module: GraphModule
    tensors: dict[Node, str]
    regions: dict[str, list[Region]]

    @classmethod
    def of(cls, module: GraphModule, root: bool) -> _Graph:
        regions = find_regions(module.graph, "" if root else None)
        return cls(module, tensor_names(module), regions)


def _all(gm: GraphModule) -> Iterator[GraphModule]:
    return graph_modules(gm)


def _name_nested(graphs: Mapping[GraphModule, _Graph]) -> None:
    """Inputs of nested graphs that are parameters, by the nodes they are called with."""
    for module, graph in graphs.items():
        for node in module.graph.nodes:
            nested = [
                attribute(module, str(n.target))
                for n in node.all_input_nodes
                if n.op == "get_attr" and isinstance(attribute(module, str(n.target)), GraphModule)
            ]
            operands = [
                n
                for n in _flat_inputs(node)
                if not (
                    n.op == "get_attr" and isinstance(attribute(module, str(n.target)), GraphModule)
                )
            ]
            for inner in nested:
                if inner not in graphs:
                    continue
                places = [n for n in inner.graph.nodes if n.op == "placeholder"]
                for place, operand in zip(places, operands, strict=False):
                    if operand in graph.tensors:
                        graphs[inner].tensors[place] = graph.tensors[operand]


def _flat_inputs(node: Node) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def _inside_leaf(
    regions: Mapping[str, Sequence[Region]], path: str, contract: Contract
) -> list[str]:
    if not _has_ports(contract) or path in regions:
        return []
    return [
        f"{path}: lies inside {outer}, which was not traced into; trace into it, or contract "
        f"{outer} itself"
        for outer, calls in regions.items()
        if outer and path.startswith(f"{outer}.") and calls[0].leaf is not None
    ]


def _has_ports(contract: Contract) -> bool:
    return bool(contract.input_names() or contract.output_names())


def _is_parameter(node: Node) -> bool:
    source = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return "._parameters[" in str(source() if callable(source) else source)


def _is_free(node: Node, name: str | None, value: torch.Tensor) -> bool:
    """Buffers and integers are not trained."""
    if not value.is_floating_point() and not value.is_complex():
        return True
    if node.op == "get_attr":
        return not isinstance(node_value(node), torch.nn.Parameter) and not value.requires_grad
    return name is not None and not _is_parameter(node)


def _input_layouts(new: Sequence[NewPort]) -> dict[Node, Layout]:
    """Layouts in which inputs of the graph arrive: as the modules declare that they go to."""
    found: dict[Node, Layout] = {}
    for port in new:
        if port.is_input and port.value.op == "placeholder" and port.value not in found:
            value = node_value(port.value)
            found[port.value] = normalize_dims(parse_layout(port.op.args[1]), value.dim())
    return found


def _remove_guards(gm: GraphModule) -> None:
    """Checks of the inputs' captured sizes, which are no longer theirs."""
    for node in list(gm.graph.nodes):
        if is_guard(node):
            gm.graph.erase_node(node)


def _check_outputs(found: Any, mesh: LiveMesh) -> None:
    for i, value in enumerate(tensors(found)):
        if value.is_cut:
            cut = next(j for j, dim in enumerate(value.dims) if dim.mesh_dims)
            names = ", ".join(mesh.spec.names[m] for m in value.dims[cut].mesh_dims)
            raise PlacementMismatchError(
                f"output {i} of the graph is cut in dimension {cut} over {names}: a model that is "
                f"split while it is compiled returns what the unsplit one does; let the contract "
                f"of its last module end in R, avoid the graph break, or use fxboundary.apply"
            )
