# mypy: disable-error-code="no-untyped-def"
"""Partial attention of a sequence's segments -> the layer's output, o_y B_V + m_V."""

import torch
import triton
import triton.language as tl

from vllm_oscar.kernels.segments import Segments

_ROWS = 64  # output channels computed at a time


@triton.jit
def _merge(
    partial, lse, first, inverse, mean, out, stride_token, stride_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, Q_LEN: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place, seq = tl.program_id(0), tl.program_id(1)
    head, tile = place // TILES, place % TILES
    begin = tl.load(first + seq)
    end = tl.load(first + seq + 1)
    n, d, s = tl.arange(0, N), tl.arange(0, DP), tl.arange(0, BLOCK)
    acc = tl.zeros([DP, N], tl.float32)
    total = tl.zeros([N], tl.float32)
    m = tl.full([N], -1e30, tl.float32)
    for start in range(begin, end, BLOCK):
        kept = start + s < end
        index = (start + s).to(tl.int64) * (HEADS * TILES) + place
        logs = tl.load(lse + index[:, None] * N + n[None, :], mask=kept[:, None], other=-1e30)
        rows = partial + index[:, None, None] * (D * N) + d[None, :, None] * N + n[None, None, :]
        part = tl.load(rows, mask=kept[:, None, None] & (d < D)[None, :, None], other=0.0)
        new = tl.maximum(m, tl.max(logs, 0))
        decay = tl.exp2(m - new)
        weight = tl.where(kept[:, None], tl.exp2(logs - new[None, :]), 0.0)
        m = new
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay[None, :] + tl.sum(part * weight[:, None, :], 0)
    y = acc / tl.maximum(total, 1e-30)[None, :]

    pair = tile * N + n
    token = seq * Q_LEN + pair // RATIO
    target = out + token.to(tl.int64) * stride_token + (head * RATIO + pair % RATIO) * stride_head
    for row in range(0, D, ROWS):
        e = row + tl.arange(0, ROWS)
        b = tl.load(inverse + (head * D + e[:, None]) * D + d[None, :], mask=(e < D)[:, None] & (d < D)[None, :], other=0.0)
        x = tl.dot(b, y) + tl.load(mean + head * D + e, mask=e < D, other=0.0)[:, None]
        tl.store(target[None, :] + e[:, None], x.to(out.dtype.element_ty), mask=(pair < Q_LEN * RATIO)[None, :] & (e < D)[:, None])


def merge_segments(
    partial: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    inverse_t: torch.Tensor,
    mean: torch.Tensor,
    q_len: int,
    tile: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """One launch from the decode kernel's partials to the output.

    Args:
        partial: float32 (segments, KV heads, tiles, D, N), normalised
        lse: float32 (segments, KV heads, tiles, N), log2 of the sum of exp2
        inverse_t: B_V transposed, float32 (KV heads, D, D), contiguous
        mean: m_V, float32 (KV heads, D)
        out: BF16 or FP16 (sequences * q_len, query heads, D)
    """
    heads, head_size = mean.shape
    n, tiles = tile
    seqs = segments.first.shape[0] - 1
    _merge[(heads * tiles, seqs)](
        partial, lse, segments.first, inverse_t, mean, out, out.stride(0), out.stride(1),
        HEADS=heads, RATIO=out.shape[1] // heads, Q_LEN=q_len, TILES=tiles, N=n,
        D=head_size, DP=triton.next_power_of_2(head_size), BLOCK=4, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
