# mypy: disable-error-code="no-untyped-def"
"""The metric encoder for keys: rounding with compensation and coordinate descent, 32 rows to a one-warp program.

Two uses. `encode_written` follows the write kernel in a prefill and encodes what it transformed. `reencode` runs once
a decode step, for all layers: decoding writes least-squares codes (the metric encoder's chain of dependent steps
would cost a decode step more than it is worth), and before tokens leave the window they are encoded again, from
their BF16 copies, codes, scale and offset, with the proof in the slot.

Rows are scaled by the largest of their groups' first scales, so that residuals fit fp16. Channels are taken in blocks
of 16: the products with the residuals of all other blocks are one tensor-core product; inside a block, every thread
has a row of its own and goes through the 16 channels one after the other. Between the two forms, and for want of
registers, rows live transposed in a workspace that stays in the L1 and L2 caches.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_oscar.hot_pool import HotPool, SlotTable
from vllm_oscar.kernels.encode import (
    changed,
    channels,
    finish,
    least_squares,
    packed,
    reciprocal,
    sanitised,
    store_rows,
    to_nearest,
)
from vllm_oscar.kernels.write import dot_depth, units_padded
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.quantizer import _RIDGE, FP16_MAX, METRIC_PASSES, Metric

_MAX_KEY_SCALE = tl.constexpr(FP16_MAX)
_RIDGE_ = tl.constexpr(_RIDGE)
_METRIC_PASSES = tl.constexpr(METRIC_PASSES)
BLOCK = tl.constexpr(16)  # channels
ROWS = tl.constexpr(32)  # of a program; one to a thread
BATCH = 32  # tokens that `reencode` takes at a time
_PROGRAMS_PER_SM = 6


@dataclass(frozen=True)
class MetricTables:
    """A Metric as the kernel reads it.

    Attributes:
        products: float16 (3, heads, D, D): compensation, descent, G
        inside: float32 (2, heads, D/16, 16, 16): the diagonal blocks of compensation and descent
        ones: float32 (heads, groups, D): rows of G summed over each group
        total: float32 (heads, groups, groups): `ones` summed over each group
    """

    products: torch.Tensor
    inside: torch.Tensor
    ones: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, metric: Metric, layout: PageLayout) -> "MetricTables":
        heads, size = metric.g.shape[:2]
        blocks = size // BLOCK.value
        both = torch.stack([metric.compensation, metric.descent])
        tiles = both.reshape(2, heads, blocks, BLOCK.value, blocks, BLOCK.value)
        inside = tiles.diagonal(dim1=2, dim2=4).movedim(-1, 2)
        ones = metric.g.reshape(heads, layout.groups, layout.group_size, size).sum(2)
        total = ones.reshape(heads, layout.groups, layout.groups, layout.group_size).sum(-1)
        products = torch.stack([metric.compensation, metric.descent, metric.g]).half()
        return cls(products, inside.float().contiguous(), ones.float().contiguous(), total.float().contiguous())


def workspace(layout: PageLayout, device: torch.device) -> torch.Tensor:
    """Scratch of the encoder's programs, float32; one for all layers."""
    programs = _programs(device)
    # the row, the block's targets, and as fp16 the residuals and codes
    return torch.empty((programs, ROWS.value * (2 * layout.head_size + BLOCK.value)), device=device)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _pick(values, index, which):
    """Column `which` of values (n, columns), (n,)."""
    return tl.sum(tl.where(index[None, :] == which, values, 0.0), 1)


@triton.jit
def _against(table, rows, block, D: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr):
    """Products of channels LOW .. LOW + SIZE of transposed fp16 rows with the block's columns of a (D, D) table."""
    n = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK) + block * BLOCK
    out = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(LOW, LOW + SIZE, K):
        k = start + tl.arange(0, K)
        left = tl.load(rows + k[None, :] * ROWS + n[:, None])
        out = tl.dot(left, tl.load(table + k[:, None] * D + column[None, :]), out)
    return out


@triton.jit
def _one_pass(
    row, target, residual, codes, table, inside, scale, offset, D: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr
):
    """One pass over the channels in order, in place on residuals and codes. scale, offset (ROWS, GROUPS)."""
    n = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    g = tl.arange(0, GROUPS)
    for block in tl.range(0, D // BLOCK, num_stages=1):  # not pipelined: it would read ahead of what the loop writes
        sums = _against(table, residual, block, D, 0, D, K)
        tl.store(target + c[None, :] * ROWS + n[:, None], sums)
        tl.debug_barrier()
        group = block * BLOCK // (D // GROUPS)
        s = _pick(scale, g, group)
        o = _pick(offset, g, group)
        inverse = reciprocal(s)
        shift = -o * inverse
        changes = ()
        for j in tl.static_range(BLOCK):
            at = n + (block * BLOCK + j) * ROWS
            y = tl.load(row + at)
            old = tl.load(residual + at).to(tl.float32)
            wanted = tl.load(target + (n + j * ROWS)) + y
            for i in tl.static_range(j):
                wanted += changes[i] * tl.load(inside + (block * BLOCK + i) * BLOCK + j)
            code = to_nearest(wanted * inverse + shift)
            new = (y - o) - code * s
            changes = changes + (new - old,)
            tl.store(residual + at, new.to(tl.float16))
            tl.store(codes + at, code.to(tl.float16))
        tl.debug_barrier()


@triton.jit
def _refit(
    row, residual, codes, g_table, ones, total, scale, offset, D: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr
):
    """Scale and offset (ROWS, GROUPS) that minimise the error in the metric for these codes: quantizer._metric_refit."""
    n = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    g = tl.arange(0, GROUPS)
    SIZE: tl.constexpr = D // GROUPS
    KG: tl.constexpr = K if K < SIZE else SIZE
    unknown = tl.arange(0, 2 * GROUPS)  # changes of the scales, then of the offsets
    r = unknown[None, :, None]
    q = unknown[None, None, :]
    normal = tl.zeros([ROWS, 2 * GROUPS, 2 * GROUPS], tl.float32)
    right = tl.zeros([ROWS, 2 * GROUPS], tl.float32)
    for a in tl.static_range(GROUPS):
        from_codes = tl.zeros([ROWS], tl.float32)
        from_ones = tl.zeros([ROWS], tl.float32)
        for b in tl.static_range(GROUPS):
            cc = tl.zeros([ROWS, BLOCK], tl.float32)
            c1 = tl.zeros([ROWS, BLOCK], tl.float32)
            ce = tl.zeros([ROWS, BLOCK], tl.float32)
            oe = tl.zeros([ROWS, BLOCK], tl.float32)
            for block in tl.range(b * SIZE // BLOCK, (b + 1) * SIZE // BLOCK, num_stages=1):
                weighted = _against(g_table, codes, block, D, a * SIZE, SIZE, KG)
                column = c + block * BLOCK
                at = column[None, :] * ROWS + n[:, None]
                e = tl.load(residual + at).to(tl.float32)
                cc += weighted * tl.load(codes + at).to(tl.float32)
                c1 += weighted
                ce += weighted * e
                oe += tl.load(ones + a * D + column)[None, :] * e
            from_codes += tl.sum(ce, 1)
            from_ones += tl.sum(oe, 1)
            normal += tl.where((r == a) & (q == b), tl.sum(cc, 1)[:, None, None], 0.0)
            mixed = ((r == a) & (q == GROUPS + b)) | ((r == GROUPS + b) & (q == a))
            normal += tl.where(mixed, tl.sum(c1, 1)[:, None, None], 0.0)
            both_ones = (r == GROUPS + a) & (q == GROUPS + b)
            normal += tl.where(both_ones, tl.load(total + a * GROUPS + b), 0.0)
        right += tl.where(unknown[None, :] == a, from_codes[:, None], 0.0)
        right += tl.where(unknown[None, :] == GROUPS + a, from_ones[:, None], 0.0)

    trace = tl.sum(tl.sum(tl.where(r == q, normal, 0.0), 2), 1)
    normal += tl.where(r == q, (_RIDGE_ / (2 * GROUPS)) * trace[:, None, None], 0.0)
    for k in tl.static_range(2 * GROUPS):  # Gauss-Jordan; positive definite, so without a search for pivots
        pivot_row = tl.sum(tl.where(r == k, normal, 0.0), 1)
        inverse = 1.0 / _pick(pivot_row, unknown, k)
        pivot_row = pivot_row * inverse[:, None]
        pivot_right = _pick(right, unknown, k) * inverse
        factor = tl.where(unknown[None, :] == k, 0.0, tl.sum(tl.where(q == k, normal, 0.0), 2))
        normal = tl.where(r == k, pivot_row[:, None, :], normal - factor[:, :, None] * pivot_row[:, None, :])
        right = tl.where(unknown[None, :] == k, pivot_right[:, None], right - factor * pivot_right[:, None])

    to_scale = g[None, :, None] == unknown[None, None, :]
    to_offset = (GROUPS + g)[None, :, None] == unknown[None, None, :]
    new_scale = scale + tl.sum(tl.where(to_scale, right[:, None, :], 0.0), 2)
    new_offset = offset + tl.sum(tl.where(to_offset, right[:, None, :], 0.0), 2)
    finite = (tl.abs(new_scale) < float("inf")) & (tl.abs(new_offset) < float("inf"))
    sound = (tl.min((finite & (new_scale > 0.25 * scale)).to(tl.int32), 1) > 0)[:, None]
    return tl.where(sound, new_scale, scale), tl.where(sound, new_offset, offset)


@triton.jit
def _encode(
    source,
    ok,
    products,
    inside,
    ones,
    total,
    scratch,
    gain,
    table_stride,
    inside_stride,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS_PAD: tl.constexpr,
    K: tl.constexpr,
):
    """Rows at `source` (ROWS pointers) -> units, meta words, saturated (ROWS,). Tables are those of one head."""
    n = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    g = tl.arange(0, GROUPS)
    SIZE: tl.constexpr = D // GROUPS
    WIDTH: tl.constexpr = 8 * UNITS_PAD
    channel, real = channels(D, UNITS_PAD)
    in_group = tl.reshape(real, (1, GROUPS, WIDTH // GROUPS))
    row = scratch
    target = scratch + ROWS * D
    residual = (target + ROWS * BLOCK).to(tl.pointer_type(tl.float16))
    codes = residual + ROWS * D

    y = tl.load(source[:, None] + channel[None, :], mask=ok[:, None] & real[None, :], other=0.0).to(tl.float32)
    bounded = sanitised(y)
    bad = changed(y, bounded)
    first_scale, first_offset, mean = least_squares(tl.reshape(bounded, (ROWS, GROUPS, WIDTH // GROUPS)), in_group, SIZE)
    unit = tl.max(tl.max(first_scale, 2), 1)
    unit = tl.where(unit > 0, unit, 1.0)
    per_unit = 1.0 / unit
    scale = tl.sum(first_scale, 2) * per_unit[:, None]  # the last axis is 1
    offset = tl.sum(first_offset, 2) * per_unit[:, None]
    transposed = channel[None, :] * ROWS + n[:, None]
    tl.store(row + transposed, bounded * per_unit[:, None], mask=real[None, :])
    tl.store(residual + transposed, tl.zeros([ROWS, WIDTH], tl.float16), mask=real[None, :])
    tl.debug_barrier()

    for number in tl.range(0, _METRIC_PASSES + 1, num_stages=1):
        table = tl.minimum(number, 1)
        _one_pass(
            row, target, residual, codes, products + table * table_stride, inside + table * inside_stride,
            scale, offset, D, GROUPS, K,
        )  # fmt: skip
        scale, offset = _refit(
            row, residual, codes, products + 2 * table_stride, ones, total, scale, offset, D, GROUPS, K
        )
        if number < _METRIC_PASSES:
            for block in tl.range(0, D // BLOCK, num_stages=1):
                group = block * BLOCK // SIZE
                at = (c + block * BLOCK)[None, :] * ROWS + n[:, None]
                fitted = tl.load(codes + at).to(tl.float32) * _pick(scale, g, group)[:, None] + _pick(offset, g, group)[:, None]
                tl.store(residual + at, (tl.load(row + at) - fitted).to(tl.float16))
            tl.debug_barrier()

    kept = tl.load(codes + transposed, mask=real[None, :], other=0.0).to(tl.float32)
    kept, meta, overflow = finish(
        tl.reshape(kept, (ROWS, GROUPS, WIDTH // GROUPS)),
        (scale * unit[:, None])[:, :, None],
        (offset * unit[:, None])[:, :, None],
        mean,
        in_group,
        gain,
        _MAX_KEY_SCALE + 0.0,
        SIZE,
    )
    tl.debug_barrier()  # the workspace may be used again from here
    return packed(tl.reshape(kept, (ROWS, WIDTH)), UNITS_PAD), meta, bad | overflow


@triton.jit
def _store(
    pages, words, slot, hot, ok, kept, h, units, meta, page_block, page_head, word_slot, word_head,
    D: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, VALUE_CODES: tl.constexpr, META: tl.constexpr,
    META_BYTES: tl.constexpr,
):  # fmt: skip
    """Encoded keys to their pages, their words to the pool as well."""
    page = pages + slot // P * page_block + h * page_head
    store_rows(page, slot % P, units, meta, ok, 0, D, GROUPS, VALUE_CODES, META, META_BYTES)
    g = tl.arange(0, GROUPS)
    proof = words + hot // P * word_slot + h * word_head + hot % P * (2 * GROUPS)
    tl.store(proof[:, None] + g[None, :], meta, mask=kept[:, None])


@triton.jit
def _encode_written(
    transformed, pages, words, slot_mapping, hot_slot_mapping, saturated, products, inside, ones, total, scratch,
    tokens, heads, gain, page_block, page_head, word_slot, word_head,
    D: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, VALUE_CODES: tl.constexpr, META: tl.constexpr,
    META_BYTES: tl.constexpr, UNITS_PAD: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """grid (programs): each takes every programs-th tile of (32 tokens, head)."""
    scratch += tl.program_id(0) * (ROWS * (2 * D + BLOCK))
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, ROWS) * heads, tl.num_programs(0), num_stages=1):
        h = tile % heads
        t = tile // heads * ROWS + tl.arange(0, ROWS)
        slot = tl.load(slot_mapping + t, mask=t < tokens, other=-1)
        hot = tl.load(hot_slot_mapping + t, mask=t < tokens, other=-1)
        ok = slot >= 0
        units, meta, bad = _encode(
            transformed + (t.to(tl.int64) * heads + h) * D, ok, products + h * (D * D), inside + h * (D * BLOCK),
            ones + h * (GROUPS * D), total + h * (GROUPS * GROUPS), scratch, gain,
            heads * (D * D), heads * (D * BLOCK), D, GROUPS, UNITS_PAD, K,
        )  # fmt: skip
        _store(
            pages, words, slot, hot, ok, ok & (hot >= 0), h, units, meta, page_block, page_head, word_slot, word_head,
            D, P, GROUPS, VALUE_CODES, META, META_BYTES,
        )  # fmt: skip
        count = tl.sum(tl.where(ok, bad, 0), 0)
        if count > 0:
            tl.atomic_add(saturated, count.to(tl.int64))


def encode_written(
    transformed: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    pool: HotPool,
    slot_mapping: torch.Tensor,
    hot_slot_mapping: torch.Tensor,
    tables: MetricTables,
    gain: float,
    scratch: torch.Tensor,
    saturated: torch.Tensor,
) -> None:
    """Encode the keys that `write` put into `transformed`; arguments as there, scratch from `workspace`."""
    tokens = slot_mapping.shape[0]
    heads = transformed.shape[1]
    tiles = triton.cdiv(tokens, ROWS.value) * heads
    _encode_written[(min(tiles, scratch.shape[0]),)](
        transformed,
        pages,
        pool.words,
        slot_mapping,
        hot_slot_mapping,
        saturated,
        tables.products,
        tables.inside,
        tables.ones,
        tables.total,
        scratch,
        tokens,
        heads,
        gain,
        pages.stride(0),
        pages.stride(1),
        pool.words.stride(0),
        pool.words.stride(1),
        D=layout.head_size,
        P=layout.block_size,
        GROUPS=layout.groups,
        VALUE_CODES=layout.value_codes_offset,
        META=layout.meta_offset,
        META_BYTES=layout.meta_bytes,
        UNITS_PAD=units_padded(layout),
        K=dot_depth(layout.head_size),
        num_warps=1,
    )
