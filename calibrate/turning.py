"""Which part of the keys' mean turns with the position, and pays for being taken off as it turns.

Where RoPE turns a pair of channels by w radians a token, the mean of the pair before RoPE is c = E[exp(-i w t) k], with
the weights of `aware`. A constant mean holds what of c exp(i w t) stays over the model's whole context; what is left,

    |c|^2 (1 - |mean of exp(i w t) over t|^2)

INT2 has to carry. It pays where that is more than all the rest of the row: large biases (Qwen2), and hardly ever
without them (docs/quality.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_oscar.calibrate.statistics import LayerStatistics
from vllm_oscar.sidecar import MAX_TURNING_PAIRS

PAYS = 1.0  # what is left of a pair, in units of the variance of all else in the row


@dataclass(frozen=True)
class Turning:
    """A mean that turns, as a sidecar holds it.

    Attributes:
        frequency: float32 (pairs,), radians a token
        vectors: float64 (heads, pairs, 2, D), of cosine and sine
    """

    frequency: torch.Tensor
    vectors: torch.Tensor


def rope_frequencies(decoder: nn.Module, options: Mapping[str, Any]) -> torch.Tensor | None:
    """float32 (pairs,), radians a token, of a layer that the decoder calls with `options`; None: no fixed ones found.

    The numbers are those of the rotary embedding whose angles the layer is given. Scaled ones (Llama 3, YaRN) are fixed
    as well; where they depend on the sequence's length, or a layer has no RoPE, there is nothing to find.
    """
    given = options.get("position_embeddings")
    if not (isinstance(given, tuple) and len(given) == 2):
        return None
    cos, sin = (part[0].double().cpu() for part in given)  # (T, pairs), mostly twice side by side
    near = slice(1, 33)
    for name, buffer in decoder.named_buffers():
        if not name.endswith("inv_freq") or "original" in name or buffer.is_meta:
            continue
        frequency = buffer.detach().float().cpu()
        pairs = len(frequency)
        if cos.shape[1] not in (pairs, 2 * pairs):
            continue
        angle = torch.arange(len(cos), dtype=torch.float64)[near, None] * frequency.double()
        size = torch.hypot(cos, sin)[near, :pairs]  # YaRN scales both; BF16 has them to 2^-9
        if ((angle.cos() * size - cos[near, :pairs]).abs() < 0.02).all():
            return frequency
    return None


def turning_mean(statistics: LayerStatistics, context: int) -> Turning | None:
    """The pairs that pay in contexts of so many tokens, at most MAX_TURNING_PAIRS; None: none do."""
    sums = statistics.tensors
    if "frequency" not in sums:
        return None
    frequency = sums["frequency"]
    both = [_before_rope(statistics, *channels) for channels in _pairings(len(frequency), sums["wave_key"].device)]
    # halves (Llama) or neighbours (GLM): the right ones have more in common
    vectors = max(both, key=lambda v: float(v.square().sum()))
    _, covariance = statistics.mean_and_covariance("key", Turning(frequency, vectors))
    rest = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    half = frequency.double() / 2
    stays = ((context * half).sin() / (context * half.sin())).square()
    left = vectors[:, :, 0].square().sum(-1) * (1 - stays)  # |c|^2 is in the cosine's vector alone
    ratio = (left / rest[:, None]).nan_to_num(0.0).amax(0)
    best = ratio.topk(min(MAX_TURNING_PAIRS, len(ratio)))
    chosen = best.indices[best.values > PAYS].sort().values
    return Turning(frequency[chosen], vectors[:, chosen]) if len(chosen) else None


def _pairings(pairs: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """First and second channel of each pair, in the two ways that models pair them."""
    index = torch.arange(pairs, device=device)
    return [(index, index + pairs), (2 * index, 2 * index + 1)]


def _before_rope(statistics: LayerStatistics, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """RoPE of each pair's mean before RoPE, by cosine and sine: (heads, pairs, 2, D); zeros where nothing counts."""
    sums = statistics.tensors
    cos, sin = sums["wave_key"].unflatten(1, (2, -1)).unbind(1)  # (heads, pairs, D): sums of w cos k, w sin k
    pair = torch.arange(cos.shape[1], device=cos.device)
    weight = sums["key_weight"][:, None]
    c1 = ((cos[:, pair, first] + sin[:, pair, second]) / weight).nan_to_num(0.0)
    c2 = ((cos[:, pair, second] - sin[:, pair, first]) / weight).nan_to_num(0.0)
    vectors = cos.new_zeros(*cos.shape[:2], 2, cos.shape[2])
    vectors[:, pair, 0, first], vectors[:, pair, 0, second] = c1, c2
    vectors[:, pair, 1, first], vectors[:, pair, 1, second] = -c2, c1
    return vectors
