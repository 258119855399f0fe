"""Small models of Hugging Face's, not written for fxboundary, and plans that split them over tp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from models import llama, llama_contracts

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A model, a call of it, and the contracts of tensor parallelism."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    contracts: Mapping[str, Any]
    output: str = "logits"
    tolerance: float = 1e-10


def _ids(*shape: int, vocab: int = 64) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


def _tokens() -> Inputs:
    return {"input_ids": _ids(2, 16), "use_cache": False}


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


def region(name: str, params: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A module that shares its work over tp, between values that every rank has."""
    return {
        "in_src": {name: {"tp": "R"}},
        "in_dst": {name: {"tp": "R"}},
        "out_src": {"tp": "P"},
        "out_dst": {"tp": "R"},
        "params": {key: {"tp": value} for key, value in params.items()},
        **more,
    }


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=8, n_positions=64)
    return _made(lambda: GPT2LMHeadModel(config))


_FUSED = {"c_attn.weight": 3, "c_attn.bias": 3}
GPT2 = Example(
    _gpt2,
    _tokens,
    {
        "transformer.h.*.attn": region(
            "hidden_states",
            {
                "c_attn.weight": "S(1)",
                "c_attn.bias": "S(0)",
                "c_proj.weight": "S(0)",
                "c_proj.bias": "R -> P",
            },
            stacked=_FUSED,
        ),
        "transformer.h.*.mlp": region(
            "hidden_states",
            {
                "c_fc.weight": "S(1)",
                "c_fc.bias": "S(0)",
                "c_proj.weight": "S(0)",
                "c_proj.bias": "R -> P",
            },
        ),
    },
)


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return _made(lambda: Qwen3ForCausalLM(config))


_GATED = {"gate_proj.weight": "S(0)", "up_proj.weight": "S(0)", "down_proj.weight": "S(1)"}
QWEN3 = Example(
    _qwen3,
    _tokens,
    {
        "model.layers.*.self_attn": region(
            "hidden_states", {"[qkv]_proj.weight": "S(0)", "o_proj.weight": "S(1)"}
        ),
        "model.layers.*.mlp": region("x", _GATED),
    },
)

LLAMA = Example(llama, _tokens, llama_contracts(False))
LLAMA_SP = Example(llama, _tokens, llama_contracts(True))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    return _made(lambda: BertForMaskedLM(config))


_UP = {"dense.weight": "S(0)", "dense.bias": "S(0)"}
_DOWN = {"dense.weight": "S(1)", "dense.bias": "R -> P"}
_HEADS = {
    "query.*": {"tp": "S(0)"},
    "key.*": {"tp": "S(0)"},
    "value.*": {"tp": "S(0)"},
}
BERT = Example(
    _bert,
    lambda: {"input_ids": _ids(2, 16), "attention_mask": torch.ones(2, 16, dtype=torch.long)},
    {
        "bert.encoder.layer.*.attention.self": {
            "in_src": {"hidden_states": {"tp": "R"}},
            "in_dst": {"hidden_states": {"tp": "R"}},
            "params": _HEADS,
        },
        "bert.encoder.layer.*.attention.output.dense": {
            "out_src": {"tp": "P"},
            "out_dst": {"tp": "R"},
            "params": {"weight": {"tp": "S(1)"}, "bias": {"tp": "R -> P"}},
        },
        "bert.encoder.layer.*.intermediate": {
            "in_src": {"hidden_states": {"tp": "R"}},
            "in_dst": {"hidden_states": {"tp": "R"}},
            "params": {key: {"tp": value} for key, value in _UP.items()},
        },
        "bert.encoder.layer.*.output.dense": {
            "out_src": {"tp": "P"},
            "out_dst": {"tp": "R"},
            "params": {"weight": {"tp": "S(1)"}, "bias": {"tp": "R -> P"}},
        },
    },
)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=96,
        num_labels=10,
    )
    return _made(lambda: ViTForImageClassification(config))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=64, d_kv=8, d_ff=96, num_layers=2, num_heads=8, use_cache=False
    )
    return _made(lambda: T5ForConditionalGeneration(config))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    return _made(lambda: MixtralForCausalLM(config)).float()  # torch's grouped_mm has no float64


VIT = Example(
    _vit,
    lambda: {
        "pixel_values": torch.randn(
            2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
    },
    {
        "vit.layers.*.attention": region(
            "hidden_states",
            {
                "[qkv]_proj.*": "S(0)",
                "o_proj.weight": "S(1)",
                "o_proj.bias": "R -> P",
            },
        ),
        "vit.layers.*.mlp": region(
            "hidden_states",
            {"fc1.*": "S(0)", "fc2.weight": "S(1)", "fc2.bias": "R -> P"},
        ),
    },
)

_T5_ATTENTION = {"[qkv].weight": "S(0)", "o.weight": "S(1)"}
_T5_FIRST = {**_T5_ATTENTION, "relative_attention_bias.weight": "S(1)"}
# The first attention of a stack also hands its position bias, of this rank's heads, to the others.
_T5_BIAS_TOO = {"out_src": {"1": {"tp": "P"}}, "out_dst": {"1": {"tp": "R"}}}
_T5_CROSS = {side: {"0": {"tp": "R"}, "1": {"tp": "R"}} for side in ("in_src", "in_dst")}
T5 = Example(
    _t5,
    lambda: {"input_ids": _ids(2, 16), "decoder_input_ids": _ids(2, 8)},
    {
        "*.block.*.layer.0.SelfAttention": region("hidden_states", _T5_ATTENTION),
        "*.block.0.layer.0.SelfAttention": region("hidden_states", _T5_FIRST, **_T5_BIAS_TOO),
        "decoder.block.*.layer.1.EncDecAttention": region("0", _T5_ATTENTION, **_T5_CROSS),
        "decoder.block.0.layer.1.EncDecAttention": region(
            "0", _T5_ATTENTION, **_T5_CROSS, **_T5_BIAS_TOO
        ),
        "*.block.*.layer.*.DenseReluDense": region(
            "hidden_states", {"wi.weight": "S(0)", "wo.weight": "S(1)"}
        ),
    },
)

MIXTRAL = Example(
    _mixtral,
    _tokens,
    {
        "model.layers.*.self_attn": QWEN3.contracts["model.layers.*.self_attn"],
        # The router's weights, and the hidden states; the indices between them are integers.
        "model.layers.*.mlp.experts": region(
            "0",
            {"gate_up_proj": "S(1)", "down_proj": "S(2)"},
            **{side: {"0": {"tp": "R"}, "2": {"tp": "R"}} for side in ("in_src", "in_dst")},
            stacked={"gate_up_proj": 2},
        ),
    },
    tolerance=1e-5,
)
