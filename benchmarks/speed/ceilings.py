# mypy: disable-error-code="no-untyped-def"
"""What a decode kernel is held against: a kernel that only reads the same bytes, and a BF16 split-KV decode."""

import torch
import triton
import triton.language as tl

_PROGRAMS = 2112  # two waves of one-warp programs; more hides the tail of a plain kernel


@triton.jit
def _read(
    pages, block_table, out, blocks, page_stride, head_stride, table_stride, WORDS: tl.constexpr, STAGES: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1)
    share = tl.cdiv(blocks, tl.num_programs(2))
    first = tl.program_id(2) * share
    word = tl.arange(0, WORDS)
    acc = tl.zeros([WORDS], tl.int32)
    for i in tl.range(first, tl.minimum(first + share, blocks), num_stages=STAGES):
        page = tl.load(block_table + seq * table_stride + i).to(tl.int64)
        acc += tl.load(pages + page * page_stride + head * head_stride + word)
    index = (seq * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(out + index, tl.sum(acc))


def read_pages(pages: torch.Tensor, block_table: torch.Tensor, blocks: int, head_bytes: int, out: torch.Tensor) -> None:
    """Read `blocks` pages of each sequence through the block table, the largest power of two of words of each.

    Args:
        pages: int32 view (blocks, heads, words)
        out: int32, at least _PROGRAMS * 2 elements
    """
    words = 1 << ((head_bytes // 4).bit_length() - 1)
    heads, seqs = pages.shape[1], block_table.shape[0]
    splits = max(1, min(_PROGRAMS // (heads * seqs), blocks))
    _read[(heads, seqs, splits)](
        pages, block_table, out, blocks, pages.stride(0), pages.stride(1), block_table.stride(0),
        WORDS=words, STAGES=5, num_warps=1,
    )  # fmt: skip


@triton.jit
def _bf16_decode(
    query, cache, block_table, seq_lens, partial, lse, scale, table_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h, b, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(seq_lens + b)
    share = tl.cdiv(tl.cdiv(length, T), splits) * T
    lo = split * share
    hi = tl.minimum(lo + share, length)
    g, d, r = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, T)
    q = tl.load(query + (b * H * G + h * G + g[:, None]) * D + d[None, :], mask=(g < G)[:, None], other=0.0)
    m = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    o = tl.zeros([16, D], tl.float32)
    last = (length - 1) // P
    for t0 in tl.range(lo, hi, T, num_stages=STAGES):
        token = t0 + r
        page = tl.load(block_table + b * table_stride + tl.minimum(token // P, last)).to(tl.int64)
        base = (page * H + h) * (2 * P * D) + (token % P) * D
        k = tl.load(cache + base[None, :] + d[:, None])
        v = tl.load(cache + (base + P * D)[:, None] + d[None, :])
        x = tl.dot(q, k) * scale
        x = tl.where((token < hi)[None, :], x, -1e30)
        new = tl.maximum(m, tl.max(x, 1))
        decay = tl.exp2(m - new)
        p = tl.exp2(x - new[:, None])
        m = new
        total = total * decay + tl.sum(p, 1)
        o = tl.dot(p.to(tl.bfloat16), v, o * decay[:, None])
    share_of = 1.0 / tl.maximum(total, 1e-30)
    index = (b * H + h) * splits + split
    tl.store(partial + index * (16 * D) + g[:, None] * D + d[None, :], o * share_of[:, None], mask=(g < G)[:, None])
    tl.store(lse + index * 16 + g, m + tl.log2(tl.maximum(total, 1e-30)))


@triton.jit
def _bf16_merge(partial, lse, out, splits, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr):
    h, b, g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d = tl.arange(0, S), tl.arange(0, D)
    index = (b * H + h) * splits + s
    logs = tl.load(lse + index * 16 + g, mask=s < splits, other=-1e30)
    weight = tl.exp2(logs - tl.max(logs, 0))
    part = tl.load(partial + index[:, None] * (16 * D) + g * D + d[None, :], mask=(s < splits)[:, None], other=0.0)
    o = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + (b * H * G + h * G + g) * D + d, o.to(tl.bfloat16))


class Bf16Decode:
    """Paged BF16 decode attention, split over the context; pages are (blocks, heads, 2, P, D)."""

    def __init__(self, seqs: int, heads: int, ratio: int, head_size: int, longest: int, device: torch.device) -> None:
        self.heads, self.ratio, self.head_size = heads, ratio, head_size
        self.splits = max(1, min(_PROGRAMS // 2 // (seqs * heads), longest // 64))
        size = seqs * heads * self.splits * 16
        self.partial = torch.empty(size * head_size, device=device)
        self.lse = torch.empty(size, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        seqs, h, g, d = seq_lens.shape[0], self.heads, self.ratio, self.head_size
        _bf16_decode[(h, seqs, self.splits)](
            query, cache, block_table, seq_lens, self.partial, self.lse, d**-0.5 * 1.4426950408889634,
            block_table.stride(0), H=h, G=g, D=d, P=cache.shape[3], T=32, STAGES=4, num_warps=2,
        )  # fmt: skip
        _bf16_merge[(h, seqs, g)](
            self.partial, self.lse, out, self.splits, H=h, G=g, D=d, S=triton.next_power_of_2(self.splits), num_warps=4
        )
