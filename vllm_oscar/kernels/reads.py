# mypy: disable-error-code="no-untyped-def"
"""Counting how stored tokens are read, on the device (see StoredRows.reads).

The layers of a KV-cache group write the same tokens and share a slot table, so that a token has a proven copy in all
of them or in none: one layer counts for all, and the others' kernels have no trace of it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class ReadCounter:
    """Given to the kernels of a layer that counts.

    Attributes:
        counts: int64 (3,), increased by the reads of BF16 copies, of INT2 rows, and of sinks among the latter
        layers: for how many layers this one counts
    """

    counts: torch.Tensor
    layers: int


@triton.jit
def add_reads(counts, copies, stored, copied_sinks, sinks, LAYERS: tl.constexpr):
    """Count reads of `stored` tokens, `copies` of them from a copy, and likewise of the sinks among them: int32, of one
    KV head."""
    kind = tl.arange(0, 4)
    count = tl.where(kind == 0, copies, tl.where(kind == 1, stored - copies, sinks - copied_sinks)) * LAYERS
    tl.atomic_add(counts + kind, count.to(tl.int64), mask=(kind < 3) & (count != 0), sem="relaxed")
