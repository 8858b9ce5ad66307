"""A model's weights in AWQ's checkpoint format: 4 bits, rounded to nearest in groups.

    python examples/awq.py .model/SmolLM2-135M-Instruct .model/SmolLM2-135M-Instruct-AWQ
    vllm serve .model/SmolLM2-135M-Instruct-AWQ --kv-cache-dtype oscar

What AWQ's activation statistics would add is left out: this makes a small checkpoint that vLLM serves with its AWQ
kernels, to show 4-bit weights and a 2-bit cache together. The sidecar of the original serves both.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 64  # input channels that share scale and zero point
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight output channels in a 32-bit word, lowest bits first
CONFIG = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}


def packed(codes: torch.Tensor) -> torch.Tensor:
    """(rows, outputs) of 0 .. 15 -> int32 (rows, outputs / 8)."""
    words = codes.long().view(codes.shape[0], -1, 8)[..., ORDER]
    word = (words << (4 * torch.arange(8))).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A linear layer's weight (outputs, inputs) as AWQ's three tensors.

    Returns:
        qweight int32 (inputs, outputs / 8), qzeros int32 (groups, outputs / 8), scales float16 (groups, outputs)
    """
    grouped = weight.float().T.reshape(-1, GROUP, weight.shape[0])
    low = grouped.amin(1, keepdim=True).clamp(max=0)
    high = grouped.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-5).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (grouped / scale + zero).round().clamp(0, 15)
    return {
        "qweight": packed(codes.flatten(0, 1)),
        "qzeros": packed(zero[:, 0]),
        "scales": scale[:, 0].half(),
    }


def convert(
    model: Path,
    out: Path,
    quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]] = quantize,
    config: Mapping[str, Any] = CONFIG,
) -> None:
    """Write `out`: the linear layers of `model` in another format, everything else as it is.

    Args:
        quantize: a linear layer's weight (outputs, inputs) -> its tensors by name
        config: what the model's configuration says about the format
    """
    out.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in model.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.endswith("_proj.weight"):
                parts = quantize(tensor)
                tensors |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
            else:
                tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for file in model.iterdir():
        if file.is_dir():
            shutil.copytree(file, out / file.name)
        elif file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    whole = json.loads((model / "config.json").read_text()) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(whole, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    convert(arguments.model, arguments.out)
