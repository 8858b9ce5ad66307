"""The GPU path inside vLLM, as far as a machine without a GPU can show it: in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_every_layer_output_of_the_gpu_path_agrees_with_the_reference(tmp_path: Path) -> None:
    """Short prompts, chunked prefill over INT2 history and mixed batches, with keys encoded in the metric.

    Tolerances are those of benchmarks/verify_engine.py, which does the same on a GPU.
    """
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        check=False,
    )
    batches = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("batch")]
    assert done.returncode == 0 and len(batches) == 3, done.stderr[-3000:]
    layers = 2
    # requests x (prefill steps + decode steps) x layers: two of 1 + 3; 110 tokens in two chunks; mixed
    assert int(batches[0][0]) == 2 * (1 + 3) * layers
    assert int(batches[1][0]) == (2 + 3) * layers
    assert all(float(worst) < 1 for _, worst in batches), batches
