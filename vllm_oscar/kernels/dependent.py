# mypy: disable-error-code="no-untyped-def"
"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs.

Of a decoding layer's four launches, `prepare` folds queries, which are complete before `write` starts. `write` is
launched as usual, so that everything before it is complete, and releases the next kernel at once. `prepare`, launched
with `launch_pdl`, waits for it only where it looks at what was written, and in every program before it ends, so that
the kernel after it finds both complete. `decode` is launched as usual too: it is one wave of programs, which are spread
unevenly over the multiprocessors when they start early (the step was 1.7 times as long on an H200). It releases `merge`
when little is left to do, which brings its matrix near and waits.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def supported(device: torch.device) -> bool:
    """Whether this device can launch kernels so: NVIDIA GPUs of compute capability 9.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def release(RELEASES: tl.constexpr):
    """Let the next kernel start once all programs of this one have come here."""
    if RELEASES:
        gdc_launch_dependents()


@triton.jit
def wait(launch_pdl: tl.constexpr):
    """Go on when the kernel before this one is complete and what it wrote is visible. Every program of a kernel that is
    launched with `launch_pdl` has to."""
    if launch_pdl:
        gdc_wait()
