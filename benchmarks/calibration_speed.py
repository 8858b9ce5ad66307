#!/usr/bin/env python3
"""How long `oscar calibrate` takes, by the layer, and what that makes for models too large to have here.

    python -m benchmarks.calibration_speed MODEL [--shapes qwen3-8b llama-70b] [--sequences 64]

Checkpoints with random weights, of one and of three layers of a published shape, are calibrated with MODEL's tokenizer;
the difference is two layers, the rest is the start. Prints a CSV line for each shape: seconds of a layer for a million
tokens, of the start, and of all layers for 512 sequences of 2,048 tokens (the default, 1.05 million tokens).
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES
from vllm_oscar.calibrate.__main__ import main as calibrate

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 80, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
TRIED: dict[str, dict[str, Any]] = {"qwen3-8b": SHAPES["qwen3-8b"], "llama-70b": LLAMA_70B}
LENGTH, DEFAULT = 2048, 512  # tokens of a sequence, sequences


def checkpoint(shape: dict[str, Any], layers: int, tokenizer: Any, folder: Path, device: str) -> None:
    """Random weights of so many layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changed = {**shape, "num_hidden_layers": layers, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(**{k: v for k, v in changed.items() if k != "architectures"})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def seconds(folder: Path, sequences: int, device: str) -> float:
    """Of a whole calibration."""
    start = time.perf_counter()
    options = ["--sequences", str(sequences), "--length", str(LENGTH), "--device", device, "--no-resume"]
    if calibrate([str(folder), *options, "--out", str(folder / "sidecar.safetensors")]):
        raise SystemExit("the calibration failed")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id whose tokenizer is used")
    parser.add_argument("--shapes", nargs="+", default=list(TRIED), choices=list(TRIED))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print("shape,device,layers,seconds a layer and million tokens,start seconds,minutes for the default", flush=True)
    for shape in options.shapes:
        took = {}
        for layers in (1, 3):
            with tempfile.TemporaryDirectory() as folder:
                checkpoint(TRIED[shape], layers, tokenizer, Path(folder), options.device)
                took[layers] = seconds(Path(folder), options.sequences, options.device)
        layer = (took[3] - took[1]) / 2
        million = options.sequences * LENGTH / 1e6
        start = max(took[1] - layer, 0.0)
        whole = (start + TRIED[shape]["num_hidden_layers"] * layer * DEFAULT / options.sequences) / 60
        layers = TRIED[shape]["num_hidden_layers"]
        print(f"{shape},{name},{layers},{layer / million:.1f},{start:.0f},{whole:.1f}", flush=True)


if __name__ == "__main__":
    main()
