"""Slot kernels against SlotTable under random schedules: the cases, and how to run one."""

import copy
import random
from dataclasses import dataclass

import torch

from vllm_oscar.hot_pool import HotContract, SlotTable
from vllm_oscar.kernels import slots
from vllm_oscar.page_layout import PageLayout

NUM_BLOCKS = 40


@dataclass(frozen=True)
class Case:
    """A schedule. long: of 10,000 operations, in which slots without a copy, of windows and of sinks are given up, and
    the limits shrink in some steps and not in others."""

    sink: int
    window: int
    num_slots: int
    steps: int = 25
    block_size: int = 16
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
    contract = HotContract(case.sink, case.window, p)
    schedules = [
        Schedule(case.sink + case.window + n, range(1 + n, NUM_BLOCKS, batches), p, threshold, device)
        for n in range(batches)
    ]
    wanted = SlotTable.empty(contract, NUM_BLOCKS, case.num_slots, device, batches, case.sliding_window)
    table = copy.deepcopy(wanted)
    scratch = slots.SlotScratch.of(table)
    given_up = torch.zeros(3, dtype=torch.int64, device=device)  # without a copy, of a window, of a sink
    for step in range(case.steps):
        block_table, seq_lens, starts, slot_mapping = schedules[step % batches].step()
        filled = (wanted.written[:-1] > 0).any(-1)
        owner, sink = wanted.block_of_slot[:-1].clone(), wanted.is_sink[:-1].clone()
        wanted.allocate(block_table, seq_lens, starts, threshold)
        equal: dict[str, torch.Tensor] = {}
        lost = (owner >= 0) & (wanted.block_of_slot[:-1] != owner)
        given_up += torch.stack([lost & ~filled, lost & filled & ~sink, lost & filled & sink]).sum(1)
        slots.allocate(table, scratch, block_table, seq_lens, starts, threshold)
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
        expected = wanted.map_copies(slot_mapping, position, before, after, each(query <= threshold))
        out = torch.full((tokens + 3,), 7, dtype=torch.int64, device=device)
        positions = out.int() if step % 2 else None  # written only where a layer's mean turns
        slots.map_copies(table, slot_mapping, starts, seq_lens, threshold, out, positions)
        equal["copies"] = (table.written[:-1] == wanted.written[:-1]).all()
        equal["copies' places"] = (out[:tokens] == expected).all() & (out[tokens:] == 7).all()
        if positions is not None:
            real = tokens - padding
            equal["positions"] = (positions[:real] == position[:real]).all() & (positions[tokens:] == 7).all()
        if not torch.stack(list(equal.values())).all():  # one look at the device
            raise AssertionError(f"step {step}: not the reference's: {[n for n, same in equal.items() if not same]}")
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
        Case(64, 256, 18, 80, 64),
        Case(16, 33, 18, 80, in_flight=2),
        Case(100, 33, 14, 80, sliding_window=50),
        Case(4000, 4000, 30, 80),
    ]
