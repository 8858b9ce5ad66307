"""One step of Lloyd's algorithm for the keys: encode rows, then take the B that decodes these codes best.

The closed form that T comes from knows nothing of the four levels, of the box that they fill, or of the encoder. Here
rows of some sequences go through the real encoder, and x = y^ B + m is solved for B by weighted least squares: k-means
for a codebook that is a lattice. A second step would follow its own errors (rows of weak directions shrink, T grows,
codes leave the box), so there is one. The mean stays: fitting it as well gains nothing, and it says what the text was
(`vllm_oscar.evaluation.drift`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_oscar.cache_layer import RowCodec
from vllm_oscar.calibrate.rope import key_moments, turned_rows
from vllm_oscar.calibrate.solve import Recipe, solve
from vllm_oscar.calibrate.statistics import LayerStatistics
from vllm_oscar.quantizer import FP16_MAX, decode
from vllm_oscar.sidecar import single_threaded

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


def refit(statistics: LayerStatistics, samples: Sequence[Keys], recipe: Recipe) -> LayerStatistics:
    """A better transform than the closed form's.

    Args:
        statistics: of a layer
        samples: keys of some of the sequences that they are of; rows are turned to places all over the context
        recipe: one with `refits`

    Returns:
        The statistics, and "key_refit_transform", float64 (heads, D, D); for a recipe with an average also "key_loss",
        float64 (): the squared error of the layer's output, in units that a model's layers share, that keys stored so
        leave.
    """
    key = solve(statistics, recipe)[0].key
    rows = torch.cat([sample.rows.float() for sample in samples], 1).transpose(0, 1)  # (tokens, heads, D)
    weight = torch.cat([sample.weight for sample in samples], 1).T.double()
    position = torch.cat([torch.arange(sample.rows.shape[1], device=rows.device) for sample in samples])
    used = weight.sum(1) > 0
    rows, weight, position = rows[used], weight[used], position[used]
    rows, position = turned_rows(rows, position, statistics, recipe.context)

    plain = replace(key, gain=1.0).shard(0, rows.shape[1], rows.device)
    codec = RowCodec.of(plain, recipe.group_size, torch.bfloat16, FP16_MAX, None)
    encoded = codec.encode(codec.transform.forward(rows, position).bfloat16())
    codes = decode(encoded.codes, encoded.scale, encoded.offset).double()
    target = (rows - codec.transform.centre(position)).double()
    before = codec.transform.inverse.double()

    share = weight / weight.sum(0).clamp(min=1e-300)
    # a few tokens have most of the weight: its root, so that more than those are fitted
    weight = weight.sqrt()
    weighted = (weight / weight.sum(0).clamp(min=1e-300))[..., None] * codes
    left = torch.einsum("nhd,nhe->hde", weighted, codes)
    right = torch.einsum("nhd,nhe->hde", weighted, target - torch.einsum("nhd,hde->nhe", codes, before))
    if recipe.per == "layer":
        left, right = left.mean(0, keepdim=True), right.mean(0, keepdim=True)
    ridge = _RIDGE * left.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    ridge = torch.where(ridge > 0, ridge, 1.0)  # heads that weigh nothing stay as they are
    with single_threaded():
        step = torch.linalg.solve(left + ridge * torch.eye(left.shape[-1]).to(left), right)
        transform = torch.linalg.inv(before + step)
    found = {"key_refit_transform": transform}
    if recipe.average is not None:
        error = target - torch.einsum("nhd,hde->nhe", codes, before + step)
        cost = key_moments(statistics, recipe.context, recipe.turning_pairs).error.to(error)
        found["key_loss"] = (share * torch.einsum("nhd,hde,nhe->nh", error, cost, error)).sum()
    return LayerStatistics(statistics.tensors | found)
