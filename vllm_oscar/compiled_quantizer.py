# mypy: disable-error-code="no-untyped-def"
"""`encode_ls` and `encode_metric` on CPU, compiled by numba: `quantizer`'s bits without its tiny torch operations.

The reference takes several torch operations for every channel, for one row as for a thousand; here a row is one loop.
To stay equal, every operation is the reference's, in float32 and in its order; nothing is fused or reassociated (numba
does neither unless asked). Only products that are exactly zero are left out.

Importing this module raises ImportError where numba is missing; vLLM brings it. A stand-in that has no compiler, with
which vLLM can be imported, is none.
"""

import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding.ffi
import numba.core.dispatcher
import numpy as np
import torch

from vllm_oscar.quantizer import (
    _RIDGE,
    FP16_MAX,
    LANES,
    LS_REFITS,
    METRIC_PASSES,
    ROW_MAX,
    STEP_OVER_STD,
    Encoded,
    Metric,
)

# A CPU engine of vLLM 0.32 that starts looks into the `__dict__` of whatever any module holds. llvmlite's library makes
# a function of every name that it is asked for, this one too, over which the engine would fall.
getattr(llvmlite.binding.ffi.lib, "_fntab", {})["__dict__"] = {}

TOP_CODE = 3
# numba takes Python's floats for float64
_ZERO, _ONE, _HALF, _QUARTER, _TINY = (np.float32(number) for number in (0, 1, 0.5, 0.25, 1e-6))
_FP16_MAX, _ROW_MAX, _RIDGE_32 = (np.float32(number) for number in (FP16_MAX, ROW_MAX, _RIDGE))
_LARGEST_ZERO = np.float32(2**-25)  # largest float32 that is 0 as a float16
_TOGETHER = 8  # rows
_NO_METRIC = np.zeros((3, 0, 0, 0), np.float32)


def encode_ls(y: torch.Tensor, group_size: int, gain: float = 1.0, max_scale: float = FP16_MAX) -> Encoded:
    """See quantizer.encode_ls; y lies on the CPU."""
    return _encode(y, _NO_METRIC, group_size, gain, max_scale)


def encode_metric(
    y: torch.Tensor, metric: Metric, group_size: int, gain: float = 1.0, max_scale: float = FP16_MAX
) -> Encoded:
    """See quantizer.encode_metric; y lies on the CPU."""
    return _encode(y, metric.stacked.numpy(), group_size, gain, max_scale)


def _encode(y: torch.Tensor, tables: np.ndarray, group_size: int, gain: float, max_scale: float) -> Encoded:
    """Tables of the metric encoder, or _NO_METRIC for the least-squares one."""
    rows = y.float().reshape(-1, *y.shape[-2:]).contiguous().numpy()
    codes = np.empty(rows.shape, np.uint8)
    fits = np.empty((2, *rows.shape[:2], rows.shape[2] // group_size), np.float32)
    numbers = (np.float32(x) for x in (TOP_CODE, STEP_OVER_STD, gain, max_scale))
    saturated = _encode_rows(rows, tables, group_size, *numbers, codes, fits)
    scale, offset = torch.from_numpy(fits).half().view(2, *y.shape[:-1], fits.shape[-1])
    return Encoded(torch.from_numpy(codes).view(y.shape), scale, offset, torch.tensor(saturated))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at the first call; the result is kept for other processes where there is a folder for it."""
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no folder that it can write
        return numba.njit(error_model="numpy")(function)


@compiled
def _sum(x, lanes):
    lanes[:] = x[:LANES]
    for start in range(LANES, len(x), LANES):
        for lane in range(LANES):
            lanes[lane] += x[start + lane]
    return _folded(lanes)


@compiled
def _dot(a, b, lanes):
    """The sum of a * b."""
    for lane in range(LANES):
        lanes[lane] = a[lane] * b[lane]
    for start in range(LANES, len(a), LANES):
        for lane in range(LANES):
            lanes[lane] += a[start + lane] * b[start + lane]
    return _folded(lanes)


@compiled
def _folded(lanes):
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@compiled
def _mean(x, lanes):
    return _sum(x, lanes) / np.float32(len(x))


@compiled
def _add_product(row, table, total):
    """total += row times table; four terms at a time, as loads and stores of `total` are what it waits for."""
    for i in range(0, len(row), 4):
        a, b, c, d = row[i], row[i + 1], row[i + 2], row[i + 3]
        for j in range(len(total)):
            total[j] = total[j] + a * table[i, j] + b * table[i + 1, j] + c * table[i + 2, j] + d * table[i + 3, j]


@compiled
def _product(row, table, total):
    total[:] = _ZERO
    _add_product(row, table, total)


@compiled
def _bounded(x, low, high):
    """Keeps NaN."""
    if x < low:
        return low
    return high if x > high else x


@compiled
def _as_half(x):
    """A finite x that fits, rounded to the nearest float16, ties to even."""
    unit = np.float32(math.ldexp(1.0, max(math.frexp(x)[1] - 11, -24)))
    return np.rint(x / unit) * unit


@compiled
def _sanitised(row, y):
    """Writes y; returns whether it differs from the row."""
    changed = False
    for i in range(len(row)):
        y[i] = _ZERO if np.isnan(row[i]) else _bounded(row[i], -_ROW_MAX, _ROW_MAX)
        changed = changed or y[i] != row[i]
    return changed


@compiled
def _inverse(scale):
    return _ONE / scale if scale > _ZERO else _ZERO


@compiled
def _nearest(y, scale, offset, top, code):
    inverse = _inverse(scale)
    for i in range(len(y)):
        code[i] = _bounded(np.rint((y[i] - offset) * inverse), _ZERO, top)


@compiled
def _initial(y, code, work, top, step, lanes):
    mean = _mean(y, lanes)
    for i in range(len(y)):
        work[i] = (y[i] - mean) * (y[i] - mean)
    scale = step * np.sqrt(_mean(work, lanes))
    offset = mean - _HALF * top * scale
    for _ in range(LS_REFITS):
        _nearest(y, scale, offset, top, code)
        code_mean = _mean(code, lanes)
        for i in range(len(y)):
            work[i] = code[i] - code_mean
        energy = _dot(work, work, lanes)
        fitted = _dot(work, y, lanes) / max(energy, _TINY)
        if energy > _TINY and fitted > _ZERO:
            scale = fitted
        offset = mean - scale * code_mean
    return scale, offset


@compiled
def _sequential_pass(y, code, residual, scale, offset, table, target, change, top):
    """For several rows side by side, as each step of a row waits for the one before.

    A change reaches the next 15 channels at once, the others with the rest of its 16: in the same order.
    """
    count, size = y.shape
    groups = scale.shape[1]
    for row in range(count):
        _product(residual[row], table, target[row])
        for i in range(size):
            target[row, i] += y[row, i]
    for start in range(0, size, LANES):
        group = start * groups // size
        for lane in range(LANES):
            i = start + lane
            for row in range(count):
                s, o = scale[row, group], offset[row, group]
                code[row, i] = _bounded(np.rint((target[row, i] - o) * _inverse(s)), _ZERO, top)
                new = y[row, i] - (code[row, i] * s + o)
                step = new - residual[row, i]
                residual[row, i], change[row, lane] = new, step
                if step != _ZERO:
                    for j in range(start, start + LANES):  # those before i are done with
                        target[row, j] += step * table[i, j]
        end = start + LANES
        for row in range(count):
            _add_product(change[row], table[start:end, end:], target[row, end:])


@compiled
def _refit(code, residual, scale, offset, g, basis, weighted, equations, lanes):
    """The second halves of `basis` and `weighted`, which are the same for all rows, are there already."""
    groups = len(scale)
    channels = len(code) // groups
    for group in range(groups):
        own = slice(group * channels, (group + 1) * channels)
        basis[group, own] = code[own]
        _product(code[own], g[own], weighted[group])
    for i in range(2 * groups):
        for j in range(2 * groups):
            equations[i, j] = _dot(weighted[i], basis[j], lanes)
        equations[i, 2 * groups] = _dot(weighted[i], residual, lanes)
    _solve(equations)
    for group in range(groups):
        scale_change, offset_change = equations[group, 2 * groups], equations[groups + group, 2 * groups]
        if not (np.isfinite(scale_change) and np.isfinite(offset_change)):
            return
        if not scale[group] + scale_change > _QUARTER * scale[group]:
            return
    for group in range(groups):
        scale[group] += equations[group, 2 * groups]
        offset[group] += equations[groups + group, 2 * groups]


@compiled
def _solve(equations):
    """In place; the solution is the last column."""
    size = len(equations)
    trace = _ZERO
    for k in range(size):
        trace += equations[k, k]
    ridge = _RIDGE_32 * (trace / np.float32(size))
    for k in range(size):
        equations[k, k] += ridge
    for k in range(size):
        pivot = equations[k, k]
        for j in range(size + 1):
            equations[k, j] /= pivot
        for i in range(size):
            if i != k:
                factor = equations[i, k]
                for j in range(size + 1):
                    equations[i, j] -= factor * equations[k, j]


@compiled
def _finish(y, code, scale, offset, gain, max_scale, lanes):
    """Scale, offset and whether one of them overflowed; rounding to float16 is the caller's."""
    code_mean = _mean(code, lanes)
    wanted_scale = scale * gain
    kept_scale = min(wanted_scale, max_scale)
    kept_offset = offset + scale * code_mean - kept_scale * code_mean
    overflow = wanted_scale > max_scale or abs(kept_offset) > _FP16_MAX
    if min(abs(kept_scale), abs(scale)) <= _LARGEST_ZERO:
        code[:] = _ZERO
        kept_scale, kept_offset = _ZERO, _mean(y, lanes)
    return kept_scale, _bounded(kept_offset, -_FP16_MAX, _FP16_MAX), overflow


@compiled
def _encode_rows(rows, tables, group_size, top, step, gain, max_scale, codes, fits):
    """All of it; the functions above are the reference's of the same name, for one row (or one group of one row).

    Args:
        rows: float32 (n, heads, D)
        tables: float32 (3, heads, D, D), compensation, descent and G; without heads: the least-squares encoder
        top: largest code
        step: first scale of a row, in standard deviations
        codes, fits: the results, uint8 (n, heads, D) and float32 (2, n, heads, groups)

    Returns:
        int, saturated rows
    """
    total, heads, size = rows.shape
    groups = size // group_size
    metric = tables.shape[1] > 0
    y, code, residual, target = np.empty((4, _TOGETHER, size), np.float32)
    scale, offset = np.empty((2, _TOGETHER, groups), np.float32)
    bad = np.empty(_TOGETHER, np.bool_)
    change = np.empty((_TOGETHER, LANES), np.float32)
    basis, weighted = np.zeros((2, 2 * groups, size), np.float32)
    equations = np.empty((2 * groups, 2 * groups + 1), np.float32)
    lanes = np.empty(LANES, np.float32)
    saturated = 0
    for head in range(heads):
        if metric:
            for group in range(groups):
                basis[groups + group, group * group_size : (group + 1) * group_size] = _ONE
                _product(basis[groups + group], tables[2, head], weighted[groups + group])
        for first in range(0, total, _TOGETHER):
            count = min(_TOGETHER, total - first)
            for row in range(count):
                bad[row] = _sanitised(rows[first + row, head], y[row])
                for group in range(groups):
                    own = slice(group * group_size, (group + 1) * group_size)
                    fit = _initial(y[row, own], code[row, own], target[row, own], top, step, lanes)
                    scale[row, group], offset[row, group] = fit
            if metric:
                residual[:] = _ZERO
                for passed in range(METRIC_PASSES + 1):
                    table = tables[min(passed, 1), head]
                    _sequential_pass(y[:count], code, residual, scale, offset, table, target, change, top)
                    for row in range(count):
                        _refit(
                            code[row], residual[row], scale[row], offset[row],
                            tables[2, head], basis, weighted, equations, lanes,
                        )  # fmt: skip
                        for group in range(groups):
                            s, o = scale[row, group], offset[row, group]
                            for i in range(group * group_size, (group + 1) * group_size):
                                residual[row, i] = y[row, i] - (code[row, i] * s + o)
            for row in range(count):
                for group in range(groups):
                    own = slice(group * group_size, (group + 1) * group_size)
                    s, o = scale[row, group], offset[row, group]
                    if not metric:
                        s, o = _as_half(min(s, _FP16_MAX)), _as_half(_bounded(o, -_FP16_MAX, _FP16_MAX))
                        _nearest(y[row, own], s, o, top, code[row, own])
                    s, o, overflow = _finish(y[row, own], code[row, own], s, o, gain, max_scale, lanes)
                    fits[0, first + row, head, group], fits[1, first + row, head, group] = s, o
                    bad[row] = bad[row] or overflow
                for i in range(size):
                    codes[first + row, head, i] = np.uint8(code[row, i])
                saturated += bad[row]
    return saturated
