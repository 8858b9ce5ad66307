"""Slot kernels against SlotTable under random schedules: the cases, and how to run one."""

import copy
import random
from dataclasses import dataclass

import torch

from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable, page_words
from vllm_oscar.kernels import slots
from vllm_oscar.page_layout import PageLayout

P = 16


@dataclass(frozen=True)
class Case:
    sink: int
    window: int
    num_slots: int
    steps: int = 25
    in_flight: int = 1


class Schedule:
    """Random requests over a small pool of blocks; blocks are reused and shared, some rows are padding."""

    def __init__(self, seed: int, blocks: range, threshold: int, device: torch.device) -> None:
        self.device = device
        self.random = random.Random(seed)
        self.free = list(blocks)
        self.running: list[tuple[list[int], int]] = []  # blocks, tokens
        self.threshold = threshold
        self.columns = 24

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_table, seq_lens, query_start_loc, slot_mapping of one step."""
        rng = self.random
        if len(self.running) > 1 and rng.random() < 0.3:
            blocks, _ = self.running.pop(rng.randrange(len(self.running)))
            shared = {b for other, _ in self.running for b in other}
            self.free += [b for b in blocks if b not in shared]
        if len(self.running) < 4 and rng.random() < 0.6:
            prefix = self.running[0][0][:1] if self.running and self.running[0][1] > P and rng.random() < 0.5 else []
            self.running.append((list(prefix), len(prefix) * P))
        rng.shuffle(self.running)
        rows, lens, starts, places = [], [], [0], []
        for number, (blocks, tokens) in enumerate(self.running):
            query = rng.choice([1, 1, self.threshold, 15, 16, 33, 70]) if tokens else rng.choice([1, 17, 60])
            after = min(tokens + query, self.columns * P)
            while len(blocks) * P < after and self.free:
                blocks.append(self.free.pop(rng.randrange(len(self.free))))
            after = min(after, len(blocks) * P)
            self.running[number] = (blocks, after)
            places += [blocks[t // P] * P + t % P for t in range(tokens, after)]
            rows.append(blocks + [0] * (self.columns - len(blocks)))
            lens.append(after)
            starts.append(starts[-1] + after - tokens)
        for _ in range(rng.randrange(3)):  # padding
            rows.append([0] * self.columns)
            lens.append(0)
            starts.append(starts[-1])
            places.append(-1)
        if not rows:
            return self.step()

        def tensor(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return tensor(rows), tensor(lens), tensor(starts), tensor(places, torch.int64)


def check(case: Case, device: torch.device) -> str:
    """See verify_gpu. Every step leaves the state that the reference leaves."""
    layout, num_blocks, threshold = PageLayout(64, P), 40, 2
    contract = HotContract(case.sink, case.window, P)
    batches = case.in_flight
    schedules = [
        Schedule(case.sink + case.window + n, range(1 + n, num_blocks, batches), threshold, device)
        for n in range(batches)
    ]
    wanted = SlotTable.empty(contract, num_blocks, case.num_slots, device, batches)
    table = copy.deepcopy(wanted)
    scratch = slots.SlotScratch.of(table)
    pool = HotPool.allocate(layout, case.num_slots, 3, torch.bfloat16, device)
    pages = torch.zeros((num_blocks, 4, layout.head_bytes + 128), dtype=torch.uint8, device=device)[:, :3]
    meta = layout.views(pages).meta
    for step in range(case.steps):
        block_table, seq_lens, starts, slot_mapping = schedules[step % batches].step()
        proven = pool.proven_slots(page_words(meta), wanted)
        wanted.allocate(block_table, seq_lens, starts, threshold, proven)
        slots.allocate(table, scratch, block_table, seq_lens, starts, threshold, pages, layout, pool)
        for name in ("slot_of_block", "block_of_slot", "last_step", "is_sink"):
            assert torch.equal(getattr(table, name)[:-1], getattr(wanted, name)[:-1]), name
        for name in ("limits", "evictions", "shrunk_steps", "step"):
            assert torch.equal(getattr(table, name), getattr(wanted, name)), name

        tokens = slot_mapping.shape[0]
        query = (starts[1:] - starts[:-1]).long()
        padding = tokens - int(query.sum())

        def each(values: torch.Tensor, query: torch.Tensor = query, padding: int = padding) -> torch.Tensor:
            return torch.cat([values.repeat_interleave(query), values.new_zeros(padding)])

        after, before = each(seq_lens), each(seq_lens - query.int())
        position = before + torch.arange(tokens, dtype=torch.int32, device=device) - each(starts[:-1])
        expected = wanted.hot_slot_mapping(slot_mapping, position, before, after, each(query <= threshold))
        out = torch.full((tokens + 3,), 7, dtype=torch.int64, device=device)
        positions = out.int() if step % 2 else None  # written only where a layer's mean turns
        slots.hot_slot_mapping(table, slot_mapping, starts, seq_lens, threshold, out, positions)
        assert torch.equal(out[:tokens], expected)
        assert (out[tokens:] == 7).all()
        if positions is not None:
            real = tokens - padding
            assert torch.equal(positions[:real], position[:real])
            assert (positions[tokens:] == 7).all()

        # write what was mapped, so that some slots prove themselves and some no longer do
        for place, hot in zip(slot_mapping.tolist(), expected.tolist(), strict=True):
            word = torch.randint(1, 30000, (2,), dtype=torch.int32, device=device)
            if place >= 0:
                meta[place // P, :, place % P] = word.view(torch.float16).reshape(2, 1, 2)
            if hot >= 0:
                pool.words[hot // P, :, hot % P] = word
    return f"{int(table.evictions)} evictions"


def gpu_cases() -> list[Case]:
    """What verify_gpu runs."""
    return [
        Case(64, 64, 64),
        Case(16, 33, 9),
        Case(0, 1, 6),
        Case(20, 100, 14, 80),
        Case(64, 256, 3000),
        Case(16, 33, 18, 80, 2),
    ]
