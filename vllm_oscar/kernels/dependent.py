# mypy: disable-error-code="no-untyped-def"
"""Programmatic dependent launch: a kernel's programs start while the kernel before it ends.

The four launches of a decoding layer (write, prepare, decode, merge) depend on each other and last microseconds each;
on Hopper and later the gaps between them are overlapped. The rules, which keep every result as it was:

- a program waits (`wait`) before it reads what any kernel wrote, and before it returns: so a kernel that has waited
  knows that all kernels before it are complete, not only the last one;
- before that it touches nothing but constants: it brings matrices near (`bring`);
- only a kernel whose successor is one of ours lets it start early (`release`).

Kernels take `launch_pdl`, which is an option of Triton's launcher too.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def supported(device: torch.device) -> bool:
    """Whether kernels on this device may be launched so: NVIDIA GPUs of compute capability 9.0 and later."""
    import os

    if os.environ.get("NO_PDL"):
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def release(launch_pdl: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have come here."""
    if launch_pdl:
        gdc_launch_dependents()


@triton.jit
def wait(launch_pdl: tl.constexpr):
    """Go on when all kernels before this one are complete and what they wrote is visible."""
    if launch_pdl:
        gdc_wait()


@triton.jit
def bring(pointer, ELEMENTS: tl.constexpr, launch_pdl: tl.constexpr):
    """Bring `ELEMENTS` 16-bit constants (a multiple of 64) from `pointer` on into the L2 cache."""
    if launch_pdl:
        LINES: tl.constexpr = triton.next_power_of_2(ELEMENTS // 64)
        line = tl.arange(0, LINES)
        line = tl.minimum(line, ELEMENTS // 64 - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(pointer + line * 64).to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
