"""Small models of many families, two layers each: what is changed of a dense configuration."""

from typing import Any

Changes = dict[str, Any]
_WINDOW: Changes = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
# every expert for every token: which of several are chosen would turn with the rounding
_ROUTED: Changes = {"num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LLAMA3: Changes = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip

SMALL: Changes = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "initializer_range": 0.1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_VISION: Changes = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
_TOKENS: Changes = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502,
                    "vision_end_token_id": 503}  # fmt: skip
_MROPE: Changes = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
# by the name that people know
FAMILIES: dict[str, Changes] = {
    "Llama-3": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": _LLAMA3},
    "Llama-4": {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 64,
        "num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size_mlp": 256,
    },
    "Mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    "Qwen3-MoE": _ROUTED | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4},
    "GLM-4.5, GLM-4.7": _ROUTED | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
        "use_qk_norm": True, "routed_scaling_factor": 1.0,
    },
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_local_experts": 4,
        "num_experts_per_tok": 4, "rotary_dim": 32, "use_qk_norm": True, "qk_norm_type": "per_layer",
        "scoring_func": "softmax", "use_routing_bias": True,  # vLLM's CPU platform has no sigmoid for experts
    },
    "Phi-3, Phi-4": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_attention_heads": 2},
    "Command R7B, Command A (Cohere2)": _WINDOW | {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "layer_norm_eps": 1e-5, "logit_scale": 1.0,
        "num_attention_heads": 2, "tie_word_embeddings": True,
    },
    "SmolLM3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0]},
    "Qwen2.5-VL, text": _TOKENS | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "vision_config": _VISION | {"patch_size": 14, "fullatt_block_indexes": [0]},
        "text_config": SMALL | {
            "model_type": "qwen2_5_vl_text", "num_attention_heads": 2, "rope_parameters": _MROPE,
        },
    },
    "Qwen3-VL, text": _TOKENS | {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
        "vision_config": _VISION | {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
        "text_config": SMALL | {"model_type": "qwen3_vl_text", "rope_parameters": _MROPE | {"mrope_interleaved": True}},
    },
    "EXAONE-4": _WINDOW | {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"},
}  # fmt: skip
