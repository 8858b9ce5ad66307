"""Small models of the hybrid families that are served: changes of a dense configuration, for tests and gates."""

from collections.abc import Callable
from typing import Any

Changes = dict[str, Any]
# every expert for every token: which of several are chosen would turn with the rounding
_EXPERTS: Changes = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True,
                     "shared_expert_intermediate_size": 64}  # fmt: skip


def _attends(count: int, attention: str, state: str) -> list[str]:
    """Types of `count` layers: the odd ones attend."""
    return [(state, attention)[index % 2] for index in range(count)]


def _delta(architecture: str, model_type: str, hidden_size: int, layers: int) -> Changes:
    """Gated delta layers, an output gate, and RoPE for a part of a head."""
    return {
        "architectures": [architecture], "model_type": model_type, "tie_word_embeddings": False, "hidden_act": "silu",
        "linear_num_key_heads": hidden_size // 128, "linear_num_value_heads": hidden_size // 128,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "layer_types": _attends(layers, "full_attention", "linear_attention"),
    }  # fmt: skip


def _qwen3_next(hidden_size: int, layers: int) -> Changes:
    changes = _delta("Qwen3NextForCausalLM", "qwen3_next", hidden_size, layers)
    return changes | _EXPERTS | {"partial_rotary_factor": 0.25}


def _qwen3_5(hidden_size: int, layers: int) -> Changes:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5],
            "mrope_interleaved": True}  # fmt: skip
    return _delta("Qwen3_5ForCausalLM", "qwen3_5_text", hidden_size, layers) | {"rope_parameters": rope}


def _qwen3_5_moe(hidden_size: int, layers: int) -> Changes:
    named = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    return _qwen3_5(hidden_size, layers) | named | _EXPERTS


def _mamba(hidden_size: int) -> Changes:
    """Mamba-2 layers, as Granite 4 and Falcon-H1 name them."""
    return {"mamba_n_heads": hidden_size // 16, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
            "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64}  # fmt: skip


def _granite(hidden_size: int, layers: int) -> Changes:
    """Without RoPE."""
    return _mamba(hidden_size) | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
        "num_attention_heads": hidden_size // 64, "num_key_value_heads": 2, "head_dim": 64,
        "num_local_experts": 4, "num_experts_per_tok": 4, "shared_intermediate_size": 256,
        "layer_types": _attends(layers, "attention", "mamba"), "position_embedding_type": "nope",
        "attention_multiplier": 0.125,
    }  # fmt: skip


def _lfm2(hidden_size: int, layers: int) -> Changes:
    """Short convolutions, whose states are smaller than a page."""
    return {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "conv_L_cache": 3, "conv_bias": False,
        "conv_dim": hidden_size, "conv_dim_out": hidden_size, "block_dim": hidden_size, "block_ff_dim": 256,
        "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6,
        "num_attention_heads": hidden_size // 64, "num_key_value_heads": 2, "head_dim": 64,
        "layer_types": _attends(layers, "full_attention", "conv"),
    }  # fmt: skip


def _nemotron_h(hidden_size: int, layers: int) -> Changes:
    """A layer is a state, attention or a feed-forward network."""
    return {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "tie_word_embeddings": False,
        "num_hidden_layers": 3 * layers // 2, "layers_block_type": ["mamba", "attention", "mlp"] * (layers // 2),
        "mamba_num_heads": hidden_size // 16, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
        "conv_kernel": 4, "expand": 2, "chunk_size": 64,
    }  # fmt: skip


def _falcon_h1(hidden_size: int, layers: int) -> Changes:
    """Every layer has both."""
    named = {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_ssm": 2 * hidden_size}
    return _mamba(hidden_size) | named


# by model_type without "_text": takes the hidden size and an even number of layers of what is changed
HYBRIDS: dict[str, Callable[[int, int], Changes]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "granitemoehybrid": _granite,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
}
