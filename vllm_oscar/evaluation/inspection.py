"""oscar inspect SIDECAR: what a calibration holds, layer by layer."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vllm_oscar.sidecar import Sidecar, TensorCalibration

HELP = "show what a sidecar holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("sidecar", type=Path, help="a file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the spectra (needs matplotlib)")


@dataclass(frozen=True)
class Row:
    """Keys or values of one layer; the worst of its heads where there is one number for all.

    Attributes:
        layer: index in the model
        tensor: "k" or "v"
        encoder, bits, gain, clip: how rows become codes
        condition: condition number of T, largest of the heads
        mean_norm: length of the mean, largest of the heads
        turning: RoPE pairs whose mean turns with the position
        first_direction: share of the variance in the strongest direction, largest of the heads; None without spectrum
        directions: how many equally strong directions would spread as much, (sum l)^2 / sum l^2, smallest of the heads
    """

    layer: int
    tensor: str
    encoder: str
    bits: int
    gain: float
    clip: float
    condition: float
    mean_norm: float
    turning: int
    first_direction: float | None
    directions: float | None

    @classmethod
    def of(cls, layer: int, tensor: str, calibration: TensorCalibration) -> "Row":
        """Numbers of one tensor of a sidecar."""
        first = directions = None
        if calibration.spectrum is not None:
            spectrum = calibration.spectrum.double().clamp(min=0)
            total = spectrum.sum(-1).clamp(min=1e-300)
            first = float((spectrum.amax(-1) / total).max())
            directions = float((total**2 / spectrum.square().sum(-1).clamp(min=1e-300)).min())
        return cls(
            layer,
            tensor,
            calibration.encoder,
            calibration.bits,
            calibration.gain,
            calibration.clip,
            float(torch.linalg.cond(calibration.transform.double()).max()),
            float(calibration.mean.norm(dim=-1).max()),
            len(calibration.turning.frequency) if calibration.turning else 0,
            first,
            directions,
        )


def rows(sidecar: Sidecar) -> list[Row]:
    """Keys, then values, of each layer."""
    return [
        Row.of(index, letter, calibration)
        for index, layer in sorted(sidecar.layers.items())
        for letter, calibration in (("k", layer.key), ("v", layer.value))
    ]


def _printable(text: str) -> str:
    """Of a file from somewhere: nothing that a terminal would act on, and no more than a few lines."""
    return (text if text.isprintable() else repr(text))[:500]


def table(sidecar: Sidecar, found: Sequence[Row]) -> str:
    """A header about the whole file and a line for each tensor."""
    model = sidecar.fingerprint
    lines = [
        f"{_printable(model.architecture)}: {model.num_layers} layers, {model.num_heads} query and "
        f"{model.num_kv_heads} KV heads of size {model.head_size}",
        f"method {sidecar.method}, a transform for each {sidecar.per}, groups of {sidecar.group_size}, sink "
        f"{sidecar.sink}, window {sidecar.window}, digest {sidecar.digest[:12]}",
        f"{sidecar.bits_in_words} stored for an element of a key or value, scales and offsets counted",
        *(_printable(f"{name}: {value}") for name, value in sidecar.metadata.items() if value is not None),
    ]
    if sidecar.absent:
        lines.append(f"layers left out: {', '.join(map(str, sidecar.absent))}")
    lines.append(
        f"{'layer':>5}{'':>3}{'encoder':>9}{'bits':>6}{'gain':>6}{'clip':>6}{'condition':>11}{'|mean|':>9}{'turning':>9}"
        f"{'first dir.':>12}{'directions':>12}"
    )
    for row in found:
        spectrum = "".join(f"{'-':>12}" for _ in range(2))
        if row.first_direction is not None and row.directions is not None:
            spectrum = f"{100 * row.first_direction:>11.1f}%{row.directions:>12.1f}"
        lines.append(
            f"{row.layer:>5}{row.tensor:>3}{row.encoder:>9}{row.bits:>6}{row.gain:>6.2f}{row.clip:>6.2f}{row.condition:>11.2f}"
            f"{row.mean_norm:>9.2f}{row.turning:>9}{spectrum}"
        )
    return "\n".join(lines)


def plot(sidecar: Sidecar, path: Path) -> None:
    """Spectra of keys and of values, averaged over heads, one line a layer.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    colours = matplotlib.colormaps["viridis"]
    last = max(sidecar.layers, default=0)
    for axes, which in zip(figure.subplots(1, 2, sharey=True), ("key", "value"), strict=True):
        for index, layer in sorted(sidecar.layers.items()):
            spectrum = getattr(layer, which).spectrum
            if spectrum is not None:
                line = spectrum.mean(0).sort(descending=True).values
                axes.plot((line / line.mean()).tolist(), color=colours(index / max(last, 1)), linewidth=1)
        axes.set_yscale("log")
        axes.set_title(f"{which}s, first layer dark, last layer bright", fontsize=9)
        axes.set_xlabel("direction")
    figure.axes[0].set_ylabel("variance over its mean")
    figure.savefig(path, dpi=150)


def run(options: argparse.Namespace) -> int:
    """Print.

    Raises:
        SidecarError: the file is not a usable sidecar; the message says why.
    """
    sidecar = Sidecar.load(options.sidecar)
    found = rows(sidecar)
    if options.json:
        description = {
            "fingerprint": asdict(sidecar.fingerprint),
            **{name: getattr(sidecar, name) for name in ("method", "per", "group_size", "sink", "window", "digest")},
            "absent_layers": list(sidecar.absent),
            "calibration": sidecar.metadata,
            "tensors": [asdict(row) for row in found],
        }
        print(json.dumps(description, indent=2))
    else:
        print(table(sidecar, found))
    if options.plot:
        plot(sidecar, options.plot)
    return 0
