"""How much fits: vLLM's own block count, with the pool counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from vllm_oscar.page_layout import PageLayout

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
LAYERS, KV_HEADS, HEAD_SIZE, BLOCK = 30, 3, 64, 32


def test_blocks_grow_by_the_ratio_of_the_layout(make_engine: Callable[..., Engine]) -> None:
    """6.4 times the blocks (512 against 80 bytes for a token and head) in what the pool leaves of the memory."""
    memory = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
    options = {"block_size": BLOCK, "num_gpu_blocks_override": None}
    bf16 = make_engine(kv_cache_dtype="auto", **options)
    oscar = make_engine({"sink": 16, "window": 32}, **options)
    layout = PageLayout(HEAD_SIZE, BLOCK)
    bf16_page, oscar_page = KV_HEADS * BLOCK * HEAD_SIZE * 2 * 2, layout.page_bytes(KV_HEADS)
    assert bf16_page / oscar_page == pytest.approx(6.4)

    pool = sum(t.nbytes for impl in oscar.impls for t in (impl.pool.rows, impl.pool.words))
    assert pool == oscar.runtime.pool_bytes > 0
    assert bf16.runner.kv_cache_config.num_blocks == memory // (LAYERS * bf16_page)
    assert oscar.runner.kv_cache_config.num_blocks == (memory - pool) // (LAYERS * oscar_page)
    # 4 requests, each a sink block and twice two blocks that 32 tokens can touch
    assert oscar.runtime.num_slots == 4 * 5
    for engine, page in ((bf16, bf16_page), (oscar, oscar_page)):
        layers = engine.runner.compilation_config.static_forward_context.values()
        blocks = engine.runner.kv_cache_config.num_blocks
        assert [layer.kv_cache.nbytes for layer in layers] == [blocks * page] * LAYERS
