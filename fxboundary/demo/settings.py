"""What the demo is asked to do, and the sizes of its model."""

from __future__ import annotations

from dataclasses import dataclass, field

# Largest relative difference of a loss from the unsharded model's, at any step.
# float32: sums in another order differ by about 1e-7, and a few dozen steps leave it there; norm
# weights whose gradients lack their all_reduce are off by more than 2e-5 at the second step.
# float64: the same at 1e-16; the rest is room for bits of float32 (see below) that flip.
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}


@dataclass(frozen=True)
class ModelSize:
    """A small Llama over bytes, and its batch: ``batch`` windows of ``sequence`` bytes."""

    layers: int = 4
    hidden: int = 256
    intermediate: int = 768
    heads: int = 8
    kv_heads: int = 4
    batch: int = 4
    sequence: int = 128

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Settings:
    """``plan`` is a YAML file that replaces the plan of the compiled run."""

    ranks: int = 2
    steps: int = 30
    dtype: str = "float32"
    device: str = "cpu"
    plan: str | None = None
    seed: int = 0
    size: ModelSize = field(default_factory=ModelSize)

    @property
    def ranks_text(self) -> str:
        return f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"

    @property
    def compiles_reference(self) -> bool:
        """Whether the compiled run is compared with the unsharded model compiled as well.

        Hugging Face's norm and rotary angles are float32 in a model of any dtype. Compiled, they
        are rounded at other places than in eager mode: in float64 the losses of one unsharded
        model, eager and compiled, differ by 2e-9.
        """
        return self.dtype == "float64"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]
