"""What the pool leaves for pages, against the longest request."""

from types import SimpleNamespace as Some

import pytest

from vllm_oscar.config import OscarConfig
from vllm_oscar.errors import ConfigError
from vllm_oscar.integration import runtime
from vllm_oscar.page_layout import PageLayout


def check(monkeypatch: pytest.MonkeyPatch, length: int, asked: int, sliding_window: int | None = None) -> None:
    """30 layers of 3 heads of 64: 57,600 bytes a block of 16; the pool leaves 1,600,000 bytes, which hold 27."""
    layer = Some(layout=PageLayout(64, 16), num_kv_heads=3, owns_cache=True, sliding_window=sliding_window)
    monkeypatch.setattr(runtime, "oscar_impls", lambda config: [layer] * 30)
    cache = Some(num_gpu_blocks_override=None)
    config = Some(
        model_config=Some(max_model_len=length, original_max_model_len=asked, is_hybrid=False), cache_config=cache
    )
    made = Some(vllm_config=config, config=OscarConfig(pool_share=0.7), block_size=16, pool_bytes=3_100_000)
    runtime.OscarRuntime._check_length(made, 4_700_000)  # type: ignore[arg-type]


def test_a_length_that_the_pool_leaves_no_room_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"pool_share 0.7 leaves .* of 433 tokens: lower --max-model-len to 432, lower"
    ):
        check(monkeypatch, 433, 433)
    check(monkeypatch, 432, 432)
    check(monkeypatch, 8192, -1)  # --max-model-len auto
    check(monkeypatch, 8192, 8192, sliding_window=128)
