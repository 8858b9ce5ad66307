# mypy: disable-error-code="no-untyped-def"
"""Which program of the decode kernel reads what: one table for the whole batch, built on the device each step.

The kernel runs best as one wave of one-warp programs, equally many for each of a multiprocessor's four schedulers: as
many as registers allow, so that some work while others wait for memory. So the stored tokens of all sequences, weighed
by what reading them costs, are cut into at most `programs / heads` segments of about equal cost, each within one
sequence. Using only half of sixteen where segments are short was tried, and made those up to 1.3 times slower.

A sequence has three stretches: [start, fast_lo) and [fast_hi, end) hold what needs a closer look (tokens that may
have a BF16 copy, the edges of a sliding window, tokens that not every query of the step sees), [fast_lo, fast_hi)
is whole tiles of plain INT2.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_oscar.page_layout import PageLayout

FIELDS: tl.constexpr = tl.constexpr(5)  # sequence, lo, fast_lo, fast_hi, hi
_MIN_COST = 4  # tiles; smaller segments cost more in the merge than they gain
_GRANULE_COST = 2  # of a granule with BF16 copies, in plain tiles
_ROWS = 32  # table rows that one program writes


def tile_tokens(head_size: int) -> int:
    """Tokens of a plain tile."""
    return 128 if head_size == 64 else 64


def granule(head_size: int) -> int:
    """Tokens that the closer look takes at a time: what one tensor-core operand holds."""
    return 32 if head_size == 64 else 16


def programs_per_multiprocessor(layout: PageLayout) -> int:
    """Programs of the decode kernel that run at once: a multiple of four, a multiprocessor's schedulers.

    At head sizes 80 to 128 and GQA up to 8 the kernel does with 128 registers for keys and values of 2 bits, and runs
    up to 9% faster with sixteen programs than with eight (8 x 128K, 29 x 100K, H200); with GQA 16 it is the same. More
    bits take more registers, at other head sizes there are up to 255.
    """
    if not 64 < layout.head_size <= 128:
        return 8
    return {4: 16, 5: 12, 6: 12}.get(layout.key_bits + layout.value_bits, 8)


def registers(layout: PageLayout) -> int:
    """The most that a thread of the decode kernel may have for so many programs to fit, each a warp; 255 is no limit.

    Without it triton 3.8 takes 132 where 3.6 took 128, and runs three programs a scheduler instead of four: up to 18%
    slower (32 x 4K, H200).
    """
    return min(65536 // (32 * programs_per_multiprocessor(layout)) // 8 * 8, 255)


def programs_per_wave(device: torch.device, layout: PageLayout) -> int:
    """Programs that run at once; a handful where there is no GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 24
    return programs_per_multiprocessor(layout) * torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Segments:
    """The table.

    Attributes:
        table: int32 (segments, 5): sequence (-1: nothing to do), lo, fast_lo, fast_hi, hi in tokens
        first: int32 (sequences + 1,), the first segment of each sequence
        layout: for which they are
    """

    table: torch.Tensor
    first: torch.Tensor
    layout: PageLayout

    @classmethod
    def allocate(cls, max_seqs: int, heads: int, layout: PageLayout, device: torch.device) -> "Segments":
        """Storage for the largest batch.

        Args:
            heads: programs that read one segment: KV heads times the column tiles of the query
        """
        size = segments_of(max_seqs, heads, layout, device)
        table = torch.full((size, FIELDS.value), -1, dtype=torch.int32, device=device)
        return cls(table, torch.zeros(max_seqs + 1, dtype=torch.int32, device=device), layout)

    def for_batch(self, seqs: int, heads: int) -> "Segments":
        """The part of the storage that a batch of this (padded) size uses, always the same."""
        size = segments_of(seqs, heads, self.layout, self.table.device)
        return Segments(self.table[:size], self.first[: seqs + 1], self.layout)


def segments_of(seqs: int, heads: int, layout: PageLayout, device: torch.device) -> int:
    """Rows of the table: those whose programs, one for each of `heads`, make one wave; at least one a sequence."""
    return max(seqs, programs_per_wave(device, layout) // heads)


@triton.jit
def _stretches(length, sink, window, q_len, sliding_window, T: tl.constexpr, GRANULE: tl.constexpr):
    """(start, fast_lo, fast_hi) of sequences with `length` tokens, the step's own q_len among them."""
    before = length - q_len
    start = tl.zeros_like(length)
    fast_lo = start + sink
    if sliding_window > 0:
        start = tl.maximum(before + 1 - sliding_window, 0) // GRANULE * GRANULE
        fast_lo = tl.maximum(fast_lo, length - sliding_window)
    fast_lo = tl.maximum((fast_lo + T - 1) // T * T, start)
    fast_hi = tl.maximum(before + 1 - window, 0) // T * T
    none = fast_hi <= fast_lo
    return start, tl.where(none, start, fast_lo), tl.where(none, start, fast_hi)


@triton.jit
def _boundary(cost, length, start, fast_lo, fast_hi, T: tl.constexpr, GRANULE: tl.constexpr, WEIGHT: tl.constexpr):
    """The token at which a sequence has cost `cost` behind it."""
    head = (fast_lo - start) // GRANULE * WEIGHT
    tiles = (fast_hi - fast_lo) // T
    tail = tl.minimum(fast_hi + (cost - head - tiles) // WEIGHT * GRANULE, length)
    token = tl.where(cost < head + tiles, fast_lo + (cost - head) * T, tail)
    return tl.where(cost < head, start + cost // WEIGHT * GRANULE, token)


@triton.jit
def _cost(length, start, fast_lo, fast_hi, T: tl.constexpr, GRANULE: tl.constexpr, WEIGHT: tl.constexpr):
    granules = (fast_lo - start) // GRANULE + (length - fast_hi + GRANULE - 1) // GRANULE
    return granules * WEIGHT + (fast_hi - fast_lo) // T


@triton.jit(do_not_specialize=["seqs", "rows", "q_len"])
def _build(
    seq_lens, limits, table, first, seqs, rows, q_len, sliding_window,
    T: tl.constexpr, GRANULE: tl.constexpr, WEIGHT: tl.constexpr, MIN_COST: tl.constexpr,
    B: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sink = tl.load(limits)
    window = tl.load(limits + 1)
    b = tl.arange(0, B)
    length = tl.load(seq_lens + b, mask=b < seqs, other=0)
    start, fast_lo, fast_hi = _stretches(length, sink, window, q_len, sliding_window, T, GRANULE)
    cost = tl.where(length > 0, _cost(length, start, fast_lo, fast_hi, T, GRANULE, WEIGHT), 0)

    # the smallest share with which the whole batch fits into the table
    low = MIN_COST
    high = tl.maximum(tl.max(cost, 0), MIN_COST)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum((cost + middle - 1) // middle, 0) <= rows
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    pieces = (cost + low - 1) // low
    end = tl.cumsum(pieces, 0)

    program = tl.program_id(0)
    if program == 0:
        tl.store(first + b + 1, end, mask=b < seqs)
        tl.store(first, 0)

    row = program * R + tl.arange(0, R)
    passed = end[None, :] <= row[:, None]
    owner = tl.sum(passed.to(tl.int32), 1)
    piece = row - tl.sum(tl.where(passed, pieces[None, :], 0), 1)
    used = owner < seqs
    length = tl.load(seq_lens + owner, mask=used, other=0)
    start, fast_lo, fast_hi = _stretches(length, sink, window, q_len, sliding_window, T, GRANULE)
    cost = _cost(length, start, fast_lo, fast_hi, T, GRANULE, WEIGHT)
    of = tl.maximum((cost + low - 1) // low, 1)
    lo = _boundary(piece * cost // of, length, start, fast_lo, fast_hi, T, GRANULE, WEIGHT)
    hi = _boundary((piece + 1) * cost // of, length, start, fast_lo, fast_hi, T, GRANULE, WEIGHT)
    fast_lo = tl.minimum(tl.maximum(fast_lo, lo), hi)
    fast_hi = tl.minimum(tl.maximum(fast_hi, fast_lo), hi)
    entry = table + row * COLUMNS
    kept = row < rows
    tl.store(entry, tl.where(used, owner, -1), mask=kept)
    tl.store(entry + 1, lo, mask=kept)
    tl.store(entry + 2, fast_lo, mask=kept)
    tl.store(entry + 3, fast_hi, mask=kept)
    tl.store(entry + 4, hi, mask=kept)


def build_segments(
    seq_lens: torch.Tensor,
    q_len: int,
    limits: torch.Tensor,
    sliding_window: int | None,
    out: Segments,
) -> None:
    """Fill the table for a step; one launch, no sync.

    Args:
        seq_lens: int32 (sequences,), tokens after this step, 0 for padding rows
        q_len: queries of each sequence in this step
        limits: int32 (2,), sink and window in force (`SlotTable.limits`)
        out: `Segments.for_batch` of this batch
    """
    head_size = out.layout.head_size
    seqs, rows = seq_lens.shape[0], out.table.shape[0]
    _build[(triton.cdiv(rows, _ROWS),)](
        seq_lens, limits, out.table, out.first, seqs, rows, q_len, sliding_window or 0,
        T=tile_tokens(head_size), GRANULE=granule(head_size), WEIGHT=_GRANULE_COST, MIN_COST=_MIN_COST,
        B=triton.next_power_of_2(seqs), R=_ROWS, COLUMNS=FIELDS.value, num_warps=4,
    )  # fmt: skip
