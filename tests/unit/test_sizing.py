"""What GPUs hold: against a start on an H200, vLLM's own states, and the page that explains it."""

import json
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from vllm_oscar.config import OscarConfig
from vllm_oscar.evaluation import sizing
from vllm_oscar.evaluation.doctor import LENGTHS
from vllm_oscar.evaluation.sizing import GB, Cache, Model, capacity, weight_bytes
from vllm_oscar.sidecar import ModelFingerprint, Sidecar

PAGE, LIMITS = ((Path(__file__).parents[2] / "docs" / page).read_text() for page in ("sizing.md", "limits.md"))
QWEN3_4B = {
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2560,
    "max_position_embeddings": 40960,
}  # fmt: skip
WEIGHTS = 2 * 4_022_468_096  # bytes of 16-bit parameters


def qwen3_4b(weights: int = WEIGHTS, **how: Any) -> Model:
    return Model.of(transformers.AutoConfig.for_model("qwen3", **QWEN3_4B), weights, **how)


def test_a_start_on_an_h200_is_met() -> None:
    """docs/metrics.md has its log: 66.7 GB for the cache of Qwen3-4B; README.md the other formats' tokens."""
    memory = 66_726_000_000
    found = capacity(qwen3_4b(int(sizing.UTILISATION * 141 * GB - sizing.OVERHEAD) - memory), 141, OscarConfig())
    assert found.memory == memory
    assert found.requests == 92
    assert found.int2 == pytest.approx(2_960_832, rel=1e-3)
    assert found.fp8 == pytest.approx(905_024, rel=1e-3)
    assert found.bf16 == pytest.approx(452_512, rel=1e-3)


def test_the_worked_example_is_what_the_formulas_give() -> None:
    model, found = qwen3_4b(), capacity(qwen3_4b(), 24, OscarConfig())
    figures = asdict(found)
    assert figures.pop("gpus") == 1
    for figure in (WEIGHTS, model.int2.token, model.fp8.token, model.bf16.token, model.slot, *figures.values()):
        assert f"{figure:,}" in PAGE, f"{figure:,}"


def test_layers_with_a_window_keep_that_of_each_request() -> None:
    config = transformers.AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        max_position_embeddings=32768, sliding_window=1024, sliding_window_pattern=6,
    )  # fmt: skip
    model = Model.of(config, 0)
    token = 4 * 2 * (256 // 4 + 4)
    assert model.int2 == Cache(token, 5 * 1024 * token)
    assert model.bf16 == Cache(4 * 1024, 5 * 1024 * 4 * 1024)
    assert model.int2.tokens(1e9, 32768) == 1e9 // (token + 5 * 1024 * token / 32768)
    assert model.slot == 6 * 4 * 64 * (2 * 256 * 2 + 8), "their copies are kept too"


def test_states_of_linear_attention_are_vllms() -> None:
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    sizes = {
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 4, 8, 64, 32, 4)
    elements = [int(torch.tensor(shape).prod()) for shape in shapes]
    for dtype, size in ((None, 2), ("float32", 4)):
        config = transformers.AutoConfig.for_model(
            "qwen3_next", num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
            mamba_ssm_dtype=dtype, **sizes,
        )  # fmt: skip
        assert sizing._state_bytes(config) == 2 * elements[0] + size * elements[1]


def test_states_of_mamba_and_convolutions_are_vllms() -> None:
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    shapes = MambaStateShapeCalculator.mamba2_state_shape(1, 256, 2, 8, 32, 16, 4)
    conv, matrix = (int(torch.tensor(shape).prod()) for shape in shapes)
    granite = {
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4,
        "mamba_expand": 2, "hidden_size": 128,
    }  # fmt: skip
    assert sizing._state_bytes(transformers.AutoConfig.for_model("granitemoehybrid", **granite)) == 2 * (conv + matrix)
    nemotron = {
        "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
    }  # fmt: skip
    assert sizing._state_bytes(transformers.AutoConfig.for_model("nemotron_h", **nemotron)) == 2 * conv + 4 * matrix
    (shape,) = MambaStateShapeCalculator.short_conv_state_shape(1, 128, 3)
    lfm2 = transformers.AutoConfig.for_model("lfm2", hidden_size=128, conv_L_cache=3)
    assert sizing._state_bytes(lfm2) == 2 * torch.tensor(shape).prod()


def test_a_block_is_as_long_as_a_state_is_large() -> None:
    """Half of the layers attend; a token of one takes 80 bytes in INT2 and 512 in 16 bits, a state 9,344."""
    config = transformers.AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=64, linear_value_head_dim=32, linear_conv_kernel_dim=4,
    )  # fmt: skip
    assert sizing._state_bytes(config) == 2 * 3 * 192 + 2 * 64 * 64 == 9344
    model = Model.of(config, 0)
    assert model.int2 == Cache(2 * 80, 2 * 2 * 128 * 80, block=128)
    assert model.bf16 == Cache(2 * 512, 2 * 2 * 32 * 512, block=32)
    assert model.int2.of_request(129) == (256 + 256) * 160
    assert model.int2.tokens(480 * 1000, 128) == 1000


def test_layers_in_16_bits_count_as_such() -> None:
    whole = Sidecar.hadamard(ModelFingerprint("qwen3", 36, 32, 8, 128, {}))
    layers = {index: layer for index, layer in whole.layers.items() if index not in (0, 35)}
    model = qwen3_4b(sidecar=replace(whole, layers=layers, absent=(0, 35)))
    assert model.int2.token == 34 * 576 + 2 * 4096
    assert model.bf16 == qwen3_4b().bf16
    assert model.slot * 36 == qwen3_4b().slot * 34, "they have no copies"


def test_gpus_too_small_for_anything_have_an_answer_too() -> None:
    assert capacity(qwen3_4b(), 2, OscarConfig()).gpus == 16


@pytest.mark.parametrize(("weights", "gpus"), [(8, 1), (18, 2), (141, 8)])
def test_as_many_gpus_as_the_weights_need(weights: int, gpus: int) -> None:
    found = capacity(qwen3_4b(weights * GB), 24, OscarConfig())
    assert found.gpus == gpus
    assert found.memory == pytest.approx(gpus * (0.9 * 24 - 2) * GB - weights * GB)


def tensors(file: Path, size: int) -> Path:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    return file


def test_weights_are_counted_from_headers_or_the_index(tmp_path: Path) -> None:
    assert weight_bytes(str(tmp_path)) is None
    tensors(tmp_path / "model-1.safetensors", 300)
    tensors(tmp_path / "model-2.safetensors", 50)
    assert weight_bytes(str(tmp_path)) == 350
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 340}, "weight_map": {}}')
    assert weight_bytes(str(tmp_path)) == 340


def test_weights_of_a_hub_id_are_counted_without_fetching_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the index; where there is none, by the file in the cache or by its header on the hub."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    index = tmp_path / "index"
    index.write_text('{"metadata": {"total_size": 340}}')
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda model, name, revision: str(index))
    assert weight_bytes("org/name") == 340

    def absent(model: str, name: str, revision: str | None) -> str:
        raise LocalEntryNotFoundError("offline") if revision else EntryNotFoundError("no index")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", absent)
    cached = tensors(tmp_path / "model.safetensors", 77)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *given, **more: str(cached))
    assert weight_bytes("org/name", "v2") == weight_bytes("org/name") == 77


def test_what_the_blocks_of_qwen3_next_cost_is_as_the_pages_say() -> None:
    """Qwen3-Next-80B-A3B's shape, 12 layers with attention and 36 with states; vLLM says 544 tokens for 16 bits."""
    config = transformers.AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )  # fmt: skip
    model = Model.of(config, 0)
    assert model.bf16.block == 544
    gains = [model.bf16.of_request(length) / model.int2.of_request(length) for length in LENGTHS]
    said = ", ".join(f"{gain:.2f}" for gain in gains)
    assert f"{model.int2.block:,} tokens (16 bits: 544)" in LIMITS and said in LIMITS, (model.int2.block, said)
