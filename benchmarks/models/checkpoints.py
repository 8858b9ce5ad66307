"""Weights in checkpoint formats that vLLM reads, rounded to nearest: what `examples/awq.py` converts a model with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 64  # input channels that share a GPTQ scale
Quantize = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """4 bits, symmetric: eight input channels in a 32-bit word, zero points stored less one."""
    grouped = weight.float().T.reshape(-1, GROUP, weight.shape[0])
    scale = (grouped.abs().amax(1, keepdim=True) / 7).clamp(min=1e-5).half().float()
    codes = ((grouped / scale).round().clamp(-8, 7) + 8).long().view(-1, 8, weight.shape[0])
    word = (codes << (4 * torch.arange(8))[:, None]).sum(1)
    return {
        "qweight": torch.where(word >= 1 << 31, word - (1 << 32), word).int(),
        "qzeros": torch.full((grouped.shape[0], weight.shape[0] // 8), 0x77777777, dtype=torch.int32),
        "scales": scale[:, 0].half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """8 bits with a scale for each output channel."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 with a scale for each output channel."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def compressed_tensors(kind: str) -> dict[str, Any]:
    """8-bit weights, and activations rounded to 8 bits token by token; kind: "int" or "float"."""
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": common | {"strategy": "channel", "dynamic": False},
                "input_activations": common | {"strategy": "token", "dynamic": True},
            }
        },
    }  # fmt: skip


FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "int8": (int8, compressed_tensors("int")),
    "fp8": (fp8, compressed_tensors("float")),
}
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def add_cache_scales(folder: Path, layers: int, scale: float) -> None:
    """Scales of keys and values for an FP8 cache, as llm-compressor puts them next to the weights."""
    file = folder / "model.safetensors"
    scales = {f"model.layers.{n}.self_attn.{kind}_scale": torch.tensor(scale) for n in range(layers) for kind in "kv"}
    save_file(load_file(file) | scales, file, {"format": "pt"})


def add_sinks(folder: Path) -> None:
    """A sink logit for each query head of each layer, from -2 to 2."""
    config = json.loads((folder / "config.json").read_text())
    file = folder / "model.safetensors"
    logits = torch.linspace(-2, 2, config["num_attention_heads"]).bfloat16()
    sinks = {f"model.layers.{n}.self_attn.sinks": logits.clone() for n in range(config["num_hidden_layers"])}
    save_file(load_file(file) | sinks, file, {"format": "pt"})
