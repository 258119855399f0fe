"""The command line: ``fxboundary demo``, ``explain``, ``draw``, ``snapshot`` and ``diff``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fxboundary.errors import FxBoundaryError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for an error of the library's own."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        return status
    except FxBoundaryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxboundary", description="Declare tensor layouts at module boundaries."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_explain(commands)
    _add_draw(commands)
    _add_snapshot(commands)
    _add_diff(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small Llama unsharded, tensor parallel, and sequence parallel compiled",
        description="Train a small Llama three ways, unsharded, tensor parallel by contracts, and "
        "tensor and sequence parallel by contracts and compiled; compare the losses. Starts its "
        "ranks itself, or runs under torchrun. Exit status 1: the losses disagree.",
    )
    demo.add_argument("--ranks", type=int, help="processes (default: 2; on cuda: visible GPUs)")
    demo.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    demo.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    demo.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    demo.add_argument("--plan", metavar="FILE.yaml", help="plan for the compiled run, on mesh tp")
    demo.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from fxboundary.demo.launch import run_demo
    from fxboundary.demo.settings import Settings

    ranks = arguments.ranks
    if ranks is None:
        ranks = _visible_gpus() if arguments.device == "cuda" else 2
    return run_demo(
        Settings(
            ranks=ranks,
            steps=arguments.steps,
            dtype=arguments.dtype,
            device=arguments.device,
            plan=arguments.plan,
            seed=arguments.seed,
        )
    )


def _visible_gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        raise FxBoundaryError("--device cuda: no GPU is visible; use --device cpu")
    return torch.cuda.device_count()


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="show the ports of a plan, their collectives and bytes",
        description="Show every port of a plan: how its layout changes, how its gradient does, "
        "the collectives and the bytes. Needs neither GPUs nor processes.",
    )
    explain.add_argument("plan", metavar="PLAN.yaml")
    explain.add_argument("--mesh", metavar="dp=2,tp=4", help="default: the plan's own mesh")
    explain.add_argument(
        "--model",
        metavar="module:factory",
        help="a function that returns a model, or (model, example_inputs); called on the meta "
        "device, so that it needs no memory",
    )
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    from fxboundary.explain import print_explanation

    print_explanation(arguments.plan, arguments.mesh, arguments.model)
    return 0


def _add_draw(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    draw = commands.add_parser(
        "draw",
        help="draw a model's modules, ports and collectives as SVG or HTML",
        description="Draw the modules of a model and what crosses their boundaries under a plan, "
        "forward and backward. Needs neither GPUs nor processes.",
    )
    draw.add_argument("plan", metavar="PLAN.yaml")
    draw.add_argument("--mesh", metavar="dp=2,tp=4", help="default: the plan's own mesh")
    draw.add_argument(
        "--model",
        metavar="module:factory",
        required=True,
        help="a function that returns (model, example_inputs); called on the meta device",
    )
    draw.add_argument("-o", "--output", metavar="FILE", required=True, help="FILE.svg or FILE.html")
    draw.set_defaults(run=_draw)


def _draw(arguments: argparse.Namespace) -> int:
    from fxboundary.draw import draw_plan

    print(draw_plan(arguments.plan, arguments.mesh, arguments.model, arguments.output))
    return 0


def _add_snapshot(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    snapshot = commands.add_parser(
        "snapshot",
        help="write down what a model communicates, or check it against a file",
        description="Capture a model split by a plan and print its ports, their collectives and "
        "bytes as text; with -o write it to a file, with --check compare it with one. Needs "
        "neither GPUs nor processes. Exit status 0: the same, or written; 1: different; 2: error.",
    )
    snapshot.add_argument("plan", metavar="PLAN.yaml")
    snapshot.add_argument(
        "--model",
        metavar="module:factory",
        required=True,
        help="a function that returns (model, example_inputs); called on the meta device, so that "
        "it needs no memory",
    )
    snapshot.add_argument("--mesh", metavar="dp=2,tp=4", help="default: the plan's own mesh")
    what = snapshot.add_mutually_exclusive_group()
    what.add_argument("-o", "--output", metavar="FILE", help="write the snapshot to this file")
    what.add_argument("--check", metavar="FILE", help="compare with the snapshot in this file")
    snapshot.set_defaults(run=_snapshot)


def _snapshot(arguments: argparse.Namespace) -> int:
    from fxboundary.testing.commands import run_snapshot

    return run_snapshot(
        arguments.plan, arguments.model, arguments.mesh, arguments.output, arguments.check
    )


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = commands.add_parser(
        "diff",
        help="show what changed between two snapshots",
        description="Show what changed between two files of `fxboundary snapshot`, port by port. "
        "Exit status 0: the same; 1: different; 2: error.",
    )
    diff.add_argument("old", metavar="OLD")
    diff.add_argument("new", metavar="NEW")
    diff.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    from fxboundary.testing.commands import run_diff

    return run_diff(arguments.old, arguments.new)
