"""The reference attention against plain softmax attention over restored rows, in float64, a query at a time."""

import math

import pytest
import torch

from vllm_oscar.attention import StoredRows, attend, attend_fused, read_rows
from vllm_oscar.cache_layer import CacheLayer, RowCodec
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.rotation import Transform

CPU = torch.device("cpu")
P = 16


def transform(heads: int, head_size: int, seed: int) -> Transform:
    """A mean and a matrix that is far from orthogonal (condition number 9)."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(heads, head_size, head_size, generator=generator)).Q
    matrix = basis * torch.logspace(-0.5, 0.45, head_size)
    return Transform.rounded(torch.randn(heads, head_size, generator=generator), matrix, torch.bfloat16)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    first: int,
    cap: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query (n, query heads, D), key and value (tokens, KV heads, D) -> float64 (n, query heads, D)."""
    n, query_heads, head_size = query.shape
    ratio = query_heads // key.shape[1]
    output = torch.empty(n, query_heads, head_size, dtype=torch.float64)
    for i in range(n):
        start = 0 if window is None else max(0, first + i - window + 1)
        for h in range(query_heads):
            k, v = (t[start : first + i + 1, h // ratio].double() for t in (key, value))
            logits = k @ query[i, h].double() * scale
            if cap:
                logits = cap * torch.tanh(logits / cap)
            weight = logits.exp()
            total = weight.sum() + (0 if sinks is None else sinks[h].double().exp())
            output[i, h] = weight / total @ v
    return output


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("ratio", [1, 3, 16])
@pytest.mark.parametrize(("stored", "fresh"), [(1, 0), (37, 0), (37, 5), (0, 5)])
def test_softmax_over_stored_and_fresh_rows(
    stored: int, fresh: int, ratio: int, cap: float, window: int | None, with_sinks: bool
) -> None:
    """A decode of one or several queries without fresh rows, a prefill with; in float32, so to 1e-4."""
    heads, head_size, n = 2, 64, fresh or min(stored, 3)
    generator = torch.Generator().manual_seed(stored + ratio)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    k_transform, v_transform = transform(heads, head_size, 1), transform(heads, head_size, 2)
    key, value = randn(stored, heads, head_size), randn(stored, heads, head_size)  # y
    query = randn(n, heads * ratio, head_size) * 2
    raw = (randn(n, heads, head_size), randn(n, heads, head_size)) if fresh else None
    first = stored if fresh else stored - n
    scale = 1 / math.sqrt(head_size)
    rows = StoredRows(key, value, torch.zeros(stored, heads, dtype=torch.bool))
    sinks = 3 * randn(heads * ratio) if with_sinks else None
    attended = [attend(query, rows, k_transform, v_transform, scale, first, raw, cap, window, sinks)]
    if not cap and sinks is None:
        attended.append(attend_fused(query, rows, k_transform, v_transform, scale, first, raw, window))

    restored = [
        torch.einsum("jhd,hde->jhe", y.double(), torch.linalg.inv(t.matrix.double())) + t.mean.double()
        for y, t in ((key, k_transform), (value, v_transform))
    ]
    if raw is not None:
        restored = [torch.cat([old, new.double()]) for old, new in zip(restored, raw, strict=True)]
    wanted = plain_attention(query, restored[0], restored[1], scale, first, cap, window, sinks)
    for got in attended:
        assert got.dtype == torch.float32 and got.shape == wanted.shape
        assert (got.double() - wanted).abs().max() < 1e-4 * wanted.abs().max()


class Cache:
    """One request of one layer: what was written, and a pool that holds copies of all of it."""

    def __init__(self, tokens: int, sink: int, window: int, num_slots: int = 12) -> None:
        self.layout = PageLayout(64, P)
        codec = [RowCodec(transform(2, 64, seed), "ls", 64, 1.0, 1.0, 254.0, None) for seed in (3, 4)]
        self.layer = CacheLayer(self.layout, codec[0], codec[1])
        pages = torch.full((20, 2, self.layout.head_bytes), 0xFF, dtype=torch.uint8)
        self.views = self.layout.views(pages)
        self.pool = HotPool.allocate(self.layout, num_slots, 2, torch.bfloat16, CPU)
        self.pool.rows.fill_(float("nan"))
        self.table = SlotTable.empty(HotContract(sink, window, P), 20, num_slots, CPU)
        self.blocks = torch.tensor([7, 2, 11, 5, 16, 3, 9])[: -(-tokens // P)]
        for slot, block in enumerate(self.blocks.tolist()):  # in an order of their own
            self.table.slot_of_block[block] = (slot * 5) % num_slots
            self.table.block_of_slot[(slot * 5) % num_slots] = block
            self.table.written[(slot * 5) % num_slots] = 1
        generator = torch.Generator().manual_seed(tokens)
        self.key, self.value = (torch.randn(tokens, 2, 64, generator=generator) for _ in range(2))
        position = torch.arange(tokens)
        place = self.blocks[position // P] * P + position % P
        copy = self.table.slot_of_block[self.blocks].long()[position // P] * P + position % P
        self.layer.write(self.views, self.pool, self.key, self.value, position, place, copy)
        self.copies = self.layer.key.transform.forward(self.key).bfloat16().float()

    def int2(self, tokens: int, before: int) -> torch.Tensor:
        """The keys with no copy read."""
        table = SlotTable.empty(self.table.contract, 20, self.table.num_slots, CPU)
        return read_rows(self.views, self.pool, table, self.blocks[: -(-tokens // P)], tokens, before).key


def test_which_rows_are_read_at_every_length() -> None:
    """Every length up to sink + window + 3 blocks; for a decode and for a prefill chunk of 10 that follows.

    All blocks have copies: those outside the contract must not be read.
    """
    sink, window = 16, 32
    last = sink + window + 3 * P
    cache = Cache(last, sink, window)
    int2 = cache.int2(last, last - 1)
    assert (int2 - cache.copies).abs().amax(-1).min() > 0.01  # nowhere are the two alike
    for tokens in range(1, last + 1):
        for before in (tokens - 1, tokens):  # a decode reads its own token, a prefill what came before
            rows = read_rows(cache.views, cache.pool, cache.table, cache.blocks[: -(-tokens // P)], tokens, before)
            hot = torch.tensor([j < sink or j >= before + 1 - window for j in range(tokens)])
            assert torch.equal(rows.hot, hot[:, None].expand(-1, 2))
            assert torch.equal(rows.key, torch.where(hot[:, None, None], cache.copies[:tokens], int2[:tokens]))


def test_reads_are_counted_by_kind() -> None:
    """Sinks 0 to 3; token 1 has no copy in one head, 4 and 5 in neither. A window of 4 hides tokens 0 to 4 from a step
    behind 8."""
    hot = torch.ones(8, 2, dtype=torch.bool)
    hot[1, 0] = False
    hot[4:6] = False
    rows = StoredRows(torch.empty(0), torch.empty(0), hot)
    assert rows.reads(8, 4, None).tolist() == [11, 5, 1]
    assert rows.reads(8, 4, 4).tolist() == [4, 2, 0]
    assert rows.reads(8, 4, 8).tolist() == [9, 5, 1]


@pytest.mark.parametrize("which", ["key scale", "key offset", "value scale", "value offset"])
def test_a_copy_whose_words_differ_in_one_bit_is_not_read(which: str) -> None:
    """Each head proves its own copy; a head whose words differ reads INT2, the other one its copy."""
    cache = Cache(40, 64, 8)
    head, token = 1, 21
    tensor, word = which.split()
    meta = cache.views.meta.view(torch.int16)
    meta[cache.blocks[token // P], head, token % P, int(tensor == "value"), 0, int(word == "offset")] ^= 1
    rows = read_rows(cache.views, cache.pool, cache.table, cache.blocks, 40, 39)
    wanted = torch.ones(40, 2, dtype=torch.bool)
    wanted[token, head] = False
    assert torch.equal(rows.hot, wanted)
    assert torch.equal(rows.key[token, 0], cache.copies[token, 0])
    assert torch.equal(rows.key[token, 1], cache.int2(40, 39)[token, 1])


def test_a_copy_that_is_not_the_tokens_is_not_read_whatever_its_words() -> None:
    cache = Cache(40, 64, 8)
    cache.table.written[cache.table.slot_of_block[cache.blocks[1]], 5] = 0
    rows = read_rows(cache.views, cache.pool, cache.table, cache.blocks, 40, 39)
    assert rows.hot[:, 0].tolist() == [j != P + 5 for j in range(40)]


def test_a_block_without_a_slot_is_read_in_int2() -> None:
    cache = Cache(40, 64, 8)
    cache.table.slot_of_block[cache.blocks[1]] = -1
    rows = read_rows(cache.views, cache.pool, cache.table, cache.blocks, 40, 39)
    assert rows.hot[:, 0].tolist() == [not 16 <= j < 32 for j in range(40)]
    assert torch.isfinite(rows.key).all()


def test_limits_of_the_step_replace_those_asked_for() -> None:
    cache = Cache(100, 64, 80)
    cache.table.limits.copy_(torch.tensor([16, 33], dtype=torch.int32))
    rows = read_rows(cache.views, cache.pool, cache.table, cache.blocks, 100, 99)
    assert rows.hot[:, 0].tolist() == [j < 16 or j >= 67 for j in range(100)]
