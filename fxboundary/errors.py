"""The exceptions of the library: one base, each also a builtin that people already catch."""

import re


class FxBoundaryError(Exception):
    """Base of everything fxboundary raises on purpose."""


class ContractError(FxBoundaryError, ValueError):
    """A contract or a plan that cannot be read, or that does not fit the model or the mesh.

    ``problems`` holds one line per fault: all of them are found before anything is changed.
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        head = "" if len(self.problems) == 1 else f"{len(self.problems)} problems:\n  "
        super().__init__(head + "\n  ".join(_merged(self.problems)))


def _merged(problems: list[str]) -> list[str]:
    """Problems that differ only in the layer of a list said once, with how many there are."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\.\d+(?=\.)", ".*", problem), []).append(problem)
    return [
        first if not others else f"{first} (and {len(others)} more like it)"
        for first, *others in alike.values()
    ]


class PlacementMismatchError(FxBoundaryError, ValueError):
    """A tensor that does not have the layout, the rank or the size that its port declares."""


class UnsupportedTransitionError(FxBoundaryError, NotImplementedError):
    """A change of layout that has no meaning, or a gradient that does not exist."""


class RankMismatchError(FxBoundaryError, RuntimeError):
    """Ranks that disagree, or a rank that is not where the plan needs it."""


class PeerError(FxBoundaryError, RuntimeError):
    """Peer memory that cannot be set up, or a rank that no longer takes part.

    ``rank`` (in the whole job) and ``pid`` name the rank at fault, where it is one.
    """

    def __init__(self, message: str, rank: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.pid = rank, pid
