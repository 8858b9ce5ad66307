# mypy: disable-error-code="no-untyped-def"
"""Which token is read from its BF16 copy: what the kernels share of hot_pool."""

import triton
import triton.language as tl


@triton.jit
def in_contract(position, before, limits):
    """hot_pool.in_contract, with the limits in force."""
    return (position < tl.load(limits)) | (position >= before + 1 - tl.load(limits + 1))


@triton.jit
def find(block, offset, asked, slot_of_block, written, P: tl.constexpr):
    """The slot with a copy of each token, of its block's present use, or -1. It counts if it is `proven` too."""
    slot = tl.load(slot_of_block + block, mask=asked, other=-1)
    there = tl.load(written + slot.to(tl.int64) * P + offset, mask=slot >= 0, other=0)
    return tl.where(there > 0, slot, -1)


@triton.jit
def proven(page, proof, found, WORDS: tl.constexpr):
    """Whether the words next to copies are those in the page; pointers to the first of each."""
    same = found
    for word in tl.static_range(WORDS):
        same = same & (tl.load(page + word, mask=found, other=0) == tl.load(proof + word, mask=found, other=0))
    return same
