"""Kernel variants compiled side by side, on all processors."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, knobs
from triton.runtime.jit import JITFunction


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, and nothing is compiled."""
    return bool(knobs.runtime.interpret)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Inside, to launch a kernel asks for its compilation only; at the end all of them are compiled.

    Triton compiles in threads where it is told to (most of the time is LLVM's and ptxas', outside Python's lock), but
    still waits for a kernel that it is to launch. What kernels would have written is not there.
    """
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor, AsyncCompileMode(executor):
            yield
    finally:
        JITFunction.run = run
