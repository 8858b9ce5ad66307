"""Decode attention against the reference: the cases, and how to run one."""

from dataclasses import dataclass, replace

import torch

from gates.synthetic import Cache, Described, fill, free_before_window, reference, turning_mean
from vllm_oscar.hot_pool import HotContract
from vllm_oscar.kernels.decode import DecodeTables, DecodeWorkspace, column_tiles, decode_attention
from vllm_oscar.kernels.reads import ReadCounter
from vllm_oscar.kernels.segments import Segments, build_segments
from vllm_oscar.page_layout import KEY_BITS, VALUE_BITS, PageLayout

TURNING = 50.0
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 3e-3}  # relative error of the output, by norm, a query head


@dataclass(frozen=True)
class Case(Described):
    """One decode batch. turning: pairs of the keys' turning mean, whose rows add logits of `TURNING` on average (1 with
    sinks); layers: that the reads are counted for, 0 not to count; saturated, value_size: see `fill`; sinks: each query
    head has a sink logit, about as large as the logarithm of its tokens' sum; queries: of each sequence, where they are
    not all q_len, which is then the most; bits: of keys and values.
    """

    head_size: int = 128
    group_size: int = 0
    block_size: int = 16
    lengths: tuple[int, ...] = (1, 15, 16, 17, 33)
    kv_heads: int = 1
    ratio: int = 4
    q_len: int = 1
    sink: int = 4
    window: int = 6
    soft_cap: float = 0.0
    sliding_window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    order: str = "packed"
    turning: int = 0
    layers: int = 3
    saturated: bool = False
    value_size: float = 1.0
    sinks: bool = False
    queries: tuple[int, ...] = ()
    bits: tuple[int, int] = (2, 2)

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.head_size, self.block_size, self.group_size, *self.bits)

    @property
    def each(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        return self.queries or (self.q_len,) * len(self.lengths)


def inputs(case: Case, device: torch.device | str, seed: int = 0) -> tuple[Cache, torch.Tensor]:
    """Cache and queries of a case."""
    contract = HotContract(case.sink, case.window, case.block_size)
    cache = fill(
        case.layout, list(case.lengths), case.kv_heads, case.dtype, contract, case.order, seed, device,
        saturated=case.saturated, value_size=case.value_size,
    )  # fmt: skip
    computed = [length - count for length, count in zip(case.lengths, case.each, strict=True)]
    free_before_window(cache, computed, case.sliding_window)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    # a sink logit stands beside whole logits, where what rounding does to all tokens alike is an error: small ones
    size = 0.5 if case.sinks else TURNING / 2
    mean = turning_mean(case.kv_heads, case.head_size, case.turning, size, generator)
    cache = replace(cache, key=replace(cache.key, turning=mean))
    shape = (sum(case.each), case.kv_heads * case.ratio, case.head_size)
    return cache, (2 * torch.randn(shape, generator=generator, device=device)).to(case.dtype)


def sink_logits(case: Case, cache: Cache) -> torch.Tensor | None:
    """Of each query head, in steps that take from nothing to nearly all of the attention to the longest sequence."""
    if not case.sinks:
        return None
    heads = case.kv_heads * case.ratio
    generator = torch.Generator(device=cache.pages.device).manual_seed(2)
    noise = torch.randn(heads, generator=generator, device=cache.pages.device)
    return (6 + 4 * noise).to(case.dtype)


def attend(case: Case, cache: Cache, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels give, in NaN-poisoned memory, and the reads that they count."""
    device = query.device
    seqs, heads = len(case.lengths), case.kv_heads
    programs = heads * column_tiles(case.q_len, case.ratio)[1]
    segments = Segments.allocate(seqs + 3, programs, cache.layout, device).for_batch(seqs, programs)
    build_segments(cache.seq_lens, case.q_len, cache.table.limits, case.sliding_window, segments)
    workspace = DecodeWorkspace.allocate(
        cache.layout, heads, case.ratio, seqs + 3, case.q_len + 1, device, cache.table.contract, case.turning > 0
    )
    for tensor in (workspace.folded, workspace.sums, workspace.partial, workspace.lse):
        tensor.fill_(float("nan"))
    out = torch.full_like(query, float("nan"))
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    starts = torch.tensor([0, *case.each], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    decode_attention(
        query, cache.pages, cache.layout, cache.pool, cache.table, cache.block_table, cache.seq_lens, case.q_len,
        segments, DecodeTables.of(cache.key, cache.value), case.head_size**-0.5, case.soft_cap, case.sliding_window,
        workspace, out, ReadCounter(counts, case.layers) if case.layers else None,
        sink_logits=sink_logits(case, cache), query_starts=starts if case.queries else None,
    )  # fmt: skip
    return out, counts


def check(case: Case, device: torch.device) -> str:
    """See gates.kernels."""
    cache, query = inputs(case, device)
    out, counts = attend(case, cache, query)
    expected, reads = reference(
        cache, query, case.each, case.head_size**-0.5, case.soft_cap, case.sliding_window, sink_logits(case, cache)
    )
    size = expected.double().norm(dim=-1).clamp(min=1e-6)
    error = ((out.double() - expected.double()).norm(dim=-1) / size).max().item()
    assert error < TOLERANCE[case.dtype], f"relative error {error:.2e}"  # of any query head
    wanted = (case.layers * reads).tolist()
    assert counts.tolist() == wanted, f"counted reads {counts.tolist()}, not {wanted}"
    return f"{error:.2e}"


def gpu_cases() -> list[Case]:
    """What gates.kernels runs."""
    mixed = (1, 15, 16, 17, 33, 320, 1000, 4099)
    long = (3000, 70, 1)
    cases = [
        Case(head_size=d, group_size=g, block_size=p, lengths=mixed, kv_heads=2, ratio=r, dtype=dtype)
        for d, g, p, r, dtype in (
            (128, 0, 16, 4, torch.bfloat16),
            (128, 0, 64, 4, torch.float16),
            (128, 64, 16, 8, torch.bfloat16),
            (128, 32, 32, 5, torch.bfloat16),
            (128, 0, 32, 1, torch.bfloat16),
            (128, 0, 256, 16, torch.bfloat16),
            (64, 0, 16, 3, torch.bfloat16),
            (64, 0, 128, 8, torch.float16),
            (64, 32, 64, 4, torch.bfloat16),
            (64, 0, 16, 16, torch.bfloat16),
            (80, 0, 16, 4, torch.bfloat16),
            (96, 0, 64, 1, torch.float16),
            (192, 0, 16, 8, torch.bfloat16),
            (256, 0, 16, 8, torch.bfloat16),
            (256, 0, 64, 16, torch.bfloat16),
        )
    ]
    cases += [
        Case(lengths=long, kv_heads=3, order="padded", sink=0, window=1),
        Case(lengths=long, kv_heads=3, order="head-major", soft_cap=20.0),
        Case(head_size=64, lengths=long, kv_heads=2, soft_cap=20.0, sliding_window=500),
        Case(lengths=(*long, 0), kv_heads=2, sliding_window=300),
        Case(lengths=(3000, 70, 4), kv_heads=2, q_len=4, ratio=4),
        Case(lengths=(3000, 70, 4), kv_heads=2, q_len=4, ratio=8, sliding_window=600),
        Case(head_size=64, lengths=(3000, 70, 9), kv_heads=2, q_len=5, ratio=16),
        Case(lengths=(40000, 200, 900, 4000), kv_heads=8, block_size=64),
        Case(lengths=tuple(range(1, 1400, 7)), kv_heads=8),
        Case(lengths=(150,), block_size=64, order="huge", kv_heads=2),
        Case(lengths=mixed, kv_heads=2, turning=8, block_size=64, ratio=7),
        Case(head_size=64, lengths=mixed, kv_heads=2, turning=8, ratio=7),
        Case(lengths=(300000, 900), kv_heads=16, ratio=1, block_size=64),
        Case(lengths=(40000, 200, 900, 4000), kv_heads=4, block_size=64, turning=3, sliding_window=1500),
        Case(head_size=64, lengths=(40000, 70, 9), kv_heads=2, q_len=5, ratio=16, turning=8),
        Case(lengths=(3000, 70, 4), kv_heads=2, q_len=4, soft_cap=20.0, turning=8, dtype=torch.float16),
        Case(head_size=80, lengths=long, kv_heads=2, turning=2),
        Case(head_size=256, lengths=long, kv_heads=2, turning=8, ratio=16),
        Case(lengths=mixed, kv_heads=2, block_size=64, layers=0),
        *(Case(lengths=(320, 1000), kv_heads=2, ratio=ratio) for ratio in (3, 5, 6, 7, 12, 14)),
        Case(lengths=(320, 1000), kv_heads=2, saturated=True),
        Case(head_size=64, lengths=(320, 1000), kv_heads=2, dtype=torch.float16, saturated=True),
        Case(lengths=(320, 1000), kv_heads=2, value_size=1e-7),
        Case(head_size=64, lengths=(1001, 1345), kv_heads=2, sliding_window=300),
        Case(head_size=64, lengths=(1001, 1345, 1346), kv_heads=2, q_len=5, queries=(1, 5, 2), sliding_window=300),
        Case(head_size=64, lengths=(*mixed, 0), kv_heads=8, ratio=8, block_size=64, sinks=True),
        Case(head_size=64, lengths=(*mixed, 20000), kv_heads=8, ratio=8, sliding_window=128, sinks=True),
        Case(lengths=(3000, 70, 4), kv_heads=2, q_len=4, turning=8, sinks=True),
        Case(head_size=256, lengths=long, kv_heads=2, soft_cap=20.0, sinks=True),
        Case(lengths=tuple(range(1, 1400, 7)), kv_heads=8, sinks=True),
        Case(lengths=(3000, 70, 4, 900), kv_heads=2, q_len=4, queries=(1, 3, 4, 2)),
        Case(lengths=(3000, 70, 5, 900), kv_heads=2, ratio=8, q_len=5, queries=(5, 1, 5, 1), sliding_window=600),
        Case(head_size=64, lengths=(*mixed, 20000), kv_heads=2, ratio=8, q_len=3, queries=(1, 2, 3) * 3, sinks=True),
        Case(lengths=(40000, 70, 9), kv_heads=2, q_len=9, queries=(2, 9, 1), soft_cap=20.0, turning=8),
        Case(
            lengths=tuple(range(7, 1400, 7)), kv_heads=8, q_len=6, queries=(1, 6, 1, 2) * 49 + (3, 4, 5), block_size=64
        ),
    ]
    combinations = [(k, v) for k in KEY_BITS for v in VALUE_BITS if (k, v) != (2, 2)]
    cases += [
        Case(head_size=d, group_size=g, block_size=64, lengths=mixed, kv_heads=2, ratio=r, dtype=dtype, bits=bits)
        for bits in combinations
        for d, g, r, dtype in (
            (128, 0, 4, torch.bfloat16),
            (128, 32, 7, torch.float16),
            (64, 0, 7, torch.bfloat16),
            (80, 0, 4, torch.bfloat16),
            (256, 0, 8, torch.bfloat16),
        )
    ]
    for bits in combinations:
        cases += [
            Case(lengths=(40000, 200, 900, 4000), kv_heads=8, block_size=64, bits=bits),
            Case(lengths=(3000, 70, 4), kv_heads=2, q_len=4, ratio=8, sliding_window=600, bits=bits),
            Case(lengths=long, kv_heads=3, order="head-major", soft_cap=20.0, turning=8, bits=bits),
            Case(lengths=(150,), block_size=64, order="huge", kv_heads=2, bits=bits),
        ]
    cases += [
        Case(head_size=64, group_size=32, lengths=mixed, kv_heads=2, block_size=64, bits=(3, 2)),
        Case(head_size=96, lengths=mixed, kv_heads=2, bits=(4, 2)),
        Case(head_size=192, lengths=mixed, kv_heads=2, bits=(3, 4)),
    ]
    return [case if case.sink == 0 else replace(case, sink=64, window=256) for case in cases]
