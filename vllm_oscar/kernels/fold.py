# mypy: disable-error-code="no-untyped-def"
"""Queries as the decode kernel wants them: q B_K', in fp16 with the weights of the bit positions divided out.

Columns of a KV head are its (query, head) pairs, query-major, in tiles of N. For each sequence, KV head and tile

    folded  fp16 (D, N)             q B_K' * 2^k / 4^(j mod 5), channel d = u + (D/8) j; 2^k brings the largest
                                    magnitude of the tile to [2^13, 2^14)
    sums    fp32 (1 + N (groups+1)) what turns a score of codes into a logit in units of log 2; then per group the
                                    sum of q B_K', times that of the softmax; then a q . m_K (soft cap only)
"""

import torch
import triton
import triton.language as tl

from vllm_oscar.kernels.unpack import POSITIONS, weight_exponent

LOG2E = 1.4426950408889634
_CHUNK = 32  # of the sum over channels


@triton.jit
def _fold(
    query, inverse, mean, folded, sums,
    seqs, scale, stride_token, stride_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, Q_LEN: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, GROUPS: tl.constexpr, SEQS: tl.constexpr, CONSTANT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, SEQS * N)
    seq = tl.program_id(0) * SEQS + column // N
    pair = tile * N + column % N
    used = (seq < seqs) & (pair < Q_LEN * RATIO)
    row = query + (seq * Q_LEN + pair // RATIO).to(tl.int64) * stride_token
    row += (head * RATIO + pair % RATIO) * stride_head
    e = tl.arange(0, DP)
    acc = tl.zeros([DP, SEQS * N], tl.float32)
    constant = tl.zeros([SEQS * N], tl.float32)
    for start in range(0, D, CHUNK):
        d = start + tl.arange(0, CHUNK)
        q = tl.load(row[None, :] + d[:, None], mask=used[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)
        b = tl.load(inverse + (head * D + e[:, None]) * D + d[None, :], mask=(e < D)[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(b, q, acc)
        if CONSTANT:
            m = tl.load(mean + head * D + d, mask=d < D, other=0.0)
            constant += tl.sum(q * m[:, None], 0)

    log_scale = scale * 1.4426950408889634
    largest = tl.max(tl.max(tl.reshape(tl.abs(acc), (DP, SEQS, N)), 2), 0)
    largest = tl.maximum(largest, 1e-20)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^floor(log2)
    per_column = tl.reshape(tl.broadcast_to((8192.0 / power)[:, None], (SEQS, N)), (SEQS * N,))
    weight = 1.0 / (1 << weight_exponent(e // (D // POSITIONS))).to(tl.float32)
    place = (seq * HEADS + head) * TILES + tile
    out = folded + place.to(tl.int64)[None, :] * (D * N) + e[:, None] * N + (column % N)[None, :]
    stored = (acc * per_column[None, :] * weight[:, None]).to(tl.float16)
    tl.store(out, stored, mask=(e < D)[:, None] & (seq < seqs)[None, :])

    stride: tl.constexpr = 1 + N * (GROUPS + 1)
    first = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    # codes come as code * 4^i * 2^-24, queries as q * 8192/power / 4^i
    tl.store(sums + ((first * HEADS + head) * TILES + tile) * stride, power * (2048.0 * log_scale), mask=first < seqs)
    sums += place * stride + 1 + column % N
    for g in tl.static_range(GROUPS):
        total = tl.sum(tl.where((e // (D // GROUPS) == g)[:, None], acc, 0.0), 0)
        tl.store(sums + g * N, total * log_scale, mask=seq < seqs)
    if CONSTANT:
        tl.store(sums + GROUPS * N, constant * log_scale, mask=seq < seqs)


def fold_queries(
    query: torch.Tensor,
    inverse: torch.Tensor,
    mean: torch.Tensor,
    scale: float,
    q_len: int,
    groups: int,
    tile: tuple[int, int],
    constant: bool,
    folded: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """One launch from raw queries to the decode kernel's operands.

    Args:
        query: BF16 or FP16 (sequences * q_len, query heads, D), after RoPE
        inverse: B_K, float32 (KV heads, D, D), contiguous
        mean: m_K, float32 (KV heads, D)
        tile: (N, tiles), see `column_tiles`
        constant: whether a q . m_K is needed
        folded, sums: workspace, see above
    """
    heads, head_size = mean.shape
    seqs = query.shape[0] // q_len
    n, tiles = tile
    # every program reads a head's whole matrix: large batches share it
    share = 1 if seqs * heads * tiles <= 512 else 64 // n
    _fold[(triton.cdiv(seqs, share), heads, tiles)](
        query, inverse, mean, folded, sums,
        seqs, scale, query.stride(0), query.stride(1),
        HEADS=heads, RATIO=query.shape[1] // heads, Q_LEN=q_len, TILES=tiles, N=n,
        D=head_size, DP=triton.next_power_of_2(head_size), GROUPS=groups, SEQS=share, CONSTANT=constant,
        CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
