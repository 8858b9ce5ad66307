"""Random models of the families that calibration is tested on."""

from typing import Any

import torch
import transformers

BASE = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"sliding_window": 20},
    "phi3": {"partial_rotary_factor": 0.5, "hidden_size": 256},  # head size is hidden_size / heads there
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_oss": {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def tiny(family: str, **changes: Any) -> Any:
    """A random model of a family, float32; weights large enough that attention is not uniform."""
    config = transformers.AutoConfig.for_model(family, **(BASE | FAMILIES[family] | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name or "bias" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def tokens(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))
