"""How well a model copies over an INT2 cache: passages that come twice, scored on the second time.

    python -m benchmarks.quality.copying MODEL SIDECAR [SIDECAR ...]

Emulated (see emulation.py). What the model needs then is one key among all, far behind the window, and that token's
value alone: no error averages out. Each sidecar is also measured with its keys, or its values, left exact.
"""

import argparse

import torch

from benchmarks.quality import emulation
from vllm_oscar.calibrate.data import builtin_text
from vllm_oscar.sidecar import Sidecar

PASSAGE = 1024  # tokens
STARTS = (3000, 12000, 20000)  # in the held-out prose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("sidecars", nargs="+")
    parser.add_argument("--windows", type=int, default=len(STARTS), choices=range(1, len(STARTS) + 1))
    options = parser.parse_args()
    model, tokenizer = emulation.load(options.model)
    ids = tokenizer(builtin_text("held_out"), add_special_tokens=False, verbose=False).input_ids
    windows = torch.tensor([2 * ids[start : start + PASSAGE] for start in STARTS[: options.windows]])
    caches = {}
    for path in options.sidecars:
        whole = emulation.cache_of(Sidecar.load(path))
        caches[path] = whole
        caches[f"{path}, values exact"] = emulation.Cache(whole.key, sink=whole.sink, window=whole.window)
        caches[f"{path}, keys exact"] = emulation.Cache(value=whole.value, sink=whole.sink, window=whole.window)
    emulation.FIRST = PASSAGE + 16  # by then the model has seen that the passage repeats
    print(emulation.HEAD)
    for name, result in emulation.measure(model, windows, caches):
        print(emulation.line(name, result), flush=True)


if __name__ == "__main__":
    main()
