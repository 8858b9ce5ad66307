# mypy: disable-error-code="no-untyped-def"
"""Partial attention of a sequence's segments -> the layer's output, o_y B_V + m_V.

A sink logit, where the head has one, takes its share of the result at the end.

A program computes some channels of the output, for which it needs the whole merged row: for small batches the merge
is done once per slice of channels, which costs less than another launch. Large batches have few segments a sequence
and share the matrix instead.
"""

import torch
import triton
import triton.language as tl

from vllm_oscar.kernels.dependent import supported, wait
from vllm_oscar.kernels.prepare import queries_of
from vllm_oscar.kernels.segments import Segments

_LOG2E = tl.constexpr(1.4426950408889634)
_FEW = 16  # (sequence, KV head, column tile) triples up to which their columns are split too
_SMALL = 512  # (sequence, KV head, column tile) triples up to which every sequence has programs of its own


@triton.jit(do_not_specialize=["ragged", "seqs"])
def _merge(
    partial, lse, first, starts, ragged, inverse, unit, mean, sink_logits, out, seqs, stride_token, stride_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, Q_LEN: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SEQS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, SINK_LOGITS: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """SEQS sequences, COLUMNS columns of the tile, of which SPLIT programs take as many each, BLOCK segments at a time,
    ROWS channels of the output."""
    place = tl.program_id(0) // SPLIT
    first_column = tl.program_id(0) % SPLIT * COLUMNS
    head, tile = place // TILES, place % TILES
    e = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    inside = (e < D)[:, None] & (d < D)[None, :]
    b = tl.load(inverse + (head * D + e[:, None]) * D + d[None, :], mask=inside, other=0.0)
    scale = tl.load(unit + head)
    centre = tl.load(mean + head * D + e, mask=e < D, other=0.0)
    wait(launch_pdl)

    # a row is (which segment of a block, sequence, column); each keeps its own maximum until the end
    C: tl.constexpr = SEQS * COLUMNS
    row = tl.arange(0, BLOCK * C)
    ahead = row // C
    seq = tl.program_id(1) * SEQS + row // COLUMNS % SEQS
    column = first_column + row % COLUMNS
    begin = tl.load(first + seq, mask=seq < seqs, other=0)
    count = tl.load(first + seq + 1, mask=seq < seqs, other=0) - begin
    queries = queries_of(starts, ragged, seq, seq < seqs, Q_LEN)[1]
    count = tl.where(tile * N + column < queries * RATIO, count, 0)
    m = tl.full([BLOCK * C], -1e30, tl.float32)
    total = tl.zeros([BLOCK * C], tl.float32)
    acc = tl.zeros([BLOCK * C, DP], tl.float32)
    for start in tl.range(0, tl.max(count, 0), BLOCK, num_stages=3):
        kept = start + ahead < count
        at = ((begin + start + ahead).to(tl.int64) * (HEADS * TILES) + place) * N + column
        logs = tl.load(lse + at, mask=kept, other=-1e30)
        part = tl.load(partial + at[:, None] * D + d[None, :], mask=kept[:, None] & (d < D)[None, :], other=0.0)
        new = tl.maximum(m, logs)
        decay = tl.exp2(m - new)
        weight = tl.exp2(logs - new)
        m = new
        total = total * decay + weight
        acc = acc * decay[:, None] + part.to(tl.float32) * weight[:, None]

    top = tl.max(tl.reshape(m, (BLOCK, C)), 0)
    weight = tl.exp2(tl.reshape(m, (BLOCK, C)) - top[None, :])
    total = tl.sum(tl.reshape(total, (BLOCK, C)) * weight, 0)
    weight /= tl.maximum(total, 1e-30)[None, :]
    acc *= tl.reshape(weight, (BLOCK * C,))[:, None]
    # the product wants eight columns; of fewer it gets several shares, which are added afterwards
    K: tl.constexpr = 8 // C if C < 8 else 1
    y = tl.sum(tl.reshape(acc, (BLOCK // K, K * C, DP)), 0)
    x = tl.dot(b, tl.trans(y.to(tl.float16)))
    x = tl.sum(tl.reshape(x, (ROWS, K, C)), 1) * scale + centre[:, None]

    column = tl.arange(0, C)
    seq = tl.program_id(1) * SEQS + column // COLUMNS
    pair = tile * N + first_column + column % COLUMNS
    if SINK_LOGITS:
        sink = tl.load(sink_logits + head * RATIO + pair % RATIO).to(tl.float32) * _LOG2E
        lead = tl.minimum(sink - top - tl.log2(tl.maximum(total, 1e-30)), 126.0)  # of all tokens together
        x *= (1.0 / (1.0 + tl.exp2(lead)))[None, :]
    own, queries = queries_of(starts, ragged, seq, seq < seqs, Q_LEN)
    token = (own + pair // RATIO).to(tl.int64)
    target = out + token * stride_token + (head * RATIO + pair % RATIO) * stride_head
    kept = (seq < seqs) & (pair < queries * RATIO)
    tl.store(target[None, :] + e[:, None], x.to(out.dtype.element_ty), mask=kept[None, :] & (e < D)[:, None])


def shares(seqs: int, places: int, columns: int, padded: int, segments: int) -> tuple[int, int, int, int]:
    """Sequences, channels of the output, segments at a time and columns of a program.

    Args:
        places: KV heads times column tiles
        columns, padded: used columns of a tile, and D, as powers of two
        segments: rows of the batch's segment table
    """
    pairs = seqs * places
    share = 1 if pairs <= _SMALL else 4
    rows = min((64 if padded <= 128 else 32) if pairs <= 256 else 128, padded)
    each = segments // seqs
    if pairs <= _FEW and each >= 8:  # many segments: a program has one column, and reads that much less of each
        return share, rows, min(triton.next_power_of_2(each), 32), 1
    width = share * columns
    # few segments at a time: adding up the rows of a block at the end costs more than some rounds of the loop
    block = min(8 if pairs <= 8 else 4, triton.next_power_of_2(each), 16384 // (width * padded))
    return share, rows, max(block, 8 // width, 1), columns


def merge_segments(
    partial: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    inverse_t: torch.Tensor,
    unit: torch.Tensor,
    mean: torch.Tensor,
    q_len: int,
    tile: tuple[int, int],
    out: torch.Tensor,
    starts: torch.Tensor,
    ragged: int,
    sink_logits: torch.Tensor | None = None,
) -> None:
    """One launch from the decode kernel's partials to the output. Nothing may be launched between the two.

    Args:
        partial: float16 (segments, KV heads, tiles, N, D), normalised
        lse: float32 (segments, KV heads, tiles, N), log2 of the sum of exp2; with sink_logits, of whole logits
        inverse_t: B_V transposed, in units of `unit`, float16 (KV heads, D, D), contiguous
        unit: float32 (KV heads,)
        mean: m_V, float32 (KV heads, D)
        out: BF16 or FP16 (tokens, query heads, D)
        starts, ragged: see `prepare.given_starts`
        sink_logits: (query heads,), contiguous
    """
    heads, head_size = mean.shape
    n, tiles = tile
    seqs = segments.first.shape[0] - 1
    padded = triton.next_power_of_2(head_size)
    used = triton.next_power_of_2(min(n, q_len * (out.shape[1] // heads)))
    share, rows, block, columns = shares(seqs, heads * tiles, used, padded, segments.table.shape[0])
    split = used // columns
    _merge[(heads * tiles * split, triton.cdiv(seqs, share), triton.cdiv(head_size, rows))](
        partial, lse, segments.first, starts, ragged, inverse_t, unit, mean, sink_logits, out, seqs, out.stride(0),
        out.stride(1),
        HEADS=heads, RATIO=out.shape[1] // heads, Q_LEN=q_len, TILES=tiles, N=n, COLUMNS=columns,
        D=head_size, DP=padded, SEQS=share, BLOCK=block, ROWS=rows, SPLIT=split,
        SINK_LOGITS=sink_logits is not None, launch_pdl=supported(out.device), num_warps=4,
    )  # fmt: skip
