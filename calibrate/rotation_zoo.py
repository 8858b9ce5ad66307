"""RotationZoo's published rotations (.pt files) to a sidecar and back.

A file holds one tensor's rotations, keys or values:

    {"format_version": 1 or 2, "objective": str,
     "layers": {id: {"layer_id": id, "rotation": fp32, "eigenvalues": fp32}}}

In format 1 a layer has one rotation (D, D) and eigenvalues (D,); in format 2 one for each KV head, (H, D, D) and
(H, D). The eigenvalues are those of the covariance whose eigenvectors the rotation is made of, R = U H P.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard
from zipfile import ZIP_STORED, ZipFile

import torch

from vllm_oscar.calibrate.solve import Recipe, unit_diagonal
from vllm_oscar.errors import (
    ConfigError,
    OscarError,
    SidecarCorruptError,
    SidecarMismatchError,
    SidecarNotFoundError,
    SidecarShapeError,
    UnsupportedError,
)
from vllm_oscar.rotation import bit_reversal_permutation, hadamard, regularised
from vllm_oscar.sidecar import ENCODERS, LayerCalibration, ModelFingerprint, Sidecar, TensorCalibration

_DIGITS = 6  # of a layer's number, at most
OLDEST_TORCH = "2.10"  # before it, weights_only does not keep a hostile file from running code


@dataclass(frozen=True)
class Rotations:
    """One file.

    Attributes:
        objective: what its author says the rotations are for
        rotations: by layer, float32 (H or 1, D, D)
        eigenvalues: by layer, float32 (H or 1, D), ascending as the columns of U are
        per: "head" (format 2) or "layer" (format 1)
    """

    objective: str
    rotations: dict[int, torch.Tensor]
    eigenvalues: dict[int, torch.Tensor]
    per: str

    @classmethod
    def load(cls, path: str | Path) -> "Rotations":
        """Read a file.

        Raises:
            UnsupportedError: this torch cannot read it safely.
            SidecarError: a subclass that says what is wrong with the file.
        """
        if torch.__version__ < OLDEST_TORCH:
            raise UnsupportedError(
                f"torch {torch.__version__} may run code hidden in a .pt file; convert with torch 2.10 or later"
            )
        if not Path(path).is_file():
            raise SidecarNotFoundError(f"{path}: no such file")
        try:
            _refuse_inflated(Path(path))
            given = torch.load(path, map_location="cpu", weights_only=True)
        except SidecarCorruptError:
            raise
        except Exception as error:  # a hostile pickle can make torch raise anything
            raise SidecarCorruptError(f"{path}: not a .pt file of plain tensors ({error!s:.200})") from error
        version = given.get("format_version") if isinstance(given, dict) else None
        if type(version) is not int or version not in (1, 2):
            raise SidecarCorruptError(f"{path}: not a RotationZoo file of format 1 or 2")
        if not isinstance(given.get("layers"), dict) or not given["layers"]:
            raise SidecarCorruptError(f"{path}: not a RotationZoo file: it has no layers")
        rotations, eigenvalues, numbers = {}, {}, 0
        for key, layer in given["layers"].items():
            index = _layer_number(key)
            parts = layer if isinstance(layer, dict) else {}
            if index is None or _layer_number(parts.get("layer_id")) != index:
                raise SidecarCorruptError(f"{path}: a layer does not carry its own number as layer_id")
            rotation, values = parts.get("rotation"), parts.get("eigenvalues")
            if not _plain(rotation) or not _plain(values):
                raise SidecarCorruptError(f"{path}: layer {index} lacks rotation or eigenvalues as plain tensors")
            if rotation.dim() != version + 1 or rotation.shape[:-1] != values.shape:
                raise SidecarShapeError(
                    f"{path}: layer {index} has a rotation {tuple(rotation.shape)} and eigenvalues "
                    f"{tuple(values.shape)}, which is not format {version}"
                )
            numbers += rotation.numel() + values.numel()
            if numbers > Path(path).stat().st_size:  # tensors that repeat or share what is in the file
                raise SidecarCorruptError(f"{path}: layers hold more numbers than the file has bytes")
            size = rotation.shape[-1]
            rotations[index] = rotation.float().reshape(-1, size, size)
            eigenvalues[index] = values.float().reshape(-1, size).sort(-1).values
        objective = given.get("objective")
        return cls(
            objective if isinstance(objective, str) else "",
            rotations,
            eigenvalues,
            "layer" if version == 1 else "head",
        )

    def save(self, path: str | Path) -> None:
        """Write a file, by temporary file and rename."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor[0] if self.per == "layer" else tensor).clone()

        content = {
            "format_version": 1 if self.per == "layer" else 2,
            "objective": self.objective,
            "layers": {
                index: {
                    "layer_id": index,
                    "rotation": kept(rotation),
                    "eigenvalues": kept(self.eigenvalues[index]),
                }
                for index, rotation in sorted(self.rotations.items())
            },
        }
        temporary = Path(f"{path}.tmp")
        torch.save(content, temporary)
        os.replace(temporary, path)


def _refuse_inflated(path: Path) -> None:
    """What a file makes torch read is at most as large as the file: PyTorch neither compresses nor shares entries."""
    with ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != ZIP_STORED for entry in entries) or (
        sum(entry.file_size for entry in entries) > path.stat().st_size
    ):
        raise SidecarCorruptError(f"{path}: not a .pt file that PyTorch wrote: it holds more than its size")


def _layer_number(given: object) -> int | None:
    """A layer's number, which files have as int or as str; None: it is none."""
    if type(given) is str and len(given) <= _DIGITS and given.isascii() and given.isdecimal():
        return int(given)
    return given if type(given) is int and 0 <= given < 10**_DIGITS else None


def _plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether it is numbers in memory, and nothing else that a pickle can make."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
    )


def to_sidecar(
    keys: Rotations, values: Rotations, fingerprint: ModelFingerprint, recipe: Recipe, sink: int, window: int
) -> Sidecar:
    """A `reference` sidecar of published rotations.

    Raises:
        SidecarMismatchError: layers, heads or head size are not the model's.
    """
    heads, size = fingerprint.num_kv_heads, fingerprint.head_size
    for name, file in (("keys", keys), ("values", values)):
        if set(file.rotations) != set(range(fingerprint.num_layers)):
            raise SidecarMismatchError(
                f"the {name} file has layers {min(file.rotations)} to {max(file.rotations)}, {len(file.rotations)} in "
                f"all, the model has {fingerprint.num_layers}"
            )
        for index, rotation in file.rotations.items():
            if rotation.shape[-1] != size or rotation.shape[0] not in (1, heads):
                raise SidecarMismatchError(
                    f"layer {index} of the {name} file has {rotation.shape[0]} rotations of size {rotation.shape[-1]}, "
                    f"the model {heads} KV heads of size {size}"
                )

    def calibration(file: Rotations, index: int, letter: str) -> TensorCalibration:
        settings = recipe.settings(letter)
        gram = _metric(file.eigenvalues[index]).expand(heads, size, size) if settings["encoder"] == "metric" else None
        return TensorCalibration(
            mean=torch.zeros(heads, size),
            transform=file.rotations[index].expand(heads, size, size),
            metric=gram,
            spectrum=file.eigenvalues[index].expand(heads, size),
            **settings,
        )

    return Sidecar(
        layers={
            index: LayerCalibration(calibration(keys, index, "k"), calibration(values, index, "v"))
            for index in range(fingerprint.num_layers)
        },
        fingerprint=fingerprint,
        method="reference",
        group_size=recipe.group_size,
        sink=sink,
        window=window,
        per="layer" if keys.per == values.per == "layer" else "head",
        metadata={"source": "RotationZoo", "key_objective": keys.objective, "value_objective": values.objective},
    )


def _metric(eigenvalues: torch.Tensor) -> torch.Tensor:
    """G = R' Sigma R for R = U H P and Sigma = U diag(eigenvalues) U': U is not needed. (H, D) -> float32 (H, D, D)."""
    size = eigenvalues.shape[-1]
    mixing = hadamard(size) @ bit_reversal_permutation(size)
    gram = mixing.T @ torch.diag_embed(eigenvalues.double()) @ mixing
    return unit_diagonal(regularised(gram)).float()


def from_sidecar(sidecar: Sidecar) -> tuple[Rotations, Rotations]:
    """The keys' and the values' rotations of a sidecar.

    Raises:
        ConfigError: it is not one of plain rotations with their eigenvalues.
    """
    if sidecar.method != "reference" or sidecar.absent:
        raise ConfigError("RotationZoo holds rotations only: export a sidecar made with --method reference")

    def rotations(letter: str) -> Rotations:
        tensors = {i: layer.key if letter == "k" else layer.value for i, layer in sidecar.layers.items()}
        if any(tensor.mean.any() or tensor.spectrum is None for tensor in tensors.values()):
            raise ConfigError("the sidecar has means, or no eigenvalues: RotationZoo cannot hold it")
        kept = 1 if sidecar.per == "layer" else sidecar.fingerprint.num_kv_heads
        objective = sidecar.metadata.get({"k": "key_objective", "v": "value_objective"}[letter])
        return Rotations(
            objective=objective if isinstance(objective, str) else {"k": "keys", "v": "values"}[letter],
            rotations={i: tensor.transform[:kept] for i, tensor in tensors.items()},
            eigenvalues={i: tensor.spectrum[:kept] for i, tensor in tensors.items() if tensor.spectrum is not None},
            per=sidecar.per,
        )

    return rotations("k"), rotations("v")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="oscar convert", description="RotationZoo .pt files to a sidecar, and back.")
    commands = p.add_subparsers(dest="command", required=True)
    into = commands.add_parser("import", help="two .pt files to a sidecar")
    into.add_argument("model", help="folder or hub id: which model the rotations are for")
    into.add_argument("--keys", required=True, help=".pt file")
    into.add_argument("--values", required=True, help=".pt file")
    into.add_argument("--out", required=True, type=Path, help="sidecar")
    into.add_argument("--key-encoder", choices=ENCODERS, default="minmax", help="metric: from the eigenvalues")
    into.add_argument("--value-encoder", choices=("ls", "minmax"), default="minmax")
    into.add_argument("--sink", type=int, default=64)
    into.add_argument("--window", type=int, default=256)
    out = commands.add_parser("export", help="a sidecar made with --method reference to two .pt files")
    out.add_argument("sidecar")
    out.add_argument("--keys", required=True, help=".pt file")
    out.add_argument("--values", required=True, help=".pt file")
    return p


def run(options: Any) -> None:
    """Convert as the command line says."""
    if options.command == "export":
        keys, values = from_sidecar(Sidecar.load(options.sidecar))
        keys.save(options.keys)
        values.save(options.values)
        return
    from transformers import AutoConfig

    fingerprint = ModelFingerprint.of(AutoConfig.from_pretrained(options.model))
    keys, values = Rotations.load(options.keys), Rotations.load(options.values)
    recipe = Recipe.of(
        "reference", options.key_encoder, options.value_encoder, per=keys.per, group_size=fingerprint.head_size
    )
    to_sidecar(keys, values, fingerprint, recipe, options.sink, options.window).save(options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        run(parser().parse_args(arguments))
    except OscarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
