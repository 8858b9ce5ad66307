"""Whether a text is still what a sidecar was calibrated on.

A sidecar keeps the calibration's statistics in the form that serving uses: the weighted mean of each head's rows, and a
transform in which their variance is 1. The same statistics of another text, seen through it, say how far that text is:

    moved = |(mean of the text - mean of the sidecar) T|^2 / D

the square of the way that the mean has gone, in standard deviations of an average channel; over all layers and heads,
for keys and for values.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_oscar.calibrate.rope import key_mean
from vllm_oscar.calibrate.statistics import FarSet
from vllm_oscar.calibrate.streaming import Model, State, collect
from vllm_oscar.sidecar import Sidecar, TensorCalibration

WINDOWS = 2  # of a text that are looked at
RECALIBRATE = 0.25  # measured, docs/calibration.md: other languages are above 0.32 and gain a quarter


@dataclass(frozen=True)
class Drift:
    """How far a text is from the calibration's.

    Attributes:
        text: its name
        keys, values: how far the mean of the rows has moved, mean over layers and heads
    """

    text: str
    keys: float
    values: float

    @property
    def moved(self) -> float:
        """What the threshold is for."""
        return (self.keys + self.values) / 2

    @property
    def recalibrate(self) -> bool:
        """Whether a calibration on such text pays."""
        return self.moved > RECALIBRATE

    def __str__(self) -> str:
        what = f"{self.text}: rows have moved by {self.moved:.2f} of their variance since calibration"
        if not self.recalibrate:
            return f"{what} (up to {RECALIBRATE:g}: the sidecar fits)"
        return f"{what} (above {RECALIBRATE:g}: `oscar calibrate --data` with such text pays)"


def drifts(model: str, sidecar: Sidecar, texts: Mapping[str, torch.Tensor]) -> list[Drift]:
    """Look at some windows of each text with transformers, layer by layer as calibration does.

    Args:
        model: folder or hub id
        sidecar: of this model; other methods than `aware` keep no statistics
        texts: int64 (windows, context), token ids, by name

    Returns:
        One for each text that reads INT2 at all, in their order; none where the method keeps no statistics.
    """
    if sidecar.method != "aware":
        return []
    far = FarSet(sidecar.sink, sidecar.window)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for name, windows in texts.items():
        if not len(far.queries(windows.shape[1])):
            continue
        context = sidecar.metadata.get("context") or 0
        with (
            tempfile.TemporaryDirectory() as folder,
            Model.opened(model, device, None, context) as opened,
            State(Path(folder) / "state", {}) as state,
        ):
            collect(opened, windows[:WINDOWS], far, state, lambda count: None)
            layers = {index: state.statistics(index) for index in sidecar.layers}
        keys, values = (
            torch.cat(moved)
            for moved in (
                [_moved(key_mean(layers[i], context, own.key.turning), own.key) for i, own in sidecar.layers.items()],
                [_moved(layers[i].mean_and_covariance("value")[0], own.value) for i, own in sidecar.layers.items()],
            )
        )
        if not keys.isnan().all():  # as where sliding windows are narrower than sink + window
            found.append(Drift(name, float(keys.nanmean()), float(values.nanmean())))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # an engine that starts now counts what is free
    return found


def _moved(mean: torch.Tensor, calibration: TensorCalibration) -> torch.Tensor:
    """Of each head, float64 (heads,); NaN for heads that read no INT2."""
    way = torch.einsum("hd,hde->he", mean.cpu() - calibration.mean.double(), calibration.transform.double())
    return way.square().mean(-1)
