# mypy: disable-error-code="no-untyped-def"
"""New keys and values into pages and hot pool: centre, transform, encode, pack, scatter. One launch for both.

y = (x - m) T is rounded to the pool's dtype, and that is what is encoded and what the copy holds (NaN and what fp16
cannot hold sanitised), so that a key encoded again later, from its copy, is the same key. x - m goes through the
tensor cores as two numbers of the run dtype, whose sum is exact to fp32 or nearly.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_oscar.cache_layer import RowCodec
from vllm_oscar.hot_pool import HotPool
from vllm_oscar.kernels.dependent import release, supported
from vllm_oscar.kernels.encode import (
    FIRST_STEP,
    changed,
    channels,
    encode_ls,
    encode_minmax,
    finish,
    packed,
    sanitised,
    store_rows,
    top_code,
)
from vllm_oscar.kernels.product import product
from vllm_oscar.kernels.turning import add_waves, depth, load_vectors, wave_tables, waves
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.quantizer import FP16_MAX, MAX_VALUE_SCALE

_MAX_KEY_SCALE = tl.constexpr(FP16_MAX)
_MAX_VALUE_SCALE = tl.constexpr(MAX_VALUE_SCALE)
_FEW_TOKENS = 64  # up to here programs of 16 tokens are faster: there are not enough of 64 to fill the GPU


@dataclass(frozen=True)
class WriteTables:
    """What the write kernel needs of one layer's calibration.

    Attributes:
        mean: float32 (2, heads, D), keys and values
        matrix: T in the run dtype, (2, heads, D, D)
        gains: decode-side stretch of keys and values
        kept: for keys and values, the rank of the magnitude that min-max clips to, or None for least squares
        step, vectors: of the keys' turning mean (see `turning`), if there is one
    """

    mean: torch.Tensor
    matrix: torch.Tensor
    gains: tuple[float, float] = (1.0, 1.0)
    kept: tuple[int | None, int | None] = (None, None)
    step: torch.Tensor | None = None
    vectors: torch.Tensor | None = None

    @classmethod
    def of(cls, key: RowCodec, value: RowCodec, dtype: torch.dtype) -> "WriteTables":
        """Tables for a run in `dtype`. Keys that have a metric get least-squares codes, to be encoded again."""
        transforms = key.transform, value.transform

        def rank(codec: RowCodec) -> int | None:
            head_size = codec.transform.mean.shape[-1]
            return min(int(codec.clip * head_size), head_size - 1) if codec.encoder == "minmax" else None

        return cls(
            torch.stack([transform.mean for transform in transforms]).float(),
            torch.stack([transform.matrix for transform in transforms]).to(dtype),
            (key.first_gain, value.first_gain),
            (rank(key), rank(value)),
            *wave_tables(key.transform.turning),
        )


@triton.jit(do_not_specialize=["tokens"])
def _write(
    key,
    value,
    pages,
    rows,
    words,
    transformed,
    position,
    slot_mapping,
    hot_slot_mapping,
    saturated,
    mean,
    step,
    vectors,
    matrix,
    tokens,
    key_gain,
    value_gain,
    key_token,
    key_head,
    value_token,
    value_head,
    page_block,
    page_head,
    row_slot,
    row_head,
    word_slot,
    word_head,
    D: tl.constexpr,
    P: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    META: tl.constexpr,
    META_BYTES: tl.constexpr,
    UNITS_PAD: tl.constexpr,
    KEY_KEPT: tl.constexpr,
    VALUE_KEPT: tl.constexpr,
    KEYS_LATER: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """grid (tiles, heads, 2): TOKENS rows of keys (2nd axis 0) or values (1) of one head."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    h = tl.program_id(1)
    which = tl.program_id(2)
    heads = tl.num_programs(1)
    here = t < tokens
    release(RELEASES)
    t = t.to(tl.int64)
    SIZE: tl.constexpr = D // GROUPS
    WIDTH: tl.constexpr = 8 * UNITS_PAD
    channel, real = channels(D, UNITS_PAD)
    x = key + h * key_head
    token_stride = key_token
    gain = key_gain
    max_scale = _MAX_KEY_SCALE + 0.0
    first = FIRST_STEP[KEY_BITS - 2]
    top = top_code(KEY_BITS)
    if which == 1:
        x = value + h * value_head
        token_stride = value_token
        gain = value_gain
        max_scale = _MAX_VALUE_SCALE + 0.0
        if KEY_BITS != VALUE_BITS:
            first = FIRST_STEP[VALUE_BITS - 2]
            top = top_code(VALUE_BITS)

    if DEPTH:
        wave = waves(step, tl.load(position + t, mask=here, other=0).to(tl.int32), DEPTH)
    weights = matrix + (which * heads + h) * (D * D)
    y = tl.zeros([TOKENS, WIDTH], tl.float32)
    for start in tl.static_range(0, D, K):
        k = start + tl.arange(0, K)
        raw = tl.load(x + t[:, None] * token_stride + k[None, :], mask=here[:, None], other=0.0)
        centred = raw.to(tl.float32) - tl.load(mean + (which * heads + h) * D + k)[None, :]
        if DEPTH and which == 0:
            nothing = tl.zeros([TOKENS, K], tl.float32)
            centred -= add_waves(nothing, wave, load_vectors(vectors, h, k, heads, D, DEPTH))
        high = centred.to(key.dtype.element_ty)
        rest = centred - high.to(tl.float32)
        rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # high is inf or NaN, which says it all
        w = tl.load(weights + k[:, None] * D + channel[None, :], mask=real[None, :], other=0.0)
        y = product(high, w, y)
        y = product(rest.to(key.dtype.element_ty), w, y)
    y = y.to(rows.dtype.element_ty).to(tl.float32)
    bounded = sanitised(y)
    bad = changed(y, bounded)

    slot = tl.load(slot_mapping + t, mask=here, other=-1)
    ok = slot >= 0
    hot = tl.load(hot_slot_mapping + t, mask=here, other=-1)
    kept = hot >= 0
    pool_slot = hot // P
    copy = rows + pool_slot * row_slot + h * row_head + (which * P + hot % P) * D
    tl.store(copy[:, None] + channel[None, :], bounded.to(rows.dtype.element_ty), mask=kept[:, None] & real[None, :])
    if KEYS_LATER and which == 0:
        out = transformed + (t * heads + h) * D
        tl.store(out[:, None] + channel[None, :], y.to(rows.dtype.element_ty), mask=ok[:, None] & real[None, :])
        return  # the encoder sanitises, and counts

    grouped = tl.reshape(bounded, (TOKENS, GROUPS, WIDTH // GROUPS))
    in_group = tl.reshape(real, (1, GROUPS, WIDTH // GROUPS))
    if KEY_KEPT is None and VALUE_KEPT is None:
        codes, scale, offset, average = encode_ls(grouped, in_group, first, top, SIZE)
    elif KEY_KEPT is not None and VALUE_KEPT is not None:
        either = tl.where(which == 0, KEY_KEPT, VALUE_KEPT)
        codes, scale, offset, average = encode_minmax(grouped, in_group, either, top, SIZE)
    elif which == (0 if VALUE_KEPT is None else 1):
        only: tl.constexpr = KEY_KEPT if VALUE_KEPT is None else VALUE_KEPT
        codes, scale, offset, average = encode_minmax(grouped, in_group, only, top, SIZE)
    else:
        codes, scale, offset, average = encode_ls(grouped, in_group, first, top, SIZE)
    code_mean = tl.sum(codes, 2, keep_dims=True) / SIZE
    constant, meta, over = finish(code_mean, scale, offset, average, gain, max_scale)
    codes = tl.where(constant, 0.0, codes).to(tl.int32)
    codes = tl.reshape(codes, (TOKENS, WIDTH))
    meta = tl.sum(meta, 2)  # the last axis is 1
    overflow = tl.max(tl.max(over.to(tl.int32), 2), 1)
    page = pages + slot // P * page_block + h * page_head
    # units of each kind have a name of their own: a variable has one type in both branches
    if KEY_BITS == VALUE_BITS:
        units = packed(codes, UNITS_PAD, KEY_BITS)
        store_rows(page, slot % P, units, meta, ok, which, D, P, GROUPS, KEY_BITS, VALUE_CODES, META, META_BYTES)
    elif which == 0:
        key_units = packed(codes, UNITS_PAD, KEY_BITS)
        store_rows(page, slot % P, key_units, meta, ok, 0, D, P, GROUPS, KEY_BITS, VALUE_CODES, META, META_BYTES)
    else:
        value_units = packed(codes, UNITS_PAD, VALUE_BITS)
        store_rows(page, slot % P, value_units, meta, ok, 1, D, P, GROUPS, VALUE_BITS, VALUE_CODES, META, META_BYTES)
    g = tl.arange(0, GROUPS)
    proof = words + pool_slot * word_slot + h * word_head + hot % P * (2 * GROUPS) + which * GROUPS
    tl.store(proof[:, None] + g[None, :], meta, mask=kept[:, None])
    count = tl.sum(tl.where(ok, bad | overflow, 0), 0)
    if count > 0:
        tl.atomic_add(saturated, count.to(tl.int64))


def dot_depth(head_size: int) -> int:
    """Channels of a row that one matrix product takes: the largest power of two up to 64 that divides D."""
    return min(64, head_size & -head_size)


def units_padded(layout: PageLayout) -> int:
    """16-bit units of a row, rounded up to a power of two."""
    return triton.next_power_of_2(layout.units)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    pool: HotPool,
    slot_mapping: torch.Tensor,
    hot_slot_mapping: torch.Tensor,
    tables: WriteTables,
    saturated: torch.Tensor,
    transformed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> None:
    """Store the new tokens of a step.

    Args:
        key, value: run dtype (tokens, heads, D), any strides with the last axis contiguous
        pages: uint8 (blocks, heads, >= head_bytes), the layer's pages, any block and head strides
        pool: the layer's copies
        slot_mapping: int64 (tokens,), block * P + offset, or -1 to skip the token
        hot_slot_mapping: int64 (tokens,), slot * P + offset, or -1 for no copy
        saturated: int64 (1,), increased by the rows in which something was not representable
        transformed: pool dtype (>= tokens, heads, D); if given, keys are only transformed, into this tensor and
            the pool, and encode_metric.encode_written has to follow
        position: int (tokens,), of each token in its request, at least where a key's mean turns with it
    """
    tokens, heads, head_size = key.shape
    rows, words = pool.rows, pool.words
    tile = 16 if tokens <= _FEW_TOKENS else 64
    _write[(triton.cdiv(tokens, tile), heads, 2)](
        key,
        value,
        pages,
        rows,
        words,
        transformed,
        position if tables.step is not None else None,
        slot_mapping,
        hot_slot_mapping,
        saturated,
        tables.mean,
        tables.step,
        tables.vectors,
        tables.matrix,
        tokens,
        tables.gains[0],
        tables.gains[1],
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.stride(0),
        pages.stride(1),
        rows.stride(0),
        rows.stride(1),
        words.stride(0),
        words.stride(1),
        D=head_size,
        P=layout.block_size,
        GROUPS=layout.groups,
        KEY_BITS=layout.key_bits,
        VALUE_BITS=layout.value_bits,
        VALUE_CODES=layout.value_codes_offset,
        META=layout.meta_offset,
        META_BYTES=layout.meta_bytes,
        UNITS_PAD=units_padded(layout),
        KEY_KEPT=tables.kept[0],
        VALUE_KEPT=tables.kept[1],
        KEYS_LATER=transformed is not None,
        DEPTH=depth(tables.step is not None),
        TOKENS=tile,
        K=dot_depth(head_size),
        RELEASES=supported(key.device),
        num_warps=4 if head_size <= 128 else 8,
    )
