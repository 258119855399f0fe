"""Which value of a graph is which input or output of a module.

A capture that traced into a module keeps no arguments. A name is bound where only one value can be
meant: the one tensor that enters, or the one whose uses stand in statements of ``forward`` that
read this parameter and no other. What cannot be bound so is called by its number.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType

from torch.fx import Node

from fxboundary.binding import bind_inputs
from fxboundary.contract import OUTPUT, Contract
from fxboundary.errors import ContractError
from fxboundary.graph.insert.regions import Region, input_name, node_value, resolve_class
from fxboundary.placements import near


def bind_names(
    region: Region, contract: Contract, parameters: Mapping[Node, str], names: Sequence[str]
) -> dict[str, Node]:
    """The value of each named input of a region that was traced into.

    Raises:
        ContractError: a name that could mean several values, or none; lists them.
    """
    values = region.inputs(parameters)
    if not region.path:
        given = {input_name(value): value for value in values if value.op == "placeholder"}
        if all(name in given for name in names):
            return {name: given[name] for name in names}
    known = _input_names(region, contract, values) if names else {}
    for name in names:
        if name.isdigit() and int(name) < len(values):
            known[name] = values[int(name)]
        elif name not in known:
            raise ContractError(
                f"{region.name}:in.{name}: {_why_not(region, name, values)}\n"
                f"{_listing('in', values)}"
            )
    return {name: known[name] for name in names}


def bind_output(region: Region, contract: Contract, name: str) -> Node:
    """The value of a named output of a region that was traced into.

    Raises:
        ContractError: several values leave the region; lists them.
    """
    values = region.outputs()
    if name.isdigit() and int(name) < len(values):
        return values[int(name)]
    positions = dict(contract.out_names or {})
    if len(values) == 1 and (name == OUTPUT or len(positions) <= 1):
        return values[0]
    what = "nothing that it makes is used" if not values else f"{len(values)} values leave it"
    raise ContractError(
        f"{region.name}:out.{name}: is ambiguous here, {what}; call the output by its number\n"
        f"{_listing('out', values)}"
    )


def _input_names(region: Region, contract: Contract, values: Sequence[Node]) -> dict[str, Node]:
    signature, declared = _signature(region.cls), contract.input_names()
    if len(values) == len(declared) == 1 and (
        signature is None or bind_inputs(declared, signature)
    ):
        return {declared[0]: values[0]}
    if signature is None:
        return {}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    taken = [p.name for p in signature.parameters.values() if p.kind not in variadic]
    return by_source(region, taken, values)


def _signature(cls: type | None) -> inspect.Signature | None:
    if cls is None:
        return None
    signature = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _why_not(region: Region, name: str, values: Sequence[Node]) -> str:
    signature = _signature(region.cls)
    if signature is not None and name not in signature.parameters and not name.isdigit():
        known = list(signature.parameters)
        return f"forward has no parameter {name!r}{near(name, known)}; it has {', '.join(known)}"
    if not values:
        return "no tensor enters it here"
    return "is ambiguous here; call the input by its number"


def _listing(side: str, values: Sequence[Node]) -> str:
    return "\n".join(f"  {side}.{i}: {_described(v)}" for i, v in enumerate(values)) or "  none"


def _described(node: Node) -> str:
    value = node_value(node)
    shape = list(value.shape) if hasattr(value, "shape") else "?"
    return f"{shape} from {node.name}{source_line(node)}"


def source_line(node: Node) -> str:
    """`` (model.py:12)``, where a capture recorded it."""
    frames = list(_frames(node))
    if not frames:
        return ""
    file, line, _ = frames[-1]
    return f" ({file.rpartition('/')[2]}:{line})"


def by_source(region: Region, names: Sequence[str], values: Sequence[Node]) -> dict[str, Node]:
    """Names of values, from the statements of ``forward`` in which they enter."""
    forward = _forward(region.cls)
    if forward is None:
        return {}
    above = [_forward(resolve_class(kind)) for _, kind in list(region.stack.values())[:-1]]
    depth = sum(other is not None and other.code is forward.code for other in above)
    claims: dict[str, list[Node]] = {}
    for value in values:
        reads = [
            _read_at(user, forward, depth, names) for user in value.users if user in region.nodes
        ]
        # A statement that reads no parameter got the value through a variable of its own.
        found = set.intersection(*([r for r in reads if r] or [set()]))
        if len(found) == 1:
            claims.setdefault(found.pop(), []).append(value)
    return {name: claimed[0] for name, claimed in claims.items() if len(claimed) == 1}


@dataclass(frozen=True)
class _Statement:
    first: int
    last: int
    reads: frozenset[str]
    writes: frozenset[str]
    alias: str | None  # of the name that it writes, as in ``residual = hidden_states``


@dataclass(frozen=True)
class _Forward:
    """Where a ``forward`` stands, and its statements, innermost ones only."""

    code: CodeType
    last: int
    statements: tuple[_Statement, ...]


@cache
def _forward(cls: type | None) -> _Forward | None:
    try:
        function = inspect.unwrap(cls.forward)  # type: ignore[union-attr]
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        code = function.__code__
    except (AttributeError, OSError, SyntaxError, TypeError):
        return None
    found = tuple(_statements(tree.body[0], first - 1))
    return _Forward(code, first + len(lines) - 1, found)


def _statements(node: ast.AST, offset: int) -> Iterator[_Statement]:
    """Simple statements, and the heads of compound ones."""
    body = [s for field in ("body", "orelse", "finalbody") for s in getattr(node, field, ())]
    if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
        inside = {id(x) for s in body for x in ast.walk(s)}
        names = [x for x in ast.walk(node) if isinstance(x, ast.Name) and id(x) not in inside]
        last = min([s.lineno - 1 for s in body], default=node.end_lineno or node.lineno)
        yield _Statement(
            node.lineno + offset,
            max(last, node.lineno) + offset,
            frozenset(x.id for x in names if isinstance(x.ctx, ast.Load)),
            frozenset(x.id for x in names if isinstance(x.ctx, ast.Store)),
            node.value.id
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
            else None,
        )
    for statement in body if isinstance(body, list) else ():
        if isinstance(statement, ast.stmt):
            yield from _statements(statement, offset)


def _read_at(node: Node, forward: _Forward, depth: int, names: Sequence[str]) -> set[str]:
    """Parameters that the statement of ``forward`` reads in which a node was made."""
    lines = [
        line
        for file, line, function in _frames(node)
        if file == forward.code.co_filename
        and function == forward.code.co_name
        and forward.code.co_firstlineno <= line <= forward.last
    ]
    if len(lines) <= depth:
        return set()
    line = lines[depth]
    around = [s for s in forward.statements if s.first <= line <= s.last]
    if not around:
        return set()
    known = {name: name for name in names}
    for statement in forward.statements:
        if statement is around[-1]:
            break
        meant = known.get(statement.alias or "")
        for written in statement.writes:
            known.pop(written, None)
            if meant is not None:
                known[written] = meant
    return {known[name] for name in around[-1].reads if name in known}


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def _frames(node: Node) -> Iterator[tuple[str, int, str]]:
    """File, line and function of each frame of a node's stack trace, outermost first."""
    for file, line, function in _FRAME.findall(node.meta.get("stack_trace") or ""):
        yield file, int(line), function
