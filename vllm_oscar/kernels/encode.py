# mypy: disable-error-code="no-untyped-def"
"""The row encoders of vllm_oscar.quantizer as Triton functions over a tile of rows.

A row of D channels is held as 8 x UNITS padded to a power of two: element j * UNITS_PAD + u is channel
j * UNITS + u, which the page keeps at bits 2j of unit u. Padding is zero in rows and codes; `real` says what is none.
"""

import triton
import triton.language as tl

from vllm_oscar.quantizer import FP16_MAX, LS_REFITS, ROW_MAX, STEP_OVER_STD

_FP16_MAX = tl.constexpr(FP16_MAX)
_ROW_MAX = tl.constexpr(ROW_MAX)
_STEP_OVER_STD = tl.constexpr(STEP_OVER_STD)
_LS_REFITS = tl.constexpr(LS_REFITS)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds half to even


@triton.jit
def channels(D: tl.constexpr, UNITS_PAD: tl.constexpr):
    """Channel of each element of a padded row, and whether it is one."""
    i = tl.arange(0, 8 * UNITS_PAD)
    if 8 * UNITS_PAD == D:
        return i, i < D
    return i // UNITS_PAD * (D // 8) + i % UNITS_PAD, i % UNITS_PAD < D // 8


@triton.jit
def sanitised(y):
    """Rows with NaN as 0 and magnitudes bounded by ROW_MAX."""
    y = tl.where(y == y, y, 0.0)
    return tl.minimum(tl.maximum(y, -_ROW_MAX), _ROW_MAX)


@triton.jit
def changed(y, bounded):
    """Which rows (n, channels) sanitising changed, int32 (n,)."""
    return tl.max((bounded != y).to(tl.int32), 1)


@triton.jit
def half(x):
    """Rounded to what fp16 holds, as fp32."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def to_nearest(t):
    """Codes 0..3 nearest to t, fp32."""
    return (tl.minimum(tl.maximum(t, 0.0), 3.0) + _MAGIC) - _MAGIC


@triton.jit
def reciprocal(scale):
    return tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit
def masked(x, real, padding, SIZE: tl.constexpr):
    """x (n, groups, padded) with its padding, if there is any, replaced."""
    if x.shape[2] == SIZE:
        return x
    return tl.where(real, x, padding)


@triton.jit
def nearest(y, scale, offset, real, SIZE: tl.constexpr):
    return masked(to_nearest((y - offset) * reciprocal(scale)), real, 0.0, SIZE)


@triton.jit
def encode_ls(y, real, SIZE: tl.constexpr):
    """Grouped rows (n, groups, padded) of SIZE channels a group -> codes, scale, offset, mean before the gain.

    Offsets are relative to the mean while they are fitted: then all sums of a refit are independent of one another.
    """
    mean = tl.sum(y, 2, keep_dims=True) / SIZE
    deviation = masked(y - mean, real, 0.0, SIZE)
    scale = _STEP_OVER_STD * tl.sqrt(tl.sum(deviation * deviation, 2, keep_dims=True) / SIZE)
    offset = -1.5 * scale
    for _ in tl.static_range(_LS_REFITS):
        codes = nearest(deviation, scale, offset, real, SIZE)
        total = tl.sum(codes, 2, keep_dims=True)
        squares = tl.sum(codes * codes, 2, keep_dims=True)
        with_rows = tl.sum(codes * deviation, 2, keep_dims=True)
        scale, offset = refitted(total, squares, with_rows, scale, SIZE)
    scale = half(tl.minimum(scale, _FP16_MAX))
    offset = half(tl.minimum(tl.maximum(mean + offset, -_FP16_MAX), _FP16_MAX))
    return nearest(deviation, scale, offset - mean, real, SIZE), scale, offset, mean


@triton.jit
def refitted(total, squares, with_rows, scale, SIZE: tl.constexpr):
    """Least-squares scale, and offset relative to the mean, from sums of codes, codes^2 and codes * deviations."""
    code_mean = total / SIZE
    energy = squares - total * code_mean  # of codes about their mean: 0, or about 1 and more
    fitted = with_rows / tl.maximum(energy, 0.5)
    scale = tl.where((energy > 0.5) & (fitted > 0), fitted, scale)
    return scale, -scale * code_mean


@triton.jit
def encode_minmax(y, real, kept, SIZE: tl.constexpr):
    """The reference's clip and min-max. `kept`: rank, 0-based, of the head row's magnitude that it clamps to."""
    n: tl.constexpr = y.shape[0]
    width: tl.constexpr = y.shape[1] * y.shape[2]
    magnitude = tl.reshape(masked(tl.abs(y), real, -1.0, SIZE), (n, width))  # padding sorts to the front
    order = tl.sort(magnitude, 1)
    rank = tl.arange(0, width) == kept + (width - y.shape[1] * SIZE)
    bound = tl.sum(tl.where(rank[None, :], order, 0.0), 1)[:, None, None]
    y = tl.minimum(tl.maximum(y, -bound), bound)
    low = tl.min(masked(y, real, float("inf"), SIZE), 2, keep_dims=True)
    high = tl.max(masked(y, real, float("-inf"), SIZE), 2, keep_dims=True)
    scale = half((high - low) / 3)
    offset = half(low)
    return nearest(y, scale, offset, real, SIZE), scale, offset, tl.sum(y, 2, keep_dims=True) / SIZE


@triton.jit
def finish(code_mean, scale, offset, mean, gain, max_scale):
    """Gain, bounds and fp16, one element a group.

    Returns:
        whether the group is constant (its codes have to be 0), its meta word int32, and whether it saturated
    """
    wanted = scale * gain
    kept = tl.minimum(wanted, max_scale)
    kept_offset = offset + scale * code_mean - kept * code_mean
    constant = (half(kept) == 0) | (half(scale) == 0)
    stored_scale = tl.where(constant, 0.0, kept).to(tl.float16)
    stored_offset = tl.where(constant, mean, kept_offset)
    stored_offset = tl.minimum(tl.maximum(stored_offset, -_FP16_MAX), _FP16_MAX).to(tl.float16)
    low = stored_scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = stored_offset.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return constant, low | high, (wanted > max_scale) | (tl.abs(kept_offset) > _FP16_MAX)


@triton.jit
def packed(codes, UNITS_PAD: tl.constexpr):
    """Codes int32 (n, padded) -> 16-bit units int16 (n, UNITS_PAD)."""
    shift = 2 * tl.arange(0, 8)
    units = tl.reshape(codes, (codes.shape[0], 8, UNITS_PAD)) << shift[None, :, None]
    return tl.sum(units, 1).to(tl.int16)


@triton.jit
def store_rows(
    page,
    offset,
    units,
    words,
    ok,
    which,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    META: tl.constexpr,
    META_BYTES: tl.constexpr,
):
    """Write encoded rows to their pages.

    Args:
        page: uint8 pointers (n,) to the head's region of each row's page
        offset: (n,), position in the block
        units, words: what `packed` and `finish` return
        which: 0 for keys, 1 for values
        VALUE_CODES, META, META_BYTES: the page's offsets and sizes, see PageLayout
    """
    u = tl.arange(0, units.shape[1])
    row = (page + which * VALUE_CODES + offset * (D // 4)).to(tl.pointer_type(tl.int16))
    tl.store(row[:, None] + u[None, :], units, mask=ok[:, None] & (u < D // 8)[None, :])
    g = tl.arange(0, GROUPS)
    meta = (page + META + offset * META_BYTES).to(tl.pointer_type(tl.int32))
    tl.store(meta[:, None] + (which * GROUPS + g)[None, :], words, mask=ok[:, None])
