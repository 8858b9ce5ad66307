"""Kernels are compiled for a GPU that is not there: Triton needs its name only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels

SCRIPT = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Device:
    is_active = staticmethod(lambda: True)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Device)
from vllm_oscar.kernels.compilation import compiled_together

@triton.jit
def add_one(x, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

run = triton.JITFunction.run
x = torch.zeros(64)
with compiled_together():
    for size in (32, 64, 64, 128):
        add_one[(1,)](x, 40, SIZE=size)
assert triton.JITFunction.run is run
cache = next(iter(add_one.device_caches.values()))[0]
print(x.sum().item(), len(cache), *sorted({type(kernel).__name__ for kernel in cache.values()}))
try:
    with compiled_together():
        add_one[(1,)](x, 40, SIZE=48)  # no power of two
except triton.CompilationError:
    print("reported", triton.JITFunction.run is run)
"""


def test_launches_inside_only_compile_and_errors_come_out(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py")]
    run = subprocess.run(command, text=True, capture_output=True, env=environment, check=False)
    assert run.stdout.splitlines() == ["0.0 3 CompiledKernel", "reported True"], run.stderr
