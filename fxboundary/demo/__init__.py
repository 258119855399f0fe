"""``fxboundary demo``: one Llama trained three ways, which must agree at every step."""

from fxboundary.demo.settings import ModelSize, Settings

__all__ = ["ModelSize", "Settings"]
