"""One layer's cache: how its rows become pages and copies. The specification of the write kernel."""

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from vllm_oscar import quantizer
from vllm_oscar.errors import ConfigError
from vllm_oscar.hot_pool import HotPool
from vllm_oscar.page_layout import KEY, VALUE, PageLayout, PageViews
from vllm_oscar.quantizer import (
    FP16_MAX,
    MAX_VALUE_SCALE,
    Encoded,
    Metric,
    encode_minmax,
    sanitised,
)
from vllm_oscar.rotation import Transform
from vllm_oscar.sidecar import LayerCalibration, TensorCalibration

logger = logging.getLogger("vllm.oscar")

# by bits: least squares shrinks keys more than the metric encoder does (docs/quality.md); with 3 and 4 bits three
# quarters of the way to the unbiased gain, as 1.10 is with 2
LS_KEY_GAIN = {2: 1.10, 3: 1.03, 4: 1.01}


def _ls_gain(gain: float, bits: int) -> float:
    """Of keys that were calibrated with this one for the metric encoder; the reference's transforms have none."""
    return LS_KEY_GAIN[bits] if gain > 1 else gain


@cache
def _encoders(device_type: str) -> ModuleType:
    """The module that encodes rows there; both give the same bits."""
    if device_type != "cpu":
        return quantizer
    try:
        from vllm_oscar import compiled_quantizer
    except ImportError as error:
        logger.warning("oscar: encoding on CPU without numba (%s), some hundred times slower: pip install numba", error)
        return quantizer
    return compiled_quantizer


@dataclass(frozen=True)
class RowCodec:
    """Keys' or values' way into the cache: y = (x - m) T, rounded to the pool's dtype, then encoded.

    Attributes:
        transform: (m, T, B)
        encoder: "ls", "metric" or "minmax"
        group_size: channels that share a scale and an offset
        gain: decode-side stretch
        clip: for `minmax`
        max_scale: bound of the scale
        bits: of a code
        metric: tables of the `metric` encoder
    """

    transform: Transform
    encoder: str
    group_size: int
    gain: float
    clip: float
    max_scale: float
    metric: Metric | None
    bits: int = 2

    @classmethod
    def of(
        cls, calibration: TensorCalibration, group_size: int, dtype: torch.dtype, max_scale: float, encoder: str | None
    ) -> "RowCodec":
        """Prepare a calibration for a run in `dtype`; `encoder` overrides the calibration's.

        Raises:
            ConfigError: the metric encoder is asked for, and the calibration holds no metric.
        """
        gain = calibration.gain
        if encoder == "ls" and calibration.encoder == "metric":
            gain = _ls_gain(gain, calibration.bits)
        encoder = encoder or calibration.encoder
        metric = None
        if encoder == "metric":
            if calibration.metric is None:
                raise ConfigError(
                    "oscar option key_encoder: 'metric' needs a sidecar that was calibrated with --key-encoder metric; "
                    "leave the option out, or use 'ls'"
                )
            metric = Metric.of(calibration.metric)
        return cls(
            Transform.rounded(calibration.mean, calibration.transform, dtype, calibration.turning),
            encoder,
            group_size,
            gain,
            calibration.clip,
            max_scale,
            metric,
            calibration.bits,
        )

    @property
    def levels(self) -> int:
        """Codes are 0 .. levels - 1."""
        return 1 << self.bits

    @property
    def first_gain(self) -> float:
        """Of the codes that the write kernel makes: least-squares ones too where the metric encoder comes later."""
        return self.gain if self.metric is None else _ls_gain(self.gain, self.bits)

    def encode(self, y: torch.Tensor) -> Encoded:
        """Rows y (tokens, heads, D) in the pool's dtype -> codes."""
        encoders = _encoders(y.device.type)
        if self.encoder == "metric":
            assert self.metric is not None
            return encoders.encode_metric(y, self.metric, self.group_size, self.gain, self.max_scale, self.levels)
        if self.encoder == "minmax":
            return encode_minmax(y, self.group_size, self.clip, self.max_scale, self.levels)
        return encoders.encode_ls(y, self.group_size, self.gain, self.max_scale, self.levels)


@dataclass(frozen=True)
class CacheLayer:
    """What one attention layer needs to write and read its cache."""

    layout: PageLayout
    key: RowCodec
    value: RowCodec

    @classmethod
    def of(
        cls,
        calibration: LayerCalibration,
        block_size: int,
        group_size: int,
        dtype: torch.dtype,
        key_encoder: str | None = None,
    ) -> "CacheLayer":
        """Prepare a layer of a sidecar for a run in `dtype` with blocks of so many tokens."""
        key, value = calibration.key, calibration.value
        return cls(
            calibration.layout(block_size, group_size),
            RowCodec.of(key, group_size, dtype, FP16_MAX, key_encoder),
            RowCodec.of(value, group_size, dtype, MAX_VALUE_SCALE, None),
        )

    def write(
        self,
        views: PageViews,
        pool: HotPool,
        key: torch.Tensor,
        value: torch.Tensor,
        position: torch.Tensor,
        slot_mapping: torch.Tensor,
        hot_slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Store new tokens: every one as INT2, the hot ones in BF16 as well.

        Args:
            key, value: (tokens, heads, D), keys after RoPE
            position: int64 (tokens,), of each token in its request
            slot_mapping: int64 (tokens,), block * P + offset, or -1 for none
            hot_slot_mapping: int64 (tokens,), slot * P + offset, or -1 for none

        Returns:
            int64 scalar, rows in which something was not representable
        """
        p = self.layout.block_size
        stored = (slot_mapping >= 0).nonzero()[:, 0]
        block, offset = slot_mapping[stored] // p, slot_mapping[stored] % p
        hot_slot = hot_slot_mapping[stored]
        hot = (hot_slot >= 0).nonzero()[:, 0]
        slot, hot_offset = hot_slot[hot] // p, hot_slot[hot] % p
        saturated = torch.zeros((), dtype=torch.int64, device=key.device)
        for which, codec, rows in ((KEY, self.key, key), (VALUE, self.value, value)):
            y = codec.transform.forward(rows[stored], position[stored]).to(pool.rows.dtype)
            encoded = codec.encode(y)
            views.store(which, (block, slice(None), offset), encoded.codes)
            views.meta[block, :, offset, which] = torch.stack([encoded.scale, encoded.offset], -1)
            pool.rows[slot, :, which, hot_offset] = sanitised(y[hot])[0].to(pool.rows.dtype)
            saturated += encoded.saturated
        written = views.meta[block[hot], :, offset[hot]]  # (hot tokens, heads, 2, groups, 2)
        pool.words[slot, :, hot_offset] = written.contiguous().view(torch.int32).flatten(-3)
        return saturated
