# mypy: disable-error-code="no-untyped-def"
"""SlotTable.allocate and SlotTable.map_copies on the GPU, in two launches and one, without a sync.

The first launch plans: its program 0 goes over the candidates of all requests several times (lowest rank of each
block, how many blocks each rank adds, which have a slot), the others find out which slots hold any copy.
The second gives slots away: each slot counts the slots that go before it, and takes the missing block of that number.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_oscar.errors import PoolError
from vllm_oscar.hot_pool import EMPTY, FLOOR, FREE, IN_FLIGHT, SINK, UNNEEDED, WINDOW, SlotTable
from vllm_oscar.kernels.copies import in_contract

_FLOOR = tl.constexpr(FLOOR)
_UNNEEDED = tl.constexpr(UNNEEDED)
_FREE, _EMPTY, _IN_FLIGHT = tl.constexpr(FREE), tl.constexpr(EMPTY), tl.constexpr(IN_FLIGHT)
_WINDOW, _SINK = tl.constexpr(WINDOW), tl.constexpr(SINK)
_NOBODY = tl.constexpr(2**31 - 1)
_AGES = tl.constexpr(1 << 28)  # a slot's key is kind * _AGES + how recently it was needed
_COUNTED = 1 << 18  # pairs of a candidate and a rank that the planning program counts at a time
_SLOTS = tl.constexpr(64)  # of one program, when slots are looked at
_SCAN = tl.constexpr(256)  # slots compared with at a time
_TOKENS = tl.constexpr(256)  # of one program of the mapping


@dataclass(frozen=True)
class SlotScratch:
    """Buffers between the launches, for one table. Neutral between steps: the plan resets what it touched.

    Attributes:
        blocks: int32 (3, blocks + 1): lowest rank, first candidate, whether it is a sink
        missing: int32 (2, slots): blocks that need a slot, and whether they are sinks
        count: int32 (1,), how many are missing
        keys: int32 (slots,), what decides who gives its slot away first
        filled: uint8 (slots,), whether the slot holds any copy
    """

    blocks: torch.Tensor
    missing: torch.Tensor
    count: torch.Tensor
    keys: torch.Tensor
    filled: torch.Tensor

    @classmethod
    def of(cls, table: SlotTable) -> "SlotScratch":
        device, slots = table.limits.device, table.num_slots
        blocks = torch.empty((3, table.slot_of_block.shape[0]), dtype=torch.int32, device=device)
        for row, neutral in zip(blocks, (UNNEEDED, _NOBODY.value, 0), strict=True):
            row.fill_(neutral)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(blocks, zeros(2, slots), zeros(1), zeros(slots), zeros(slots, dtype=torch.uint8))


@triton.jit
def _candidate(
    i, total, block_table, seq_lens, query_start_loc, table_stride, columns, num_blocks, threshold,
    SINK: tl.constexpr, WINDOW: tl.constexpr, P: tl.constexpr, SLIDING_WINDOW: tl.constexpr,
):  # fmt: skip
    """SlotTable._needs for candidates i: block, rank, is_sink. Rank _UNNEEDED where there is nothing to do."""
    SINK_BLOCKS: tl.constexpr = (SINK + P - 1) // P
    DEPTH: tl.constexpr = (WINDOW + P - 2) // P
    TAIL_BLOCKS: tl.constexpr = DEPTH + 1
    PER_REQUEST: tl.constexpr = SINK_BLOCKS + 2 * TAIL_BLOCKS
    request = i // PER_REQUEST
    k = i % PER_REQUEST
    there = i < total
    after = tl.load(seq_lens + request, mask=there, other=0)
    query = tl.load(query_start_loc + request + 1, mask=there, other=0)
    query -= tl.load(query_start_loc + request, mask=there, other=0)
    before = after - query
    tail = k - SINK_BLOCKS
    end_of = tl.where(tail < TAIL_BLOCKS, before, after)
    last = tl.where(end_of > 0, (end_of - 1) // P, -1)  # rounded down
    logical = tl.where(k < SINK_BLOCKS, k, last - tail % TAIL_BLOCKS)
    start = logical * P
    end = start + P
    exists = there & (logical >= 0) & (start < after)

    reading = tl.where(start < before, before + 1 - tl.minimum(end - 1, before - 1), _UNNEEDED)
    writing = tl.where(end > before, after + 1 - tl.minimum(end - 1, after - 1), _UNNEEDED)
    reach = tl.minimum(reading, writing)
    seen = exists
    if SLIDING_WINDOW:
        seen = seen & (reach <= SLIDING_WINDOW)
    is_sink = seen & (start < SINK)
    rank = tl.where(is_sink, DEPTH + logical, _UNNEEDED)
    rank = tl.where(seen & (reach <= WINDOW), tl.minimum(rank, (reach + P - 2) // P), rank)
    floor = is_sink & (logical == 0)
    floor = floor | (exists & (after <= end)) | (exists & (query <= threshold) & (end > before))
    rank = tl.where(floor, _FLOOR, rank)
    column = tl.minimum(tl.maximum(logical, 0), columns - 1)
    block = tl.load(block_table + request.to(tl.int64) * table_stride + column, mask=exists, other=0)
    valid = exists & (block > 0) & (block < num_blocks)
    return tl.where(valid, block, 0), tl.where(valid, rank, _UNNEEDED), is_sink & valid


@triton.jit(do_not_specialize=["total", "table_stride", "columns"])
def _plan(
    block_table, seq_lens, query_start_loc, slot_of_block, block_of_slot, last_step, is_sink, limits, shrunk_steps,
    step_count, blocks, missing, count, keys, filled, written,
    total, table_stride, columns, num_blocks, num_slots, slots_per_step, in_flight, threshold,
    SINK: tl.constexpr, WINDOW: tl.constexpr, P: tl.constexpr, SLIDING_WINDOW: tl.constexpr, DEPTH: tl.constexpr,
    LEVELS: tl.constexpr, LEVELS_PAD: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """grid (1 + slot tiles)."""
    if tl.program_id(0) > 0:
        s = (tl.program_id(0) - 1) * _SLOTS + tl.arange(0, _SLOTS)
        there = s < num_slots
        at = written + s[:, None] * P + tl.arange(0, P)[None, :]
        copies = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
        tl.store(filled + s, tl.max(copies, 1).to(tl.uint8), mask=there)
        return

    step = tl.load(step_count) + 1
    lowest = blocks
    first = blocks + (num_blocks + 1)
    sink_block = first + (num_blocks + 1)
    for base in tl.range(0, total, CANDIDATES, num_stages=1):
        i = base + tl.arange(0, CANDIDATES)
        block, rank, sink = _candidate(
            i, total, block_table, seq_lens, query_start_loc, table_stride, columns, num_blocks, threshold,
            SINK, WINDOW, P, SLIDING_WINDOW,
        )  # fmt: skip
        wanted = rank < _UNNEEDED
        tl.atomic_min(lowest + block, rank, mask=wanted)
        tl.atomic_min(first + block, i, mask=wanted)
        tl.atomic_max(sink_block + block, 1, mask=sink)
    tl.debug_barrier()

    # blocks of each rank; what atomics wrote is read past the L1 cache
    level = tl.arange(0, LEVELS_PAD)
    blocks_of_rank = tl.zeros([LEVELS_PAD], tl.int32)
    for base in tl.range(0, total, CANDIDATES, num_stages=1):
        i = base + tl.arange(0, CANDIDATES)
        block, rank, sink = _candidate(
            i, total, block_table, seq_lens, query_start_loc, table_stride, columns, num_blocks, threshold,
            SINK, WINDOW, P, SLIDING_WINDOW,
        )  # fmt: skip
        distinct = (rank < _UNNEEDED) & (tl.load(first + block, cache_modifier=".cg") == i)
        rank = tl.load(lowest + block, cache_modifier=".cg")
        blocks_of_rank += tl.sum((distinct[:, None] & (rank[:, None] == level[None, :])).to(tl.int32), 0)
    fits = (tl.cumsum(blocks_of_rank, 0) <= slots_per_step) & (level < LEVELS)
    granted = tl.sum(fits.to(tl.int32), 0) - 1  # the last rank that fits
    tl.store(limits, tl.minimum((1 + tl.maximum(granted - DEPTH, 0)) * P, SINK))
    tl.store(limits + 1, tl.minimum(1 + granted * P, WINDOW))
    tl.store(shrunk_steps, tl.load(shrunk_steps) + tl.where(granted < LEVELS - 1, 1, 0))
    tl.store(step_count, step)

    # needed blocks with a slot keep it, the others are listed in the candidates' order
    listed = tl.zeros([], tl.int32)
    for base in tl.range(0, total, CANDIDATES, num_stages=1):
        i = base + tl.arange(0, CANDIDATES)
        block, rank, sink = _candidate(
            i, total, block_table, seq_lens, query_start_loc, table_stride, columns, num_blocks, threshold,
            SINK, WINDOW, P, SLIDING_WINDOW,
        )  # fmt: skip
        distinct = (rank < _UNNEEDED) & (tl.load(first + block, cache_modifier=".cg") == i)
        needed = distinct & (tl.load(lowest + block, cache_modifier=".cg") <= granted)
        sinks = tl.load(sink_block + block, cache_modifier=".cg")
        slot = tl.load(slot_of_block + block, mask=needed, other=-1)
        kept = slot >= 0
        tl.store(last_step + slot, step, mask=kept)
        tl.store(is_sink + slot, sinks.to(tl.uint8), mask=kept)
        absent = needed & (slot < 0)
        number = listed + tl.cumsum(absent.to(tl.int32), 0) - 1
        tl.store(missing + number, block, mask=absent)
        tl.store(missing + num_slots + number, sinks, mask=absent)
        listed += tl.sum(absent.to(tl.int32), 0)
    tl.store(count, listed)
    tl.debug_barrier()

    for base in tl.range(0, total, CANDIDATES, num_stages=1):
        i = base + tl.arange(0, CANDIDATES)
        block, rank, sink = _candidate(
            i, total, block_table, seq_lens, query_start_loc, table_stride, columns, num_blocks, threshold,
            SINK, WINDOW, P, SLIDING_WINDOW,
        )  # fmt: skip
        wanted = rank < _UNNEEDED
        tl.store(lowest + block, _UNNEEDED, mask=wanted)
        tl.store(first + block, _NOBODY, mask=wanted)
        tl.store(sink_block + block, 0, mask=wanted)
    for base in tl.range(0, num_slots, CANDIDATES, num_stages=1):
        s = base + tl.arange(0, CANDIDATES)
        there = s < num_slots
        used = tl.load(last_step + s, mask=there, other=0, cache_modifier=".cg")
        sink = tl.load(is_sink + s, mask=there, other=0, cache_modifier=".cg") > 0
        owned = tl.load(block_of_slot + s, mask=there, other=-1) >= 0
        kind = tl.where(step - used < in_flight, _IN_FLIGHT, tl.where(sink, _SINK, _WINDOW))
        kind = tl.where(owned, kind, _FREE)
        recent = tl.maximum(_AGES - 1 - (step - used), 0)
        tl.store(keys + s, kind * _AGES + recent, mask=there)


@triton.jit
def _keys(s, num_slots, keys, filled):
    """Keys of slots s: by kind, then by age; less goes first."""
    there = s < num_slots
    key = tl.load(keys + s, mask=there, other=(_IN_FLIGHT + 1) * _AGES)
    kind = key // _AGES
    empty = (tl.load(filled + s, mask=there, other=1) == 0) & ((kind == _WINDOW) | (kind == _SINK))
    return tl.where(empty, key - (kind - _EMPTY) * _AGES, key)


@triton.jit
def _assign(
    slot_of_block, block_of_slot, written, last_step, is_sink, evictions, step_count, missing, count, keys, filled,
    num_slots, P: tl.constexpr,
):  # fmt: skip
    """grid (slot tiles): the slot that k others go before takes the k-th missing block."""
    wanted = tl.load(count)
    if wanted == 0:
        return
    s = tl.program_id(0) * _SLOTS + tl.arange(0, _SLOTS)
    key = _keys(s, num_slots, keys, filled)
    if tl.min(key, 0) >= _IN_FLIGHT * _AGES:
        return
    before = tl.zeros([_SLOTS], tl.int32)
    for base in tl.range(0, num_slots, _SCAN):
        other = base + tl.arange(0, _SCAN)
        other_key = _keys(other, num_slots, keys, filled)
        goes_first = other_key[None, :] < key[:, None]
        goes_first = goes_first | ((other_key[None, :] == key[:, None]) & (other[None, :] < s[:, None]))
        before += tl.sum(goes_first.to(tl.int32), 1)
    taken = (before < wanted) & (s < num_slots)
    block = tl.load(missing + before, mask=taken, other=0)
    old = tl.load(block_of_slot + s, mask=taken, other=-1)
    evicted = taken & (old >= 0)
    tl.store(slot_of_block + old, -1, mask=evicted)
    tl.store(slot_of_block + block, s, mask=taken)
    tl.store(block_of_slot + s, block, mask=taken)
    at = written + s[:, None] * P + tl.arange(0, P)[None, :]
    tl.store(at, tl.zeros([_SLOTS, P], tl.uint8), mask=taken[:, None])
    tl.store(last_step + s, tl.load(step_count), mask=taken)
    tl.store(is_sink + s, tl.load(missing + num_slots + before, mask=taken, other=0).to(tl.uint8), mask=taken)
    tl.atomic_add(evictions, tl.sum(evicted.to(tl.int64), 0))


def allocate(
    table: SlotTable,
    scratch: SlotScratch,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    decode_threshold: int,
) -> None:
    """SlotTable.allocate."""
    contract = table.contract
    requests = seq_lens.shape[0]
    slots = table.num_slots
    levels_pad = triton.next_power_of_2(contract.levels)
    is_sink = table.is_sink.view(torch.uint8)
    _plan[(1 + triton.cdiv(slots, _SLOTS.value),)](
        block_table, seq_lens, query_start_loc, table.slot_of_block, table.block_of_slot, table.last_step, is_sink,
        table.limits, table.shrunk_steps, table.step, scratch.blocks, scratch.missing, scratch.count, scratch.keys,
        scratch.filled, table.written,
        requests * contract.slots_per_request, block_table.stride(0), block_table.shape[1],
        table.slot_of_block.shape[0] - 1, slots, table.slots_per_step, table.in_flight, decode_threshold,
        SINK=contract.sink, WINDOW=contract.window, P=contract.block_size, SLIDING_WINDOW=table.sliding_window or 0,
        DEPTH=contract.depth, LEVELS=contract.levels, LEVELS_PAD=levels_pad,
        CANDIDATES=min(1024, _COUNTED // levels_pad), num_warps=8,
    )  # fmt: skip
    _assign[(triton.cdiv(slots, _SLOTS.value),)](
        table.slot_of_block, table.block_of_slot, table.written, table.last_step, is_sink, table.evictions, table.step,
        scratch.missing, scratch.count, scratch.keys, scratch.filled, slots, P=contract.block_size, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "requests", "halvings"])
def _map_copies(
    slot_mapping, query_start_loc, seq_lens, slot_of_block, written, limits, out, positions, tokens, requests, halvings,
    threshold, P: tl.constexpr,
):  # fmt: skip
    """grid (token tiles)."""
    t = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    there = t < tokens
    low = tl.zeros([_TOKENS], tl.int32)  # the last request that starts at or before the token lies in [low, high)
    high = tl.full([_TOKENS], 0, tl.int32) + requests
    for _ in tl.range(0, halvings, num_stages=1):
        middle = (low + high) // 2
        starts = tl.load(query_start_loc + middle) <= t
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, tl.maximum(middle, low + 1))
    start = tl.load(query_start_loc + low)
    query = tl.load(query_start_loc + low + 1) - start
    there = there & (t < start + query)
    after = tl.load(seq_lens + low)
    before = after - query
    position = before + t - start
    if positions is not None:
        tl.store(positions + t, position, mask=t < tokens)
    hot = in_contract(position, after, limits) | (query <= threshold)
    place = tl.load(slot_mapping + t, mask=there, other=-1)
    slot = tl.load(slot_of_block + place // P, mask=place >= 0, other=-1)
    copy = slot.to(tl.int64) * P + place % P
    tl.store(written + copy, hot.to(tl.uint8), mask=slot >= 0)
    tl.store(out + t, tl.where(hot & (slot >= 0), copy, -1), mask=t < tokens)


def map_copies(
    table: SlotTable,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    decode_threshold: int,
    out: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> None:
    """SlotTable.map_copies; positions follow from where each request's queries end.

    Args:
        slot_mapping: int64 (tokens,)
        query_start_loc: int32 (requests + 1,); seq_lens: int32 (requests,), tokens after the step
        decode_threshold: longest query that reads its own tokens from the pool
        out: int64 (>= tokens,); the first `tokens` are written
        positions: int32 (>= tokens,), likewise, with each token's position in its request; padding gets any

    Raises:
        PoolError: there are more tokens than a buffer has room for.
    """
    tokens, requests = slot_mapping.shape[0], seq_lens.shape[0]
    room = min(buffer.shape[0] for buffer in (out, positions) if buffer is not None)
    if tokens > room:
        raise PoolError(f"a step of {tokens} tokens, and room to map {room}: this is a bug, please report it")
    _map_copies[(triton.cdiv(tokens, _TOKENS.value),)](
        slot_mapping, query_start_loc, seq_lens, table.slot_of_block, table.written, table.limits, out, positions,
        tokens, requests, requests.bit_length(), decode_threshold, P=table.contract.block_size, num_warps=4,
    )  # fmt: skip
