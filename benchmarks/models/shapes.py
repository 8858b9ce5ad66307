"""Models for speed measurements: published shapes, dummy weights, and a sidecar of the right shape."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_oscar.evaluation.sizing import ATTENTION, layer_types
from vllm_oscar.rotation import grouped_hadamard
from vllm_oscar.sidecar import LayerCalibration, ModelFingerprint, Sidecar, TensorCalibration
from vllm_oscar.turning import TurningMean

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "llama-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 80,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "tiny": {
        **_QWEN3,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
}
# changes that make "tiny" one with a soft cap, and a window in every other layer
GEMMA2: dict[str, object] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 128,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}
# and changes that make it gpt-oss-20b's attention: 8 query heads to a key of 64, sink logits, a short window
GPT_OSS: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_attention_heads": 16,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def model_folder(shape: str, root: Path, **changes: object) -> Path:
    """A folder with config.json (no weights: serve with --load-format dummy) and a sidecar in its oscar/ folder."""
    config = {**SHAPES[shape], **changes}
    name = "-".join([shape, *(f"{k}{v}" for k, v in changes.items() if isinstance(v, int))])
    folder = root / name[:200]  # file systems take 255
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_weights(folder: Path, device: str = "cpu") -> None:
    """A checkpoint for the config.json in a folder of `model_folder`: weights on disk, where dummy ones will not do."""
    from transformers import AutoConfig

    from vllm_oscar.calibrate.streaming import auto_class

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # that they matter
            torch.nn.init.normal_(parameter, 3.0, 2.0)
    model.save_pretrained(folder)


def to_mxfp4(folder: Path) -> None:
    """Give the gpt-oss checkpoint in a folder of `random_weights` experts of random MXFP4 weights, as OpenAI's are."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), generator=generator, dtype=torch.uint8)
        # numbers up to 6, times 2^-8
        tensors[f"{name}_scales"] = torch.full(blocks, 127 - 8, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": dense}
    (folder / "config.json").write_text(json.dumps(config))


def random_adapter(folder: Path) -> Path:
    """A LoRA of rank 8 for the attention of the model in a folder of `model_folder`, in PEFT's format."""
    from safetensors.torch import save_file

    shape = json.loads((folder / "config.json").read_text())
    hidden = shape["hidden_size"]
    size = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    queries, keys = size * shape["num_attention_heads"], size * shape["num_key_value_heads"]
    sizes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{module}.lora_A.weight"] = torch.randn(8, inputs, generator=generator) / inputs**0.5
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(outputs, 8, generator=generator)
    adapter = folder / "adapter"
    adapter.mkdir(exist_ok=True)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": [f"{n}_proj" for n in sizes]}))
    return adapter


def liven(model: torch.nn.Module) -> None:
    """vLLM's dummy weights are so small that nothing reaches the keys and values; norms of one change that."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)


def random_sidecar(
    folder: Path, turning: int = 0, group_size: int = 0, bits: Sequence[tuple[int, int]] = ((2, 2),)
) -> Path:
    """An `aware` sidecar with random transforms (condition below 10) and metrics for the layers that attend; as fast as
    a calibrated one.

    Args:
        turning: pairs of channels in which the keys' mean turns with the position, in every other layer
        group_size: channels that share a scale and an offset; 0 for the whole head
        bits: of keys and values of a layer; layers take them in turn
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    fingerprint, kinds = ModelFingerprint.of(config), layer_types(config.get_text_config())
    absent = tuple(index for index, kind in enumerate(kinds) if kind not in ATTENTION)
    heads, size = fingerprint.num_kv_heads, fingerprint.head_size
    group_size = group_size or size
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def tensor(encoder: str, gain: float, size_of_rows: float) -> TensorCalibration:
        basis = torch.linalg.qr(random(heads, size, size)).Q
        stretch = torch.exp(0.3 * random(heads, size, 1))
        transform = (basis * stretch.mT) @ grouped_hadamard(size, group_size) / size_of_rows
        metric = None
        if encoder == "metric":
            factor = torch.linalg.qr(random(heads, size, size)).Q * torch.exp(0.5 * random(heads, 1, size))
            metric = factor @ factor.mT
            metric = (metric / metric.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]).float()
        mean = (0.5 * size_of_rows * random(heads, size)).float()
        return TensorCalibration(mean, transform.float(), encoder, gain, 1.0, metric)

    # as large as keys (behind a norm) and values are in a model with dummy weights and `liven`
    key, value = tensor("metric", 1.05, 1.0), tensor("ls", 1.1, 0.02)
    moving = key
    if turning:
        vectors = 3 * random(heads, turning, 2, size) / turning**0.5
        moving = replace(key, turning=TurningMean(torch.logspace(0, -3, turning), vectors.float()))
    layers = {}
    for i in set(range(fingerprint.num_layers)) - set(absent):
        of_key, of_value = bits[i % len(bits)]
        layers[i] = LayerCalibration(replace((key, moving)[i % 2], bits=of_key), replace(value, bits=of_value))
    path = folder / "oscar" / "random.safetensors"
    Sidecar(layers, fingerprint, "aware", group_size, 64, 256, absent=absent).save(path)
    return path


def prompts(count: int, length: int, shift: int = 0) -> list[dict[str, list[int]]]:
    """Different prompts of one length, for the vocabulary of "tiny"."""
    return [{"prompt_token_ids": [(i * 37 + j * 11 + shift) % 1000 + 5 for j in range(length)]} for i in range(count)]
