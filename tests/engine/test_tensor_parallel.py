"""Two tensor-parallel ranks, each a process with one of the two KV heads."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import random_sidecar

pytestmark = pytest.mark.engine
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.1,
    "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def answer(folder: Path, sidecar: Path, ranks: int) -> Any:
    """Token ids and their log probability, from a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("parallel.py")), str(folder), str(sidecar), str(ranks)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line.removeprefix("answer ") for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert len(lines) == 1, done.stderr[-3000:]
    return json.loads(lines[0])


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """The heads' transforms differ, so a rank with the other's would answer something else.

    In float32 the same text; its log probability (about -58) differs by the order of sums over ranks: 0.02 measured.
    """
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    sidecar = random_sidecar(tmp_path)
    (one, likely), (two, likely_too) = answer(tmp_path, sidecar, 1), answer(tmp_path, sidecar, 2)
    assert one == two
    assert abs(likely - likely_too) < 0.2
