# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RET505  (Triton compiles what follows a return as well)
"""Two bits of a 16-bit unit as an fp16 number, in one AND.

`unit & (3 << 2i)` read as fp16 is the denormal code * 4^i * 2^-24: exact, and tensor cores take it at full speed.
Bits 0..9 (five codes) need nothing but the AND, the other three the same ANDs after one shift by 10, so the code at
position J comes out times 4^(J mod 5) * 2^-24. Whoever uses it folds that weight into something smaller.
"""

import os

import triton
import triton.language as tl

POSITIONS: tl.constexpr = tl.constexpr(8)  # codes of a unit
_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # runs no PTX


@triton.jit
def weight_exponent(J):
    """e with weight 4^(J mod 5) = 2^e."""
    return (J % 5) * 2


@triton.jit
def unpack(units, J: tl.constexpr):
    """int16 units -> fp16, the code at position J times 4^(J mod 5) * 2^-24."""
    if _INTERPRETED:
        return ((units >> (J // 5 * 10)) & (tl.constexpr(3) << (J % 5 * 2))).to(tl.int16).to(tl.float16, bitcast=True)
    # two units in a register; Triton by itself would mask them one by one
    if J == 0:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [units], tl.float16, True, 2)
    elif J == 1:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x000C000C;", "=r,r", [units], tl.float16, True, 2)
    elif J == 2:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00300030;", "=r,r", [units], tl.float16, True, 2)
    elif J == 3:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00C000C0;", "=r,r", [units], tl.float16, True, 2)
    elif J == 4:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x03000300;", "=r,r", [units], tl.float16, True, 2)
    elif J == 5:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 10; and.b32 $0, t, 0x00030003;}", "=r,r", [units], tl.float16, True, 2
        )
    elif J == 6:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 10; and.b32 $0, t, 0x000C000C;}", "=r,r", [units], tl.float16, True, 2
        )
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 10; and.b32 $0, t, 0x00300030;}", "=r,r", [units], tl.float16, True, 2
        )


@triton.jit
def scale_of(pair):
    """A page's int32 (scale, offset) word -> scale, float32."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def offset_of(pair):
    """A page's int32 (scale, offset) word -> offset, float32."""
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
