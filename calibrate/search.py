"""Gains, and the clips of min-max, that leave a layer's attention output least wrong on samples that were kept of it.

Least squares shrinks rows towards their mean, so that INT2 tokens lose weight against the BF16 ones beside them. How
far each layer should be stretched back is found here by running its attention over keys and values out of INT2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_oscar.cache_layer import RowCodec
from vllm_oscar.calibrate.capture import Attention, exact
from vllm_oscar.calibrate.statistics import FarSet
from vllm_oscar.quantizer import FP16_MAX, MAX_VALUE_SCALE, decode
from vllm_oscar.sidecar import LayerCalibration, TensorCalibration

SAMPLES = 4  # sequences whose attention calls are kept of a layer
QUERIES = 64  # looked at of each, evenly spread
KEY_GAINS = tuple(0.95 + 0.025 * step for step in range(11))
VALUE_GAINS = (0.9, 1.3)  # bounds; the best one in between has a closed form
CLIPS = (0.88, 0.90, 0.92, 0.94, 0.96, 0.98, 1.0)


def search(
    layer: LayerCalibration, samples: Sequence[Attention], far: FarSet, group_size: int
) -> dict[str, torch.Tensor]:
    """What serves the samples best; of these, what the layer's encoders make use of.

    Args:
        layer: its transforms, its clips as a start
        samples: some sequences' attention calls
        far: which pairs read INT2
        group_size: channels that share a scale and an offset

    Returns:
        Scalars "key_clip", "value_clip", "key_gain", "value_gain"; none where nothing is read as INT2.
    """

    def errors(candidate: LayerCalibration, gains: Sequence[float] = (1.0,)) -> torch.Tensor:
        return torch.stack([_errors(attention, candidate, far, group_size, gains) for attention in samples]).sum(0)

    def clipped(name: str, clip: float) -> LayerCalibration:
        return replace(layer, **{name: replace(getattr(layer, name), clip=clip)})

    sums = errors(layer, KEY_GAINS)
    if not sums.any():
        return {}
    found: dict[str, float] = {}
    for name in ("key", "value"):
        if getattr(layer, name).encoder == "minmax":
            found[f"{name}_clip"] = min(CLIPS, key=lambda clip: float(errors(clipped(name, clip))[0, 0]))
            layer = clipped(name, found[f"{name}_clip"])
            sums = errors(layer, KEY_GAINS)
    square, product, stretch = sums.unbind(-1)
    gain = (1 - product / stretch).clamp(*VALUE_GAINS) if layer.value.encoder != "minmax" else torch.ones_like(product)
    error = square + 2 * (gain - 1) * product + (gain - 1) ** 2 * stretch
    best = int(error.argmin())
    if layer.key.encoder != "minmax":
        found["key_gain"] = KEY_GAINS[best]
    if layer.value.encoder != "minmax":
        found["value_gain"] = float(gain[best])
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


@dataclass(frozen=True)
class _Stored:
    """Rows of one sequence out of INT2, by gain: `rows` + (gain - 1) * `stretch`, both float32 (KV heads, T, D)."""

    rows: torch.Tensor
    stretch: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, calibration: TensorCalibration, group_size: int, max_scale: float) -> "_Stored":
        on_device = replace(calibration, gain=1.0).shard(0, len(x), x.device)
        codec = RowCodec.of(on_device, group_size, torch.bfloat16, max_scale, None)
        position = torch.arange(x.shape[1], device=x.device)
        encoded = codec.encode(codec.transform.forward(x.transpose(0, 1), position).bfloat16())
        y = decode(encoded.codes, encoded.scale, encoded.offset)
        spread = y.unflatten(-1, (-1, group_size))
        spread = (spread - spread.mean(-1, keepdim=True)).flatten(-2)
        stretch = codec.transform.backward(y + spread, position) - codec.transform.backward(y, position)
        return cls(codec.transform.backward(y, position).transpose(0, 1), stretch.transpose(0, 1))


def _errors(
    attention: Attention, layer: LayerCalibration, far: FarSet, group_size: int, gains: Sequence[float]
) -> torch.Tensor:
    """For each key gain |A|^2, A.B and |B|^2 of the layer output's error A + (value gain - 1) B: float64 (gains, 3)."""
    key = _Stored.of(attention.key, layer.key, group_size, FP16_MAX)
    value = _Stored.of(attention.value, layer.value, group_size, MAX_VALUE_SCALE)
    kept, projection = exact(attention.value), exact(attention.projection)
    sums = torch.zeros(len(gains), 3, dtype=torch.float64)
    queries = far.queries(attention.key.shape[1])
    chosen = queries[:: max(1, len(queries) // QUERIES)].to(attention.key.device)

    def output(heads: torch.Tensor) -> torch.Tensor:  # (KV heads, group, n, D) -> (n, hidden)
        return torch.einsum("rnd,rhd->nh", heads.flatten(0, 1), projection)

    for rows in attention.blocks(chosen):
        keys, pairs = far.pairs(rows)
        logits, _ = attention.logits(rows)
        seen = kept[:, None, : logits.shape[-1]]
        true = attention.softmax(logits) @ seen
        for number, gain in enumerate(gains):
            stored, _ = replace(attention, key=key.rows + (gain - 1) * key.stretch).logits(rows)
            mixed = logits.clone()
            mixed[..., keys] = torch.where(pairs, stored[..., keys], logits[..., keys])
            p = attention.softmax(mixed)
            p_far = p[..., keys] * pairs
            a = output(p @ seen - true + p_far @ (value.rows - kept)[:, None, keys])
            b = output(p_far @ value.stretch[:, None, keys])
            sums[number] += torch.stack([a.square().sum(), (a * b).sum(), b.square().sum()]).double().cpu()
    return sums
