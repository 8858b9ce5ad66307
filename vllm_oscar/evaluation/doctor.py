"""oscar doctor [MODEL]: what is installed, what keeps OSCAR from running, and what it would do for a model.

No engine is started and no weights are read. Exit status: 0 where nothing keeps OSCAR from running, warnings or not; 1
where something does; 2 for options that do not exist.
"""

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vllm_oscar import __version__
from vllm_oscar.config import OscarConfig
from vllm_oscar.errors import OscarError, SidecarNotFoundError
from vllm_oscar.evaluation.sizing import (
    ATTENTION,
    GB,
    GPUS,
    KINDS,
    Capacity,
    Model,
    capacity,
    layer_types,
    weight_bytes,
)
from vllm_oscar.sidecar import ModelFingerprint, Sidecar, find_sidecar

HELP = "check the installation, and what would happen for a model"
GROUP, NAME = "vllm.general_plugins", "oscar"  # of the entry point
LENGTHS = (8192, 32768, 131072)  # tokens of requests
MARKS = {"ok": "  ok  ", "warn": " warn ", "fail": " FAIL "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("model", nargs="?", help="folder or hub id")
    parser.add_argument("--sidecar", help="the model's sidecar; without it: where serving looks for it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


@dataclass(frozen=True)
class Finding:
    """Something looked at: "ok", "warn" or "fail", and a sentence that says what to do where it is not ok.

    Attributes:
        figures: those of the text, for scripts
    """

    what: str
    status: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


def environment() -> Iterator[Finding]:
    """Versions, seams, entry point, device, options."""
    yield Finding(
        "versions", "ok", f"vllm-oscar {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    yield _seams()
    entry_points = importlib.metadata.entry_points(group=GROUP)
    if NAME in entry_points.names:
        yield Finding("entry point", "ok", f"{NAME!r} is registered in {GROUP}")
    else:
        yield Finding(
            "entry point", "fail", f"{GROUP} has no {NAME!r}: install vllm-oscar with pip, also for a checkout"
        )
    yield _allowed(os.environ.get("VLLM_PLUGINS"))
    yield from _hidden()
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
        from vllm_oscar.integration.seams import FIRST_GPU

        if (major, minor) < FIRST_GPU:
            yield Finding("device", "fail", f"{name}: refused, tensor cores for BF16 came with 8.0 (Ampere)")
        elif (major, minor) != (9, 0):
            yield Finding("device", "warn", f"{name}: the kernels were run on 9.0 (Hopper) only; gates/kernels.py")
        else:
            yield Finding("device", "ok", name)
    else:
        yield Finding("device", "ok", "no GPU: the CPU platform runs the torch reference, complete but slow")
    yield _checked("options", lambda: f"outside of --additional-config: {OscarConfig.parse(None)}")


def model(name: str, sidecar_given: str | None = None) -> Iterator[Finding]:
    """What --kv-cache-dtype oscar would do for a model.

    Args:
        sidecar_given: path or repo id; None: the options' (VLLM_OSCAR_CONFIG), else looked up
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
        runner = _runner(name)
        fingerprint = ModelFingerprint.of(config)
    except (OSError, ValueError, OscarError) as error:
        yield Finding("model", "fail", f"{name}: {error}")
        return
    if runner:
        yield Finding("runner", "ok", f"vLLM's model runner {runner}")
    yield Finding(
        "model",
        "ok",
        f"{fingerprint.architecture}, {fingerprint.num_layers} layers, {fingerprint.num_heads} query and "
        f"{fingerprint.num_kv_heads} KV heads of size {fingerprint.head_size}",
    )
    kinds = layer_types(config.get_text_config())
    if odd := sorted(set(kinds) - KINDS):
        yield Finding("layers", "warn", f"{', '.join(odd)} layers: not tried with an INT2 cache")
    sidecar: Sidecar | None = None
    try:
        attending = {index for index, kind in enumerate(kinds) if kind in ATTENTION}
        sidecar, text = _sidecar(name, fingerprint, attending, sidecar_given)
        yield Finding("sidecar", "ok", text)
    except SidecarNotFoundError as error:  # nothing is wrong: it can be made
        yield Finding("sidecar", "fail" if sidecar_given else "warn", str(error))
    except (OscarError, ImportError) as error:
        yield Finding("sidecar", "fail", str(error))
    yield from sizes(name, config, sidecar)


def sizes(name: str, config: Any, sidecar: Sidecar | None) -> Iterator[Finding]:
    """Bytes of a token, and what GPUs would hold, with the sidecar's groups and its layers in 16 bits; where there is
    no sidecar, as `oscar calibrate` makes them."""
    try:
        options = OscarConfig.parse(None)
        weights, unknown = _weights(name, config)
        model = Model.of(config, weights, sidecar)
    except OscarError as error:
        yield Finding("memory", "fail", str(error))
        return
    kept = model.bf16.token / model.int2.token
    fixed = f", and {model.int2.request:,} a request (windows that slide, states)" if model.int2.request else ""
    yield Finding(
        "memory",
        "ok",
        f"{model.int2.token:,} bytes a token over all layers{fixed}; FP8 {model.fp8.token:,}, 16 bits "
        f"{model.bf16.token:,}: {(1 - options.pool_share) * kept:.2f} times the tokens of 16 bits in the same memory, "
        f"of which the BF16 copies take at most {100 * options.pool_share:g}%",
        {format: getattr(model, format).token for format in ("int2", "fp8", "bf16")},
    )
    if model.int2.block > 1:
        yield _gain(model)
    if unknown:
        yield Finding("weights", "warn", f"{unknown}: what GPUs would hold is not known")
        return
    yield Finding("weights", "ok", f"{weights / GB:.2f} GB", {"bytes": weights})
    for gpu in GPUS:
        yield _held(f"{gpu} GB GPU", capacity(model, gpu, options))
    if torch.cuda.is_available():
        here = capacity(model, torch.cuda.get_device_properties(0).total_memory // GB, options)
        found = _held("this GPU", here)
        there = torch.cuda.device_count()
        yield found if here.gpus <= there else replace(found, status="fail", text=f"{found.text}; there are {there}")


def _gain(model: Model) -> Finding:
    """What of a hybrid model's cache is states, and does not shrink."""
    gains = {context: model.bf16.of_request(context) / model.int2.of_request(context) for context in LENGTHS}
    shown = ", ".join(f"{context:,} tokens {gain:.2f}" for context, gain in gains.items())
    return Finding(
        "states",
        "ok",
        f"a block has {model.int2.block:,} tokens, as many as a state of its other layers is large (16 bits: "
        f"{model.bf16.block:,}), and prefix hits come in blocks; requests in the memory of one in 16 bits, states and "
        f"whole blocks counted, BF16 copies not: of {shown}",
        {"block": model.int2.block, "gain": gains},
    )


def _held(what: str, capacity: Capacity) -> Finding:
    several = f"{capacity.gpus} of them (--tensor-parallel-size): " if capacity.gpus > 1 else ""
    return Finding(
        what,
        "ok",
        f"{several}{capacity.memory / GB:.1f} GB beside the weights hold {capacity.int2:,} tokens (FP8 "
        f"{capacity.fp8:,}, 16 bits {capacity.bf16:,}) and the full windows of {capacity.requests} requests",
        asdict(capacity),
    )


def _weights(name: str, config: Any) -> tuple[int, str]:
    """Bytes as they are served, or why they are not known."""
    try:
        weights = weight_bytes(name)
    except (OSError, ValueError, KeyError) as error:  # offline, or a file that is damaged
        return 0, f"{name}: {error}"
    if weights is None:
        return 0, f"{name} has no safetensors files"
    return weights // (2 if getattr(config.get_text_config(), "dtype", None) == torch.float32 else 1), ""


def _seams() -> Finding:
    try:
        from vllm_oscar.integration import seams

        version = seams.vllm_version()
        seams.install()
    except (OscarError, ImportError) as error:
        return Finding("vLLM", "fail", str(error))
    if torch.cuda.is_available() and version.release[:2] not in [one.release[:2] for one in seams.VERIFIED_ON_GPUS]:
        verified = " and ".join(map(str, seams.VERIFIED_ON_GPUS))
        return Finding(
            "vLLM",
            "warn",
            f"{version}, every seam is as expected; on GPUs only {verified} were run: install one of them, or check "
            "with gates/engine.py",
        )
    return Finding("vLLM", "ok", f"{version}, every seam is as expected")


def _runner(name: str) -> str | None:
    """The model runner that vLLM would choose.

    Raises:
        UnsupportedError, ValueError: what the start of an engine would refuse because of the model.
    """
    try:
        from vllm_oscar.integration import look
    except ImportError:  # which `environment` says
        return None
    return look.model_runner(look.configured(name))


def _sidecar(
    name: str, fingerprint: ModelFingerprint, attending: set[int], given: str | None
) -> tuple[Sidecar | None, str]:
    """The sidecar, where one is asked for, and what is said of it.

    Args:
        attending: layers with attention
    """
    options = OscarConfig.parse(None)
    if options.rotation == "hadamard" and not given:
        return None, "not asked for (rotation: hadamard)"
    path = find_sidecar(name, given or options.sidecar)
    sidecar = Sidecar.load(path, fingerprint)
    packed = f"{len(attending & sidecar.layers.keys())} of {len(attending)} layers with attention"
    absent = sorted(attending & set(sidecar.absent))
    skip = f"; the others need --kv-cache-dtype-skip-layers {','.join(map(str, absent))}" if absent else ""
    packed += f", {sidecar.bits_in_words} an element"
    return sidecar, f"{path}: method {sidecar.method}, digest {sidecar.digest[:12]}, {packed}{skip}"


def _allowed(plugins: str | None) -> Finding:
    """vLLM runs only the plugins that VLLM_PLUGINS names, and none of ours says a word where it is left out."""
    if plugins is None or NAME in plugins.split(","):
        return Finding("VLLM_PLUGINS", "ok", "not set" if plugins is None else f"names {NAME!r}")
    return Finding(
        "VLLM_PLUGINS", "fail", f"is {plugins!r}, so that vLLM does not load this plugin: unset it, or add {NAME!r}"
    )


def _hidden() -> Iterator[Finding]:
    """A folder of our name where the user is: `python` looks there first, and `oscar` does not."""
    here = Path("vllm_oscar").resolve()
    if here.is_dir() and here != Path(__file__).resolve().parents[1]:
        yield Finding(
            "working directory",
            "warn",
            f"{here} can hide this package from programs that `python` starts here: move it",
        )


def _checked(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", look())
    except (OscarError, ImportError) as error:
        return Finding(what, "fail", str(error))


def run(options: argparse.Namespace) -> int:
    """Print what was found; 1 if something keeps OSCAR from running."""
    found = list(environment())
    if options.model:
        found += model(options.model, options.sidecar)
    if options.json:
        described: list[dict[str, Any]] = [asdict(finding) for finding in found]
        print(json.dumps(described, indent=2))
    else:
        for finding in found:
            print(f"[{MARKS[finding.status]}] {finding.what}: {finding.text}")
    return int(any(finding.status == "fail" for finding in found))
