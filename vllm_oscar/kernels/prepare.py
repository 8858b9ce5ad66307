# mypy: disable-error-code="no-untyped-def"
"""What the decode kernel wants to know beforehand, in one launch: folded queries, and where each token's copy is.

Columns of a KV head are its (query, head) pairs, query-major, in tiles of N. For each sequence, KV head and tile

    folded  fp16 (D, N)             q B_K' * 2^k / weight(bits, j), channel d = u + (D/8) j; 2^k brings the largest
                                    magnitude of the tile to [2^13, 2^14)
    sums    fp32 (1 + N (groups+1)) the factor that turns scores of codes into logits in units of log 2; then per
                                    group the sum of q B_K' over that factor; then a q . m_K (soft cap only); then,
                                    where m_K turns, (16, N) more: a q . vectors over that factor (see turning)

and for each sequence and KV head

    copies  int32 (capacity,)       the slot that holds a proven copy of a token, or -1: first the tokens that may be
                                    sinks, then those from `origin` on, which may be in the window
"""

import torch
import triton
import triton.language as tl

from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.kernels.copies import find, in_contract, proven
from vllm_oscar.kernels.dependent import supported, wait
from vllm_oscar.kernels.reads import ReadCounter, add_reads
from vllm_oscar.kernels.segments import tile_tokens
from vllm_oscar.kernels.turning import depth, load_vectors
from vllm_oscar.kernels.unpack import POSITIONS, weight
from vllm_oscar.page_layout import PageLayout

_CHUNK = 32  # channels of the query that one step of the product takes


def sink_capacity(contract: HotContract, layout: PageLayout) -> int:
    """Entries of `copies` for sinks."""
    tile = tile_tokens(layout.head_size)
    return triton.cdiv(contract.sink, tile) * tile


def copies_capacity(contract: HotContract, layout: PageLayout, q_len: int) -> int:
    """Entries of `copies` of one sequence and KV head."""
    return sink_capacity(contract, layout) + contract.window + q_len + tile_tokens(layout.head_size)


@triton.jit
def window_origin(length, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, T: tl.constexpr):
    """A whole tile at or below every token that any window in force can reach, of up to Q_LEN queries."""
    return tl.maximum(length - Q_LEN + 1 - WINDOW, 0) // T * T


@triton.jit
def queries_of(starts, ragged, seq, real, Q_LEN: tl.constexpr):
    """First query of a sequence, and how many it has; of one that is not `real`, anything."""
    known = tl.where(real, ragged, 0) > 0
    begin = tl.load(starts + seq, mask=known, other=0)
    end = tl.load(starts + seq + 1, mask=known, other=0)
    return tl.where(known, begin, seq * Q_LEN), tl.where(known, end - begin, Q_LEN)


@triton.jit
def _fold(
    query, starts, ragged, inverse, mean, vectors, folded, sums, first, head, tile, seqs, scale,
    stride_token, stride_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, Q_LEN: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, GROUPS: tl.constexpr, SEQS: tl.constexpr, CONSTANT: tl.constexpr,
    CHUNK: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Queries of SEQS sequences from `first` on."""
    column = tl.arange(0, SEQS * N)
    seq = first + column // N
    pair = tile * N + column % N
    own, count = queries_of(starts, ragged, seq, seq < seqs, Q_LEN)
    used = (seq < seqs) & (pair < count * RATIO)
    row = query + (own + pair // RATIO).to(tl.int64) * stride_token
    row += (head * RATIO + pair % RATIO) * stride_head
    e = tl.arange(0, DP)
    acc = tl.zeros([DP, SEQS * N], tl.float32)
    constant = tl.zeros([SEQS * N], tl.float32)
    turning = tl.zeros([DEPTH if DEPTH else 1, SEQS * N], tl.float32)
    for start in range(0, D, CHUNK):
        d = start + tl.arange(0, CHUNK)
        q = tl.load(row[None, :] + d[:, None], mask=used[None, :] & (d < D)[:, None], other=0.0).to(tl.float16)
        inside = (e < D)[:, None] & (d < D)[None, :]
        b = tl.load(inverse + (head * D + e[:, None]) * D + d[None, :], mask=inside, other=0.0)
        acc = tl.dot(b, q, acc)
        if CONSTANT:
            m = tl.load(mean + head * D + d, mask=d < D, other=0.0)
            constant += tl.sum(q.to(tl.float32) * m[:, None], 0)
        if DEPTH:
            high, low = load_vectors(vectors, head, d, HEADS, D, DEPTH)
            turning = tl.dot(high, q, tl.dot(low, q, turning))

    largest = tl.max(tl.max(tl.reshape(tl.abs(acc), (DP, SEQS, N)), 2), 0)
    largest = tl.maximum(largest, 1e-20)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^floor(log2)
    per_column = tl.reshape(tl.broadcast_to((8192.0 / power)[:, None], (SEQS, N)), (SEQS * N,))
    by_weight = tl.full([DP], 1.0, tl.float32)
    for j in tl.static_range(POSITIONS):
        by_weight = tl.where(e // (D // POSITIONS) == j, 1.0 / weight(BITS, j), by_weight)
    place = (seq * HEADS + head) * TILES + tile
    out = folded + place.to(tl.int64)[None, :] * (D * N) + e[:, None] * N + (column % N)[None, :]
    stored = (acc * per_column[None, :] * by_weight[:, None]).to(tl.float16)
    tl.store(out, stored, mask=(e < D)[:, None] & (seq < seqs)[None, :])

    size: tl.constexpr = 1 + N * (GROUPS + 1 + DEPTH)
    each = first + tl.arange(0, SEQS)
    # codes come as code * weight * 2^-24, queries as q * 8192/power / weight
    log_scale = scale * 1.4426950408889634
    factor = power * (2048.0 * log_scale)
    tl.store(sums + ((each * HEADS + head) * TILES + tile) * size, factor, mask=each < seqs)
    sums += place * size + 1 + column % N
    for g in tl.static_range(GROUPS):
        total = tl.sum(tl.where((e // (D // GROUPS) == g)[:, None], acc, 0.0), 0)
        tl.store(sums + g * N, total * per_column * 5.9604644775390625e-08, mask=seq < seqs)  # log_scale / factor
    if CONSTANT:
        tl.store(sums + GROUPS * N, constant * log_scale, mask=seq < seqs)
    if DEPTH:
        at = sums[None, :] + (GROUPS + 1 + tl.arange(0, DEPTH))[:, None] * N
        tl.store(at, turning * (per_column * 5.9604644775390625e-08)[None, :], mask=(seq < seqs)[None, :])


@triton.jit
def _find_copies(
    pages32, words, slot_of_block, written, limits, table, length, before, copies, reads, first, head,
    page_block_stride, page_head_stride, words_slot_stride, words_head_stride,
    Q_LEN: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, META: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, CAPACITY: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, LAYERS: tl.constexpr,
    SINK: tl.constexpr, SLIDING_WINDOW: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Entries from `first` on of one sequence and head: a copy counts if the contract names its token and its words
    are the page's."""
    i = first + tl.arange(0, TOKENS)
    token = tl.where(i < SINKS, i, window_origin(length, Q_LEN, WINDOW, T) + i - SINKS)
    named = in_contract(token, before, limits) & (token < length) & (i < CAPACITY)
    block = tl.load(table + token // P, mask=named, other=0)
    slot = find(block, token % P, named, slot_of_block, written, P)
    off = token % P * (2 * GROUPS)
    page = pages32 + block.to(tl.int64) * page_block_stride + head.to(tl.int64) * page_head_stride + META // 4 + off
    proof = words + slot.to(tl.int64) * words_slot_stride + head * words_head_stride + off
    wait(launch_pdl)  # tables are of the step; words may have been written just now
    copied = proven(page, proof, slot >= 0, 2 * GROUPS)
    tl.store(copies + i, tl.where(copied, slot, -1), mask=i < CAPACITY)
    if LAYERS:
        start = 0
        if SLIDING_WINDOW:
            start = tl.maximum(before + 1 - SLIDING_WINDOW, 0)
        # requests that vLLM makes up, to warm up or to capture a graph, have nothing but its null block
        real = tl.load(table + tl.maximum(length - 1, 0) // P) > 0
        stored = tl.where(real & (first == 0), length - start, 0)
        sinks = tl.maximum(tl.minimum(stored, SINK - start), 0)
        once = (i < SINKS) | (token >= SINKS)  # tokens of both parts have an entry in each
        read = (real & copied & once & (token >= start)).to(tl.int32)
        copied_sinks = tl.where(token < SINK, read, 0)
        add_reads(reads, tl.sum(read, 0), stored, tl.sum(copied_sinks, 0), sinks, LAYERS)


@triton.jit(do_not_specialize=["ragged", "seqs", "table_stride"])
def _prepare(
    query, starts, ragged, inverse, mean, vectors, folded, sums, seqs, scale, stride_token, stride_head,
    pages32, words, slot_of_block, written, limits, block_table, seq_lens, copies, reads,
    page_block_stride, page_head_stride, words_slot_stride, words_head_stride, table_stride,
    HEADS: tl.constexpr, RATIO: tl.constexpr, Q_LEN: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, GROUPS: tl.constexpr, SEQS: tl.constexpr, CONSTANT: tl.constexpr,
    CHUNK: tl.constexpr, P: tl.constexpr, META: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    CAPACITY: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
    LAYERS: tl.constexpr, SINK: tl.constexpr, SLIDING_WINDOW: tl.constexpr, BITS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """The first programs fold, the others look for copies."""
    program, head = tl.program_id(0), tl.program_id(1)
    folding = tl.cdiv(seqs, SEQS) * TILES
    if program < folding:
        _fold(
            query, starts, ragged, inverse, mean, vectors, folded, sums, program // TILES * SEQS, head,
            program % TILES, seqs, scale, stride_token, stride_head, HEADS, RATIO, Q_LEN, TILES, N, D, DP, GROUPS, SEQS,
            CONSTANT, CHUNK, DEPTH, BITS,
        )  # fmt: skip
        wait(launch_pdl)
    else:
        chunks: tl.constexpr = (CAPACITY + TOKENS - 1) // TOKENS
        seq = (program - folding) // chunks
        length = tl.load(seq_lens + seq)
        _find_copies(
            pages32, words, slot_of_block, written, limits, block_table + seq.to(tl.int64) * table_stride,
            length, length - queries_of(starts, ragged, seq, seq >= 0, Q_LEN)[1],
            copies + (seq * HEADS + head) * CAPACITY, reads, (program - folding) % chunks * TOKENS, head,
            page_block_stride, page_head_stride, words_slot_stride, words_head_stride,
            Q_LEN, GROUPS, P, META, SINKS, WINDOW, CAPACITY, T, TOKENS, LAYERS, SINK, SLIDING_WINDOW,
            launch_pdl,
        )  # fmt: skip


def given_starts(query_starts: torch.Tensor | None, seq_lens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`starts` and `ragged` of the kernels, where batches of both kinds share compiled code: a pointer that is not
    followed, if all sequences have equally many queries."""
    return (seq_lens, 0) if query_starts is None else (query_starts, 1)


def shares(seqs: int, columns: int) -> tuple[int, int]:
    """Sequences that a folding program takes, and tokens that a looking one takes.

    Every folding program reads a head's whole matrix: large batches share it.

    Args:
        columns: KV heads times column tiles
    """
    return (4, 512) if seqs * columns > 512 else (1, 128)


def prepare(
    query: torch.Tensor,
    inverse: torch.Tensor,
    mean: torch.Tensor,
    vectors: torch.Tensor | None,
    scale: float,
    q_len: int,
    tile: tuple[int, int],
    constant: bool,
    pages: torch.Tensor,
    layout: PageLayout,
    pool: HotPool,
    table: SlotTable,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    folded: torch.Tensor,
    sums: torch.Tensor,
    copies: torch.Tensor,
    query_starts: torch.Tensor | None = None,
    sliding_window: int | None = None,
    reads: ReadCounter | None = None,
    behind_write: bool = False,
) -> None:
    """Fill `folded`, `sums` and `copies` (see above).

    Args:
        query: BF16 or FP16 (sequences * q_len, query heads, D), after RoPE
        inverse: B_K, float16 (KV heads, D, D), contiguous
        mean: m_K, float32 (KV heads, D)
        vectors: float16 (2, KV heads, 16, D) where a part of m_K turns, see `turning`
        tile: (N, tiles), see `column_tiles`
        constant: whether a q . m_K is needed
        pages: int32 (blocks, KV heads, words)
        query_starts: see `decode_attention`
        sliding_window: tokens behind it are not counted
        reads: where the layer counts
        behind_write: whether `query` was complete before this layer's `write`, and nothing was launched since
    """
    heads, seqs = pages.shape[1], seq_lens.shape[0]
    n, tiles = tile
    share, tokens = shares(seqs, heads * tiles)
    capacity = copies_capacity(table.contract, layout, q_len)
    programs = triton.cdiv(seqs, share) * tiles + seqs * triton.cdiv(capacity, tokens)
    _prepare[(programs, heads)](
        query, *given_starts(query_starts, seq_lens), inverse, mean, vectors, folded, sums, seqs, scale,
        query.stride(0), query.stride(1),
        pages, pool.words, table.slot_of_block, table.written, table.limits, block_table, seq_lens, copies,
        reads.counts if reads else None,
        pages.stride(0), pages.stride(1), pool.words.stride(0), pool.words.stride(1), block_table.stride(0),
        HEADS=heads, RATIO=query.shape[1] // heads, Q_LEN=q_len, TILES=tiles, N=n,
        D=layout.head_size, DP=triton.next_power_of_2(layout.head_size), GROUPS=layout.groups, SEQS=share,
        CONSTANT=constant, CHUNK=_CHUNK, P=layout.block_size, META=layout.meta_offset,
        SINKS=sink_capacity(table.contract, layout), WINDOW=table.contract.window, CAPACITY=capacity,
        T=tile_tokens(layout.head_size), TOKENS=tokens, DEPTH=depth(vectors is not None),
        LAYERS=reads.layers if reads else 0, SINK=table.contract.sink,
        SLIDING_WINDOW=(sliding_window or 0) if reads else 0,  # else one variant serves layers with and without
        BITS=layout.key_bits, launch_pdl=behind_write and supported(query.device), num_warps=4,
    )  # fmt: skip
