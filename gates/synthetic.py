"""Random pages, copies and transforms, and what the reference makes of them: for tests and benchmarks of kernels.

Whatever no token was written to holds bytes 0xFF, NaN in every float format.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_oscar import attention
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable, page_words
from vllm_oscar.page_layout import KEY, VALUE, PageLayout
from vllm_oscar.quantizer import MAX_VALUE_SCALE, encode_ls, sanitised
from vllm_oscar.rotation import Transform
from vllm_oscar.turning import TurningMean


class Described:
    """A case that is called by what it changes of the default one."""

    def __str__(self) -> str:
        defaults = vars(type(self))
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != defaults.get(name)]
        return " ".join(changed).replace("torch.", "") or "default"


@dataclass(frozen=True)
class Cache:
    """A layer's stored tokens.

    Attributes:
        pages: uint8 (blocks, heads, head_bytes), possibly strided
        block_table: int32 (sequences, blocks)
        seq_lens: int32 (sequences,)
        key, value: transforms
    """

    layout: PageLayout
    pages: torch.Tensor
    pool: HotPool
    table: SlotTable
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    key: Transform
    value: Transform


def transform(
    heads: int, head_size: int, dtype: torch.dtype, generator: torch.Generator, size: float = 1.0
) -> Transform:
    """A random transform that is not orthogonal, with a mean, of rows whose elements are of about `size`."""
    device = generator.device
    matrix = torch.randn(heads, head_size, head_size, generator=generator, device=device, dtype=torch.float64)
    matrix = torch.linalg.qr(matrix).Q * torch.linspace(0.5, 2.0, head_size, device=device, dtype=torch.float64)
    mean = torch.randn(heads, head_size, generator=generator, device=device)
    return Transform.rounded(size * mean, matrix.float() / size, dtype)


def turning_mean(heads: int, head_size: int, pairs: int, size: float, generator: torch.Generator) -> TurningMean | None:
    """A random one of `pairs` pairs, from fast to hardly turning; rows of it have elements of about `size`."""
    if not pairs:
        return None
    device = generator.device
    frequency = torch.logspace(0, -4, pairs, device=device)
    vectors = torch.randn(heads, pairs, 2, head_size, generator=generator, device=device)
    return TurningMean(frequency, size / pairs**0.5 * vectors)


def strided_pages(layout: PageLayout, blocks: int, heads: int, order: str, device: torch.device) -> torch.Tensor:
    """Pages full of 0xFF. order: 'packed', 'padded' (gaps after heads and blocks), 'head-major' or 'huge' (1 GiB from
    block to block, so that offsets pass 2^31)."""
    size = layout.head_bytes
    if order == "packed":
        return torch.full((blocks, heads, size), 0xFF, dtype=torch.uint8, device=device)
    if order == "padded":
        whole = torch.full((blocks, heads + 1, size + 128), 0xFF, dtype=torch.uint8, device=device)
        return whole[:, :heads, :size]
    if order == "huge":
        whole = torch.full((blocks << 30,), 0xFF, dtype=torch.uint8, device=device)
        return whole.as_strided((blocks, heads, size), (1 << 30, size, 1))
    return torch.full((heads, blocks, size), 0xFF, dtype=torch.uint8, device=device).transpose(0, 1)


def fill(
    layout: PageLayout,
    lengths: list[int],
    heads: int,
    dtype: torch.dtype,
    contract: HotContract,
    order: str = "packed",
    seed: int = 0,
    device: torch.device | str = "cpu",
    copied: float = 0.8,
    saturated: bool = False,
    value_size: float = 1.0,
) -> Cache:
    """A cache of sequences in random blocks. Not every block has a slot, not every token of it a copy, and not every
    copy is proven: unproven rows hold NaN, proven ones are there outside the contract too. If `saturated`, some rows
    are as large as rows can be, and transforms such that raw ones are not; value_size: see `transform`."""
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    p, d = layout.block_size, layout.head_size
    widest = max(1, max(-(-length // p) for length in lengths))
    blocks = 1 + sum(-(-length // p) for length in lengths)
    pages = strided_pages(layout, blocks, heads, order, device)
    views = layout.views(pages)

    block_table = torch.zeros(len(lengths), widest + 1, dtype=torch.int32, device=device)
    free = 1 + torch.randperm(blocks - 1, generator=generator, device=device).int()
    taken = 0
    table = SlotTable.empty(contract, blocks, max(1, blocks - 1), device)
    pool = HotPool.allocate(layout, table.num_slots, heads, dtype, device)
    pool.rows.view(torch.uint8).fill_(0xFF)
    for index, length in enumerate(lengths):
        count = -(-length // p)
        if not count:
            continue
        own = free[taken : taken + count]
        taken += count
        block_table[index, :count] = own
        rows = torch.randn(2, length, heads, d, generator=generator, device=device)
        if saturated:  # one key: attention to several would be decided by their rounding
            rows[KEY, -1] *= 1e6
            rows[VALUE, ::2] *= 1e6
        rows = sanitised(rows)[0].to(dtype)
        token = torch.arange(length, device=device)
        at, off = own[token // p].long(), token % p
        for which, bits in ((KEY, layout.key_bits), (VALUE, layout.value_bits)):
            encoded = encode_ls(rows[which], layout.group_size, max_scale=MAX_VALUE_SCALE, levels=1 << bits)
            views.store(which, (at, slice(None), off), encoded.codes)
            views.meta[at, :, off, which] = torch.stack([encoded.scale, encoded.offset], -1)

        slots = (own - 1).int()  # any injective choice
        has = torch.rand(count, generator=generator, device=device) < copied
        table.slot_of_block[own.long()] = torch.where(has, slots, -1)
        slot = slots[token // p].long()
        table.written[slot, off] = (torch.rand(length, generator=generator, device=device) < 0.9).to(torch.uint8)
        pool.rows[slot, :, :, off] = rows.transpose(0, 1).transpose(1, 2)
        pool.words[slot, :, off] = page_words(views.meta[at])[torch.arange(length, device=device), :, off]
        stale = torch.rand(length, heads, generator=generator, device=device) < 1 - copied
        where = stale.nonzero()
        word = torch.randint(0, 2 * layout.groups, (where.shape[0],), generator=generator, device=device)
        pool.words[slot[where[:, 0]], where[:, 1], off[where[:, 0]], word] ^= 1
        pool.rows[slot[where[:, 0]], where[:, 1], :, off[where[:, 0]]] = float("nan")
    return Cache(
        layout, pages, pool, table, block_table, torch.tensor(lengths, dtype=torch.int32, device=device),
        transform(heads, d, dtype, generator, 1e-3 if saturated else 1.0),
        transform(heads, d, dtype, generator, 1e-3 if saturated else value_size),
    )  # fmt: skip


def free_before_window(cache: Cache, computed: list[int], sliding_window: int | None) -> None:
    """What vLLM does to the block tables of a sliding-window group: blocks that no further token sees are gone, and its
    null block, which is full of NaN here, stands in their place.

    Args:
        computed: tokens of each sequence before the step
    """
    for index, before in enumerate(computed):
        gone = attention.first_seen(before, sliding_window) // cache.layout.block_size
        cache.block_table[index, :gone] = 0


def reference(
    cache: Cache,
    query: torch.Tensor,
    queries: Sequence[int],
    scale: float,
    soft_cap: float,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a decode step must give, float32 (tokens, query heads, D), with m_V, or 0 with sink_logits, for sequences of
    length 0, and its reads, int64 (3,), see StoredRows.reads.

    Args:
        queries: of each sequence
    """
    views = cache.layout.views(cache.pages)
    ratio = query.shape[1] // cache.pages.shape[1]
    parts = []
    reads = torch.zeros(3, dtype=torch.int64, device=query.device)
    each = zip(cache.seq_lens.tolist(), queries, query.split(list(queries)), strict=True)
    for index, (length, count, own) in enumerate(each):
        if length == 0:
            mean = cache.value.mean.repeat_interleave(ratio, 0).expand(count, -1, -1)
            parts.append(mean if sink_logits is None else torch.zeros_like(mean))
            continue
        blocks = cache.block_table[index, : -(-length // cache.layout.block_size)].long()
        before = length - count
        stored = attention.read_rows(views, cache.pool, cache.table, blocks, length, before, sliding_window)
        reads += stored.reads(before, cache.table.contract.sink, sliding_window)
        parts.append(
            attention.attend(
                own, stored, cache.key, cache.value, scale, before, None, soft_cap, sliding_window, sink_logits
            )
        )
    return torch.cat(parts), reads
