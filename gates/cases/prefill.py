"""Prefill attention over stored history against the reference: the cases, and how to run one."""

from dataclasses import dataclass, replace

import torch

from gates.synthetic import Described, fill, free_before_window, turning_mean
from vllm_oscar import attention
from vllm_oscar.hot_pool import HotContract
from vllm_oscar.kernels.history import Call, RestoreTables, plan
from vllm_oscar.kernels.prefill import PrefillWorkspace, prefill
from vllm_oscar.kernels.prefill import attention as attention_kernel
from vllm_oscar.kernels.reads import ReadCounter
from vllm_oscar.page_layout import KEY_BITS, VALUE_BITS, PageLayout

TURNING = 4.0  # size of a turning mean in units of the rows; larger keys lose what the run dtype rounds off
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative error of a request's output, by norm


@dataclass(frozen=True)
class Case(Described):
    """A step: for each request (tokens before, new tokens); the first `decoding` of them are not asked; turning: pairs
    of the keys' turning mean; bias: size of the keys' constant mean; layers: that the reads are counted for, 0 not to
    count; saturated: see `fill`; sinks: each query head has a sink logit; bits: of keys and values."""

    head_size: int = 128
    group_size: int = 0
    block_size: int = 16
    requests: tuple[tuple[int, int], ...] = ((17, 5), (33, 17), (0, 16))
    kv_heads: int = 1
    ratio: int = 2
    capacity: int = 64
    decoding: int = 0
    sink: int = 16
    window: int = 20
    soft_cap: float = 0.0
    sliding_window: int | None = None
    dtype: torch.dtype = torch.float16
    order: str = "padded"
    turning: int = 0
    bias: float = 1.0
    layers: int = 3
    saturated: bool = False
    sinks: bool = False
    bits: tuple[int, int] = (2, 2)

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.head_size, self.block_size, self.group_size, *self.bits)


def check(case: Case, device: torch.device) -> str:
    """See gates.kernels."""
    layout = case.layout
    lengths = [before for before, _ in case.requests]
    contract = HotContract(case.sink, case.window, case.block_size)
    cache = fill(
        layout, lengths, case.kv_heads, case.dtype, contract, case.order, device=device, saturated=case.saturated,
    )  # fmt: skip
    free_before_window(cache, lengths, case.sliding_window)
    starts = [0]
    for _, query in case.requests:
        starts.append(starts[-1] + query)
    total, heads, size = starts[-1], case.kv_heads * case.ratio, case.head_size
    generator = torch.Generator(device=device).manual_seed(1)
    mean = turning_mean(case.kv_heads, case.head_size, case.turning, TURNING, generator)
    bias = case.bias * cache.key.mean
    cache = replace(cache, key=replace(cache.key, mean=bias, turning=mean))
    fused = torch.randn(total, heads + 2 * case.kv_heads, size, generator=generator, device=device).to(case.dtype)
    query, key, value = fused.split([heads, case.kv_heads, case.kv_heads], 1)  # views, as vLLM has them
    key += bias.to(case.dtype)

    after = [sum(pair) for pair in case.requests]
    calls = plan(after, starts, case.decoding, case.capacity, case.sliding_window, device)
    workspace = PrefillWorkspace.allocate(case.capacity, total, heads, case.kv_heads, size, case.dtype, device)
    for tensor in (workspace.restored, workspace.out, workspace.lse):
        tensor.fill_(float("nan"))
    out = torch.full((total, heads, size), float("nan"), dtype=case.dtype, device=device)
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    scale = size**-0.5
    sinks = (3 + 2 * torch.randn(heads, generator=generator, device=device)).to(case.dtype) if case.sinks else None

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, out: torch.Tensor, lse: torch.Tensor,
        scale: float, soft_cap: float, sliding_window: int | None,
    ) -> None:  # fmt: skip
        assert not keys.isnan().any() and not values.isnan().any(), "rows that nobody filled are handed out"
        attention_kernel(query, keys, values, call, out, lse, scale, soft_cap, sliding_window)

    prefill(
        query, key, value, cache.pages, layout, cache.pool, cache.table, cache.block_table,
        RestoreTables.of(cache.key, cache.value, case.dtype), calls, workspace, out, scale, case.soft_cap,
        case.sliding_window, run, reads=ReadCounter(counts, case.layers) if case.layers else None, sink_logits=sinks,
    )  # fmt: skip

    views = layout.views(cache.pages)
    worst = 0.0
    reads = torch.zeros_like(counts)
    for index, before in enumerate(lengths):
        rows = slice(starts[index], starts[index + 1])
        if index < case.decoding:
            assert out[rows].isnan().all()
            continue
        blocks = cache.block_table[index, : -(-before // case.block_size)].long()
        stored = attention.read_rows(views, cache.pool, cache.table, blocks, before, before, case.sliding_window)
        reads += stored.reads(before, case.sink, case.sliding_window)
        expected = attention.attend(
            query[rows], stored, cache.key, cache.value, scale, before, (key[rows], value[rows]), case.soft_cap,
            case.sliding_window, sinks,
        )  # fmt: skip
        error = ((out[rows].float() - expected).norm() / expected.norm()).item()
        assert error < TOLERANCE[case.dtype], f"relative error {error:.2e}"
        worst = max(worst, error)
    wanted = (case.layers * reads).tolist()
    assert counts.tolist() == wanted, f"counted reads {counts.tolist()}, not {wanted}"
    return f"{worst:.1e}"


def gpu_cases() -> list[Case]:
    """What gates.kernels runs."""
    step = ((4099, 1), (1000, 700), (0, 333), (2600, 129), (15, 16))
    cases = [
        Case(d, g, p, step, 2, ratio, 4096, 1, 64, 256, dtype=dtype, order="head-major")
        for d, g, p, ratio, dtype in (
            (64, 0, 16, 1, torch.bfloat16),
            (64, 32, 16, 16, torch.float16),
            (80, 0, 16, 4, torch.bfloat16),
            (96, 0, 32, 3, torch.float16),
            (128, 0, 16, 4, torch.bfloat16),
            (128, 64, 64, 8, torch.float16),
            (128, 32, 16, 5, torch.bfloat16),
            (192, 0, 16, 2, torch.bfloat16),
            (256, 0, 16, 8, torch.float16),
        )
    ]
    cases += [
        Case(requests=((5000, 700), (10, 20)), capacity=1024, kv_heads=3, sink=64, window=256),
        Case(requests=((5000, 700), (10, 20)), capacity=4096, soft_cap=20.0, sliding_window=700),
        Case(64, requests=((5000, 700),), capacity=1024, soft_cap=20.0, sliding_window=2000, sink=64, window=256),
        Case(requests=((40, 20),), order="huge"),
        Case(requests=step, capacity=4096, kv_heads=2, sink=64, window=256, turning=8),
        Case(64, requests=((5000, 700),), capacity=1024, soft_cap=20.0, sliding_window=2000, turning=3),
        Case(80, requests=((5000, 700), (10, 20)), capacity=4096, turning=1),
        Case(256, requests=((2600, 129),), capacity=4096, ratio=8, turning=8),
        Case(requests=step, capacity=4096, kv_heads=2, sink=64, window=256, layers=0),
        Case(requests=step, capacity=4096, kv_heads=2, sink=64, window=256, bias=300.0, dtype=torch.bfloat16),
        Case(requests=((1000, 700), (10, 20)), capacity=1024, saturated=True),
        Case(64, requests=((5000, 700), (10, 20)), capacity=1024, kv_heads=2, ratio=8, sinks=True),
        Case(64, requests=step, capacity=4096, kv_heads=2, ratio=8, sliding_window=128, sinks=True),
        Case(64, requests=((5000, 700),), capacity=1024, ratio=8, bias=10.0, turning=3, sinks=True),
    ]
    cases += [
        Case(d, g, 64, step, 2, 4, 4096, 1, 64, 256, dtype=torch.bfloat16, order="head-major", bits=(key, value))
        for key in KEY_BITS
        for value in VALUE_BITS
        for d, g in ((64, 32), (80, 0), (128, 0))
        if (key, value) != (2, 2)
    ]
    return cases
