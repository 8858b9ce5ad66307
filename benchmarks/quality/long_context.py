"""INT2 caches of long contexts by what they were calibrated for, emulated.

    python -m benchmarks.quality.long_context MODEL

The same sequences of 2,048 tokens, with the statistics that they have themselves and with those of a whole context
(`oscar calibrate --context`), measured on windows of both lengths.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks.quality.emulation import HEAD, cache_of, line, load, measure
from vllm_oscar.calibrate.__main__ import calibrate
from vllm_oscar.calibrate.data import open_corpus, sequences
from vllm_oscar.calibrate.solve import Recipe
from vllm_oscar.calibrate.statistics import FarSet
from vllm_oscar.calibrate.streaming import Model, State
from vllm_oscar.evaluation.windows import held_out
from vllm_oscar.sidecar import ModelFingerprint

LENGTH = 2048  # of a calibration sequence
SINK, WINDOW = 64, 256


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibrations of short sequences in long contexts.")
    parser.add_argument("model", help="folder of a causal model")
    parser.add_argument("--sequences", type=int, default=12, help="of calibration")
    parser.add_argument("--contexts", type=int, nargs="+", default=[LENGTH, 4 * LENGTH], help="measured, in tokens")
    parser.add_argument("--windows", type=int, default=1, help="of each length")
    parser.add_argument("--data", nargs="+", default=["prose"], help="texts by name")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    fingerprint = ModelFingerprint.of(model.config)
    data = sequences(open_corpus(None, tokenizer), tokenizer, options.sequences, LENGTH, 0)
    caches = {}
    with tempfile.TemporaryDirectory() as folder:
        for context in (LENGTH, max(options.contexts)):
            recipe = Recipe.of("aware", per="head", group_size=fingerprint.head_size, context=context)
            with (
                State(Path(folder) / "state", {"context": context}) as state,
                Model.opened(options.model, torch.device("cpu"), None, context) as opened,
            ):
                made = calibrate(opened, fingerprint, data, recipe, FarSet(SINK, WINDOW), state)
            turning = sum(layer.key.turning is not None for layer in made.layers.values())
            caches[f"calibrated for {context:,}, {turning} layers turn"] = cache_of(made)
    for text in options.data:
        for context in options.contexts:
            print(f"{text}, {options.windows} windows of {context:,} tokens\n{HEAD}", flush=True)
            for name, result in measure(model, held_out(tokenizer, text, options.windows, context), caches):
                print(line(name, result), flush=True)


if __name__ == "__main__":
    main()
