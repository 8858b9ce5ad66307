"""One step of Lloyd's algorithm for the keys: encode rows, then take the B and m that decode these codes best.

The closed form that T comes from knows nothing of the four levels, of the box that they fill, or of the encoder. Here
rows of some sequences go through the real encoder, and x = y^ B + m is solved for B and m by weighted least squares:
k-means for a codebook that is a lattice. A second step would follow its own errors (rows of weak directions shrink, T
grows, codes leave the box), so there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_oscar.cache_layer import RowCodec
from vllm_oscar.calibrate.rope import turned_rows
from vllm_oscar.calibrate.statistics import LayerStatistics
from vllm_oscar.quantizer import FP16_MAX, decode
from vllm_oscar.sidecar import TensorCalibration

SAMPLES = 12  # sequences whose keys are kept of a layer
_RIDGE = 0.1  # towards the B there was, in units of the mean variance of a channel


@dataclass(frozen=True)
class Keys:
    """Of one sequence.

    Attributes:
        rows: (heads, T, D), after RoPE
        weight: (heads, T), what a logit error at the token costs the layer's output
    """

    rows: torch.Tensor
    weight: torch.Tensor


def refit(
    key: TensorCalibration,
    samples: Sequence[Keys],
    statistics: LayerStatistics,
    context: int,
    group_size: int,
    per: str,
) -> dict[str, torch.Tensor]:
    """A better transform and mean.

    Args:
        key: the closed form's
        samples: keys of some of the sequences that it was made from
        statistics: of the layer
        context: tokens, as in `key_moments`: rows are turned to places all over it
        group_size: channels that share a scale and an offset
        per: "head", or "layer": one B for all heads

    Returns:
        "key_refit_transform" (heads, D, D), "key_refit_mean" (heads, D), float64.
    """
    rows = torch.cat([sample.rows.float() for sample in samples], 1).transpose(0, 1)  # (tokens, heads, D)
    weight = torch.cat([sample.weight for sample in samples], 1).T.double()
    position = torch.cat([torch.arange(sample.rows.shape[1], device=rows.device) for sample in samples])
    used = weight.sum(1) > 0
    rows, weight, position = rows[used], weight[used], position[used]
    rows, position = turned_rows(rows, position, statistics, context)

    codec = RowCodec.of(
        replace(key, gain=1.0).shard(0, rows.shape[1], rows.device), group_size, torch.bfloat16, FP16_MAX, None
    )
    encoded = codec.encode(codec.transform.forward(rows, position).bfloat16())
    codes = decode(encoded.codes, encoded.scale, encoded.offset).double()
    target = (rows - codec.transform.centre(position)).double()
    before = codec.transform.inverse.double()

    # a few tokens have most of the weight: its root, so that more than those are fitted
    weight = weight.sqrt()
    weight = (weight / weight.sum(0).clamp(min=1e-300))[..., None]
    code_mean, target_mean = (weight * codes).sum(0), (weight * target).sum(0)
    codes, target = codes - code_mean, target - target_mean
    left = torch.einsum("nhd,nhe->hde", weight * codes, codes)
    right = torch.einsum("nhd,nhe->hde", weight * codes, target - torch.einsum("nhd,hde->nhe", codes, before))
    if per == "layer":
        left, right = left.mean(0, keepdim=True), right.mean(0, keepdim=True)
    ridge = _RIDGE * left.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    known = ridge > 0  # heads that weigh nothing stay as they are
    step = torch.linalg.solve(left + torch.where(known, ridge, 1.0) * torch.eye(left.shape[-1]).to(left), right)
    inverse = before + step
    mean = codec.transform.mean.double() + target_mean - torch.einsum("hd,hde->he", code_mean, inverse)
    return {"key_refit_transform": torch.linalg.inv(inverse), "key_refit_mean": mean}
