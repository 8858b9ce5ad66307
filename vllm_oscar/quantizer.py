"""Rows of floats to 2-bit codes with one scale and one offset a group, and back: the specification.

    y_hat = scale * code + offset,   code in {0, 1, 2, 3},   scale and offset in fp16

Three encoders, all over rows y of shape (..., heads, D):

    encode_ls       least squares (values; keys as the cheap choice)
    encode_metric   error measured as e' G e: rounding with compensation, then coordinate descent (keys)
    encode_minmax   the reference's clip and min-max (arXiv 2605.17757)

Rows are independent: whatever a row holds (inf, NaN, a range fp16 cannot represent), the result is finite, other
rows do not change, and the row counts in `Encoded.saturated`.

On CPU every sum of `encode_ls` and `encode_metric` has a stated order (`ordered_sum`, `ordered_product`), so that their
compiled form (compiled_quantizer) is the same to the last bit, whatever BLAS and vector width there are.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

FP16_MAX = 65504.0
ROW_MAX = 65280.0  # the largest magnitude that FP16 and BF16 both hold: a bounded row is the same in either
MAX_VALUE_SCALE = 254.0  # the decode kernel multiplies probability * scale * 256 in fp16
STEP_OVER_STD = 0.9957  # optimal step of a uniform 4-level quantizer of a Gaussian, in standard deviations
LS_REFITS = 2
METRIC_PASSES = 2
LANES = 16  # of an ordered sum; every head and group size is a multiple
_RIDGE = 1e-6  # of the refit's normal equations; keeps rows with one code only solvable


class Encoded(NamedTuple):
    """Codes of some rows.

    Attributes:
        codes: uint8 (..., heads, D), 0..3
        scale, offset: float16 (..., heads, groups)
        saturated: int64 scalar, rows in which something was not representable
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    saturated: torch.Tensor


def decode(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """y_hat, float32 (..., D), from codes (..., D) and scale, offset (..., groups)."""
    group_size = codes.shape[-1] // scale.shape[-1]
    grouped = codes.unflatten(-1, (-1, group_size)).float()
    return (grouped * scale.float()[..., None] + offset.float()[..., None]).flatten(-2)


def sanitised(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows with NaN as 0 and magnitudes bounded by ROW_MAX, and a mask (..., heads) of changed rows."""
    bounded = torch.nan_to_num(y.float(), nan=0.0).clamp(-ROW_MAX, ROW_MAX)
    return bounded, (bounded != y.float()).any(-1)


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis, which stays with size 1: each of 16 lanes first to last, then the lanes in halves."""
    first, *others = x.unflatten(-1, (-1, LANES)).unbind(-2)
    for other in others:
        first = first + other
    while (half := first.shape[-1] // 2) > 0:
        first = first[..., :half] + first[..., half:]
    return first


def ordered_mean(x: torch.Tensor) -> torch.Tensor:
    """Means over the last axis, which stays with size 1."""
    return ordered_sum(x) / x.shape[-1]


def ordered_product(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """(heads, n, D) times (heads, D, E), added up first to last."""
    total = rows.new_zeros(*rows.shape[:-1], table.shape[-1])
    for channel in range(rows.shape[-1]):
        total += rows[..., channel, None] * table[:, None, channel]
    return total


def _initial(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped rows (..., groups, G) -> least-squares (scale, offset), each (..., groups, 1)."""
    mean = ordered_mean(y)
    scale = STEP_OVER_STD * ordered_mean((y - mean).square()).sqrt()
    offset = mean - 1.5 * scale
    for _ in range(LS_REFITS):
        codes = _nearest(y, scale, offset)
        code_mean = ordered_mean(codes)
        spread = codes - code_mean
        energy = ordered_sum(spread.square())
        fitted = ordered_sum(spread * y) / energy.clamp(min=1e-6)
        scale = torch.where((energy > 1e-6) & (fitted > 0), fitted, scale)
        offset = mean - scale * code_mean
    return scale, offset


def _nearest(y: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    return ((y - offset) * inverse).round().clamp(0, 3)


def _finish(
    y: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    changed: torch.Tensor,
    gain: float,
    max_scale: float,
) -> Encoded:
    """Apply the gain on the decode side and round scale and offset to fp16. All grouped (..., groups, G or 1)."""
    code_mean = ordered_mean(codes)
    wanted_scale = scale * gain
    kept_scale = wanted_scale.clamp(max=max_scale)
    centre = offset + scale * code_mean  # what gain and clamp leave in place
    kept_offset = centre - kept_scale * code_mean
    stored_scale = kept_scale.half()
    constant = (stored_scale == 0) | (scale.half() == 0)
    codes = torch.where(constant, 0.0, codes)
    stored_scale = torch.where(constant, 0.0, stored_scale.float())
    stored_offset = torch.where(constant, ordered_mean(y), kept_offset).clamp(-FP16_MAX, FP16_MAX)
    overflow = (wanted_scale > max_scale) | (kept_offset.abs() > FP16_MAX)
    saturated = changed | overflow[..., 0].any(-1)
    return Encoded(
        codes.flatten(-2).to(torch.uint8), stored_scale[..., 0].half(), stored_offset[..., 0].half(), saturated.sum()
    )


def encode_ls(y: torch.Tensor, group_size: int, gain: float = 1.0, max_scale: float = FP16_MAX) -> Encoded:
    """Least-squares codes: a start from mean and deviation, two refits of (scale, offset), codes by rounding.

    Args:
        y: float (..., heads, D)
        group_size: channels that share a scale and an offset
        gain: decode-side stretch about each row's mean, against the shrinkage of least squares
        max_scale: bound of the scale (MAX_VALUE_SCALE for values)
    """
    rows, changed = sanitised(y)
    grouped = rows.unflatten(-1, (-1, group_size))
    scale, offset = _initial(grouped)
    scale = scale.clamp(max=FP16_MAX).half().float()
    offset = offset.clamp(-FP16_MAX, FP16_MAX).half().float()
    return _finish(grouped, _nearest(grouped, scale, offset), scale, offset, changed, gain, max_scale)


def encode_minmax(y: torch.Tensor, group_size: int, clip: float, max_scale: float = FP16_MAX) -> Encoded:
    """The reference encoder: clamp the head row to +-sort(|y|)[int(clip * D)], then scale = (max - min)/3.

    Args:
        y: float (..., heads, D)
        group_size: channels that share a scale and an offset
        clip: fraction of the row's magnitudes that is kept exactly (0.96 keys, 0.92 values in the paper); 1 or
            more: no clip
    """
    rows, changed = sanitised(y)
    head_size = rows.shape[-1]
    index = min(int(clip * head_size), head_size - 1)
    bound = rows.abs().sort(-1).values[..., index : index + 1]
    grouped = rows.clamp(-bound, bound).unflatten(-1, (-1, group_size))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = ((high - low) / 3).half().float()
    offset = low.half().float()
    return _finish(grouped, _nearest(grouped, scale, offset), scale, offset, changed, 1.0, max_scale)


@dataclass(frozen=True)
class Metric:
    """Tables of the metric encoder, float32, made from G once at load.

    With the residual r = y - y_hat, both passes are
        code_j = clamp(round((y_j - offset + sum_i r_i M_ij) / scale))
    M being `compensation` (strictly upper: only channels already rounded) or `descent` (all others).

    Attributes:
        g: (heads, D, D), symmetric positive definite, mean diagonal 1
        compensation: (heads, D, D), R_ij = V_ji / V_jj with G = V'V, V lower triangular
        descent: (heads, D, D), C_ij = G_ij / G_jj, zero diagonal
    """

    g: torch.Tensor
    compensation: torch.Tensor
    descent: torch.Tensor

    @cached_property
    def stacked(self) -> torch.Tensor:
        """All three, (3, heads, D, D)."""
        return torch.stack([self.compensation, self.descent, self.g])

    @classmethod
    def of(cls, g: torch.Tensor) -> "Metric":
        """Tables for G (heads, D, D); computed in float64."""
        exact = g.double()
        eye = torch.eye(exact.shape[-1], dtype=torch.float64, device=exact.device)
        exact = exact / exact.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] + 1e-6 * eye
        lower = torch.linalg.cholesky(exact.flip(-1, -2)).mT.flip(-1, -2)  # V: G = V'V, V lower
        diagonal = lower.diagonal(dim1=-2, dim2=-1)
        compensation = (lower / diagonal[..., :, None]).mT.triu(1)
        descent = exact / exact.diagonal(dim1=-2, dim2=-1)[..., None, :] * (1 - eye)
        return cls(exact.float(), compensation.float().contiguous(), descent.float().contiguous())


def encode_metric(
    y: torch.Tensor, metric: Metric, group_size: int, gain: float = 1.0, max_scale: float = FP16_MAX
) -> Encoded:
    """Codes that make e' G e small, e = y_hat - y.

    From the least-squares fit: one pass of rounding with compensation, then METRIC_PASSES passes of coordinate
    descent; (scale, offset) are refitted in the metric after each pass.

    Args:
        y: float (..., heads, D)
        metric: tables with the same heads and D
        group_size: channels that share a scale and an offset
        gain: decode-side stretch, as in `encode_ls`
    """
    rows, changed = sanitised(y)
    heads, head_size = rows.shape[-2:]
    flat = rows.reshape(-1, heads, head_size).transpose(0, 1).contiguous()  # (heads, rows, D), as bmm likes it
    grouped = flat.unflatten(-1, (-1, group_size))
    scale, offset = _initial(grouped)

    residual = torch.zeros_like(flat)
    codes = torch.zeros_like(flat)
    for number in range(METRIC_PASSES + 1):
        table = metric.compensation if number == 0 else metric.descent
        _sequential_pass(flat, codes, residual, scale, offset, table, group_size)
        scale, offset = _metric_refit(codes, residual, scale, offset, metric.g, group_size)
        residual = flat - (codes.unflatten(-1, (-1, group_size)) * scale + offset).flatten(-2)

    def ungrouped(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(0, 1).reshape(*rows.shape[:-1], *t.shape[2:])

    return _finish(
        ungrouped(grouped),
        ungrouped(codes.unflatten(-1, (-1, group_size))),
        ungrouped(scale),
        ungrouped(offset),
        changed,
        gain,
        max_scale,
    )


def _sequential_pass(
    y: torch.Tensor,
    codes: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    table: torch.Tensor,
    group_size: int,
) -> None:
    """One pass over the channels in order, in place on codes and residual (heads, rows, D)."""
    target = y + ordered_product(residual, table)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    for channel in range(y.shape[-1]):
        s, o, i = (part[..., channel // group_size, 0] for part in (scale, offset, inverse))
        code = ((target[..., channel] - o) * i).round().clamp(0, 3)
        new = y[..., channel] - (code * s + o)
        change = new - residual[..., channel]
        target[..., channel + 1 :] += change[..., None] * table[:, None, channel, channel + 1 :]
        codes[..., channel] = code
        residual[..., channel] = new


def _metric_refit(
    codes: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    g: torch.Tensor,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, offset) that minimise e' G e for these codes, from 2n x 2n normal equations (n groups).

    Solved for the change, as the residual is small where the values are not; a change that would cost more than
    three quarters of a scale is not made (rows with hardly any spread).
    """
    groups = scale.shape[-2]
    member = torch.eye(groups, device=codes.device).repeat_interleave(group_size, 1)  # (groups, D)
    basis = torch.cat([codes[..., None, :] * member, member.expand(*codes.shape[:2], groups, -1)], -2)
    weighted = ordered_product(basis.flatten(1, 2), g).view_as(basis)
    sides = [*basis.unbind(-2), residual]
    equations = torch.cat([ordered_sum(weighted * side[..., None, :]) for side in sides], -1)  # (.., 2n, 2n + 1)
    change = _solve(equations)
    new_scale = scale + change[..., :groups, None]
    sound = torch.isfinite(change).all(-1)[..., None, None] & (new_scale > 0.25 * scale).all(-2, keepdim=True)
    return torch.where(sound, new_scale, scale), torch.where(sound, offset + change[..., groups:, None], offset)


def _solve(equations: torch.Tensor) -> torch.Tensor:
    """x of A x = b for positive definite A, given as [A b] (..., k, k + 1), by elimination, A with a ridge added."""
    size = equations.shape[-2]
    diagonal = equations.diagonal(dim1=-2, dim2=-1)
    trace = sum(diagonal.unbind(-1), start=torch.zeros_like(diagonal[..., 0]))
    diagonal += _RIDGE * (trace / size)[..., None]
    for k in range(size):
        row = equations[..., k, None, :] / equations[..., k, k, None, None]
        equations = equations - equations[..., :, k, None] * row
        equations[..., k, :] = row[..., 0, :]
    return equations[..., -1]
