# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RET505  (Triton compiles what follows a return as well)
"""Codes of 2, 3 or 4 bits as fp16 numbers, in one AND.

A code at bit p of a 16-bit word, masked and read as fp16, is the denormal code * 2^p * 2^-24: exact, as long as it
ends below bit 10, and tensor cores take it at full speed. So a word's lowest codes (five of 2 bits, three of 3, two of
4) need nothing but the AND, the others the same ANDs after one shift. A unit's code at position j comes out times
weight(bits, j) * 2^-24: whoever uses it folds that into something smaller.

`units` are what a kernel has loaded of some rows' codes, int16 words: the first of each unit, and of 4 bits the second.
Of 3 bits the rest is bytes. They are read two to a word too, each word twice, so that what is loaded goes to the tensor
cores' operands in the one way that Triton pipelines: the left half of the columns are the lower bytes of the words, the
right half the upper ones (see decode). Their codes' ninth bit, in the first words, is a product of its own.
"""

import os

import triton
import triton.language as tl

POSITIONS: tl.constexpr = tl.constexpr(8)  # codes of a unit
_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # runs no PTX


@triton.constexpr_function
def in_words(bits):
    """Codes of a unit that its first word holds."""
    return 16 // bits


@triton.constexpr_function
def in_bytes(bits, j):
    """Whether the code at position j is one of those that bytes hold."""
    return bits == 3 and j >= 16 // bits


@triton.constexpr_function
def weights(bits):
    """How many weights there are: 1, 2^bits, 4^bits ..."""
    return 10 // bits


@triton.constexpr_function
def weight(bits, j):
    """With what the code at position j comes out multiplied, besides 2^-24."""
    return 1 << j % (16 // bits) % (10 // bits) * bits


@triton.constexpr_function
def _shift(bits, j):
    """By how much a word goes right before the code at position j is masked."""
    return j % (16 // bits) // (10 // bits) * (10 // bits) * bits


@triton.constexpr_function
def _extraction(shift, mask):
    """PTX for two words in a register; Triton by itself would mask them one by one."""
    if shift == 0:
        return f"and.b32 $0, $1, 0x{mask:04X}{mask:04X};"
    return f"{{.reg .b32 t; shr.u32 t, $1, {shift}; and.b32 $0, t, 0x{mask:04X}{mask:04X};}}"


@triton.jit
def _masked(words, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """fp16 of (words >> SHIFT) & MASK."""
    if _INTERPRETED:
        return ((words >> SHIFT) & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(_extraction(SHIFT, MASK), "=r,r", [words], tl.float16, True, 2)


@triton.jit
def unpack(units, J: tl.constexpr, BITS: tl.constexpr):
    """fp16, the code at position J times weight(BITS, J) * 2^-24; of the last of 3 bits, without its `ninth_bit`."""
    if in_bytes(BITS, J):
        return _masked_bytes(units[1], ((1 << BITS) - 1) * weight(BITS, J) & 0xFF)
    else:
        return _masked(units[J // in_words(BITS)], _shift(BITS, J), ((1 << BITS) - 1) * weight(BITS, J))


@triton.jit
def ninth_bit(words):
    """fp16, what `unpack` left out of the last 3-bit codes: their highest bit, times 4 and their weight."""
    return _masked(words, 7, 0x100)


@triton.jit
def _masked_bytes(words, MASK: tl.constexpr):
    """fp16 of bytes & MASK: the lower bytes of the left half of the columns, the upper ones of the right half."""
    width: tl.constexpr = words.shape[1]
    shift = (tl.arange(0, width) // (width // 2) * 8)[None, :].to(tl.int16)
    if _INTERPRETED:
        return ((words >> shift) & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    shift, words = tl.broadcast(shift, words)
    asm: tl.constexpr = _byte_extraction(MASK)
    return tl.inline_asm_elementwise(asm, "=r,r,r", [words, shift], tl.float16, True, 2)


@triton.constexpr_function
def _byte_extraction(mask):
    """The same for words of which both have their byte in one place: the second operand's, once for each."""
    return f"{{.reg .b32 t; and.b32 t, $2, 8; shr.u32 t, $1, t; and.b32 $0, t, 0x{mask:04X}{mask:04X};}}"


@triton.jit
def scale_of(pair):
    """A page's int32 (scale, offset) word -> scale, float32."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def offset_of(pair):
    """A page's int32 (scale, offset) word -> offset, float32."""
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
