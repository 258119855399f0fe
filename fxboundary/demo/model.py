"""The demo's model, its plans and its batches: the same on every rank for a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F

from fxboundary.demo.examples import example_path
from fxboundary.demo.settings import Settings
from fxboundary.errors import FxBoundaryError
from fxboundary.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

VOCABULARY = 256  # bytes
Batch: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


def build_model(settings: Settings, device: torch.device) -> torch.nn.Module:
    """Hugging Face's Llama with random weights; nothing of it is edited."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = settings.size
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(settings.seed)
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.to(device=device, dtype=getattr(torch, settings.dtype))


def build_plan(path: str | Path, mesh: DeviceMesh, settings: Settings) -> Plan:
    """The plan of a file, on the demo's mesh, with attention heads kept whole.

    Raises:
        ContractError: the file cannot be read as a plan, or does not fit the mesh.
        FxBoundaryError: there is no such file.
    """
    try:
        plan = Plan.from_yaml(Path(path), mesh)
    except OSError as error:
        raise FxBoundaryError(f"--plan {path}: {error.strerror}") from None
    units = {"[qkv]_proj.weight": settings.size.head_dim, "o_proj.weight": settings.size.head_dim}
    return Plan(
        mesh,
        {
            pattern: replace(contract, param_units=units)
            if pattern.endswith("self_attn") and contract.params and not contract.param_units
            else contract
            for pattern, contract in plan.contracts.items()
        },
    )


def read_batches(settings: Settings, device: torch.device) -> list[Batch]:
    """Random windows of the example text, one batch a step: bytes, and the bytes after them."""
    text = torch.frombuffer(
        bytearray(example_path("data/psalms.txt").read_bytes()), dtype=torch.uint8
    )
    length, count = settings.size.sequence + 1, settings.size.batch
    generator = torch.Generator().manual_seed(settings.seed)
    batches = []
    for _ in range(settings.steps):
        starts = torch.randint(0, len(text) - length, (count,), generator=generator)
        windows = torch.stack([text[s : s + length] for s in starts.tolist()]).long().to(device)
        batches.append((windows[:, :-1].contiguous(), windows[:, 1:].contiguous()))
    return batches


def batch_loss(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """Mean cross entropy in the logits' own dtype: the model's own loss rounds to float32."""
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
