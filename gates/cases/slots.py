"""Slot kernels against SlotTable under random schedules: the cases, and how to run one."""

import copy
import random
from dataclasses import dataclass

import torch

from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable, page_words
from vllm_oscar.kernels import slots
from vllm_oscar.page_layout import PageLayout

NUM_BLOCKS = 40


@dataclass(frozen=True)
class Case:
    """A schedule. stride: bytes from page to page, where it is not what they take; long: of 10,000 operations, in which
    copies without proof, of windows and of sinks are given up, and the window shrinks in some steps and not in others.
    """

    sink: int
    window: int
    num_slots: int
    steps: int = 25
    block_size: int = 16
    stride: int = 0
    long: bool = False
    in_flight: int = 1
    sliding_window: int | None = None

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in vars(self).items() if v != vars(Case).get(k))

    @property
    def layout(self) -> PageLayout:
        return PageLayout(64, self.block_size)


class Schedule:
    """Random requests over a small pool of blocks; blocks are reused and shared, some rows are padding."""

    def __init__(self, seed: int, blocks: range, block_size: int, threshold: int, device: torch.device) -> None:
        self.device = device
        self.block_size = block_size
        self.random = random.Random(seed)
        self.free = list(blocks)
        self.running: list[tuple[list[int], int]] = []  # blocks, tokens
        self.threshold = threshold
        self.columns = 24
        self.operations = 0  # requests that started, advanced, ended

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_table, seq_lens, query_start_loc, slot_mapping of one step."""
        rng, p = self.random, self.block_size
        if len(self.running) > 1 and rng.random() < 0.3:
            blocks, _ = self.running.pop(rng.randrange(len(self.running)))
            shared = {b for other, _ in self.running for b in other}
            self.free += [b for b in blocks if b not in shared]
            self.operations += 1
        if len(self.running) < 4 and rng.random() < 0.6:
            prefix = self.running[0][0][:1] if self.running and self.running[0][1] > p and rng.random() < 0.5 else []
            self.running.append((list(prefix), len(prefix) * p))
            self.operations += 1
        rng.shuffle(self.running)
        rows, lens, starts, places = [], [], [0], []
        for number, (blocks, tokens) in enumerate(self.running):
            query = rng.choice(
                [1, 1, self.threshold, p - 1, p, 2 * p + 1, 4 * p + 6] if tokens else [1, p + 1, 4 * p - 4]
            )
            after = min(tokens + query, self.columns * p)
            while len(blocks) * p < after and self.free:
                blocks.append(self.free.pop(rng.randrange(len(self.free))))
            after = min(after, len(blocks) * p)
            self.running[number] = (blocks, after)
            self.operations += after > tokens
            places += [blocks[t // p] * p + t % p for t in range(tokens, after)]
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
    """See gates.kernels. Every step leaves the state that the reference leaves."""
    p, threshold, batches = case.block_size, 2, case.in_flight
    layout, contract = case.layout, HotContract(case.sink, case.window, p)
    schedules = [
        Schedule(case.sink + case.window + n, range(1 + n, NUM_BLOCKS, batches), p, threshold, device)
        for n in range(batches)
    ]
    wanted = SlotTable.empty(contract, NUM_BLOCKS, case.num_slots, device, batches, case.sliding_window)
    table = copy.deepcopy(wanted)
    scratch = slots.SlotScratch.of(table)
    pool = HotPool.allocate(layout, case.num_slots, 3, torch.bfloat16, device)
    head = layout.head_bytes + 128
    stride = case.stride or 4 * head
    pages = torch.zeros(NUM_BLOCKS * stride, dtype=torch.uint8, device=device)
    pages = pages.as_strided((NUM_BLOCKS, 3, head), (stride, head, 1))
    meta = layout.views(pages).meta
    given_up = torch.zeros(3, dtype=torch.int64, device=device)  # without proof, of a window, of a sink
    for step in range(case.steps):
        block_table, seq_lens, starts, slot_mapping = schedules[step % batches].step()
        proven = pool.proven_slots(page_words(meta), wanted)
        owner, sink = wanted.block_of_slot[:-1].clone(), wanted.is_sink[:-1].clone()
        wanted.allocate(block_table, seq_lens, starts, threshold, proven)
        equal: dict[str, torch.Tensor] = {}
        lost = (owner >= 0) & (wanted.block_of_slot[:-1] != owner)
        given_up += torch.stack([lost & ~proven, lost & proven & ~sink, lost & proven & sink]).sum(1)
        slots.allocate(table, scratch, block_table, seq_lens, starts, threshold, pages, layout, pool)
        for name in ("slot_of_block", "block_of_slot", "last_step", "is_sink"):
            equal[name] = (getattr(table, name)[:-1] == getattr(wanted, name)[:-1]).all()
        for name in ("limits", "evictions", "shrunk_steps", "step"):
            equal[name] = (getattr(table, name) == getattr(wanted, name)).all()

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
        equal["copies' places"] = (out[:tokens] == expected).all() & (out[tokens:] == 7).all()
        if positions is not None:
            real = tokens - padding
            equal["positions"] = (positions[:real] == position[:real]).all() & (positions[tokens:] == 7).all()
        if not torch.stack(list(equal.values())).all():  # one look at the device
            raise AssertionError(f"step {step}: not the reference's: {[n for n, same in equal.items() if not same]}")

        # write what was mapped, so that some slots prove themselves and some no longer do
        word = torch.randint(1, 30000, (tokens, 2), dtype=torch.int32, device=device)
        place, hot = slot_mapping >= 0, expected >= 0
        written = word[place].view(torch.float16).reshape(-1, 1, 2, 1, 2)
        meta[slot_mapping[place] // p, :, slot_mapping[place] % p] = written.expand(-1, 3, -1, -1, -1)
        pool.words[expected[hot] // p, :, expected[hot] % p] = word[hot, None].expand(-1, 3, -1)
    kinds, shrunk = given_up.tolist(), int(wanted.shrunk_steps)
    assert sum(kinds) == int(table.evictions)
    if case.long:
        operations = sum(schedule.operations for schedule in schedules)
        assert operations >= 10_000, operations
        assert min(kinds) > 0, kinds
        assert 0 < shrunk < case.steps, shrunk
    return f"evictions {kinds}"


def gpu_cases() -> list[Case]:
    """What gates.kernels runs."""
    return [
        Case(64, 256, 18, 3_500, 64, long=True),
        Case(64, 64, 64),
        Case(16, 33, 9),
        Case(0, 1, 6),
        Case(20, 100, 14, 80),
        Case(64, 256, 3000),
        Case(64, 256, 18, 80, 64, stride=1 << 27),  # more than 4 GiB
        Case(16, 33, 18, 80, in_flight=2),
        Case(100, 33, 14, 80, sliding_window=50),
        Case(4000, 4000, 30, 80),
    ]
