"""Blocks that leave the engine and come back, through vLLM's shared-storage connector: whole pages, as bytes.

Its own offloading to memory wants a GPU: `python -m gates.engine --only offloading`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.models.shapes import random_sidecar
from tests.engine.conftest import divergence
from tests.engine.test_heads import LLAMA, NOISE, OPTIONS, text

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
BLOCK, TOKENS, MOVED = 16, 200, 192  # the last token is computed, with the block that it is in
ONES = 0xFF


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors are refused otherwise."""
    monkeypatch.setenv("VLLM_OSCAR_UNVERIFIED", "1")


@pytest.fixture
def stored(tiny_model: Callable[..., Path], any_engine: Callable[..., Engine], tmp_path: Path) -> Callable[..., Engine]:
    """An engine of one model with one shared storage, by its sidecar and options."""
    folder, storage = tiny_model(LLAMA), tmp_path / "storage"
    transfer = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }  # fmt: skip

    def make(turning: int = 0, **options: Any) -> Engine:
        given = {"kv_transfer_config": transfer, "skip_tokenizer_init": True, "dtype": "bfloat16"} | options
        return any_engine(folder, random_sidecar(folder, turning), OPTIONS, enable_prefix_caching=True, **given)

    return make


def test_a_block_comes_back_as_it_left_and_its_copies_are_not_believed(
    stored: Callable[..., Engine], tmp_path: Path
) -> None:
    engine, prompt = stored(), text(TOKENS, 0)
    answer = engine.answer(prompt, 20, "first")
    first = engine.log_probabilities("first", TOKENS - 1, TOKENS + 19)
    layers = engine.runner.compilation_config.static_forward_context
    files = {name: load_file(next(tmp_path.rglob(f"{name}.safetensors")))["kv_cache"] for name in layers}

    # pages of others, and nothing that the local prefix cache could find
    assert engine.llm.reset_prefix_cache()
    for layer in layers.values():
        layer.kv_cache.fill_(ONES)
    back = engine.run({"back": prompt}, 20, forced={"back": prompt + answer})["back"]
    assert back.num_cached_tokens == MOVED
    assert engine.chunks["back"][0] == (MOVED, TOKENS), "what came back is not computed again"
    again = engine.log_probabilities("back", TOKENS - 1, TOKENS + 19)
    kl = divergence(first, again)
    print(f"mean {float(kl.mean()):.2g}, worst {float(kl.max()):.2g}")
    assert float(kl.mean()) < 2 * NOISE
    statistics = engine.runtime.statistics()
    assert statistics["int2_sink_reads"] > 0, "the sink's copies stayed behind"

    blocks = engine.metadata[next(iter(layers))].block_table[0, : -(-(TOKENS + 20) // BLOCK)].long()
    for name, layer in layers.items():
        pages = layer.kv_cache
        came = pages[blocks[: MOVED // BLOCK]].transpose(1, 2).flatten(0, 1)  # (tokens, heads, bytes)
        assert torch.equal(came, files[name])
        others = torch.ones(pages.shape[0], dtype=torch.bool)
        others[blocks] = False
        others[0] = False  # vLLM's null block, which padding is written to
        assert (pages[others] == ONES).all(), "no other block was touched"

    # the prefix cache that it is in now is hit like any other
    local = engine.run({"local": prompt}, 20, forced={"local": prompt + answer})["local"]
    assert local.num_cached_tokens == MOVED
    assert torch.equal(engine.log_probabilities("local", TOKENS - 1, TOKENS + 19), again)


def test_engines_of_another_calibration_block_size_or_dtype_find_nothing(stored: Callable[..., Engine]) -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    prompt = text(TOKENS, 0)

    def found(engine: Engine) -> int:
        tokens = engine.run({"one": prompt}, 2)["one"].num_cached_tokens
        ensure_kv_transfer_shutdown()  # a process has one, which would go on writing where the first engine did
        return int(tokens)

    assert found(stored()) == 0
    assert found(stored(turning=3)) == 0, "another sidecar"
    assert found(stored(block_size=32)) == 0, "other blocks"
    assert found(stored(kv_cache_dtype="auto", block_size=32)) == 0, "16 bits"
    assert found(stored()) == MOVED, "the same calibration"
