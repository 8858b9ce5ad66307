"""Where the KL of an INT2 cache comes from: a table of emulated caches that leave one thing out at a time.

    python -m benchmarks.quality.sources MODEL SIDECAR [--more NAME=SIDECAR ...] [--data TEXT] [--windows N]

Keys or values, thirds of the layers, sink and window, gains, 8-bit scale and offset, other calibrations (--more). A row
takes about ten seconds a window for SmolLM2-135M on one core.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.quality.emulation import HEAD, Cache, Stored, cache_of, exact, line, load, measure
from vllm_oscar.evaluation.windows import held_out
from vllm_oscar.quantizer import Encoded
from vllm_oscar.sidecar import Sidecar


@dataclass
class EightBit(Stored):
    """Scale in sixteenths of an octave, the middle of the row in sixteenths of the scale: 8 bits each."""

    def stored(self, encoded: Encoded) -> Encoded:
        scale = torch.exp2((torch.log2(encoded.scale.float().clamp(min=1e-8)) * 16).round() / 16)
        middle = ((encoded.offset.float() / scale + 1.5) * 16).round().clamp(-128, 127) / 16
        return encoded._replace(scale=scale, offset=(middle - 1.5) * scale)


def with_gains(sidecar: Sidecar, key: float, value: float) -> Sidecar:
    """The same gains in all layers."""
    layers = {
        index: replace(layer, key=replace(layer.key, gain=key), value=replace(layer.value, gain=value))
        for index, layer in sidecar.layers.items()
    }
    return replace(sidecar, layers=layers)


def rows(sidecar: Sidecar) -> Iterator[tuple[str, Cache]]:
    """What is tried, by name."""
    yield "the sidecar", cache_of(sidecar)
    yield "keys alone", cache_of(sidecar, value=exact)
    yield "values alone", cache_of(sidecar, key=exact)
    count = sidecar.fingerprint.num_layers
    for third in range(3):
        kept = range(third * count // 3, (third + 1) * count // 3)
        plain = frozenset(range(count)) - frozenset(kept)
        name = f"layers {kept.start} to {kept.stop - 1} alone"
        yield name, cache_of(sidecar, key=Stored(sidecar, "k", plain), value=Stored(sidecar, "v", plain))
    for window in (64, 128, 512):
        yield f"window {window}", cache_of(sidecar, window=window)
    for sink in (0, 4):
        yield f"sink {sink}", cache_of(sidecar, sink=sink)
    for key, value in ((1.0, 1.1), (1.025, 1.1), (1.05, 1.1), (1.025, 1.05), (1.025, 1.15)):
        yield f"gains {key:g} of keys, {value:g} of values", cache_of(with_gains(sidecar, key, value))
    yield "8-bit scale and offset", cache_of(sidecar, key=EightBit(sidecar, "k"), value=EightBit(sidecar, "v"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print where the KL of an INT2 cache comes from.")
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("sidecar", help="its calibration")
    parser.add_argument("--more", nargs="+", default=[], metavar="NAME=SIDECAR", help="other calibrations")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--data", default="prose", help="as for `oscar eval`")
    parser.add_argument("--windows", type=int, default=2, help="of 2,048 tokens")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    caches = {name: cache for name, cache in rows(Sidecar.load(options.sidecar)) if options.only in name}
    caches |= {name: cache_of(Sidecar.load(path)) for name, _, path in (more.partition("=") for more in options.more)}
    windows = held_out(tokenizer, options.data, options.windows, 2048)
    print(f"{options.data}, {len(windows)} windows\n{HEAD}", flush=True)
    for name, result in measure(model, windows, caches):
        print(line(name, result), flush=True)


if __name__ == "__main__":
    main()
