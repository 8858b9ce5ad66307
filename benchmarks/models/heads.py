"""Drafting heads for the models of `shapes`, and for any other Llama or Qwen: one layer, random weights.

A head drafts the token that it saw last, more or less: what a random target repeats is accepted, and else nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_TARGETS = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size max_position_embeddings"
)
# changes that make the "tiny" model of `shapes` MiMo's, a Qwen2 with a head in its files, as vLLM goes by architecture
MIMO: dict[str, object] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "head_dim": 64,
    "num_nextn_predict_layers": 1,
}
SMALL = 0.02  # standard deviation of weights in the head's layer


def head_folder(target: Path, method: str) -> Path:
    """A folder with the config.json of a head for the model in a folder, without weights: for --load-format dummy.

    Args:
        method: "eagle" or "eagle3"
    """
    model = json.loads((target / "config.json").read_text())
    config = {name: model[name] for name in _TARGETS.split()} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if method == "eagle3":  # after which layers the target's hidden states are taken; checkpoints say it in either way
        layers = [1, 2, model["num_hidden_layers"] - 1]
        config["eagle_aux_hidden_state_layer_ids"] = layers
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    folder = target / method
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def head_weights(target: Path, method: str) -> Path:
    """The same, with weights for the checkpoint of the target in its folder."""
    from safetensors.torch import load_file, save_file

    folder = head_folder(target, method)
    config = json.loads((folder / "config.json").read_text())
    hidden, identity = config["hidden_size"], torch.eye(config["hidden_size"])
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    if method == "eagle":  # of the token and of the target's hidden state, the token
        weights = _layer(config, "layers.0.", hidden) | {"fc.weight": torch.cat([identity, 0 * identity], 1)}
    else:
        weights = _layer(config, "midlayer.", 2 * hidden) | {
            "fc.weight": torch.cat([identity, 0 * identity, 0 * identity], 1),
            "midlayer.hidden_norm.weight": torch.ones(hidden),
            "midlayer.input_layernorm.weight": torch.ones(hidden),
            "norm.weight": torch.ones(hidden),
            "lm_head.weight": embedding.float(),
        }
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def mimo_weights(folder: Path, config: Mapping[str, Any]) -> Path:
    """A checkpoint of MiMo: Qwen2 with a head (MTP) in the same files.

    Args:
        config: of a Qwen2
    """
    from safetensors.torch import load_file, save_file

    from benchmarks.models.shapes import random_weights

    mimo = {**config, **MIMO}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(mimo))
    random_weights(folder)
    (folder / "config.json").write_text(json.dumps(mimo))  # transformers wrote Qwen2's
    hidden, prefix = mimo["hidden_size"], "model.mtp_layers.0."
    identity = torch.eye(hidden)
    head = _layer(mimo, prefix, hidden, bias=True) | {
        f"{prefix}{name}.weight": torch.ones(hidden)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    }
    head[f"{prefix}input_proj.weight"] = torch.cat([0 * identity, identity], 1)  # of state and token, the token
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor.bfloat16() for name, tensor in head.items()}, file, {"format": "pt"})
    return folder


def _layer(config: Mapping[str, Any], prefix: str, inputs: int, bias: bool = False) -> dict[str, torch.Tensor]:
    """Attention and MLP that add little to what passes by.

    Args:
        inputs: channels that the attention takes
    """
    generator = torch.Generator().manual_seed(1)
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (queries, inputs), "self_attn.k_proj": (keys, inputs), "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    weights = {f"{prefix}{n}.weight": SMALL * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    if bias:
        sizes = {"q": queries, "k": keys, "v": keys}
        weights |= {f"{prefix}self_attn.{n}_proj.bias": torch.zeros(size) for n, size in sizes.items()}
    return weights | {f"{prefix}post_attention_layernorm.weight": torch.ones(hidden)}
