"""From statistics to what the sidecar holds: mean, transform, metric, encoder settings of each layer."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_oscar.cache_layer import LS_KEY_GAIN
from vllm_oscar.calibrate.rope import Moments, key_moments
from vllm_oscar.calibrate.statistics import LayerStatistics
from vllm_oscar.errors import ConfigError
from vllm_oscar.rotation import aware_transform, grouped_hadamard, reference_rotation, regularised
from vllm_oscar.sidecar import MAX_TURNING_PAIRS, LayerCalibration, TensorCalibration, single_threaded

VALUE_TARGETS = {"weighted": "value_weighted", "output": "value_output", "plain": "value_plain"}
KEY_CLIP, VALUE_CLIP = 0.96, 0.92  # of the paper
# measured: least squares shrinks what INT2 gives against the BF16 tokens beside it. Refitted keys would like 1.025 for
# prose, 1.05 for text that repeats; of 3 bits, 1.01 and 1.02. Values of 4 bits hardly care
GAINS = {
    ("k", "metric"): {2: 1.0375, 3: 1.015, 4: 1.005},
    ("k", "ls"): LS_KEY_GAIN,
    ("v", "ls"): {2: 1.10, 4: 1.005},
}


@dataclass(frozen=True)
class Recipe:
    """How transforms are made.

    Attributes:
        method: "aware" or "reference"
        per: "head" or "layer": statistics averaged over KV heads
        group_size: channels that share a scale and an offset
        key_encoder, value_encoder: "ls", "metric" (keys only) or "minmax"
        value_target: of `reference`, the covariance that values are rotated by: "weighted" (the published code's
            weights), "output" (the paper's formula, exact) or "plain"
        key_gain, value_gain: None: the method's own
        key_clip, value_clip: of `minmax`
        search: gains and clips are those that `calibrate.search` finds for each layer, where it finds any
        context: tokens of the longest context, whose statistics keys get (`rope`); 0: those of the sequences
        turning_pairs: RoPE pairs whose mean may turn with the position, at most
        key_bits, value_bits: of a code
        average: bits of an element up to which some layers' keys get more than `key_bits` (`allocation`); None: none do
    """

    method: str
    per: str
    group_size: int
    key_encoder: str
    value_encoder: str
    value_target: str = "weighted"
    key_gain: float | None = None
    value_gain: float | None = None
    key_clip: float = KEY_CLIP
    value_clip: float = VALUE_CLIP
    search: bool = False
    context: int = 0
    turning_pairs: int = MAX_TURNING_PAIRS
    key_bits: int = 2
    value_bits: int = 2
    average: float | None = None

    @classmethod
    def of(cls, method: str, key_encoder: str | None = None, value_encoder: str | None = None, **more: Any) -> "Recipe":
        """With the encoders that a method uses unless told otherwise."""
        default = {"aware": ("metric", "ls"), "reference": ("minmax", "minmax")}[method]
        return cls(method, key_encoder=key_encoder or default[0], value_encoder=value_encoder or default[1], **more)

    def __post_init__(self) -> None:
        if not 0 <= self.turning_pairs <= MAX_TURNING_PAIRS:
            raise ConfigError(f"--turning-pairs must be 0 to {MAX_TURNING_PAIRS}")
        if self.value_encoder == "metric":
            raise ConfigError("values have no metric encoder; use --value-encoder ls")
        if self.average is not None and (not self.refits or self.search or self.key_gain is not None):
            raise ConfigError("--bits auto goes with neither another method or key encoder, nor --search or --key-gain")
        for letter, name in ("k", "key"), ("v", "value"):
            settings = self.settings(letter)
            if settings["encoder"] == "minmax" and settings["gain"] != 1:
                raise ConfigError(f"minmax has no gain; leave --{name}-gain out, or use --{name}-encoder ls")

    @property
    def aware(self) -> bool:
        """Whether the statistics of `aware` are called for."""
        return self.method == "aware"

    @property
    def refits(self) -> bool:
        """Whether the keys' transform is fitted to what their encoder makes of them."""
        return self.aware and self.key_encoder == "metric"

    def settings(self, letter: str) -> dict[str, Any]:
        """Encoder, gain, clip and bits of "k" or "v"."""
        encoder = self.key_encoder if letter == "k" else self.value_encoder
        gain = self.key_gain if letter == "k" else self.value_gain
        bits = self.key_bits if letter == "k" else self.value_bits
        if gain is None:
            gain = GAINS[letter, encoder][bits] if self.aware and encoder != "minmax" else 1.0
        clip = {"k": self.key_clip, "v": self.value_clip}[letter] if encoder == "minmax" else 1.0
        return {"encoder": encoder, "gain": float(gain), "clip": float(clip), "bits": bits}


@single_threaded()
def solve(statistics: LayerStatistics, recipe: Recipe) -> tuple[LayerCalibration, dict[str, list[int]]]:
    """One layer.

    Returns:
        The calibration, and by "k" or "v" the heads that no INT2 token was read from: these got a plain Hadamard
        matrix and no mean.
    """
    sums = LayerStatistics({name: tensor.cpu() for name, tensor in statistics.tensors.items()})
    idle: dict[str, list[int]] = {}
    if recipe.aware:
        mean, covariance = sums.mean_and_covariance("value")
        values = Moments(mean, covariance, sums.tensors["value_error"], None)
        keys = key_moments(sums, recipe.context, recipe.turning_pairs)
        key, idle["k"] = _aware(keys, recipe, "k")
        value, idle["v"] = _aware(values, recipe, "v")
        if "key_refit_transform" in sums.tensors:
            key = _refitted(key, sums.tensors["key_refit_transform"], keys.error, recipe)
    else:
        key = _reference(sums.average("query_covariance"), recipe, "k")
        value = _reference(sums.average(VALUE_TARGETS[recipe.value_target]), recipe, "v")
    return LayerCalibration(_searched(key, sums, "key"), _searched(value, sums, "value")), idle


def _gram(transform: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """What an error in y costs, where one in x costs `error`: (heads, D, D), the mean of its diagonal being 1."""
    inverse = torch.linalg.inv(transform)
    return unit_diagonal(inverse @ regularised(error) @ inverse.mT)


def _refitted(
    key: TensorCalibration, transform: torch.Tensor, error: torch.Tensor, recipe: Recipe
) -> TensorCalibration:
    """With the transform that `refit` found, and the metric that belongs to it."""
    if recipe.per == "layer":
        error = error.mean(0, keepdim=True)
    gram = _gram(transform, error).float()
    known = _trace(error) > 0  # heads that INT2 was read from
    assert key.metric is not None  # Recipe.refits
    return replace(key, transform=transform.float(), metric=torch.where(known[:, None, None], gram, key.metric))


def _searched(calibration: TensorCalibration, statistics: LayerStatistics, name: str) -> TensorCalibration:
    """With the gain and the clip that were found for this layer, where any were."""
    found = {
        setting: float(statistics.tensors[f"{name}_{setting}"])
        for setting in ("gain", "clip")
        if f"{name}_{setting}" in statistics.tensors
    }
    return replace(calibration, gain=found.get("gain", calibration.gain), clip=found.get("clip", calibration.clip))


def _aware(moments: Moments, recipe: Recipe, letter: str) -> tuple[TensorCalibration, list[int]]:
    mean, data, error, turning = moments.mean, moments.covariance, moments.error, moments.turning
    heads, head_size = mean.shape
    known = torch.isfinite(data).all(-1).all(-1) & (_trace(data) > 0) & (_trace(error) > 0)
    settings = recipe.settings(letter)
    metric = settings["encoder"] == "metric"

    transform = grouped_hadamard(head_size, recipe.group_size).repeat(heads, 1, 1)
    spectrum = torch.ones(heads, head_size, dtype=torch.float64)
    gram = torch.eye(head_size, dtype=torch.float64).repeat(heads, 1, 1)
    mean = torch.where(known[:, None], mean, 0.0)
    if known.any():
        data, error = data[known], error[known]
        if recipe.per == "layer":
            data, error = data.mean(0, keepdim=True), error.mean(0, keepdim=True)
            known = torch.ones_like(known)  # all heads share what the ones with weight say
        transform[known] = made = aware_transform(data, error, recipe.group_size)
        spectrum[known] = torch.linalg.eigvalsh(made.mT @ data @ made).flip(-1)
        gram[known] = _gram(made, error)
    calibration = TensorCalibration(
        mean=mean.float(),
        transform=transform.float(),
        metric=gram.float() if metric else None,
        spectrum=spectrum.float(),
        turning=turning and replace(turning, vectors=turning.vectors.float()),
        **settings,
    )
    return calibration, (~known).nonzero()[:, 0].tolist()


def _reference(covariance: torch.Tensor, recipe: Recipe, letter: str) -> TensorCalibration:
    heads, head_size = covariance.shape[:2]
    if recipe.per == "layer":
        covariance = covariance.mean(0, keepdim=True)
    rotation = reference_rotation(covariance)
    settings = recipe.settings(letter)
    gram = unit_diagonal(rotation.mT @ regularised(covariance) @ rotation)

    def per_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().expand(heads, *tensor.shape[1:])

    return TensorCalibration(
        mean=torch.zeros(heads, head_size),
        transform=per_head(rotation),
        metric=per_head(gram) if settings["encoder"] == "metric" else None,
        spectrum=per_head(torch.linalg.eigvalsh(covariance)),
        **settings,
    )


def unit_diagonal(matrix: torch.Tensor) -> torch.Tensor:
    """Exactly symmetric, scaled to mean diagonal 1; (heads, D, D)."""
    symmetric = (matrix + matrix.mT) / 2
    return symmetric / (_trace(symmetric) / matrix.shape[-1])[:, None, None]


def _trace(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
