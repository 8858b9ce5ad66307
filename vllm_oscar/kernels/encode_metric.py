# mypy: disable-error-code="no-untyped-def,var-annotated,unreachable"
"""The metric encoder for keys: rounding with compensation and coordinate descent, 32 rows to a one-warp program.

Two uses. `encode_written` follows the write kernel in a prefill and encodes what it transformed. `reencode` runs now
and then before a step, for all layers: decoding writes least-squares codes (the metric encoder's chain of dependent
steps would cost a decode step more than it is worth), and as soon as 32 tokens of a request are there they are encoded
again, from their BF16 copies, codes, scale and offset, with the proof in the slot.

Rows are scaled by the largest of their groups' first scales, so that residuals fit fp16. Channels are taken in blocks
of 16: the products with the residuals of all other blocks are one tensor-core product; inside a block, every thread
has a row of its own and goes through the 16 channels one after the other. Between the two forms, and for want of
registers, rows live transposed in a workspace that stays in the L1 and L2 caches.
"""

from collections import deque
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_oscar.hot_pool import HotPool, SlotTable
from vllm_oscar.kernels.copies import find, proven
from vllm_oscar.kernels.encode import (
    FIRST_STEP,
    finish,
    planes,
    reciprocal,
    refitted,
    sanitised,
    store_rows,
    to_nearest,
    top_code,
)
from vllm_oscar.kernels.unpack import in_words
from vllm_oscar.kernels.write import dot_depth, units_padded
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.quantizer import _RIDGE, FP16_MAX, LS_REFITS, METRIC_PASSES, Metric

_MAX_KEY_SCALE = tl.constexpr(FP16_MAX)
_RIDGE_ = tl.constexpr(_RIDGE)
_METRIC_PASSES = tl.constexpr(METRIC_PASSES)
_LS_REFITS = tl.constexpr(LS_REFITS)
BLOCK = tl.constexpr(16)  # channels
ROWS = tl.constexpr(32)  # of a program; one to a thread
BATCH = ROWS.value  # tokens that `reencode` takes at a time
_PROGRAMS_PER_SM = 6
_EVERY = 8  # steps of a request from one call of `reencode` to the next


@dataclass(frozen=True)
class MetricTables:
    """A Metric as the kernel reads it.

    Attributes:
        products: float16 (3, heads, D, D), transposed: compensation, descent, G
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
        products = torch.stack([metric.compensation, metric.descent, metric.g]).mT.half().contiguous()
        return cls(products, inside.float().contiguous(), ones.float().contiguous(), total.float().contiguous())


def workspace(layout: PageLayout, device: torch.device) -> torch.Tensor:
    """Scratch of the encoder's programs, float32; one for all layers."""
    programs = _programs(device)
    # the row, the block's targets, and as fp16 the residuals and codes
    size = ROWS.value * (2 * layout.head_size + BLOCK.value)
    return torch.empty((programs, size), dtype=torch.float32, device=device)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _group(values, index, which):
    """Row `which` of values (groups, ROWS), (ROWS,)."""
    return tl.sum(tl.where(index[:, None] == which, values, 0.0), 0)


@triton.jit
def _added(values, index, which, more):
    """values (groups, ROWS) with `more` (ROWS,) added to row `which`."""
    return values + tl.where(index[:, None] == which, more[None, :], 0.0)


@triton.jit
def _place(first, CHANNELS: tl.constexpr):
    """Where CHANNELS channels from `first` on are in transposed rows, (CHANNELS, ROWS)."""
    return (tl.arange(0, CHANNELS) + first)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]


@triton.jit
def _against(table, rows, first, low, D: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr):
    """Rows first .. + CHANNELS of a transposed (D, D) table times channels low .. + SIZE of fp16 rows."""
    n = tl.arange(0, ROWS)
    column = tl.arange(0, CHANNELS) + first
    out = tl.zeros([CHANNELS, ROWS], tl.float32)
    for start in tl.static_range(0, SIZE, K):
        k = low + start + tl.arange(0, K)
        left = tl.load(table + column[:, None] * D + k[None, :])
        out = tl.dot(left, tl.load(rows + k[:, None] * ROWS + n[None, :]), out)
    return out


@triton.jit
def _first_fit(row, mean, D: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr):
    """quantizer._initial: scale and offset, each (GROUPS, ROWS), from the rows and their means."""
    g = tl.arange(0, GROUPS)
    SIZE: tl.constexpr = D // GROUPS
    energy = tl.zeros([GROUPS, ROWS], tl.float32)
    for first in tl.range(0, D, CHUNK, num_stages=1):
        group = first // SIZE
        deviation = tl.load(row + _place(first, CHUNK)) - _group(mean, g, group)[None, :]
        energy = _added(energy, g, group, tl.sum(deviation * deviation, 0))
    top = top_code(BITS)
    scale = FIRST_STEP[BITS - 2] * tl.sqrt(energy / SIZE)
    offset = -0.5 * top * scale  # relative to the mean
    for _ in tl.range(0, _LS_REFITS, num_stages=1):
        total = tl.zeros([GROUPS, ROWS], tl.float32)
        squares = tl.zeros([GROUPS, ROWS], tl.float32)
        with_rows = tl.zeros([GROUPS, ROWS], tl.float32)
        inverse = reciprocal(scale)
        for first in tl.range(0, D, CHUNK, num_stages=1):
            group = first // SIZE
            deviation = tl.load(row + _place(first, CHUNK)) - _group(mean, g, group)[None, :]
            code = to_nearest((deviation - _group(offset, g, group)[None, :]) * _group(inverse, g, group)[None, :], top)
            total = _added(total, g, group, tl.sum(code, 0))
            squares = _added(squares, g, group, tl.sum(code * code, 0))
            with_rows = _added(with_rows, g, group, tl.sum(code * deviation, 0))
        scale, offset = refitted(total, squares, with_rows, scale, SIZE)
    return scale, mean + offset


@triton.jit
def _one_pass(
    row, target, residual, codes, table, inside, scale, offset,
    D: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One pass over the channels in order, in place on residuals and codes. scale, offset (GROUPS, ROWS)."""
    n = tl.arange(0, ROWS)
    g = tl.arange(0, GROUPS)
    for first in tl.range(0, D, BLOCK, num_stages=1):  # not pipelined: it would read ahead of what the loop writes
        sums = _against(table, residual, first, 0, D, BLOCK, D, K)
        tl.store(target + _place(0, BLOCK), sums + tl.load(row + _place(first, BLOCK)))
        tl.debug_barrier()
        group = first // (D // GROUPS)
        s = _group(scale, g, group)
        o = _group(offset, g, group)
        inverse = reciprocal(s)
        shift = -o * inverse
        # first all loads and last all stores: a load behind a store would wait for it
        wanted = ()
        rest = ()
        old = ()
        for j in tl.static_range(BLOCK):
            at = n + (first + j) * ROWS
            wanted = wanted + (tl.load(target + (n + j * ROWS)),)
            rest = rest + (tl.load(row + at) - o,)
            old = old + (tl.load(residual + at).to(tl.float32),)
        code = ()
        new = ()
        change = ()
        for j in tl.static_range(BLOCK):
            t = wanted[j]
            for i in tl.static_range(j):
                t += change[i] * tl.load(inside + (first + i) * BLOCK + j)
            code = code + (to_nearest(t * inverse + shift, top_code(BITS)),)
            new = new + (rest[j] - code[j] * s,)
            change = change + (new[j] - old[j],)
        for j in tl.static_range(BLOCK):
            at = n + (first + j) * ROWS
            tl.store(residual + at, new[j].to(tl.float16))
            tl.store(codes + at, code[j].to(tl.float16))
        tl.debug_barrier()


@triton.jit
def _refit(
    residual, codes, g_table, ones, total, scale, offset, D: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr
):
    """quantizer._metric_refit: scale, offset (GROUPS, ROWS) that minimise the error in the metric for these codes."""
    g = tl.arange(0, GROUPS)
    SIZE: tl.constexpr = D // GROUPS
    unknown = tl.arange(0, 2 * GROUPS)  # changes of the scales, then of the offsets
    r = unknown[:, None, None]
    q = unknown[None, :, None]
    normal = tl.zeros([2 * GROUPS, 2 * GROUPS, ROWS], tl.float32)
    right = tl.zeros([2 * GROUPS, ROWS], tl.float32)
    for a in tl.range(0, GROUPS, num_stages=1):
        for first in tl.range(0, D, CHUNK, num_stages=1):
            b = first // SIZE
            weighted = _against(g_table, codes, first, a * SIZE, D, CHUNK, SIZE, CHUNK)
            e = tl.load(residual + _place(first, CHUNK)).to(tl.float32)
            code = tl.load(codes + _place(first, CHUNK)).to(tl.float32)
            summed = tl.load(ones + a * D + (tl.arange(0, CHUNK) + first))[:, None] * e
            right = _added(right, unknown, a, tl.sum(weighted * e, 0))
            right = _added(right, unknown, GROUPS + a, tl.sum(summed, 0))
            both = tl.sum(weighted * code, 0)[None, None, :]
            normal += tl.where((r == a) & (q == b), both, 0.0)
            mixed = ((r == a) & (q == GROUPS + b)) | ((r == GROUPS + b) & (q == a))
            normal += tl.where(mixed, tl.sum(weighted, 0)[None, None, :], 0.0)
    i = unknown % GROUPS
    constants = tl.load(total + i[:, None] * GROUPS + i[None, :])[:, :, None]
    normal = tl.where((r >= GROUPS) & (q >= GROUPS), constants, normal)

    trace = tl.sum(tl.sum(tl.where(r == q, normal, 0.0), 1), 0)
    normal += tl.where(r == q, (_RIDGE_ / (2 * GROUPS)) * trace[None, None, :], 0.0)
    for k in tl.range(0, 2 * GROUPS, num_stages=1):  # Gauss-Jordan; positive definite: no search for pivots
        pivot_row = tl.sum(tl.where(r == k, normal, 0.0), 0)
        inverse = 1.0 / _group(pivot_row, unknown, k)
        pivot_row = pivot_row * inverse[None, :]
        pivot_right = _group(right, unknown, k) * inverse
        factor = tl.where(unknown[:, None] == k, 0.0, tl.sum(tl.where(q == k, normal, 0.0), 1))
        normal = tl.where(r == k, pivot_row[None, :, :], normal - factor[:, None, :] * pivot_row[None, :, :])
        right = tl.where(unknown[:, None] == k, pivot_right[None, :], right - factor * pivot_right[None, :])

    to_scale = g[:, None, None] == unknown[None, :, None]
    to_offset = (GROUPS + g)[:, None, None] == unknown[None, :, None]
    new_scale = scale + tl.sum(tl.where(to_scale, right[None, :, :], 0.0), 1)
    new_offset = offset + tl.sum(tl.where(to_offset, right[None, :, :], 0.0), 1)
    finite = (tl.abs(new_scale) < float("inf")) & (tl.abs(new_offset) < float("inf"))
    sound = (tl.min((finite & (new_scale > 0.25 * scale)).to(tl.int32), 0) > 0)[None, :]
    return tl.where(sound, new_scale, scale), tl.where(sound, new_offset, offset)


@triton.jit
def _encode(
    source, ok, products, inside, ones, total, scratch, gain, table_stride, inside_stride,
    D: tl.constexpr, GROUPS: tl.constexpr, UNITS_PAD: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Rows at `source` (ROWS pointers) -> units, meta words, saturated (ROWS,). Tables are those of one head."""
    n = tl.arange(0, ROWS)
    g = tl.arange(0, GROUPS)
    SIZE: tl.constexpr = D // GROUPS
    CHUNK: tl.constexpr = K if K < SIZE else SIZE  # channels at a time where their order does not matter
    row = scratch
    target = scratch + ROWS * D
    residual = (target + ROWS * BLOCK).to(tl.pointer_type(tl.float16))
    codes = residual + ROWS * D

    bad = tl.zeros([ROWS], tl.int32)
    sums = tl.zeros([GROUPS, ROWS], tl.float32)
    for first in tl.range(0, D, CHUNK, num_stages=1):
        channel = tl.arange(0, CHUNK) + first
        y = tl.load(source[None, :] + channel[:, None], mask=ok[None, :], other=0.0).to(tl.float32)
        bounded = sanitised(y)
        bad = bad | tl.max((bounded != y).to(tl.int32), 0)
        sums = _added(sums, g, first // SIZE, tl.sum(bounded, 0))
        tl.store(row + _place(first, CHUNK), bounded)
    tl.debug_barrier()
    mean = sums / SIZE
    first_scale, first_offset = _first_fit(row, mean, D, GROUPS, CHUNK, BITS)
    unit = tl.max(first_scale, 0)
    unit = tl.where(unit > 0, unit, 1.0)
    per_unit = 1.0 / unit
    scale = first_scale * per_unit[None, :]
    offset = first_offset * per_unit[None, :]
    for first in tl.range(0, D, CHUNK, num_stages=1):
        at = _place(first, CHUNK)
        tl.store(row + at, tl.load(row + at) * per_unit[None, :])
        tl.store(residual + at, tl.zeros([CHUNK, ROWS], tl.float16))
    tl.debug_barrier()

    for number in tl.range(0, _METRIC_PASSES + 1, num_stages=1):
        table = tl.minimum(number, 1)
        _one_pass(
            row, target, residual, codes, products + table * table_stride, inside + table * inside_stride,
            scale, offset, D, GROUPS, K, BITS,
        )  # fmt: skip
        scale, offset = _refit(
            residual, codes, products + 2 * table_stride, ones, total, scale, offset, D, GROUPS, CHUNK
        )
        if number < _METRIC_PASSES:
            for first in tl.range(0, D, CHUNK, num_stages=1):
                group = first // SIZE
                at = _place(first, CHUNK)
                code = tl.load(codes + at).to(tl.float32)
                fitted = code * _group(scale, g, group)[None, :] + _group(offset, g, group)[None, :]
                tl.store(residual + at, (tl.load(row + at) - fitted).to(tl.float16))
            tl.debug_barrier()

    sums = tl.zeros([GROUPS, ROWS], tl.float32)
    for first in tl.range(0, D, CHUNK, num_stages=1):
        code = tl.load(codes + _place(first, CHUNK)).to(tl.float32)
        sums = _added(sums, g, first // SIZE, tl.sum(code, 0))
    constant, meta, over = finish(
        sums / SIZE, scale * unit[None, :], offset * unit[None, :], mean, gain, _MAX_KEY_SCALE + 0.0
    )
    u = tl.arange(0, UNITS_PAD)
    FIRST: tl.constexpr = in_words(BITS)
    words = tl.zeros([UNITS_PAD, ROWS], tl.int32)
    rest = tl.zeros([UNITS_PAD, ROWS], tl.int32)
    for j in tl.range(0, 8, num_stages=1):
        channel = u + j * (D // 8)
        code = tl.load(codes + channel[:, None] * ROWS + n[None, :], mask=(u < D // 8)[:, None], other=0.0)
        zero = _group(constant.to(tl.float32), g, j * GROUPS // 8) > 0
        code = tl.where(zero[None, :], 0, code.to(tl.int32))
        if BITS == 2:
            words += code << (2 * j)
        else:
            code = code << (BITS * (j % FIRST))
            words += tl.where(j < FIRST, code, 0)
            rest += tl.where(j < FIRST, 0, code)
    tl.debug_barrier()  # the workspace may be used again from here
    units = planes(words, rest, BITS)
    transposed = (tl.trans(units[0]),)
    if BITS > 2:
        transposed = (tl.trans(units[0]), tl.trans(units[1]))
    return transposed, tl.trans(meta), bad | tl.max(over.to(tl.int32), 0)


@triton.jit
def _store(
    pages, words, slot, hot, ok, kept, h, units, meta, page_block, page_head, word_slot, word_head,
    D: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, META: tl.constexpr,
    META_BYTES: tl.constexpr,
):  # fmt: skip
    """Encoded keys to their pages, their words to the pool as well."""
    page = pages + slot // P * page_block + h * page_head
    store_rows(page, slot % P, units, meta, ok, 0, D, P, GROUPS, BITS, 0, META, META_BYTES)
    g = tl.arange(0, GROUPS)
    proof = words + hot // P * word_slot + h * word_head + hot % P * (2 * GROUPS)
    tl.store(proof[:, None] + g[None, :], meta, mask=kept[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _encode_written(
    transformed, pages, words, slot_mapping, hot_slot_mapping, saturated, products, inside, ones, total, scratch,
    tokens, heads, gain, page_block, page_head, word_slot, word_head,
    D: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, META: tl.constexpr,
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
            heads * (D * D), heads * (D * BLOCK), D, GROUPS, UNITS_PAD, K, BITS,
        )  # fmt: skip
        _store(
            pages, words, slot, hot, ok, ok & (hot >= 0), h, units, meta, page_block, page_head, word_slot, word_head,
            D, P, GROUPS, BITS, META, META_BYTES,
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
        BITS=layout.key_bits,
        META=layout.meta_offset,
        META_BYTES=layout.meta_bytes,
        UNITS_PAD=units_padded(layout),
        K=dot_depth(layout.head_size),
        num_warps=1,
    )


class Rounds:
    """In which steps to call `reencode`, and for how many tokens. The batches of a pipeline take turns, or one runs
    alone: any batch has a step among `in_flight` consecutive ones, so a round is as many, and the next comes `_EVERY`
    times as many steps later.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._step = 0
        # since the first step of the last round, as seen from the last step of this one
        self._queries: deque[int] = deque(maxlen=(_EVERY + 1) * in_flight - 1)

    def step(self, longest: int) -> int:
        """Called in every step.

        Args:
            longest: query that a decoding request may have in it

        Returns:
            `grown` of the call that is due in this step (at least 1: the first one compiles the kernel), or 0
        """
        due = self._step % (_EVERY * self._in_flight) < self._in_flight
        grown = max(1, sum(self._queries)) if due else 0
        self._step += 1
        self._queries.append(longest)
        return grown


@dataclass(frozen=True)
class ReencodeTable:
    """Layers of a KV-cache group that have the metric encoder and pages of one layout, for one launch.

    Attributes:
        layout: of their pages
        pointers: int64 (layers, 7): pages, pool rows, pool words, and a MetricTables' four tensors
        gains: float32 (layers,)
        page_strides, row_strides, word_strides: of a block or slot, and of a head
        heads, dtype: of the pools
    """

    layout: PageLayout
    pointers: torch.Tensor
    gains: torch.Tensor
    page_strides: tuple[int, int]
    row_strides: tuple[int, int]
    word_strides: tuple[int, int]
    heads: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        layout: PageLayout,
        pages: list[torch.Tensor],
        pools: list[HotPool],
        tables: list[MetricTables],
        gains: list[float],
    ) -> "ReencodeTable":
        """One entry a layer; all layers have the same shapes and strides. Whoever calls keeps the tensors alive."""
        entries = [
            [t.data_ptr() for t in (page, pool.rows, pool.words, m.products, m.inside, m.ones, m.total)]
            for page, pool, m in zip(pages, pools, tables, strict=True)
        ]
        device, pool = pages[0].device, pools[0]
        block, head = pages[0].stride()[:2]
        return cls(
            layout,
            torch.tensor(entries, dtype=torch.int64, device=device),
            torch.tensor(gains, dtype=torch.float32, device=device),
            (block, head),
            (pool.rows.stride(0), pool.rows.stride(1)),
            (pool.words.stride(0), pool.words.stride(1)),
            pool.rows.shape[1],
            pool.rows.dtype,
        )


@triton.jit
def _pointer(pointers, layer, which: tl.constexpr, dtype: tl.constexpr):
    return tl.multiple_of(tl.load(pointers + layer * 7 + which).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["items", "grown", "table_stride"])
def _reencode(
    pointers, gains, block_table, seq_lens, query_start_loc, slot_of_block, written, scratch,
    items, layers, heads, threshold, grown, table_stride,
    page_block, page_head, row_slot, row_head, word_slot, word_head,
    D: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, META: tl.constexpr,
    META_BYTES: tl.constexpr, UNITS_PAD: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """grid (programs): each takes every programs-th item of (request, which of its due layers, head)."""
    scratch += tl.program_id(0) * (ROWS * (2 * D + BLOCK))
    due = (layers + ROWS - 1) // ROWS * grown
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        h = item % heads
        nth = item // heads % due
        request = item // heads // due
        query = tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request)
        before = tl.load(seq_lens + request) - query
        end = before - nth % grown
        layer = end % ROWS + nth // grown * ROWS
        if (end > 0) & (query <= threshold) & (layer < layers):
            pages = _pointer(pointers, layer, 0, tl.uint8)
            rows = _pointer(pointers, layer, 1, ROW)
            words = _pointer(pointers, layer, 2, tl.int32)
            j = end - ROWS + tl.arange(0, ROWS)
            ok = j >= 0
            at = block_table + request.to(tl.int64) * table_stride + j // P
            block = tl.load(at, mask=ok, other=0).to(tl.int64)
            offset = j % P
            slot = find(block, offset, ok, slot_of_block, written, P).to(tl.int64)
            meta = (pages + block * page_block + h * page_head + META + offset * META_BYTES).to(
                tl.pointer_type(tl.int32)
            )
            proof = words + slot * word_slot + h * word_head + offset * (2 * GROUPS)
            ok = proven(meta, proof, slot >= 0, 2 * GROUPS)
            if tl.max(ok.to(tl.int32), 0) > 0:
                units, found, _ = _encode(
                    rows + slot * row_slot + h * row_head + offset * D, ok,
                    _pointer(pointers, layer, 3, tl.float16) + h * (D * D),
                    _pointer(pointers, layer, 4, tl.float32) + h * (D * BLOCK),
                    _pointer(pointers, layer, 5, tl.float32) + h * (GROUPS * D),
                    _pointer(pointers, layer, 6, tl.float32) + h * (GROUPS * GROUPS),
                    scratch, tl.load(gains + layer), heads * (D * D), heads * (D * BLOCK),
                    D, GROUPS, UNITS_PAD, K, BITS,
                )  # fmt: skip
                _store(
                    pages, words, block * P + offset, slot * P + offset, ok, ok, h, units, found, page_block,
                    page_head, word_slot, word_head, D, P, GROUPS, BITS, META, META_BYTES,
                )  # fmt: skip


def reencode(
    table: ReencodeTable,
    slots: SlotTable,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    decode_threshold: int,
    grown: int,
    scratch: torch.Tensor,
) -> None:
    """Before a step's forward: encode keys of decoding requests again, as long as they have copies.

    The tokens go in batches of 32; a layer's are complete when a request's tokens are its number modulo 32, so that a
    step completes those of about one layer in 32. The encoder takes as long for one row as for a thousand: whoever
    calls lets some steps pass between two calls (see `Rounds`). Only rows with a proven copy are touched.

    Args:
        block_table, seq_lens, query_start_loc: the step's, as for SlotTable.allocate
        grown: most tokens that a request got since the last call; batches that they completed are done
        scratch: see `workspace`
    """
    layers, layout = table.pointers.shape[0], table.layout
    items = seq_lens.shape[0] * triton.cdiv(layers, BATCH) * grown * table.heads
    _reencode[(min(items, scratch.shape[0]),)](
        table.pointers, table.gains, block_table, seq_lens, query_start_loc, slots.slot_of_block, slots.written,
        scratch, items, layers, table.heads, decode_threshold, grown, block_table.stride(0), *table.page_strides,
        *table.row_strides, *table.word_strides,
        D=layout.head_size, P=layout.block_size, GROUPS=layout.groups, BITS=layout.key_bits,
        META=layout.meta_offset, META_BYTES=layout.meta_bytes, UNITS_PAD=units_padded(layout),
        K=dot_depth(layout.head_size), ROW=tl.float16 if table.dtype == torch.float16 else tl.bfloat16, num_warps=1,
    )  # fmt: skip
