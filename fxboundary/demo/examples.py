"""Where the example text and plans are: in an installed package, or in a checkout."""

from __future__ import annotations

from pathlib import Path

from fxboundary.errors import FxBoundaryError


def example_path(name: str) -> Path:
    """The file of an example, as ``data/psalms.txt`` or ``plans/llama_tp.yaml``.

    Raises:
        FxBoundaryError: it is neither in the package nor in a checkout around it.
    """
    package = Path(__file__).parents[1]
    places = [package / "_data" / name, package.parent / "examples" / name]
    for path in places:
        if path.is_file():
            return path
    raise FxBoundaryError(
        f"the example {name} is missing: looked for {' and '.join(map(str, places))}"
    )
