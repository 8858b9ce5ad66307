"""BF16 copies of the sink and the recent tokens, keyed by physical block and proven by the page itself.

INT2 is always complete. In addition, tokens that the contract below names have a copy of their transformed row in a
slot of the pool. A slot holds one vLLM block's tokens; which block, `SlotTable.slot_of_block` says, and which of them
have a copy, `SlotTable.written`. It follows every write to a page that is ours: a token that is written without a copy,
or a slot that goes to another block, leaves none behind. So whatever the scheduler does with a block, no other token's
copy is read, and no event from it is needed.

Pages may also change behind our back: a sleep discards them. So next to each row the slot keeps the scale and offset
words that the page held when both were written; a reader compares them with the page's words as integers, and uses the
row only if they agree.

The contract. Let c be the tokens of a request before this step. Token j is read in BF16 if and only if its copy is
proven and
    j < sink   or   j >= c + 1 - window
and in INT2 otherwise, also where a copy is left over, so that the output never depends on what was evicted when.

Slots are handed out once a step from (block_table, seq_lens, query_start_loc) alone, without a host sync.
"""

from dataclasses import dataclass

import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.page_layout import PageLayout

NO_SLOT = -1
FLOOR = 0  # rank of a block without which a request cannot be served, see SlotTable.allocate
UNNEEDED = 1 << 20  # rank of a block that this step does not need
FREE, EMPTY, WINDOW, SINK, IN_FLIGHT = range(5)  # kinds of slots, in the order in which they are given away


def in_contract(
    position: torch.Tensor, before: int | torch.Tensor, sink: int | torch.Tensor, window: int | torch.Tensor
) -> torch.Tensor:
    """Which tokens the contract lets a step read in BF16: j < S or j >= c + 1 - W.

    Args:
        position: j, int (tokens,)
        before: c, tokens of the request before the step
    """
    return (position < sink) | (position >= before + 1 - window)


@dataclass(frozen=True)
class HotContract:
    """Which tokens are read in BF16.

    Attributes:
        sink: first tokens of a request, S
        window: last tokens of a request, W (at least 1)
        block_size: tokens of a slot, P
    """

    sink: int
    window: int
    block_size: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.window < 1:
            raise ConfigError(f"sink {self.sink} must be at least 0 and window {self.window} at least 1")

    @property
    def sink_blocks(self) -> int:
        return -(-self.sink // self.block_size)

    @property
    def depth(self) -> int:
        """Steps of one block in which the window shrinks from W to 1."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def levels(self) -> int:
        """Ranks that a needed block may have, see SlotTable.allocate: the floor's, the window's, the far sinks'."""
        return 1 + self.depth + max(self.sink_blocks - 1, 0)

    @property
    def tail_blocks(self) -> int:
        """Most blocks that W consecutive tokens can touch."""
        return self.depth + 1

    @property
    def slots_per_request(self) -> int:
        """Slots that one request can need in a step; a prefilling request holds two tails."""
        return self.sink_blocks + 2 * self.tail_blocks

    def floor_slots_per_request(self, decode_threshold: int) -> int:
        """Slots below which a request cannot be served: its first sink block and the blocks that a decode writes.

        Args:
            decode_threshold: longest query that reads its own tokens from the pool
        """
        return (1 if self.sink else 0) + 1 + -(-(decode_threshold - 1) // self.block_size)


@dataclass
class SlotTable:
    """Which block has which slot: one table for all layers of a KV-cache group. All tensors live on one device.

    Attributes:
        slot_of_block: int32 (blocks + 1,), NO_SLOT where a block has none; the last element takes masked writes
        block_of_slot: int32 (slots + 1,), -1 where a slot is free; the last element takes masked writes
        written: uint8 (slots + 1, P), which tokens of the slot's block have a copy; the last row takes masked writes
        last_step: int32 (slots + 1,), the step in which the slot was last needed
        is_sink: bool (slots + 1,)
        limits: int32 (2,), the sink and the window that hold in this step (smaller than asked for when the
            running requests need more slots than there are: first the sink, down to one block, then the window)
        evictions: int64 (1,), copies given up so far
        shrunk_steps: int64 (1,), steps in which the limits were below what was asked for
        step: int32 (1,), number of calls of `allocate` so far
        in_flight: batches of a pipeline, whose steps take turns: each may fill its share of the slots, and none gives
            away what another's last step needed
        sliding_window: tokens that the group's layers see, the widest of them; None: all
    """

    contract: HotContract
    slot_of_block: torch.Tensor
    block_of_slot: torch.Tensor
    written: torch.Tensor
    last_step: torch.Tensor
    is_sink: torch.Tensor
    limits: torch.Tensor
    evictions: torch.Tensor
    shrunk_steps: torch.Tensor
    step: torch.Tensor
    in_flight: int
    sliding_window: int | None

    @classmethod
    def empty(
        cls,
        contract: HotContract,
        num_blocks: int,
        num_slots: int,
        device: torch.device,
        in_flight: int = 1,
        sliding_window: int | None = None,
    ) -> "SlotTable":
        def made(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        table = cls(
            contract,
            slot_of_block=made(num_blocks + 1, dtype=torch.int32),
            block_of_slot=made(num_slots + 1, dtype=torch.int32),
            written=made(num_slots + 1, contract.block_size, dtype=torch.uint8),
            last_step=made(num_slots + 1, dtype=torch.int32),
            is_sink=made(num_slots + 1, dtype=torch.bool),
            limits=made(2, dtype=torch.int32),
            evictions=made(1, dtype=torch.int64),
            shrunk_steps=made(1, dtype=torch.int64),
            step=made(1, dtype=torch.int32),
            in_flight=in_flight,
            sliding_window=sliding_window,
        )
        table.clear()
        return table

    def clear(self) -> None:
        """Take every slot back and start counting anew, in place."""
        self.slot_of_block.fill_(NO_SLOT)
        self.block_of_slot.fill_(-1)
        self.limits[:1].fill_(self.contract.sink)
        self.limits[1:].fill_(self.contract.window)
        for counts in (self.written, self.last_step, self.is_sink, self.evictions, self.shrunk_steps, self.step):
            counts.zero_()

    @property
    def num_slots(self) -> int:
        return self.block_of_slot.shape[0] - 1

    @property
    def slots_per_step(self) -> int:
        """Most slots that a step may need."""
        return self.num_slots // self.in_flight

    def allocate(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        decode_threshold: int,
    ) -> None:
        """Give every block that this step needs a slot; calling it again with the same arguments changes nothing
        but the step number.

        Ranks decide what goes when the step's requests need more than `slots_per_step`: 0 the floor (first sink block,
        tail block, blocks that a decode step writes), d the blocks that a window of 1 + d*P tokens reaches, and, last,
        depth + b the sink block number b. The largest rank that fits, counted over distinct blocks, sets `limits` for
        all. Blocks that no layer of the group sees any more are not needed: vLLM may have given them to others.

        Args:
            block_table: int32 (requests, >= blocks of the longest)
            seq_lens: int32 (requests,), tokens after this step; 0 for padding rows
            query_start_loc: int32 (requests + 1,)
            decode_threshold: longest query that reads its own tokens from the pool
        """
        contract = self.contract
        self.step += 1
        logical, rank, is_sink = self._needs(seq_lens, query_start_loc, decode_threshold)
        column = logical.clamp(0, block_table.shape[1] - 1).long()
        block = block_table.gather(1, column).flatten().long()
        rank, is_sink = rank.flatten(), is_sink.flatten()
        num_blocks = self.slot_of_block.shape[0] - 1
        rank = torch.where((block > 0) & (block < num_blocks), rank, UNNEEDED)
        block = torch.where(rank < UNNEEDED, block, num_blocks)  # masked entries go to the spare element

        # one entry for each distinct block: its lowest rank, and the first candidate that names it
        best = torch.full_like(self.slot_of_block, UNNEEDED).scatter_reduce(0, block, rank, "amin")
        index = torch.arange(block.shape[0], device=block.device)
        first = torch.full_like(self.slot_of_block, block.shape[0], dtype=torch.int64)
        first = first.scatter_reduce(0, block, index, "amin")
        distinct = (first[block] == index) & (rank < UNNEEDED)
        sink_block = torch.zeros_like(self.slot_of_block).scatter_reduce(0, block, is_sink.int(), "amax")

        levels = contract.levels
        histogram = torch.zeros(levels, dtype=torch.int64, device=block.device)
        histogram.scatter_add_(0, best[block].clamp(max=levels - 1).long(), distinct.long())
        fits = histogram.cumsum(0) <= self.slots_per_step
        level = fits.long().cumprod(0).sum() - 1  # the last rank that fits; -1 cannot be, start-up refuses it
        self._set_limits(level)
        needed = distinct & (best[block] <= level)

        slot = self.slot_of_block[block].long()
        kept = needed & (slot != NO_SLOT)
        spare = self.num_slots
        kept_slot = torch.where(kept, slot, spare)
        self.last_step.scatter_(0, kept_slot, self.step.expand(kept_slot.shape))
        self.is_sink[kept_slot] = sink_block[block].bool()

        victims = self._victims()
        missing = needed & ~kept
        order = (missing.long().cumsum(0) - 1).clamp(0, spare - 1)
        new_slot = torch.where(missing, victims[order], spare)
        old_block = self.block_of_slot[new_slot].long()
        evicted = missing & (old_block >= 0)
        self.evictions += evicted.sum()
        self.slot_of_block[torch.where(evicted, old_block, num_blocks)] = NO_SLOT
        self.slot_of_block[torch.where(missing, block, num_blocks)] = new_slot.int()
        self.block_of_slot[new_slot] = block.int()
        self.written[new_slot] = 0
        self.last_step.scatter_(0, new_slot, self.step.expand(new_slot.shape))
        self.is_sink[new_slot] = sink_block[block].bool()
        self.slot_of_block[num_blocks] = NO_SLOT
        self.block_of_slot[spare] = -1

    def _needs(
        self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, decode_threshold: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidates of each request: logical block, rank and whether it is a sink, each (requests, K)."""
        contract, p = self.contract, self.contract.block_size
        after = seq_lens.int()[:, None]
        query_lens = (query_start_loc[1:] - query_start_loc[:-1]).int()[:, None]
        before = after - query_lens
        short = query_lens <= decode_threshold

        def around(end: torch.Tensor) -> torch.Tensor:
            """The blocks of the W tokens that end before `end`."""
            last = torch.div(end - 1, p, rounding_mode="floor")
            return last - torch.arange(contract.tail_blocks, device=end.device, dtype=torch.int32)

        sinks = torch.arange(contract.sink_blocks, device=after.device, dtype=torch.int32).expand(after.shape[0], -1)
        logical = torch.cat([sinks, around(before), around(after)], 1)
        start, end = logical * p, (logical + 1) * p
        exists = (logical >= 0) & (start < after)

        # the smallest window that reaches the block: for reading history, and for the step that comes next
        reading = torch.where(start < before, before + 1 - torch.minimum(end - 1, before - 1), UNNEEDED)
        writing = torch.where(end > before, after + 1 - torch.minimum(end - 1, after - 1), UNNEEDED)
        reach = torch.minimum(reading, writing)
        seen = exists if self.sliding_window is None else exists & (reach <= self.sliding_window)
        is_sink = seen & (start < contract.sink)
        rank = torch.where(is_sink, contract.depth + logical, UNNEEDED)
        depth = torch.div(reach + p - 2, p, rounding_mode="floor")
        rank = torch.where(seen & (reach <= contract.window), torch.minimum(rank, depth), rank)
        tail = exists & (after <= end)
        floor = (is_sink & (logical == 0)) | tail | (exists & short & (end > before))
        return logical, torch.where(floor, FLOOR, rank).int(), is_sink

    def _set_limits(self, level: torch.Tensor) -> None:
        contract, p = self.contract, self.contract.block_size
        window = (1 + level * p).clamp(max=contract.window)
        sink = ((1 + (level - contract.depth).clamp(min=0)) * p).clamp(max=contract.sink)
        self.limits.copy_(torch.stack([sink, window]))
        self.shrunk_steps += (level < contract.levels - 1).long()

    def _victims(self) -> torch.Tensor:
        """Slots in the order in which they may be given away, int64 (slots,); those needed now, or by another batch in
        flight, come last."""
        last_step, block = self.last_step[:-1].long(), self.block_of_slot[:-1]
        kind = torch.where(self.is_sink[:-1], SINK, WINDOW)
        kind = torch.where((self.written[:-1] > 0).any(-1), kind, EMPTY)
        kind = torch.where(self.step - last_step < self.in_flight, IN_FLIGHT, kind)
        kind = torch.where(block < 0, FREE, kind)
        return torch.argsort((kind << 32) | last_step, stable=True)

    def map_copies(
        self,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        short: torch.Tensor,
    ) -> torch.Tensor:
        """Where each new token's copy goes, int64 (tokens,): slot * P + offset, or -1 for no copy. The step that writes
        them has to follow: `written` is as it leaves it.

        Args:
            slot_mapping: int64 (tokens,), vLLM's block * block_size + offset, or -1
            positions: int32 (tokens,), position of the token in its request
            before, after: int32 (tokens,), its request's tokens before and after this step
            short: bool (tokens,), whether its request decodes (and so reads its own tokens from the pool)
        """
        p = self.contract.block_size
        hot = in_contract(positions, after, self.limits[0], self.limits[1]) | (short & (positions >= before))
        block = torch.where(slot_mapping >= 0, slot_mapping // p, self.slot_of_block.shape[0] - 1)
        slot = self.slot_of_block[block].long()
        held = (slot != NO_SLOT) & (slot_mapping >= 0)
        self.written[torch.where(held, slot, self.num_slots), slot_mapping % p] = hot.to(torch.uint8)
        return torch.where(hot & held, slot * p + slot_mapping % p, -1)


@dataclass
class HotPool:
    """One layer's copies.

    Attributes:
        rows: BF16 or FP16 (slots, heads, 2, P, D), transformed keys and values
        words: int32 (slots, heads, P, 2 * groups), the page's (scale, offset) pairs when the row was written
    """

    rows: torch.Tensor
    words: torch.Tensor

    @classmethod
    def allocate(
        cls, layout: PageLayout, num_slots: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
    ) -> "HotPool":
        shape = (num_slots, num_kv_heads, 2, layout.block_size, layout.head_size)
        words = (num_slots, num_kv_heads, layout.block_size, 2 * layout.groups)
        # filled, not torch.zeros: memory that was never touched is missing from the size that vLLM measures on CPUs
        return cls(
            torch.full(shape, 0, dtype=dtype, device=device), torch.full(words, -1, dtype=torch.int32, device=device)
        )

    @staticmethod
    def slot_bytes(layout: PageLayout, num_kv_heads: int, dtype: torch.dtype) -> int:
        """Bytes of one slot of one layer."""
        row = 2 * layout.head_size * dtype.itemsize
        return num_kv_heads * layout.block_size * (row + 2 * layout.groups * 4)


def page_words(meta: torch.Tensor) -> torch.Tensor:
    """A page's scales and offsets as integers: fp16 (blocks, heads, P, 2, groups, 2) -> int32 (..., P, 2 * groups)."""
    return meta.view(torch.int32).flatten(-3)
