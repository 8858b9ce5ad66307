"""Weights that are not plain BF16: what the cache costs is what it costs with plain weights. KL in nats."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

import pytest

pytestmark = pytest.mark.engine
TOKENS, CHUNK = 600, 16
REACH = 64 + 256  # up to here everything is read in BF16
OPTIONS = {"max_model_len": TOKENS + 16, "max_num_batched_tokens": TOKENS + 16, "max_num_seqs": 1}


def log_probabilities(engine: Engine, prompt: list[int]) -> torch.Tensor:
    engine.chunk_limit(CHUNK)
    engine.run({"one": prompt}, 1)
    return engine.log_probabilities("one", 0, TOKENS)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def test_awq_weights(
    any_engine: Callable[..., Engine], model_path: Path, sidecar_path: Path, prose: list[int], tmp_path: Path
) -> None:
    """A checkpoint in AWQ's format, made here, through vLLM's AWQ kernels; the sidecar is the original's.

    vLLM's CPU kernel rounds activations too, which makes two exact attentions differ by 0.035 nats; so both caches are
    compared with plain weights.
    """
    folder = tmp_path / "awq"
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "awq.py"))["convert"](model_path, folder)
    prompt = prose[1000 : 1000 + TOKENS]
    bf16 = {"kv_cache_dtype": "auto", "block_size": 32} | OPTIONS
    plain = log_probabilities(any_engine(model_path, None, **bf16), prompt)
    alone = divergence(plain, log_probabilities(any_engine(folder, None, **bf16), prompt))
    engine = any_engine(folder, sidecar_path, **OPTIONS)
    assert engine.model.quant_config.get_name() == "auto_awq"
    both = divergence(plain, log_probabilities(engine, prompt))
    for name, part in ("BF16", slice(REACH)), ("INT2", slice(REACH, None)):
        print(f"{name} reads: AWQ {float(alone[part].mean()):.3f}, with the cache {float(both[part].mean()):.3f}")
    assert alone.mean() > 0.05, "4-bit weights are served"
    assert both[:REACH].mean() < 1.1 * alone[:REACH].mean()
    assert both[REACH:].mean() < 1.1 * alone[REACH:].mean() + 0.02


def test_lora_on_the_attention_projections(
    any_engine: Callable[..., Engine], model_path: Path, sidecar_path: Path, prose: list[int], tmp_path: Path
) -> None:
    """An adapter that changes queries, keys and values a lot: the cache stores the adapted rows, whose statistics the
    calibration did not see."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("random", 1, str(lora(model_path, tmp_path)))
    prompt = prose[1000 : 1000 + TOKENS]
    options = OPTIONS | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}

    def adapted(engine: Engine, request: LoRARequest | None) -> torch.Tensor:
        engine.chunk_limit(CHUNK)
        engine.run({"one": prompt}, 1, lora=request)
        return engine.log_probabilities("one", 0, TOKENS)

    bf16 = any_engine(model_path, None, kv_cache_dtype="auto", block_size=32, **options)
    plain, exact = adapted(bf16, None), adapted(bf16, adapter)
    kl = divergence(exact, adapted(any_engine(model_path, sidecar_path, **options), adapter))
    moved = float(divergence(exact, plain).mean())
    print(f"adapter {moved:.2g}, BF16 reads {float(kl[:REACH].mean()):.2g}, INT2 reads {float(kl[REACH:].mean()):.2g}")
    assert moved > 0.3
    assert kl[:REACH].mean() < 6e-3  # measured: 0.0027
    assert 1e-4 < kl[REACH:].mean() < 0.02  # measured: 0.008


def lora(model: Path, folder: Path) -> Path:
    """A random adapter of rank 8 for q, k, v and o of every layer, in PEFT's format."""
    shape = json.loads((model / "config.json").read_text())
    hidden, size = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    outputs = {"q": hidden, "k": size * shape["num_key_value_heads"], "v": size * shape["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name in "qkvo":
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{module}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) / hidden**0.5
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(outputs.get(name, hidden), 8, generator=generator)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM",
                "target_modules": [f"{name}_proj" for name in "qkvo"],
            }
        )
    )  # fmt: skip
    return folder
