"""Ranks, each a process: with one of the two KV heads each, two ranks a head, or both heads of half the layers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import random_sidecar

pytestmark = pytest.mark.engine
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
    "torch_dtype": "float32",
}  # fmt: skip


def answers(folder: Path, sidecar: Path, **options: int) -> Any:
    """Token ids, log probability and tokens found in the prefix cache of each answer, from a process of its own."""
    script = Path(__file__).with_name("parallel.py")
    command = [sys.executable, str(script), str(folder), str(sidecar), json.dumps(options)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line.removeprefix("answers ") for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert len(lines) == 1, done.stderr[-3000:]
    return json.loads(lines[0])


def test_ranks_answer_as_one(tiny_model: Callable[..., Path]) -> None:
    """The transforms of heads and layers differ, so a rank with the other's would answer something else. A pipeline's
    ranks work on one request each, so their steps alternate.

    In float32 the same texts; their log probability (about -58) differs by the order of sums over heads: 1e-4 measured.
    """
    folder = tiny_model(CONFIG)
    sidecar = random_sidecar(folder)
    one = answers(folder, sidecar)
    assert [found for _, _, found in one] == [0, 0, 144]  # nine blocks of sixteen
    for ranks in ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
        many = answers(folder, sidecar, **ranks)
        assert [[tokens, found] for tokens, _, found in many] == [[tokens, found] for tokens, _, found in one], ranks
        assert [likely for _, likely, _ in many] == pytest.approx([likely for _, likely, _ in one], abs=0.01), ranks
