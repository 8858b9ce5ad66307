# mypy: disable-error-code="no-untyped-def"
"""A prefill's stored tokens, back as raw keys and values in a workspace of bounded size.

Any attention kernel can then read them next to the step's own keys and values, which are copied in behind them: the
product with B and the mean are done, so that soft cap, sliding window and softmax see what they always see. Restoring
costs a token once a step and KV head; attention costs it once for each of thousands of queries.

`plan` cuts a step into calls whose keys fit the workspace, on the host, once for all layers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_oscar.hot_pool import HotPool, SlotTable
from vllm_oscar.kernels.copies import find, in_contract
from vllm_oscar.kernels.encode import sanitised
from vllm_oscar.kernels.product import product
from vllm_oscar.kernels.reads import ReadCounter, add_reads
from vllm_oscar.kernels.turning import add_waves, depth, load_vectors, wave_tables, waves
from vllm_oscar.kernels.unpack import in_words
from vllm_oscar.kernels.write import dot_depth
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.rotation import Transform

_TILE = tl.constexpr(64)  # tokens of a program
_FIELDS = tl.constexpr(8)


@dataclass(frozen=True)
class Call:
    """One attention call: queries of consecutive requests and some of their keys.

    Attributes:
        first_query, last_query: the step's tokens [first, last) that are asked
        keys: rows of the workspace that are filled; behind them there may be anything, also NaN
        max_query, max_key: longest of a request in this call
        aligned: whether each request's keys end with its last query, as causal attention of other libraries assumes;
            if not, the keys are older than all queries
        continues: whether an earlier call has the queries' attention to older keys
        query_starts, key_starts: int32 (requests + 1,), from first_query and from the workspace's first row
        shifts: int32 (requests,); query i sees keys j <= i + shift (and j > i + shift - sliding window)
        tiles: int32 (tiles, 8) for `restore`: row in the workspace, request, its first position, tokens,
            tokens before the step, first token in the step's keys; twice nothing, for alignment
    """

    first_query: int
    last_query: int
    keys: int
    max_query: int
    max_key: int
    aligned: bool
    continues: bool
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    shifts: torch.Tensor
    tiles: torch.Tensor


class _Piece(NamedTuple):
    request: int
    query_start: int
    query: int
    before: int
    low: int  # positions [low, high) of the keys
    high: int
    continues: bool


def plan(
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    first: int,
    capacity: int,
    sliding_window: int | None,
    device: torch.device,
) -> list[Call]:
    """The calls of a step's prefills, brought to the device in one copy.

    Args:
        seq_lens: tokens after the step of every request
        query_start_loc: (requests + 1,)
        first: the first request that prefills; all behind it do
        capacity: rows of the workspace, at least the longest query
    """
    calls: list[list[_Piece]] = []
    room = 0  # rows that the last call leaves
    for request in range(first, len(seq_lens)):
        start, end = query_start_loc[request : request + 2]
        after, query = seq_lens[request], end - start
        if not query:
            continue
        before = after - query
        low = 0 if sliding_window is None else max(0, before + 1 - sliding_window)
        cuts = [low]
        while after - cuts[-1] > capacity:  # older keys in calls of their own
            cuts.append(min(cuts[-1] + capacity, before))
        pieces = [
            _Piece(request, start, query, before, *keys, keys[0] > low) for keys in itertools.pairwise([*cuts, after])
        ]
        if after - low <= room:
            calls[-1] += pieces
            room -= after - low
        else:
            calls += [[piece] for piece in pieces]
            room = capacity - (after - low)  # none behind a request of several calls
    return _on_device(calls, device) if calls else []


def _on_device(calls: Sequence[Sequence[_Piece]], device: torch.device) -> list[Call]:
    tables: list[list[int]] = []
    for pieces in calls:
        tables.append(list(itertools.accumulate((p.query for p in pieces), initial=0)))
        tables.append(list(itertools.accumulate((p.high - p.low for p in pieces), initial=0)))
        tables.append([p.before - p.low for p in pieces])
    # kernels are compiled anew for pointers that are not multiples of 16 bytes
    padded = [table + [0] * (-len(table) % 4) for table in tables]
    tiles, tiles_of_calls = _tiles(calls, tables[1::3])
    numbers = torch.cat([torch.tensor(list(itertools.chain(*padded)), dtype=torch.int32), tiles.flatten()])
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    *parts, tiles = numbers.split([*(len(table) for table in padded), tiles.numel()])
    return [
        Call(
            first_query=pieces[0].query_start,
            last_query=pieces[-1].query_start + pieces[-1].query,
            keys=sum(p.high - p.low for p in pieces),
            max_query=max(p.query for p in pieces),
            max_key=max(p.high - p.low for p in pieces),
            aligned=pieces[0].high > pieces[0].before,
            continues=pieces[0].continues,
            query_starts=parts[3 * index][: len(pieces) + 1],
            key_starts=parts[3 * index + 1][: len(pieces) + 1],
            shifts=parts[3 * index + 2][: len(pieces)],
            tiles=own,
        )
        for index, (pieces, own) in enumerate(
            zip(calls, tiles.view(-1, _FIELDS.value).split(tiles_of_calls), strict=True)
        )
    ]


def _tiles(calls: Sequence[Sequence[_Piece]], key_starts: Sequence[list[int]]) -> tuple[torch.Tensor, list[int]]:
    """`Call.tiles` of all calls, int32 (tiles, 8), and how many each has: of a long history, ten thousands."""
    rows = [
        (row, p.request, p.low, p.high, p.before, p.query_start, 0, 0)
        for pieces, starts in zip(calls, key_starts, strict=True)
        for p, row in zip(pieces, starts, strict=False)
    ]
    counts = [-(-(row[3] - row[2]) // _TILE.value) for row in rows]
    first = torch.tensor(list(itertools.accumulate(counts, initial=0)), dtype=torch.int32)
    of_piece = torch.repeat_interleave(torch.tensor(counts))
    tiles = torch.tensor(rows, dtype=torch.int32)[of_piece]
    ahead = _TILE.value * (torch.arange(len(tiles), dtype=torch.int32) - first[of_piece])
    tiles[:, 0] += ahead
    tiles[:, 2] += ahead
    tiles[:, 3] = (tiles[:, 3] - tiles[:, 2]).clamp_(max=_TILE.value)
    counts_left = iter(counts)
    return tiles, [sum(itertools.islice(counts_left, len(pieces))) for pieces in calls]


@dataclass(frozen=True)
class RestoreTables:
    """What restoring needs of one layer's calibration: x = y B + m.

    Attributes:
        mean: float32 (2, heads, D), keys and values
        inverse: B in the run dtype, (2, heads, D, D)
        step, vectors: of the keys' turning mean (see `turning`), if there is one
    """

    mean: torch.Tensor
    inverse: torch.Tensor
    step: torch.Tensor | None = None
    vectors: torch.Tensor | None = None

    @classmethod
    def of(cls, key: Transform, value: Transform, dtype: torch.dtype) -> "RestoreTables":
        mean, inverse = torch.stack([key.mean, value.mean]), torch.stack([key.inverse, value.inverse])
        return cls(mean.float(), inverse.to(dtype), *wave_tables(key.turning))


@triton.jit
def _codes(plane, offset, d, here, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr):
    """Codes of channels d of tokens at `offset` in a block, fp32. plane: pointers to the block's first plane."""
    UNITS: tl.constexpr = D // 8
    FIRST: tl.constexpr = in_words(BITS)
    row = offset * (D // 4)
    j = (d // UNITS)[None, :]
    if BITS == 4:
        row = row[:, None] + j // FIRST * (P * (D // 4))
        units = tl.load((plane[:, None] + row).to(tl.pointer_type(tl.int16)) + (d % UNITS)[None, :], mask=here, other=0)
    else:
        words = (plane + row).to(tl.pointer_type(tl.int16))
        units = tl.load(words[:, None] + (d % UNITS)[None, :], mask=here, other=0)
    units = units.to(tl.int32)
    if BITS == 3:
        rest = plane + P * (D // 4) + offset * (D // 8)
        rest = tl.load(rest[:, None] + (d % UNITS)[None, :], mask=here & (j >= FIRST), other=0).to(tl.int32)
        units = tl.where(j < FIRST, units, rest | ((units >> 7) & 0x100))
    return ((units >> (j % FIRST * BITS)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit(do_not_specialize=["table_stride"])
def _restore(
    tiles, key, value, pages, rows, words, slot_of_block, written, limits, block_table, mean, step, vectors, inverse,
    out, reads, key_token, key_head, value_token, value_head, page_block, page_head, row_slot, row_head, word_slot,
    word_head, table_stride, out_which, out_token, out_head,
    D: tl.constexpr, D_PAD: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, VALUE_CODES: tl.constexpr,
    META: tl.constexpr, META_BYTES: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, LAYERS: tl.constexpr,
    SINK: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """grid (tiles, heads, 2): keys or values of up to _TILE tokens of one head."""
    h = tl.program_id(1)
    which = tl.program_id(2)
    heads = tl.num_programs(1)
    tile = tiles + tl.program_id(0) * _FIELDS
    row = tl.load(tile)
    request = tl.load(tile + 1)
    position = tl.load(tile + 2)
    count = tl.load(tile + 3)
    before = tl.load(tile + 4)
    query_start = tl.load(tile + 5)
    i = tl.arange(0, _TILE)
    at = position + i
    stored = (i < count) & (at < before)
    fresh = (i < count) & (at >= before)

    block = tl.load(block_table + request.to(tl.int64) * table_stride + at // P, mask=stored, other=0).to(tl.int64)
    offset = at % P
    page = pages + block * page_block + h * page_head
    d = tl.arange(0, D_PAD)
    real = d < D
    SIZE: tl.constexpr = D // GROUPS
    here = stored[:, None] & real[None, :]
    if KEY_BITS == VALUE_BITS:
        code = _codes(page + which * VALUE_CODES, offset, d, here, D, P, KEY_BITS)
    elif which == 0:
        code = _codes(page, offset, d, here, D, P, KEY_BITS)
    else:
        code = _codes(page + VALUE_CODES, offset, d, here, D, P, VALUE_BITS)

    slot = find(block, offset, stored & in_contract(at, before, limits), slot_of_block, written, P)
    hot = slot >= 0
    slot = slot.to(tl.int64)
    meta = (page + META + offset * META_BYTES).to(tl.pointer_type(tl.int32))
    proof = words + slot * word_slot + h * word_head + offset * (2 * GROUPS)
    y = code
    for g in tl.static_range(2 * GROUPS):
        word = tl.load(meta + g, mask=stored, other=0)
        hot = hot & (tl.load(proof + g, mask=hot, other=-1) == word)
        if g // GROUPS == which:
            scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            shift = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            mine = (d // SIZE == g % GROUPS)[None, :]
            y = tl.where(mine, code * scale[:, None] + shift[:, None], y)
    if LAYERS and which == 0:
        sink = at < SINK
        read = stored & (block > 0)  # requests that are made up to warm up have nothing but vLLM's null block
        add_reads(
            reads, tl.sum((read & hot).to(tl.int32), 0), tl.sum(read.to(tl.int32), 0),
            tl.sum((read & hot & sink).to(tl.int32), 0), tl.sum((read & sink).to(tl.int32), 0), LAYERS,
        )  # fmt: skip
    copy = rows + slot * row_slot + h * row_head + (which * P + offset) * D
    kept = tl.load(copy[:, None] + d[None, :], mask=hot[:, None] & real[None, :], other=0.0).to(tl.float32)
    # INT2 of a row at the bound may lie beyond it, which FP16 does not hold
    y = sanitised(tl.where(real[None, :], tl.where(hot[:, None], kept, y), 0.0)).to(out.dtype.element_ty)

    raw = key + h * key_head
    raw_token = key_token
    if which == 1:
        raw = value + h * value_head
        raw_token = value_token
    raw += (query_start + at - before).to(tl.int64)[:, None] * raw_token
    head = which * heads + h
    to = out + which * out_which + (row + i).to(tl.int64)[:, None] * out_token + h * out_head
    if DEPTH:
        wave = waves(step, at, DEPTH)
    for start in tl.static_range(0, D, N):
        column = start + tl.arange(0, N)
        b = tl.load(inverse + head * (D * D) + d[:, None] * D + column[None, :], mask=real[:, None], other=0.0)
        x = product(y, b, tl.zeros([_TILE, N], tl.float32))
        m = tl.load(mean + head * D + column)[None, :]
        if which == 1 or not CENTRED:
            x += m
        if DEPTH and which == 0:
            x = add_waves(x, wave, load_vectors(vectors, h, column, heads, D, DEPTH))
        own = tl.load(raw + column[None, :], mask=fresh[:, None], other=0.0)
        if which == 0 and CENTRED:
            own = (own.to(tl.float32) - m).to(out.dtype.element_ty)
        x = tl.where(fresh[:, None], own, sanitised(x).to(out.dtype.element_ty))
        tl.store(to + column[None, :], x, mask=(i < count)[:, None])


def restore(
    call: Call,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    pool: HotPool,
    table: SlotTable,
    block_table: torch.Tensor,
    tables: RestoreTables,
    out: torch.Tensor,
    reads: ReadCounter | None = None,
    centred: bool = False,
) -> None:
    """Fill the workspace for a call.

    Args:
        key, value: run dtype (tokens, heads, D), the step's own, any strides with the last axis contiguous
        pages: uint8 (blocks, heads, >= head_bytes)
        block_table: int32 (requests, blocks), the whole batch's
        out: run dtype (2, capacity, heads, D), keys and values
        reads: where the layer counts
        centred: keys are given without m, which adds the same to all logits of a query. Where m is hundreds of times
            larger than what keys differ by, as with the biases of Qwen2, rounding k to BF16 loses as much as INT2 does
    """
    heads, size = key.shape[1:]
    rows, words = pool.rows, pool.words
    _restore[(call.tiles.shape[0], heads, 2)](
        call.tiles, key, value, pages, rows, words, table.slot_of_block, table.written, table.limits, block_table,
        tables.mean, tables.step, tables.vectors, tables.inverse, out,
        reads.counts if reads else None,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), pages.stride(0), pages.stride(1),
        rows.stride(0), rows.stride(1), words.stride(0), words.stride(1), block_table.stride(0),
        out.stride(0), out.stride(1), out.stride(2),
        D=size, D_PAD=triton.next_power_of_2(size), P=layout.block_size, GROUPS=layout.groups,
        VALUE_CODES=layout.value_codes_offset, META=layout.meta_offset, META_BYTES=layout.meta_bytes,
        KEY_BITS=layout.key_bits, VALUE_BITS=layout.value_bits, DEPTH=depth(tables.step is not None), N=dot_depth(size),
        LAYERS=reads.layers if reads else 0, SINK=table.contract.sink, CENTRED=centred,
        num_warps=4 if size <= 128 else 8,
    )  # fmt: skip
