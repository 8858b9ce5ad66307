"""Weights that are not plain BF16: what the cache costs is what it costs with plain weights. KL in nats."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from benchmarks.models.checkpoints import FORMATS, FP8_CACHE, add_cache_scales
from tests.engine.conftest import divergence

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

import pytest

pytestmark = pytest.mark.engine
TOKENS, CHUNK = 600, 16
REACH = 64 + 256  # up to here everything is read in BF16
OPTIONS = {"max_model_len": TOKENS + 16, "max_num_batched_tokens": TOKENS + 16, "max_num_seqs": 1}
BF16 = OPTIONS | {"kv_cache_dtype": "auto", "block_size": 32}


def log_probabilities(engine: Engine, prompt: list[int]) -> torch.Tensor:
    engine.chunk_limit(CHUNK)
    engine.run({"one": prompt}, 1)
    return engine.log_probabilities("one", 0, TOKENS)


@pytest.fixture(scope="module")
def convert() -> Callable[..., None]:
    """`convert` of examples/awq.py."""
    script = Path(__file__).parents[2] / "examples" / "awq.py"
    function: Callable[..., None] = runpy.run_path(str(script))["convert"]
    return function


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Engine], prose: list[int]) -> torch.Tensor:
    """What BF16 weights say over a BF16 cache."""
    return log_probabilities(make_engine(**BF16), prose[1000 : 1000 + TOKENS])


@pytest.mark.parametrize(
    ("format", "method"), [("awq", "auto_awq"), ("gptq", "auto_gptq"), ("int8", "compressed-tensors")]
)
def test_quantized_weights(
    any_engine: Callable[..., Engine],
    convert: Callable[..., None],
    plain: torch.Tensor,
    model_path: Path,
    sidecar_path: Path,
    prose: list[int],
    tmp_path: Path,
    format: str,
    method: str,
) -> None:
    """A checkpoint made here, through vLLM's kernels for its format; the sidecar is the original's.

    vLLM's CPU kernels round activations too, which makes two exact attentions differ by 0.035 nats; so both caches are
    compared with plain weights.
    """
    folder, prompt = tmp_path / "quantized", prose[1000 : 1000 + TOKENS]
    convert(model_path, folder, *FORMATS.get(format, ()))
    alone = divergence(plain, log_probabilities(any_engine(folder, None, **BF16), prompt))
    if method == "compressed-tensors":  # such checkpoints may bring scales for an FP8 cache; these would ruin ours
        folder, (quantize, config) = tmp_path / "with-scales", FORMATS[format]
        convert(model_path, folder, quantize, config | {"kv_cache_scheme": FP8_CACHE})
        add_cache_scales(folder, 30, 123.0)
    engine = any_engine(folder, sidecar_path, **OPTIONS)
    assert engine.model.quant_config.get_name() == method
    both = divergence(plain, log_probabilities(engine, prompt))
    for name, part in ("BF16", slice(REACH)), ("INT2", slice(REACH, None)):
        print(f"{name} reads: {format} {float(alone[part].mean()):.3f}, with the cache {float(both[part].mean()):.3f}")
    assert alone.mean() > 0.02, "rounded weights are served"
    assert both[:REACH].mean() < 1.1 * alone[:REACH].mean()
    assert both[REACH:].mean() < 1.1 * alone[REACH:].mean() + 0.02


def test_fp8_weights_with_scales_for_an_fp8_cache(
    any_engine: Callable[..., Engine], convert: Callable[..., None], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A small model: torch emulates the product on CPUs, and would take minutes for the real one. The window covers
    everything, so ours is exact up to rounding."""
    llama = tiny_model({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    folders = tmp_path / "fp8", tmp_path / "with-scales"
    quantize, config = FORMATS["fp8"]
    for folder, scheme in zip(folders, (None, FP8_CACHE), strict=True):
        convert(llama, folder, quantize, config | {"kv_cache_scheme": scheme})
    add_cache_scales(folders[1], 4, 123.0)
    prompt = [(7 * i * i + 3 * i) % 500 + 5 for i in range(60)]

    def served(folder: Path, **options: Any) -> torch.Tensor:
        engine = any_engine(folder, None, skip_tokenizer_init=True, **options)
        engine.chunk_limit(CHUNK)
        engine.run({"one": prompt}, 1)
        return engine.log_probabilities("one", 0, len(prompt))

    plain, exact = (served(folder, kv_cache_dtype="auto", block_size=32) for folder in (llama, folders[0]))
    kl = divergence(exact, served(folders[1], oscar={"rotation": "hadamard"}))
    rounding = float(divergence(plain, exact).mean())
    print(f"FP8 weights {rounding:.2g}, with the cache {float(kl.mean()):.2g}")
    assert rounding > 5e-3
    assert kl.mean() < 0.5 * rounding


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
