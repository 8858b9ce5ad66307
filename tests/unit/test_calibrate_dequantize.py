"""Quantized checkpoints: their weights are those that vLLM serves, and they are calibrated like any other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks.models.checkpoints import FORMATS, add_cache_scales  # noqa: E402
from examples import awq  # noqa: E402
from tests.unit.tiny_models import tiny, tokens  # noqa: E402
from vllm_oscar import errors  # noqa: E402
from vllm_oscar.calibrate.dequantize import dequantize, quantization  # noqa: E402
from vllm_oscar.calibrate.statistics import FarSet  # noqa: E402
from vllm_oscar.calibrate.streaming import Model, State, collect  # noqa: E402

BLOCK = (48, 80)  # neither divides the weights


def block_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 with a scale for each block, as Qwen3's and DeepSeek's FP8 checkpoints."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True))
    scale = torch.zeros(rows, columns)
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            scale[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}


def tensor_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale, "input_scale": torch.ones(())}


def packed_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors' own packing, in groups of 32 inputs."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # type: ignore[import-untyped]

    grouped = weight.unflatten(1, (-1, 32))
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    codes = (grouped / scale).round().clamp(-8, 7).to(torch.int8).flatten(1)
    return {
        "weight_packed": pack_to_int32(codes, 4).contiguous(),
        "weight_shape": torch.tensor(weight.shape),
        "weight_scale": scale[..., 0],
    }


INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"all": {"targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
MADE: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any], float]] = {
    "fp8, blocks": (block_fp8, FP8, 0.03),
    "fp8, one scale": (tensor_fp8, {"quant_method": "fp8"}, 0.03),
    "compressed-tensors, int8": (*FORMATS["int8"], 0.01),
    "compressed-tensors, fp8": (*FORMATS["fp8"], 0.03),
    "compressed-tensors, int4": (packed_int4, INT4, 0.12),
    "gptq": (*FORMATS["gptq"], 0.12),
    "awq": (awq.quantize, awq.CONFIG, 0.12),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    tiny("llama", hidden_size=128, intermediate_size=192).save_pretrained(folder)
    return folder


def converted(plain: Path, folder: Path, kind: str) -> Path:
    quantize, config, _ = MADE[kind]
    awq.convert(plain, folder / "quantized", quantize, config)
    return folder / "quantized"


@pytest.mark.parametrize("kind", list(MADE))
def test_weights_are_the_originals_up_to_their_rounding(kind: str, plain: Path, tmp_path: Path) -> None:
    """Channels in another order, or zero points off by one, would be off by all of a weight."""
    if "int4" in kind:
        pytest.importorskip("compressed_tensors")
    config = transformers.AutoConfig.from_pretrained(quantized := converted(plain, tmp_path, kind))
    settings = quantization(config)
    assert settings is not None
    dequantize(quantized, tmp_path / "back", settings, torch.float32)
    original, found = (load_file(folder / "model.safetensors") for folder in (plain, tmp_path / "back"))
    assert {name for name in found if not name.endswith("input_scale")} == original.keys()
    for name, weight in original.items():
        error = (found[name] - weight).norm() / weight.norm()
        assert error <= (MADE[kind][2] if name.endswith("_proj.weight") else 0), name


@pytest.mark.parametrize(("kind", "moved"), [("fp8, blocks", 0.1), ("gptq", 0.5)])
def test_quantized_checkpoints_are_calibrated(kind: str, moved: float, plain: Path, tmp_path: Path) -> None:
    """In shards, parts of a weight in different ones, with scales for an FP8 cache: statistics near the original's."""
    quantized = converted(plain, tmp_path, kind)
    add_cache_scales(quantized, 3, 0.5)
    weights = load_file(quantized / "model.safetensors")
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, name in enumerate(sorted(weights)):
        shards[number % 2][name] = weights[name]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (quantized / "model.safetensors").unlink()
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, quantized / file, {"format": "pt"})
    index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    found = []
    for number, folder in enumerate((plain, quantized)):
        with (
            State(tmp_path / f"state{number}", {}) as state,
            Model.opened(str(folder), torch.device("cpu"), torch.float32) as model,
        ):
            collect(model, tokens(1, 48), FarSet(4, 8, 1), state, lambda count: None)
            found.append(state.statistics(0).tensors["value_second"])
    assert (found[1] - found[0]).norm() < moved * found[0].norm()


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "mxfp4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
    ],
)
def test_other_formats_say_what_to_calibrate_instead(settings: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedError, match=r"oscar calibrate ORIGINAL --out FILE"):
        dequantize(plain, tmp_path / "none", settings, torch.bfloat16)
    assert not (tmp_path / "none").exists()
