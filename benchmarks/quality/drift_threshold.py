"""What `oscar eval` should warn of: how far texts are from an English calibration, and what one of their own gains.

    python -m benchmarks.quality.drift_threshold MODEL SIDECAR [--texts german ...]

The last two windows of each text are measured over an emulated cache, with the sidecar and with a calibration on up to
eight windows before them (prose and code: the sidecar's own kind of text, and eight windows of other library modules).
"""

import argparse
from dataclasses import replace
from typing import Any

import torch

from benchmarks.quality.emulation import cache_of, load, measure
from vllm_oscar.calibrate.capture import Attention, capturing
from vllm_oscar.calibrate.data import builtin_text
from vllm_oscar.calibrate.refit import Keys, refit
from vllm_oscar.calibrate.solve import Recipe, solve
from vllm_oscar.calibrate.statistics import FarSet, LayerStatistics
from vllm_oscar.evaluation.drift import drifts
from vllm_oscar.evaluation.texts import TEXTS
from vllm_oscar.sidecar import Sidecar

CONTEXT, MEASURED, CALIBRATED = 2048, 2, 8


def cut(text: str, tokenizer: Any) -> torch.Tensor:
    """int64 (windows, CONTEXT)."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)


def split(name: str, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to calibrate on (none for prose), and windows to measure."""
    if name == "prose":
        return torch.empty(0, CONTEXT), cut(builtin_text("held_out"), tokenizer)[:MEASURED]
    if name == "code":
        other = cut(builtin_text("calibration", "code")[:400_000], tokenizer)[::4]
        return other[:CALIBRATED], cut(builtin_text("held_out", "code"), tokenizer)[:MEASURED]
    windows = cut("\n".join(TEXTS[name](tokenizer).documents), tokenizer)
    return windows[: min(CALIBRATED, len(windows) - MEASURED)], windows[-MEASURED:]


@torch.inference_mode()
def calibrated(model: Any, like: Sidecar, windows: torch.Tensor) -> Sidecar:
    """A sidecar from these windows."""
    far = FarSet(like.sink, like.window)
    layers: list[tuple[LayerStatistics, list[Keys]]] = [
        (LayerStatistics(), []) for _ in range(like.fingerprint.num_layers)
    ]
    for window in windows:
        waiting = iter(layers)

        def observe(attention: Attention) -> None:
            statistics, keys = next(waiting)  # noqa: B023
            weight = statistics.add(attention, far)
            assert weight is not None
            keys.append(Keys(attention.key, weight.float()))

        with capturing(model.config, observe):
            model.get_decoder()(input_ids=window[None], use_cache=False)
    recipe = Recipe.of("aware", per=like.per, group_size=like.group_size)
    solved = {
        index: solve(refit(statistics, keys, recipe), recipe)[0] for index, (statistics, keys) in enumerate(layers)
    }
    return replace(like, layers=solved)


def main() -> None:
    parser = argparse.ArgumentParser(description="Distance from a calibration, and what another one gains.")
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("sidecar", help="calibrated on English prose")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), help="of those that `oscar eval` knows")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    english = Sidecar.load(options.sidecar)
    print(f"{'text':<10}{'moved':>7}{'KL':>9}{'+-':>9}{'KL, own':>9}{'+-':>9}{'windows':>9}")
    for name in options.texts:
        own, text = split(name, tokenizer)
        caches = {"english": cache_of(english)}
        if len(own):
            caches["own"] = cache_of(calibrated(model, english, own))
        found = dict(measure(model, text, caches))
        (drift,) = drifts(options.model, english, {name: text})
        numbers = "".join(f"{found[c]['kl']:>9.4f}{found[c]['kl_error']:>9.4f}" for c in caches)
        print(f"{name:<10}{drift.moved:>7.2f}{numbers}{len(own):>9}", flush=True)


if __name__ == "__main__":
    main()
