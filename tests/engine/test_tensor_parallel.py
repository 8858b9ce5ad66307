"""Two tensor-parallel ranks, each a process with one of the two KV heads."""

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


def answer(folder: Path, sidecar: Path, ranks: int) -> Any:
    """Token ids and their log probability, from a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("parallel.py")), str(folder), str(sidecar), str(ranks)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line.removeprefix("answer ") for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert len(lines) == 1, done.stderr[-3000:]
    return json.loads(lines[0])


def test_two_ranks_answer_as_one(tiny_model: Callable[..., Path]) -> None:
    """The heads' transforms differ, so a rank with the other's would answer something else.

    In float32 the same text; its log probability (about -58) differs by the order of sums over ranks: 0.02 measured.
    """
    folder = tiny_model(CONFIG)
    sidecar = random_sidecar(folder)
    (one, likely), (two, likely_too) = answer(folder, sidecar, 1), answer(folder, sidecar, 2)
    assert one == two
    assert abs(likely - likely_too) < 0.2
