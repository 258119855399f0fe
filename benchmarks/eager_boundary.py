"""One eager boundary against the bare functional collective and against DTensor.

A fake process group of 4 and a small tensor: what is measured is Python and dispatch, which is what
a boundary adds to a collective. Ratios are of medians, the candidates taking turns in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import alternate, fake_mesh, parser, verdict, write_json
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fxboundary as fb

N = 4
FUNCTIONAL = torch.ops._c10d_functional
# name: src, dst, layout of the gradient at dst
TRANSITIONS = {
    "P -> R": ("P", "R", "R"),
    "S(0) -> R": ("S(0)", "R", "P"),
    "S(1) -> R": ("S(1)", "R", "P"),
    "R -> S(1)": ("R", "S(1)", "S(1)"),
    "P -> S(1)": ("P", "S(1)", "S(1)"),
    "S(0) -> S(1)": ("S(0)", "S(1)", "S(1)"),
    "S(0) -> P": ("S(0)", "P", "R"),
    "R -> P": ("R", "P", "R"),
    "R -> R, gradient P": ("R", "R", "P"),
    "S(0) -> R, gradient R": ("S(0)", "R", "R"),
    "P -> R, gradient P": ("P", "R", "P"),
}


def bare(name: str, group: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The least that functional collectives need; ``None`` where no collective runs forward."""
    wait = FUNCTIONAL.wait_tensor

    def stack(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.split(x.shape[1] // N, 1))

    def unstack(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.split(x.shape[0] // N), 1)

    splits = [4] * N
    return {
        "P -> R": lambda x: wait(FUNCTIONAL.all_reduce(x, "sum", group)),
        "S(0) -> R": lambda x: wait(FUNCTIONAL.all_gather_into_tensor(x, N, group)),
        "S(1) -> R": lambda x: unstack(wait(FUNCTIONAL.all_gather_into_tensor(x, N, group))),
        "P -> S(1)": lambda x: wait(FUNCTIONAL.reduce_scatter_tensor(stack(x), "sum", N, group)),
        "S(0) -> S(1)": lambda x: wait(
            FUNCTIONAL.all_to_all_single(stack(x), splits, splits, group)
        ),
    }.get(name)


def through_dtensor(mesh: DeviceMesh, src: str, dst: str) -> Callable[[torch.Tensor], Any]:
    source, target = [fb.parse_placement(src)], [fb.parse_placement(dst)]

    def run(x: torch.Tensor) -> torch.Tensor:
        tensor = DTensor.from_local(x, mesh, source, run_check=False)
        return tensor.redistribute(placements=target).to_local()

    return run


def boundary(mesh: DeviceMesh, src: str, dst: str, grad: str) -> Callable[[torch.Tensor], Any]:
    contract = fb.Contract(
        in_src={"x": {"tp": src}}, in_dst={"x": {"tp": dst}}, in_grad={"x": {"tp": grad}}
    )
    made = fb.PrecompiledBoundary(contract, mesh, ("tp",))
    return lambda x: made.redistribute_inputs((x,), {})[0][0]


def output_boundary(mesh: DeviceMesh) -> Callable[[torch.Tensor], Any]:
    contract = fb.Contract(out_src={"tp": "P"}, out_dst={"tp": "R"})
    return fb.PrecompiledBoundary(contract, mesh, ("tp",)).redistribute_outputs


def measure(mesh: DeviceMesh, rounds: int) -> dict[str, dict[str, float]]:
    group = mesh.get_group().group_name
    results = {}
    for name, (src, dst, grad) in TRANSITIONS.items():
        x = torch.randn(4, 16)
        trained = torch.randn(4, 16, requires_grad=True)
        ours = output_boundary(mesh) if name == "P -> R" else boundary(mesh, src, dst, grad)
        peer, least = through_dtensor(mesh, src, dst), bare(f"{src} -> {dst}", group)
        runs: dict[str, Callable[[], Any]] = {"fxboundary": lambda f=ours, x=x: f(x)}
        if least is not None:
            runs["bare"] = lambda f=least, x=x: f(x)
        if (src, dst) != ("R", "R"):
            runs["dtensor"] = lambda f=peer, x=x: f(x)
            runs["dtensor grad"] = lambda f=peer, x=trained: f(x).sum().backward()
        runs["fxboundary grad"] = lambda f=ours, x=trained: f(x).sum().backward()
        runs["no boundary grad"] = lambda x=trained: (x * 1).sum().backward()
        try:
            results[name] = alternate(runs, rounds=rounds, calls=100)
        except (RuntimeError, NotImplementedError) as error:  # what DTensor refuses
            runs = {key: run for key, run in runs.items() if "dtensor" not in key}
            results[name] = alternate(runs, rounds=rounds, calls=100)
            Console(stderr=True).print(f"{name}: DTensor: {str(error).splitlines()[0]}")
    return results


def show(results: dict[str, dict[str, float]]) -> None:
    table = Table(title="one eager boundary, fake group of 4, tensor (4, 16), µs")
    for heading in ("", "fxboundary", "bare", "ratio", "DTensor", "faster"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, times in results.items():
        ours, least, peer = (times.get(key) for key in ("fxboundary", "bare", "dtensor"))
        table.add_row(name, *_row(ours, least, peer))
    table.add_section()
    for name, times in results.items():
        peer = times.get("dtensor grad")
        table.add_row(f"{name}, with backward", *_row(times["fxboundary grad"], None, peer))
    Console().print(table)
    reduce = results["P -> R"]
    ratio = reduce["fxboundary"] / reduce["bare"]
    faster = reduce["dtensor"] / reduce["fxboundary"]
    print("P -> R, no grad:")
    print(f"  {ratio:.2f} x bare: {verdict(ratio, 1.4, at_most=True)}")
    print(f"  {faster:.1f} x faster than DTensor: {verdict(faster, 6, at_most=False)}")


def _row(ours: float | None, least: float | None, peer: float | None) -> list[str]:
    def micro(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e6:.1f}"

    ratio = f"{ours / least:.2f}" if ours and least else ""
    faster = f"{peer / ours:.1f} ×" if ours and peer else ""
    return [micro(ours), micro(least), ratio, micro(peer), faster]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()
    with fake_mesh(tp=N) as mesh:
        results = measure(mesh, options.rounds)
    show(results)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
