"""Models, plans and the comparison with the unsharded model that several tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxboundary as fb
from fxboundary.state import gather_tensor, sharded_params

WIDTH = 8


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP(hidden=hidden)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Residual blocks on activations (batch, sequence, WIDTH)."""

    def __init__(self, layers: int = 2, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MLP_PARAMS = {
    "up.*": {"tp": "S(0)"},
    "down.weight": {"tp": "S(1)"},
    "down.bias": {"tp": "R -> P"},
}


def mlp_contracts(sequence_parallel: bool) -> dict[str, dict[str, Any]]:
    outside = "S(1)" if sequence_parallel else "R"
    contracts: dict[str, dict[str, Any]] = {
        "layers.*.mlp": {
            "in_src": {"x": {"tp": outside}},
            "in_dst": {"x": {"tp": "R"}},
            "out_src": {"tp": "P"},
            "out_dst": {"tp": outside},
            "params": MLP_PARAMS,
        }
    }
    if sequence_parallel:
        sharded = {"x": {"tp": "S(1)"}}
        contracts["layers.*.norm"] = {"in_src": sharded, "in_dst": sharded}
    return contracts


def llama(layers: int = 2, heads: int = 8, kv_heads: int = 4, tie: bool = False, vocab: int = 64):
    """Hugging Face's Llama, small, in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        use_cache=False,
        tie_word_embeddings=tie,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def llama_contracts(sequence_parallel: bool) -> dict[str, dict[str, Any]]:
    outside = "S(1)" if sequence_parallel else "R"
    between = {"tp": outside}
    contracts: dict[str, dict[str, Any]] = {
        "model.layers.*.self_attn": {
            "in_src": {"hidden_states": between},
            "in_dst": {"hidden_states": {"tp": "R"}},
            "out_src": {"tp": "P"},
            "out_dst": between,
            "params": {"[qkv]_proj.weight": {"tp": "S(0)"}, "o_proj.weight": {"tp": "S(1)"}},
            "param_units": {"[qkv]_proj.weight": 8},
        },
        "model.layers.*.mlp": {
            "in_src": {"x": between},
            "in_dst": {"x": {"tp": "R"}},
            "out_src": {"tp": "P"},
            "out_dst": between,
            "params": {
                "gate_proj.weight": {"tp": "S(0)"},
                "up_proj.weight": {"tp": "S(0)"},
                "down_proj.weight": {"tp": "S(1)"},
            },
        },
        "lm_head": {
            "in_src": {"input": between},
            "in_dst": {"input": {"tp": "R"}},
            "out_src": {"tp": "S(-1)"},
            "out_dst": {"tp": "R"},
            "params": {"weight": {"tp": "S(0)"}},
        },
    }
    if sequence_parallel:
        contracts["model.layers.0"] = {
            "in_src": {"hidden_states": {"tp": "R"}},
            "in_dst": {"hidden_states": {"tp": "S(1)"}},
        }
        sharded = {"hidden_states": {"tp": "S(1)"}}
        for norm in ("model.layers.*.*_layernorm", "model.norm"):
            contracts[norm] = {"in_src": sharded, "in_dst": sharded}
    return contracts


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameter gradients as the unsharded model has them; every rank joins."""
    ports = {name: (port, mesh) for name, _, port, mesh in sharded_params(model)}
    gradients = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, f"{name} has no gradient"
        gradients[name] = (
            gather_tensor(param.grad, *ports[name]) if name in ports else param.grad.clone()
        )
    return gradients


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float, scale: float = 1e-30
) -> None:
    """Equal up to ``tolerance`` relative to the largest entry; ``scale`` is that of the terms of
    a sum that may cancel."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    largest = expected.abs().max().clamp(min=scale)
    error = ((actual - expected).abs().max() / largest).item()
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def assert_gradients(actual: dict[str, torch.Tensor], reference: nn.Module, tolerance: float):
    for name, param in reference.named_parameters():
        assert param.grad is not None
        assert_close(actual[name], param.grad, f"gradient of {name}", tolerance)


def check_stack(
    mesh: DeviceMesh,
    contracts: dict[str, Any],
    *,
    sequence_parallel: bool,
    wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model,
    hidden: int = 16,
    tolerance: float = 1e-13,
) -> None:
    """Outputs, input gradients and parameter gradients of a contracted Stack, in float64."""
    torch.manual_seed(0)
    reference = Stack(hidden=hidden).double()
    model = copy.deepcopy(reference)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    weight = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    x_reference = x.clone().requires_grad_()
    expected = reference(x_reference)
    (expected * weight).sum().backward()

    n, rank = mesh["tp"].size(), mesh["tp"].get_local_rank()

    def local(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(n, 1)[rank].contiguous() if sequence_parallel else t

    fb.apply(model, fb.Plan(mesh, contracts))
    run = wrap(model)
    x_local = local(x).clone().requires_grad_()
    y = run(x_local)
    (y * local(weight)).sum().backward()
    assert_close(y, local(expected.detach()), "output", tolerance)
    assert_close(x_local.grad, local(x_reference.grad), "input gradient", tolerance)
    assert_gradients(full_gradients(model), reference, tolerance)


def token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def check_llama(
    mesh: DeviceMesh,
    contracts: dict[str, Any],
    *,
    wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model,
    tolerance: float = 1e-12,
    data_dim: str | None = None,
    **config: Any,
) -> nn.Module:
    """Logits and every parameter gradient of a contracted Llama, as the unsharded one's.

    With ``data_dim``, the batch is split over that mesh dimension and losses are averaged.
    """
    reference = llama(**config)
    model = copy.deepcopy(reference)
    ids = torch.randint(0, reference.config.vocab_size, (4, 16), generator=_generator())
    expected = reference(input_ids=ids).logits
    token_loss(expected, ids).backward()
    expected = expected.detach()
    if data_dim is not None:
        n, index = mesh[data_dim].size(), mesh[data_dim].get_local_rank()
        ids, expected = ids.chunk(n)[index], expected.chunk(n)[index]
    fb.apply(model, fb.Plan(mesh, contracts))
    logits = wrap(model)(input_ids=ids).logits
    token_loss(logits, ids).backward()
    assert_close(logits.detach(), expected, "logits", tolerance)
    assert_gradients(full_gradients(model), reference, tolerance)
    return model


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()
