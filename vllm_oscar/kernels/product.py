# mypy: disable-error-code="no-untyped-def"
"""Matrix products that Triton's interpreter can do as well (it knows no BF16), and how their operands stay in range."""

import os

import torch
import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def scaled(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices (..., D, D) as `dtype`, contiguous, times a power of two each: float32 (...,). The largest element lies
    in [2^14, 2^15), so that fp16 keeps all bits of those down to 2^-28 of it; unscaled it loses what is below 2^-14."""
    exponent = torch.frexp(matrix.abs().amax((-2, -1))).exponent - 15
    unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return (matrix / unit[..., None, None]).to(dtype).contiguous(), unit


@triton.jit
def product(a, b, accumulator):
    """accumulator + a @ b, fp32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator)
    return tl.dot(a, b, accumulator)
