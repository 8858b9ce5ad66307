"""A quantized checkpoint as one in 16 bits, tensor by tensor: calibration runs where the format's kernels do not.

Names become those of the checkpoint that it was made from, and transformers loads it like that one. What is measured
are the keys and values of the quantized weights.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_oscar.errors import UnsupportedError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word's codes, lowest bits first, each of eight channels is
_FORMATS = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"}  # of compressed-tensors
_INDEX = "model.safetensors.index.json"

Parts = Mapping[str, torch.Tensor]  # what a weight is in, by `_role`


def quantization(config: Any) -> dict[str, Any] | None:
    """What a transformers configuration says about its checkpoint's quantization; None: it is not quantized."""
    for part in (config, config.get_text_config()):
        if given := getattr(part, "quantization_config", None):
            return dict(given if isinstance(given, dict) else given.to_dict())
    return None


def dequantize(source: Path, target: Path, settings: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Write the checkpoint in folder `source` to a new folder, file by file.

    Args:
        settings: its `quantization_config`
        dtype: of the weights that were quantized; the others stay as they are

    Raises:
        UnsupportedError: the format is none that is read here.
    """
    weight_of = _reader(settings)
    target.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".py") and path.name != _INDEX:
            shutil.copy(path, target)
    places: dict[str, str] = {}
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in sorted(source.glob("*.safetensors"))}
        home = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        beside: dict[str, list[str]] = {}
        for name in home:
            if stem := _stem(name, home):
                beside.setdefault(stem, []).append(name)
        for path, file in files.items():
            written: dict[str, torch.Tensor] = {}
            for name in file.keys():  # noqa: SIM118
                stem = _stem(name, home)
                if stem is None:
                    written[name] = file.get_tensor(name)
                elif name == min(beside[stem]):  # one of the tensors that a weight is in
                    parts = {_role(part, stem): home[part].get_tensor(part) for part in beside[stem]}
                    written[stem] = weight_of(parts).to(dtype).contiguous()
            save_file(written, target / path.name, {"format": "pt"})
            places |= dict.fromkeys(written, path.name)
    if len(files) > 1:
        (target / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _stem(name: str, names: Mapping[str, Any]) -> str | None:
    """The name of the weight that a tensor is a part of; None: it is a whole one.

    GPTQ and AWQ have M.qweight, M.qzeros, M.scales, M.g_idx for M.weight; the others W, W_scale, W_packed and so on.
    """
    module, _, last = name.rpartition(".")
    if f"{module}.qweight" in names and last in ("qweight", "qzeros", "scales", "g_idx"):
        return f"{module}.weight"
    for end in ("_scale_inv", "_scale", "_packed", "_zero_point", "_g_idx", "_shape"):
        whole = name.removesuffix(end)
        if whole != name and (whole in names or f"{whole}_packed" in names):
            return whole
    return name if any(f"{name}{end}" in names for end in ("_scale_inv", "_scale")) else None


def _role(name: str, stem: str) -> str:
    """What a tensor is in the weight `stem`: "qweight", "scales", ...; "", "_scale", "_packed", ... behind its name."""
    return name.removeprefix(stem) if name.startswith(stem) else name.rpartition(".")[2]


def _reader(settings: Mapping[str, Any]) -> Callable[[Parts], torch.Tensor]:
    """How a weight of this format is read: its parts -> float32 (outputs, inputs)."""
    method = settings.get("quant_method")
    bits = settings.get("bits")
    if method == "fp8":
        return partial(_scaled, block=settings.get("weight_block_size"))
    if method == "compressed-tensors":
        groups = [settings, *settings.get("config_groups", {}).values()]
        formats = {group["format"] for group in groups if group.get("format")} - {"mixed-precision"}
        weights = [group["weights"] for group in groups if group.get("weights")]
        packable = all(each["num_bits"] in (4, 8) and each.get("symmetric", True) for each in weights)
        if formats <= _FORMATS and (packable or "pack-quantized" not in formats):
            (width,) = {each["num_bits"] for each in weights} if len(weights) == 1 else {None}
            return partial(_scaled, block=None, bits=width)
    if method == "gptq" and bits in (4, 8):
        return partial(_gptq, bits=bits, lower=settings.get("checkpoint_format") != "gptq_v2")
    if method == "awq" and bits == 4 and settings.get("version", "gemm") == "gemm":
        return _awq
    name = f"{method} {settings.get('format') or ''}".strip()
    raise UnsupportedError(
        f"weights quantized with {name} are not read by calibration: calibrate the checkpoint that they were made "
        'from, as its sidecar serves both (oscar calibrate ORIGINAL --out FILE, then "sidecar": "FILE")'
    )


def _scaled(parts: Parts, block: Sequence[int] | None, bits: int | None = None) -> torch.Tensor:
    """Numbers times scales: one for all, for each output, or for each block of outputs and inputs.

    compressed-tensors packs its integers along the inputs, offset so that none is negative.
    """
    if "_packed" in parts:
        assert bits is not None
        shape = [int(size) for size in parts["_shape"]]
        numbers = _codes(parts["_packed"], bits).flatten(-2)[..., : shape[-1]].float() - (1 << (bits - 1))
    else:
        numbers = parts[""].float()
    scale = _spread(parts["_scale_inv" if "_scale_inv" in parts else "_scale"], numbers, block, parts.get("_g_idx"))
    if "_zero_point" in parts:
        numbers = numbers - _spread(parts["_zero_point"], numbers, block, parts.get("_g_idx"))
    return numbers * scale


def _spread(
    scale: torch.Tensor, like: torch.Tensor, block: Sequence[int] | None, groups: torch.Tensor | None
) -> torch.Tensor:
    """Scales (or zero points), one for each number, or so that they broadcast."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() < like.dim():
        return scale[..., None]
    if groups is not None:
        return scale[..., groups.long()]
    for axis in (-2, -1):
        if scale.shape[axis] not in (1, like.shape[axis]):
            step = block[axis] if block else like.shape[axis] // scale.shape[axis]
            scale = scale.repeat_interleave(step, axis).narrow(axis, 0, like.shape[axis])
    return scale


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 (...) -> int32 (..., 32 / bits), lowest bits first."""
    return (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)


def _gptq(parts: Parts, bits: int, lower: bool) -> torch.Tensor:
    """Inputs in words; zero points are stored less one, unless by version 2."""
    codes = _codes(parts["qweight"], bits).transpose(-1, -2).flatten(0, 1)  # (inputs, outputs)
    zeros = _codes(parts["qzeros"], bits).flatten(-2) + int(lower)  # (groups, outputs)
    size = len(codes) // len(zeros)
    group = parts["g_idx"].long() if "g_idx" in parts else torch.arange(len(codes)) // size
    return ((codes - zeros[group]).float() * parts["scales"].float()[group]).T


def _awq(parts: Parts) -> torch.Tensor:
    """Outputs in words, in an order of their own."""
    codes, zeros = (_codes(parts[name], 4)[..., _AWQ_ORDER].flatten(-2) for name in ("qweight", "qzeros"))
    group = torch.arange(len(codes)) // (len(codes) // len(zeros))
    return ((codes - zeros[group]).float() * parts["scales"].float()[group]).T
