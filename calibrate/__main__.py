"""python -m vllm_oscar.calibrate MODEL [--data FILE] [--out FILE]: measure a model on text, write its sidecar."""

import argparse
import logging
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_oscar import __version__
from vllm_oscar.calibrate import allocation
from vllm_oscar.calibrate.capture import Attention
from vllm_oscar.calibrate.data import Sequences, open_corpus, sequences, with_returns
from vllm_oscar.calibrate.explain import explained
from vllm_oscar.calibrate.progress import stage
from vllm_oscar.calibrate.refit import Keys, refit
from vllm_oscar.calibrate.rope import default_context
from vllm_oscar.calibrate.search import SAMPLES, search
from vllm_oscar.calibrate.solve import KEY_CLIP, VALUE_CLIP, VALUE_TARGETS, Recipe, solve
from vllm_oscar.calibrate.statistics import FarSet, LayerStatistics
from vllm_oscar.calibrate.streaming import Model, State, cannot_stream, collect
from vllm_oscar.errors import CalibrationError, ConfigError, OscarError
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.sidecar import (
    ENCODERS,
    MAX_TURNING_PAIRS,
    LayerCalibration,
    ModelFingerprint,
    Sidecar,
    cached_path,
)

logger = logging.getLogger("vllm_oscar.calibrate")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="oscar calibrate",
        description="Measure a model on text and write the sidecar that OSCAR serves it with.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("model", help="folder or hub id of a Hugging Face decoder")
    p.add_argument("--data", help="text, .jsonl or .parquet file (rows with text, or chats with messages); "
                   "without it: text that comes with Python")  # fmt: skip
    p.add_argument("--tokenizer", metavar="MODEL", help="folder or hub id of one, where the model's own is not with it")
    p.add_argument("--out", type=Path, help="the sidecar; without it: where serving looks for it in the user's cache")
    p.add_argument("--method", choices=("aware", "reference"), default="aware")
    p.add_argument("--per", choices=("head", "layer"), default="head", help="a transform for each KV head, or for all")
    p.add_argument("--sequences", type=int, default=16, help="at most; fewer where the text is shorter")
    p.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    p.add_argument("--returns", action="store_true", help="for models that quote, small ones above all: in every other "
                   "sequence passages come again, among them strings that mean nothing")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="which sequences of the text are taken")
    p.add_argument("--sink", type=int, default=64, help="first tokens that serving keeps in BF16")
    p.add_argument("--window", type=int, default=256, help="last tokens that serving keeps in BF16")
    p.add_argument("--stride", type=int, default=4, help="aware: look at every n-th query")
    p.add_argument("--group-size", type=int, default=0, help="channels that share a scale; 0: the whole head")
    p.add_argument("--bits", default="k2v2", metavar="kNvM", help="of keys, 2, 3 or 4, and values, 2 or 4; k2v2 makes "
                   "the smallest cache, k4v4 the most exact; auto:B: keys of 2 to 4 bits, more in the layers that lose "
                   "the most, B bits an element on average")  # fmt: skip
    p.add_argument("--key-encoder", choices=ENCODERS, help="aware: metric; reference: minmax")
    p.add_argument("--value-encoder", choices=("ls", "minmax"), help="aware: ls; reference: minmax")
    p.add_argument("--key-gain", type=float, help="aware, 2 bits: 1.0375 (ls keys: 1.1), less with more; reference: 1")
    p.add_argument("--value-gain", type=float, help="aware, 2 bits: 1.1, less with more; reference: 1")
    p.add_argument("--key-clip", type=float, default=KEY_CLIP, help="of minmax")
    p.add_argument("--value-clip", type=float, default=VALUE_CLIP, help="of minmax")
    p.add_argument("--search", action="store_true", help="instead of these gains and clips: for each layer those that "
                   "leave its attention output least wrong")  # fmt: skip
    p.add_argument("--context", type=int, help="aware: tokens of the longest context to serve; the model's")
    p.add_argument("--turning-pairs", type=int, default=MAX_TURNING_PAIRS, metavar="N",
                   help="aware: RoPE pairs of a layer whose mean may turn with the position, at most")  # fmt: skip
    p.add_argument("--value-target", choices=tuple(VALUE_TARGETS), default="weighted",
                   help="reference: what values are rotated by")  # fmt: skip
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
                   help="of the forward passes; auto: the checkpoint's, bfloat16 for float32")  # fmt: skip
    p.add_argument("--revision", help="branch, tag or commit of a hub id; the sidecar is looked for by it")
    p.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the checkpoint")
    p.add_argument("--no-resume", action="store_true", help="do not go on from a calibration that was killed")
    return p


def bits(text: str) -> tuple[int, int, float | None]:
    """Of keys and of values, and the average up to which some layers' keys get more, from what `--bits` says.

    Raises:
        ConfigError: it is not of that form.
    """
    if found := re.fullmatch(r"k(\d)v(\d)", text):
        return int(found[1]), int(found[2]), None
    if found := re.fullmatch(r"auto:(\d(?:\.\d+)?)", text):
        return 2, 2, float(found[1])
    raise ConfigError(f"--bits {text}: say k2v2, k3v2, k4v2, k2v4, k3v4, k4v4, or auto and an average, as auto:2.5")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parser().parse_args(arguments)
    try:
        run(options)
    except OscarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> Sidecar:
    """Calibrate as the command line says."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # ours is the one to look at
    start = time.perf_counter()
    out = options.out or cached_path(options.model, options.revision)
    checkpoint = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    with explained(options.model, "configuration"):
        config = AutoConfig.from_pretrained(options.model, **checkpoint)
    fingerprint = ModelFingerprint.of(config)
    key_bits, value_bits, average = bits(options.bits)
    # refuses odd sizes
    layout = PageLayout(fingerprint.head_size, 64, options.group_size, key_bits, value_bits)
    recipe = Recipe.of(
        options.method,
        options.key_encoder,
        options.value_encoder,
        per=options.per,
        group_size=layout.group_size,
        key_bits=key_bits,
        value_bits=value_bits,
        average=average,
        value_target=options.value_target,
        key_gain=options.key_gain,
        value_gain=options.value_gain,
        key_clip=options.key_clip,
        value_clip=options.value_clip,
        search=options.search,
        context=options.context or default_context(config),
        turning_pairs=options.turning_pairs,
    )
    if options.sequences < 1 or options.length < 2 or options.stride < 1 or (options.context or 1) < 1:
        raise ConfigError("--sequences, --length, --stride and --context must be positive")
    with explained(options.tokenizer or options.model, "tokenizer", "name one with --tokenizer"):
        named = {"trust_remote_code": options.trust_remote_code} if options.tokenizer else checkpoint
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model, **named)
    data = sequences(open_corpus(options.data, tokenizer), tokenizer, options.sequences, options.length, options.seed)
    if options.returns:
        data = with_returns(data, tokenizer)
    logger.info("%d sequences of %d tokens from %s, in %.0f s", *data.ids.shape, data.name, time.perf_counter() - start)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    state_folder = out.with_name(out.name + ".state")
    far = FarSet(options.sink, options.window, options.stride)
    with Model.opened(options.model, torch.device(options.device), dtype, recipe.context, **checkpoint) as model:
        job = describe(options.model, model, fingerprint, data, recipe, far)
        with State(state_folder, job, resume=not options.no_resume) as state:
            sidecar = calibrate(model, fingerprint, data, recipe, far, state)
            if model.files() != job["weights"]:
                raise CalibrationError(f"{options.model} was changed while it was calibrated; start again")
            written = sidecar.save(out)
            state.discard()
    logger.info("wrote %s (%s)\n%s", out, written.digest[:12], _peak_memory(torch.device(options.device)))
    return written


def describe(
    name: str, model: Model, fingerprint: ModelFingerprint, data: Sequences, recipe: Recipe, far: FarSet
) -> dict[str, Any]:
    """All that a layer's statistics depend on: a killed run goes on only where it is the same."""
    return {
        "version": __version__,
        "model": name,
        "fingerprint": vars(fingerprint),
        "weights": model.files(),
        "data": data.digest,
        "far": vars(far) if recipe.aware else None,
        "dtype": str(next(model.decoder.parameters()).dtype),
        "context": recipe.context,
        "tuned": vars(recipe) if recipe.refits or recipe.search else None,
    }


def calibrate(
    model: Model, fingerprint: ModelFingerprint, data: Sequences, recipe: Recipe, far: FarSet, state: State
) -> Sidecar:
    """A sidecar in memory; `state` is left for the caller to discard once it is saved.

    Raises:
        ConfigError: no sequence is longer than sink + window, so that none reads INT2.
        CalibrationError: what was measured is not the checkpoint's model.
        UnsupportedError: the model cannot be measured.
    """
    length = data.ids.shape[1]
    if length <= far.sink + far.window:
        raise ConfigError(
            f"sequences of {length} tokens never read INT2: take --length above sink + window = {far.sink + far.window}"
        )

    def tune(statistics: LayerStatistics, keys: Sequence[Keys], samples: Sequence[Attention]) -> LayerStatistics:
        if recipe.average is not None:
            statistics = allocation.refits(statistics, keys, recipe)
        elif recipe.refits:
            statistics = refit(statistics, keys, recipe)
        if recipe.search:
            statistics.tensors |= search(solve(statistics, recipe)[0], samples, far, recipe.group_size)
        return statistics

    if state.done >= 0:
        logger.info("going on after %d layers (%s)", state.done, state.folder)
    layers = len(model.layers)
    with stage(layers * len(data.ids), "layer passes") as advance:
        calls_kept = SAMPLES if recipe.search else 0
        tuned = recipe.refits or recipe.search
        collect(model, data.ids, far if recipe.aware else None, state, advance, tune if tuned else None, calls_kept)
    start = time.perf_counter()
    solved: dict[int, LayerCalibration] = {}
    absent, unknown, without_rope = [], [], []
    allocated = {} if recipe.average is None else _allocated(state, layers, fingerprint, recipe)
    for index in range(layers):
        statistics = state.statistics(index)
        if not statistics.tensors:
            absent.append(index)
            continue
        if index in allocated:
            statistics = allocation.fitted(statistics, allocated[index])
        if recipe.aware:
            frequency = statistics.tensors.get("frequency")
            if frequency is None:
                unknown.append(index)
            elif not len(frequency):
                without_rope.append(index)
        solved[index], idle = solve(statistics, replace(recipe, key_bits=allocated.get(index, recipe.key_bits)))
        for letter, which in idle.items():
            if which:
                logger.info("layer %d: plain Hadamard for %s of heads %s, as no INT2 token counts there",
                            index, {"k": "keys", "v": "values"}[letter], which)  # fmt: skip
    if not solved:
        raise cannot_stream(model.decoder, "has no attention that transformers lets us look at")
    logger.info("%d layers solved in %.0f s", len(solved), time.perf_counter() - start)
    if unknown and recipe.context > length:
        logger.warning(
            "no fixed RoPE frequencies were found for layers %s: their keys are calibrated for contexts of %d tokens; "
            "if they have RoPE, take a --length as long as what you serve",
            unknown,
            length,
        )
    metadata = {
        "data": data.name,
        "data_digest": data.digest,
        "sequences": len(data.ids),
        "length": length,
        "tokens": data.ids.numel(),
        "stride": far.stride,
        "context": recipe.context if recipe.aware else None,
        "layers_without_rope": without_rope or None,
        "layers_with_unknown_rope": unknown or None,
        "search": recipe.search,
        "average_bits": recipe.average,
        "value_target": recipe.value_target if recipe.method == "reference" else None,
        "vllm_oscar": __version__,
    }
    return Sidecar(
        solved, fingerprint, recipe.method, recipe.group_size, far.sink, far.window, recipe.per, tuple(absent), metadata
    )


def _allocated(state: State, layers: int, fingerprint: ModelFingerprint, recipe: Recipe) -> dict[int, int]:
    """Bits of the keys of each layer that was measured, for a recipe with an average."""
    assert recipe.average is not None
    layout = PageLayout(fingerprint.head_size, 64, recipe.group_size, recipe.key_bits, recipe.value_bits)
    measured = ((index, state.statistics(index)) for index in range(layers))  # one layer's at a time
    losses = {index: allocation.losses(statistics) for index, statistics in measured if statistics.tensors}
    chosen = allocation.allocated(losses, allocation.steps(layout, len(losses), recipe.average))
    logger.info("bits of the layers' keys: %s", " ".join(map(str, chosen.values())))
    return chosen


def _peak_memory(device: torch.device) -> str:
    # not getrusage: its maximum starts with what the parent process held
    status = Path("/proc/self/status").read_text()
    kilobytes = int(status.split("VmHWM:")[1].split()[0])
    peak = f"peak memory {kilobytes / 2**20:.2f} GiB"
    if device.type == "cuda":
        peak += f", {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB on the GPU"
    return peak


if __name__ == "__main__":
    sys.exit(main())
