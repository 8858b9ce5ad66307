"""Ranks, each a process: with one of the two KV heads each, two ranks a head, or both heads of half the layers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.models.shapes import random_sidecar
from vllm_oscar.config import OscarConfig
from vllm_oscar.errors import ConfigError
from vllm_oscar.page_layout import PageLayout

pytestmark = pytest.mark.engine
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
    "torch_dtype": "float32",
}  # fmt: skip


RANKS: tuple[dict[str, int], ...] = (
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {},
)


def test_ranks_answer_as_one(tiny_model: Callable[..., Path]) -> None:
    """The transforms of heads and layers differ, so a rank with the other's would answer something else. A pipeline's
    ranks work on one request each, so their steps alternate.

    In float32 the same texts; their log probability (about -58) differs by the order of sums over heads: 1e-4 measured.
    """
    folder = tiny_model(CONFIG)
    script = Path(__file__).with_name("parallel.py")
    command = [sys.executable, str(script), str(folder), str(random_sidecar(folder)), *map(json.dumps, RANKS)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line.removeprefix("answers ") for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert len(lines) == len(RANKS), done.stderr[-3000:]
    *of_ranks, one = map(json.loads, lines)
    assert [found for _, _, found in one] == [0, 0, 144]  # nine blocks of sixteen
    for ranks, many in zip(RANKS, of_ranks, strict=False):
        assert [[tokens, found] for tokens, _, found in many] == [[tokens, found] for tokens, _, found in one], ranks
        assert [likely for _, likely, _ in many] == pytest.approx([likely for _, likely, _ in one], abs=0.01), ranks


def test_a_pipelines_pool_holds_all_requests_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches take turns, and any of them may hold all requests: each has what the pool is without a pipeline."""
    from vllm_oscar.integration import runtime as module

    layer = SimpleNamespace(layout=PageLayout(64, 16), num_kv_heads=1, owns_cache=True, sliding_window=None)
    slot = 16 * (4 * 64 + 8)  # bytes: two rows in BF16, and their words
    monkeypatch.setattr(module, "oscar_impls", lambda config: [layer])

    def slots(in_flight: int, affordable: int) -> tuple[int, int]:
        """Of the pool, and of a step."""
        runtime = module.OscarRuntime.__new__(module.OscarRuntime)
        cache = SimpleNamespace(block_size=16, kv_cache_memory_bytes=2 * affordable * slot, num_gpu_blocks_override=99)
        runtime.vllm_config = SimpleNamespace(
            cache_config=cache,
            model_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=5),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        runtime.config = OscarConfig(sink=16, window=17, pool_share=0.5)
        runtime.pool_dtype, runtime.decode_threshold, runtime.block_size = torch.bfloat16, 1, 16
        runtime.num_slots, runtime.in_flight, runtime.counters, runtime._tables = 0, in_flight, module.Counters(), {}
        runtime.plan_pool(torch.device("cpu"))
        runtime.vllm_config.compilation_config.static_forward_context["layer"] = SimpleNamespace(impl=layer)
        return runtime.num_slots, runtime.table(["layer"], 99, torch.device("cpu")).slots_per_step

    wanted, floor = 1 + 2 * 2, 2  # of a request: sink and two tails; sink and tail
    for in_flight in (1, 2, 3):
        assert slots(in_flight, 1000) == (5 * wanted * in_flight, 5 * wanted)
        assert slots(in_flight, 5 * floor * in_flight) == (5 * floor * in_flight, 5 * floor)
        with pytest.raises(ConfigError, match=f"need at least {5 * floor * in_flight}: "):
            slots(in_flight, 5 * floor * in_flight - 1)
