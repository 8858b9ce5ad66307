"""Pages that the compiled functions write and read are the reference's to the last bit."""

import math

import pytest
import torch

pytest.importorskip("numba", reason="comes with vLLM")

from vllm_oscar import attention, compiled_pages
from vllm_oscar.cache_layer import CacheLayer, RowCodec
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.quantizer import FP16_MAX, MAX_VALUE_SCALE, Metric
from vllm_oscar.rotation import Transform

CPU = torch.device("cpu")
P, HEADS, SLOTS = 16, 2, 12
BLOCKS = torch.tensor([7, 2, 11, 5, 16, 3, 9])


def layer(head_size: int, group_size: int, key_bits: int, value_bits: int) -> CacheLayer:
    generator = torch.Generator().manual_seed(head_size)
    matrix = torch.linalg.qr(torch.randn(HEADS, head_size, head_size, generator=generator)).Q
    transform = Transform.rounded(torch.randn(HEADS, head_size, generator=generator), matrix, torch.bfloat16)
    metric = Metric.of((matrix * torch.logspace(0, -2, head_size)) @ matrix.mT)
    return CacheLayer(
        PageLayout(head_size, P, group_size, key_bits, value_bits),
        RowCodec(transform, "metric", group_size, 1.05, 1.0, FP16_MAX, metric, key_bits),
        RowCodec(transform, "ls", group_size, 1.0, 1.0, MAX_VALUE_SCALE, None, value_bits),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_size", "group_size", "key_bits", "value_bits"),
    [(64, 64, 2, 2), (64, 32, 3, 2), (80, 80, 2, 2), (128, 32, 4, 4), (256, 256, 3, 4)],
)
def test_pages_and_rows(head_size: int, group_size: int, key_bits: int, value_bits: int, dtype: torch.dtype) -> None:
    """Written twice and read twice: what one writes the other reads; bad rows, tokens without a place, lost proofs."""
    tokens, sink, window = 100, 20, 40
    own = layer(head_size, group_size, key_bits, value_bits)
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(tokens, HEADS, head_size, generator=generator).to(dtype) for _ in range(2))
    key[3, 0, 5], key[90, 1, 2], value[95, 0, 7], value[2, 1] = math.nan, math.inf, -math.inf, 6e4
    position = torch.arange(tokens)
    table = SlotTable.empty(HotContract(sink, window, P), 20, SLOTS, CPU)
    for logical in (0, 1, 3, 4, 5, 6):
        table.slot_of_block[BLOCKS[logical]] = (logical * 5) % SLOTS
    place = BLOCKS[position // P] * P + position % P
    slot = table.slot_of_block[BLOCKS[position // P]].long()
    hot_place = torch.where(slot >= 0, slot * P + position % P, -1)
    place[[7, 50]], hot_place[[7, 50]] = -1, -1

    written = []
    for write in (CacheLayer.write, compiled_pages.write):
        pages = torch.full((20, HEADS, own.layout.head_bytes), 0xEE, dtype=torch.uint8)
        pool = HotPool.allocate(own.layout, SLOTS, HEADS, dtype, CPU)
        views = own.layout.views(pages)
        saturated = write(own, views, pool, key, value, position, place, hot_place)
        assert int(saturated) >= 3
        written.append((pages, pool.rows.view(torch.int16), pool.words, saturated))
    for reference, compiled in zip(*written, strict=True):
        assert torch.equal(reference, compiled) and reference.dtype == compiled.dtype

    table.written[slot[hot_place >= 0], (position % P)[hot_place >= 0]] = 1
    table.written[slot[97], 1] = 0
    views.meta[BLOCKS[5], 1, 3, 0, 0, 0] += 1  # a copy that proves nothing any more
    for length, before in ((tokens, tokens - 1), (tokens, tokens), (33, 90), (0, 0)):
        blocks = BLOCKS[: -(-length // P)]
        rows = [
            read(views, pool, table, blocks, length, before) for read in (attention.read_rows, compiled_pages.read_rows)
        ]
        assert rows[0].hot.any() == (length > 0)
        for reference, compiled in zip(*rows, strict=True):
            assert torch.equal(reference, compiled) and reference.dtype == compiled.dtype
