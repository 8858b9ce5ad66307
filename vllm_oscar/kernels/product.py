# mypy: disable-error-code="no-untyped-def"
"""Matrix products that Triton's interpreter can do as well: it knows no BF16."""

import os

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def product(a, b, accumulator):
    """accumulator + a @ b, fp32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator)
    return tl.dot(a, b, accumulator)
