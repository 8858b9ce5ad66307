"""How long `oscar calibrate` takes, by the layer, and what that makes for models too large to have here.

    python -m benchmarks.speed.calibration MODEL [--shapes qwen3-8b llama-70b] [--sequences 64]

Checkpoints with random weights, of one and of three layers of a published shape, are calibrated with MODEL's tokenizer;
the difference is two layers, the rest is the start. Prints a CSV line for each shape: seconds of a layer for a million
tokens, of the start, and of all layers for the default number of sequences, of 2,048 tokens.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.models.shapes import SHAPES, model_folder, random_weights
from vllm_oscar.calibrate.__main__ import main as calibrate
from vllm_oscar.calibrate.__main__ import parser as calibrate_parser

TRIED = ("qwen3-8b", "llama-70b")
LENGTH = 2048  # tokens of a sequence
DEFAULT: int = calibrate_parser().get_default("sequences")


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
    parser.add_argument("--shapes", nargs="+", default=TRIED, choices=list(SHAPES))
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
            with tempfile.TemporaryDirectory() as root:
                folder = model_folder(shape, Path(root), num_hidden_layers=layers, vocab_size=len(tokenizer))
                random_weights(folder, options.device)
                tokenizer.save_pretrained(folder)
                took[layers] = seconds(folder, options.sequences, options.device)
        layer = (took[3] - took[1]) / 2
        million = options.sequences * LENGTH / 1e6
        start = max(took[1] - layer, 0.0)
        layers = SHAPES[shape]["num_hidden_layers"]
        whole = (start + layers * layer * DEFAULT / options.sequences) / 60
        print(f"{shape},{name},{layers},{layer / million:.1f},{start:.0f},{whole:.1f}", flush=True)


if __name__ == "__main__":
    main()
