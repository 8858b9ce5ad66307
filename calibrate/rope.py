"""What RoPE does to the keys over a long context, from statistics of short sequences.

RoPE turns a pair of channels by w radians a token. Attention sees differences of positions only, so text at positions
s, s + 1, ... has the keys and queries of the same text at 0, 1, ..., all turned by w s. Their statistics over a whole
context are therefore those of the calibration's sequences, averaged over shifts s: pairs as complex numbers,

    E[k_p] g(w_p)      E[k_p conj(k_q)] g(w_p - w_q)      E[k_p k_q] g(w_p + w_q)      g(w) = mean of exp(i w s)

Lengths of contexts from the sequences' to the model's longest count by their logarithm: doublings count alike, so that
short contexts, which most are, lose little.

A mean c of a pair before RoPE does not survive that where the pair turns: |c|^2 (1 - |g(w)|^2) of it is left in every
row. Where that is large (Qwen2's biases; slow pairs in long contexts) the mean itself turns with the position and is
taken off as it turns: vllm_oscar.turning.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from vllm_oscar.calibrate.statistics import LayerStatistics
from vllm_oscar.sidecar import MAX_TURNING_PAIRS
from vllm_oscar.turning import TurningMean

_LENGTHS = 32  # of contexts, that stand for all
_ROUNDING = 0.03  # of a pair's keys: what BF16 does to RoPE is below 0.01
PAYS = 1.0  # what is left of a pair, in units of the variance of all else in the row; measured, docs/quality.md


def turning_frequencies(
    before: torch.Tensor, after: torch.Tensor, candidates: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """What RoPE does to a layer's keys, found from the keys themselves: a layer may be given angles and not use them.

    Args:
        before: (heads, T, D), the layer's keys with every angle 0
        after: (heads, T, D), the same keys with their own angles
        candidates: (pairs,) each, radians a token, such as the model's `inv_freq` buffers

    Returns:
        float32 (pairs,): the candidate that turns the first into the second. Empty: the layer has no RoPE. None: no
        candidate does, as where RoPE is of another kind, or norms come after it.
    """
    if torch.equal(before, after):
        return torch.zeros(0, device=before.device)
    before, after = before.float(), after.float()
    for frequency in candidates:
        frequency = frequency.to(before)
        if 0 < 2 * len(frequency) <= before.shape[-1] and any(
            _turns(before, after, frequency, *layout) for layout in _layouts(frequency)
        ):
            return frequency
    return None


def _turns(
    before: torch.Tensor, after: torch.Tensor, frequency: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> bool:
    """Whether pairs (first, second) turn by that; all may be stretched as well (YaRN)."""
    angle = torch.arange(before.shape[1], device=before.device)[:, None] * frequency.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    x, y = before[..., first], before[..., second]
    turned = torch.stack([x * cos - y * sin, y * cos + x * sin])  # (2, heads, T, pairs)
    found = torch.stack([after[..., first], after[..., second]])
    stretch = (turned * found).sum() / turned.square().sum().clamp(min=1e-30)
    rest = torch.ones(before.shape[-1], dtype=torch.bool, device=before.device)
    rest[first] = rest[second] = False
    error, size = ((part.square()).sum((0, 1, 2)) for part in (found - stretch * turned, found))
    return torch.equal(before[..., rest], after[..., rest]) and bool((error <= _ROUNDING**2 * size).all())


def _layouts(frequency: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Channels of each pair: halves of the rotated ones (Llama), or neighbours (GLM, Cohere)."""
    index = torch.arange(len(frequency), device=frequency.device)
    return [(index, index + len(index)), (2 * index, 2 * index + 1)]


def default_context(config: Any) -> int:
    """Tokens of the longest context that vLLM serves unless told otherwise; 0: the configuration does not say."""
    text = config.get_text_config()
    for parameters in _scalings(text):
        if parameters.get("rope_type") == "longrope":  # longer ones cost short prompts quality: vLLM wants to be asked
            return int(_original_context(text, parameters))
    return getattr(text, "max_position_embeddings", None) or 0


def as_served(config: Any, context: int) -> Any:
    """A copy of a transformers configuration whose RoPE is the same for short sequences as for the context.

    LongRoPE has factors for short and for long sequences. vLLM takes one set for all positions, by `--max-model-len`;
    transformers would take the short ones for every calibration.
    """
    config = deepcopy(config)
    text = config.get_text_config()
    for parameters in _scalings(text):
        if parameters.get("rope_type") == "longrope":
            used = "long" if context > _original_context(text, parameters) else "short"
            for name in ("factor", "mscale"):
                if f"{used}_{name}" in parameters:
                    parameters[f"short_{name}"] = parameters[f"long_{name}"] = parameters[f"{used}_{name}"]
    return config


def _scalings(config: Any) -> list[dict[str, Any]]:
    """The configuration's own RoPE parameters: one dict, or one for each layer type."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_type = [value for value in given.values() if isinstance(value, dict)]
    return by_type or [given]


def _original_context(config: Any, parameters: dict[str, Any]) -> int:
    kept = parameters.get("original_max_position_embeddings")
    return kept or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings


@dataclass(frozen=True)
class Moments:
    """Of a layer's rows (keys: over a whole context), float64.

    Attributes:
        mean: (heads, D), what does not turn of it
        covariance, error: (heads, D, D), of the rows without their mean, and what an error in them costs
        turning: the part of the keys' mean that turns; None: nothing does
    """

    mean: torch.Tensor
    covariance: torch.Tensor
    error: torch.Tensor
    turning: TurningMean | None


def key_moments(statistics: LayerStatistics, context: int, pairs: int = MAX_TURNING_PAIRS) -> Moments:
    """The keys' moments in contexts of so many tokens.

    Args:
        statistics: of `aware`; without RoPE, or where it is not known, its moments are returned as they are
        context: tokens; not longer than the sequences: the moments are those of the sequences
        pairs: at most so many turn
    """
    error = statistics.tensors["key_error"]
    if not _has_rope(statistics):
        mean, covariance = statistics.mean_and_covariance("key")
        return Moments(mean, covariance, error, None)
    rope = _Rope.of(statistics, context)
    turning = rope.turning(statistics, pairs)
    mean, covariance = statistics.mean_and_covariance("key", turning)
    second = rope.averaged_moment(covariance + mean[..., :, None] * mean[..., None, :])
    mean = rope.averaged_mean(mean)
    return Moments(mean, second - mean[..., :, None] * mean[..., None, :], rope.averaged_moment(error), turning)


def key_mean(statistics: LayerStatistics, context: int, turning: TurningMean | None) -> torch.Tensor:
    """What `key_moments` has for the mean where that much of it turns, float64 (heads, D)."""
    mean, _ = statistics.mean_and_covariance("key", turning)
    return _Rope.of(statistics, context).averaged_mean(mean) if _has_rope(statistics) else mean


def turned_rows(
    rows: torch.Tensor, position: torch.Tensor, statistics: LayerStatistics, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys as they are at random places of the context, the same every time, and their positions there.

    Args:
        rows: float32 (tokens, heads, D), after RoPE
        position: int64 (tokens,), where they are now
        statistics: of `aware`; without RoPE, or where it is not known, rows stay where they are
    """
    if not _has_rope(statistics):
        return rows, position
    rope = _Rope.of(statistics, context)
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(_LENGTHS, (len(rows),), generator=generator)
    shift = (torch.rand(len(rows), generator=generator) * rope.shifts.cpu()[length]).long().to(rows.device)
    angle = shift[:, None, None] * rope.frequency.to(rows.device).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second = rows[..., rope.first], rows[..., rope.second]
    turned = rows.clone()
    turned[..., rope.first], turned[..., rope.second] = first * cos - second * sin, second * cos + first * sin
    return turned, position + shift


def _has_rope(statistics: LayerStatistics) -> bool:
    """Whether it is known how the layer's keys turn."""
    return len(statistics.tensors.get("frequency", ())) > 0


@dataclass(frozen=True)
class _Rope:
    """A layer's RoPE.

    Attributes:
        frequency: float32 (pairs,)
        first, second: int64 (pairs,), channels of each pair
        lengths: float64 (_LENGTHS,), of contexts
        shifts: float64 (_LENGTHS,), so many places a sequence has in each
    """

    frequency: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    lengths: torch.Tensor
    shifts: torch.Tensor

    @classmethod
    def of(cls, statistics: LayerStatistics, context: int) -> "_Rope":
        """Which of both layouts it is: the right pairs have more in common."""
        frequency, own = statistics.tensors["frequency"], int(statistics.tensors["length"])
        step = (torch.arange(_LENGTHS, dtype=torch.float64, device=frequency.device) + 0.5) / _LENGTHS
        lengths = (own * (max(context, own) / own) ** step).ceil()
        both = [cls(frequency, *layout, lengths, lengths - own + 1) for layout in _layouts(frequency)]
        return max(both, key=lambda rope: float(rope._before(statistics).square().sum()))

    def _before(self, statistics: LayerStatistics) -> torch.Tensor:
        """RoPE of each pair's mean before RoPE, by cosine and sine, (heads, pairs, 2, D); zeros without weight."""
        cos, sin = statistics.tensors["wave_key"].unflatten(1, (2, -1)).unbind(1)  # sums of w cos k, w sin k
        pair = torch.arange(cos.shape[1], device=cos.device)
        weight = statistics.tensors["key_weight"][:, None]
        c1 = ((cos[:, pair, self.first] + sin[:, pair, self.second]) / weight).nan_to_num(0.0)
        c2 = ((cos[:, pair, self.second] - sin[:, pair, self.first]) / weight).nan_to_num(0.0)
        vectors = cos.new_zeros(*cos.shape[:2], 2, cos.shape[2])
        vectors[:, pair, 0, self.first], vectors[:, pair, 0, self.second] = c1, c2
        vectors[:, pair, 1, self.first], vectors[:, pair, 1, self.second] = -c2, c1
        return vectors

    def turning(self, statistics: LayerStatistics, pairs: int) -> TurningMean | None:
        """The pairs of whose mean most is left, if it pays."""
        vectors = self._before(statistics)
        _, covariance = statistics.mean_and_covariance("key", TurningMean(self.frequency, vectors))
        rest = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        stays = _mean_wave(self.frequency.double(), self.lengths).abs().square()
        left = vectors[:, :, 0].square().sum(-1) * (1 - stays)  # |c|^2 is in the cosine's vector alone
        ratio = (left / rest[:, None]).nan_to_num(0.0).amax(0)
        best = ratio.topk(min(pairs, len(ratio)))
        chosen = best.indices[best.values > PAYS].sort().values
        return TurningMean(self.frequency[chosen], vectors[:, chosen]) if len(chosen) else None

    def averaged_mean(self, mean: torch.Tensor) -> torch.Tensor:
        """A mean (heads, D) of rows that are turned by every shift."""
        basis, angle = self._basis(mean)
        waves = _mean_wave(angle, self.shifts)
        return (torch.linalg.inv(basis) @ (waves * (mean.to(basis.dtype) @ basis.T)).mT).mT.real

    def averaged_moment(self, moment: torch.Tensor) -> torch.Tensor:
        """Second moments (heads, D, D) of such rows."""
        basis, angle = self._basis(moment)
        inverse = torch.linalg.inv(basis)
        waves = _mean_wave(angle[:, None] - angle, self.shifts)
        return (inverse @ (basis @ moment.to(basis.dtype) @ basis.mH * waves) @ inverse.mH).real

    def _basis(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Directions (D, D) that RoPE only turns, k1 + i k2 and k1 - i k2 of each pair; their angles a token (D,)."""
        size, device = like.shape[-1], like.device
        real, imaginary = torch.eye(size, device=device), torch.zeros(size, size, device=device)
        real[self.second, self.first], real[self.second, self.second] = 1.0, 0.0
        imaginary[self.first, self.second], imaginary[self.second, self.second] = 1.0, -1.0
        angle = torch.zeros(size, dtype=torch.float64, device=device)
        angle[self.first], angle[self.second] = self.frequency.double(), -self.frequency.double()
        return torch.complex(real.double(), imaginary.double()), angle


def _mean_wave(frequency: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean of exp(i w s) over s = 0 ... n - 1, complex, for float64 w, and of that over the counts n."""
    half = frequency[..., None] / 2
    size = torch.where(half == 0, 1.0, (counts * half).sin() / (counts * half.sin()))
    return (torch.polar(torch.ones_like(size), (counts - 1) * half) * size).mean(-1)
