"""Slots and copies against a slow oracle, over schedules in which everything happens that a scheduler can do."""

import copy
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from vllm_oscar import compiled_pages
from vllm_oscar.attention import read_rows
from vllm_oscar.audit import check_places, check_table
from vllm_oscar.errors import ConfigError
from vllm_oscar.hot_pool import NO_SLOT, HotContract, HotPool, SlotTable, in_contract, page_words
from vllm_oscar.page_layout import KEY, VALUE, PageLayout

CPU = torch.device("cpu")
P, HEADS, COLUMNS = 16, 2, 20


def from_bits(uids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers that only these tokens have in this dtype. Below 0x7C00 the bits are finite in fp16 and in BF16."""
    assert max(uids) < 0x7C00
    return torch.tensor(uids, dtype=torch.int16).view(dtype).float()


# --- the oracle: documentation in plain Python ------------------------------------------------------------------------


@dataclass
class Request:
    """A running request: its physical blocks, its tokens so far, and how many a step adds; `gone`: its first blocks,
    which a sliding window has left, and which are free again or another's."""

    blocks: list[int]
    tokens: int
    query: int = 0
    gone: int = 0

    @property
    def after(self) -> int:
        return self.tokens + self.query

    @property
    def own(self) -> list[int]:
        return self.blocks[self.gone :]


def hot_blocks(request: Request, sink: int, window: int, sliding_window: int) -> set[int]:
    """Blocks with tokens whose copies a step needs: history that it reads, what the next step may read. A sink's block
    is needed from its first token on."""
    before, after = request.tokens, request.after
    blocks = set()
    for tokens, c in ((range(before), before), (range(after), after)):
        seen = {j // P for j in tokens if j >= c + 1 - sliding_window}
        blocks |= {b for b in seen if b * P < sink}
        blocks |= {j // P for j in tokens if j >= c + 1 - window and j // P in seen}
    return blocks


def limits_shrinking(contract: HotContract) -> list[tuple[int, int]]:
    """(sink, window) from what is asked for to the least: sinks lose their last block, then windows their first."""
    sinks = [contract.sink, *(b * P for b in range(contract.sink_blocks - 1, 0, -1))]
    windows = [contract.window, *(1 + d * P for d in range(contract.depth - 1, -1, -1))]
    return [(sink, contract.window) for sink in sinks] + [(sinks[-1], window) for window in windows[1:]]


def expected_step(
    contract: HotContract, requests: list[Request], threshold: int, num_slots: int, sliding_window: int = 1 << 20
) -> tuple[set[int], tuple[int, int], bool]:
    """Physical blocks that must have a slot, limits, and whether they are below what was asked for: the largest that
    fit."""
    for sink, window in limits_shrinking(contract):
        blocks = set()
        for request in requests:
            if request.after == 0:
                continue
            logical = {(request.after - 1) // P} | hot_blocks(request, sink, window, sliding_window)
            if request.query <= threshold:  # a decode writes into the pool
                logical |= {j // P for j in range(request.tokens, request.after)}
            blocks |= {request.blocks[b] for b in logical}
        if len(blocks) <= num_slots:
            return blocks, (sink, window), (sink, window) != (contract.sink, contract.window)
    raise AssertionError("the floor does not fit: the schedule is wrong")


def victim_key(table: SlotTable, slot: int, filled: bool) -> tuple[int, int]:
    """Free slots go first, then those without a copy, then the stalest window, then the stalest sinks; never those that
    a step in flight needs. The table is as the step before left it."""
    if int(table.block_of_slot[slot]) < 0:
        return (0, int(table.last_step[slot]))
    if int(table.step + 1 - table.last_step[slot]) < table.in_flight:
        return (4, 0)
    kind = 1 if not filled else 3 if bool(table.is_sink[slot]) else 2
    return (kind, int(table.last_step[slot]))


@dataclass
class World:
    """vLLM, as far as the pool sees it: requests come, grow, share prefixes, are preempted and finish, blocks are
    reused or change places, and now and then somebody else writes a page.

    Attributes:
        alike: every page row has the same words, and nobody but steps writes pages: words tell nothing then
        page: uid of the token in each (block, offset)
        copies: uid in each (slot, offset) of the slot's block
        preempted: tokens of each request that waits to be computed again
        rejected: uids of drafts that were written and not accepted
        happened: how often each operation, and what came of them
    """

    seed: int
    contract: HotContract
    num_slots: int
    threshold: int
    max_requests: int
    num_blocks: int = 45
    in_flight: int = 1
    sliding_window: int | None = None
    alike: bool = False
    page: dict[tuple[int, int], int] = field(default_factory=dict)
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    rejected: set[int] = field(default_factory=set)
    happened: Counter[str] = field(default_factory=Counter)
    uid: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.free = list(range(1, self.num_blocks))
        self.layout = PageLayout(64, P)
        self.table = SlotTable.empty(
            self.contract, self.num_blocks, self.num_slots, CPU, self.in_flight, self.sliding_window
        )
        pages = torch.full((self.num_blocks, HEADS, self.layout.head_bytes), 0x5A, dtype=torch.uint8)
        self.views = self.layout.views(pages)
        for which in (KEY, VALUE):
            self.views.planes[which][0].zero_()
        self.pool = HotPool.allocate(self.layout, self.num_slots, HEADS, torch.bfloat16, CPU)
        self.pool.rows.fill_(float("nan"))

    def write_page(self, block: int, offset: int) -> int:
        """A new token's INT2 row (all codes are 0): its uid as the offset."""
        self.uid += 1
        word = 7 if self.alike else self.uid
        self.views.meta[block, :, offset] = torch.tensor([0, word], dtype=torch.int16).view(torch.float16)
        self.page[block, offset] = self.uid
        return self.uid

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.free_unused(request.own)

    def free_unused(self, blocks: list[int]) -> None:
        used = {block for other in self.running for block in other.own}
        self.free += [block for block in blocks if block not in used]

    def schedule(self) -> None:
        """What the next step does."""
        rng = self.random
        if self.running and rng.random() < 0.12:
            self.release(rng.choice(self.running))
            self.happened["finish"] += 1
        while len(self.running) < self.max_requests and rng.random() < 0.5:
            blocks: list[int] = []
            if self.running and rng.random() < 0.6:
                donor = rng.choice(self.running)
                blocks = [] if donor.gone else donor.blocks[: rng.randrange(donor.tokens // P + 1)]
                self.happened["share"] += bool(blocks)
            self.running.append(Request(list(blocks), len(blocks) * P))
            self.happened["admit"] += 1
        rng.shuffle(self.running)
        self.happened["reorder"] += len(self.running) > 1
        if self.running and not self.alike and rng.random() < 0.1:
            self.move_block(rng.choice(self.running))
        for request in list(self.running):
            if request.tokens:
                query = rng.choice([1, 1, 1, self.threshold, 5, 16, 40, 90])
            else:  # one that was preempted is computed again at once
                query = self.preempted.pop() if self.preempted else rng.choice([1, 17, 70])
            query = min(query, COLUMNS * P - request.tokens)
            total = -(-(request.tokens + query) // P)
            if not query:
                self.release(request)
                self.happened["finish"] += 1
                continue
            if total - len(request.blocks) > len(self.free):
                self.release(request)
                self.preempted.append(request.after)
                self.happened["preempt"] += 1
                continue
            while len(request.blocks) < total:
                request.blocks.append(self.free.pop(rng.randrange(len(self.free))))
            request.query = query
            self.happened["decode" if query <= self.threshold else "chunk"] += 1
        if self.page and not self.alike and rng.random() < 0.2:  # a connector restores, or somebody copies, a page
            block = rng.choice(sorted(self.page))[0]
            for offset in range(P):
                if (block, offset) in self.page:
                    self.write_page(block, offset)
            self.happened["overwrite"] += 1

    def move_block(self, request: Request) -> None:
        """A block's page goes to another block, as when one is swapped out and in again; all who share it follow."""
        if not request.own or not self.free:
            return
        old, new = self.random.choice(request.own), self.free.pop(0)
        self.views.meta[new] = self.views.meta[old]
        for offset in range(P):
            self.page.pop((new, offset), None)
            if (old, offset) in self.page:
                self.page[new, offset] = self.page[old, offset]
        for other in self.running:
            other.blocks[other.gone :] = [new if block == old else block for block in other.own]
        self.free.append(old)
        self.happened["swap"] += 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_table, seq_lens, query_start_loc; with padding rows now and then."""
        padding = self.random.randrange(3)
        rows = [r.blocks + [0] * (COLUMNS - len(r.blocks)) for r in self.running] + [[0] * COLUMNS] * padding
        starts = [0]
        for request in self.running:
            starts.append(starts[-1] + request.query)
        return (
            torch.tensor(rows, dtype=torch.int32).view(-1, COLUMNS),
            torch.tensor([r.after for r in self.running] + [0] * padding, dtype=torch.int32),
            torch.tensor(starts + starts[-1:] * padding, dtype=torch.int32),
        )

    def write(self) -> None:
        """The step's tokens, as `CacheLayer.write` does it: page first, then the copy with the page's words."""
        for request in self.running:
            n = request.query
            position = torch.arange(request.tokens, request.after, dtype=torch.int32)
            places = torch.tensor([request.blocks[j // P] * P + j % P for j in position.tolist()])
            mapping = self.table.map_copies(
                places, position, torch.full((n,), request.tokens), torch.full((n,), request.after),
                torch.full((n,), n <= self.threshold),
            )  # fmt: skip
            check_places(self.table, places, mapping)
            sink, window = self.table.limits.tolist()
            for j, place, hot in zip(position.tolist(), places.tolist(), mapping.tolist(), strict=True):
                uid = self.write_page(place // P, place % P)
                named = j < sink or j >= request.after + 1 - window or n <= self.threshold
                held = int(self.table.slot_of_block[place // P])
                assert (hot >= 0) == (named and held >= 0)
                self.copies.pop((held, place % P), None)
                if hot >= 0:
                    slot, offset = divmod(hot, P)
                    self.pool.rows.view(torch.int16)[slot, :, :, offset] = uid
                    self.pool.words[slot, :, offset] = page_words(self.views.meta[place // P])[:, offset]
                    self.copies[slot, offset] = uid

    def check_reads(self, request: Request) -> None:
        """Each token is the one in the page, in BF16 if and only if its copy is there and the contract says so."""
        sink, window = self.table.limits.tolist()
        tokens = request.after if request.query <= self.threshold else request.tokens
        if not tokens:
            return
        blocks = torch.tensor(request.blocks[: -(-tokens // P)])
        read = self.views, self.pool, self.table, blocks, tokens, request.tokens, self.sliding_window
        rows = read_rows(*read)
        for row, other in zip(rows, compiled_pages.read_rows(*read), strict=True):
            assert torch.equal(row, other)
        first = max(0, request.tokens + 1 - (self.sliding_window or tokens + 1))
        uids = [self.page[request.blocks[j // P], j % P] if j >= first else 0 for j in range(tokens)]
        slots = [int(self.table.slot_of_block[block]) for block in request.blocks]
        copied = [self.copies.get((slots[j // P], j % P)) == uid for j, uid in enumerate(uids)]
        assert not self.rejected & set(uids), "the next step writes over what was rejected"
        named = [j >= first and (j < sink or j >= request.tokens + 1 - window) for j in range(tokens)]
        hot = torch.tensor(copied) & torch.tensor(named)
        wanted = torch.where(hot, from_bits(uids, torch.bfloat16), from_bits(uids, torch.float16))
        assert torch.equal(rows.hot, hot[:, None].expand(-1, HEADS))
        known = hot if self.alike else torch.ones_like(hot)
        for row in (rows.key, rows.value):
            assert torch.equal(row[known], wanted[known, None, None].expand_as(row[known]))
        self.happened["hot"] += int(hot.sum())
        self.happened["int2"] += int((~hot).sum())

    def step(self) -> None:
        self.schedule()
        if not self.running:
            return
        arguments = self.tensors()
        old = copy.deepcopy(self.table)
        self.table.allocate(*arguments, self.threshold)
        self.check_allocation(old)
        moved = {
            slot for slot, block in enumerate(old.block_of_slot.tolist()) if self.table.block_of_slot[slot] != block
        }
        self.copies = {place: uid for place, uid in self.copies.items() if place[0] not in moved}
        self.write()
        assert {(slot, offset) for slot, offset in self.table.written[:-1].nonzero().tolist()} == set(self.copies)
        self.check_reads(self.random.choice(self.running))
        again = copy.deepcopy(self.table)
        self.table.allocate(*arguments, self.threshold)
        for name in ("slot_of_block", "block_of_slot", "written", "is_sink"):
            assert torch.equal(getattr(self.table, name)[:-1], getattr(again, name)[:-1]), f"not idempotent: {name}"
        for name in ("limits", "evictions"):
            assert torch.equal(getattr(self.table, name), getattr(again, name)), f"not idempotent: {name}"
        self.table = again
        for request in self.running:
            self.accept(request)

    def accept(self, request: Request) -> None:
        """A verification step keeps its first token and some of its drafts; the others stay where they were written."""
        drafts = request.query - 1 if request.query <= self.threshold else 0
        first = request.after - self.random.randint(0, drafts)
        self.rejected |= {self.page[request.blocks[j // P], j % P] for j in range(first, request.after)}
        self.happened["reject"] += first < request.after
        request.tokens, request.query = first, 0
        if self.sliding_window:
            was, request.gone = request.gone, max(0, first + 1 - self.sliding_window) // P
            self.happened["gone"] += request.gone > was
            self.free_unused(request.blocks[was : request.gone])

    def check_allocation(self, old: SlotTable) -> None:
        needed, limits, shrunk = expected_step(
            self.contract,
            self.running,
            self.threshold,
            self.num_slots // self.in_flight,
            self.sliding_window or 1 << 20,
        )
        table = self.table
        assert tuple(table.limits.tolist()) == limits
        assert int(table.shrunk_steps - old.shrunk_steps) == shrunk
        self.happened["shrunk"] += shrunk
        slot_of, old_slot_of = table.slot_of_block[:-1].tolist(), old.slot_of_block[:-1].tolist()
        check_table(table)
        for block in needed:
            assert slot_of[block] != NO_SLOT, (block, "is needed and has no slot")
            assert old_slot_of[block] in (NO_SLOT, slot_of[block]), "a block that had a slot keeps it"
        taken = [slot_of[block] for block in needed if old_slot_of[block] == NO_SLOT]
        kept = {old_slot_of[block] for block in needed} - {NO_SLOT}
        filled = {slot for slot, _ in self.copies}
        keys = {s: victim_key(old, s, s in filled) for s in range(self.num_slots) if s not in kept}
        assert sorted(keys[s] for s in taken) == sorted(keys.values())[: len(taken)]
        evicted = [s for s in taken if keys[s][0] > 0]
        assert all(keys[s][0] < 4 for s in evicted)
        assert int(table.evictions - old.evictions) == len(evicted)
        for slot in evicted:
            self.happened[("", "evicted empty", "evicted window", "evicted sink")[keys[slot][0]]] += 1


@pytest.mark.parametrize(
    ("sink", "window", "num_slots", "threshold", "requests", "in_flight", "sliding_window"),
    [
        (16, 33, 30, 1, 4, 1, None),  # room for everything: no shrinking
        (64, 64, 22, 1, 4, 1, None),  # evictions, and some shrinking
        (20, 100, 12, 1, 4, 1, None),  # sinks and windows that end inside blocks
        (0, 1, 9, 1, 4, 1, None),  # the smallest contract
        (32, 48, 10, 4, 3, 1, None),  # speculative verification
        (16, 40, 8, 1, 4, 1, None),  # exactly the floor
        (16, 40, 17, 1, 4, 2, None),  # a pipeline's
        (40, 33, 13, 1, 4, 1, 50),  # blocks that a sliding window left are another's
        (16, 40, 9, 1, 3, 1, 20),
    ],
    ids=str,
)
def test_random_schedules_agree_with_the_oracle(
    sink: int, window: int, num_slots: int, threshold: int, requests: int, in_flight: int, sliding_window: int | None
) -> None:
    """10,000 operations in all, each step of them checked."""
    happened: Counter[str] = Counter()
    operations = {"admit", "chunk", "decode", "finish", "preempt", "share", "swap", "reorder", "overwrite"}
    seeds = itertools.count()
    while sum(happened[name] for name in operations) < 10000 / 9:
        contract = HotContract(sink, window, P)
        world = World(
            next(seeds), contract, num_slots, threshold, requests, in_flight=in_flight, sliding_window=sliding_window
        )
        for _ in range(50):
            world.step()
        happened += world.happened
    expected = operations | {"hot", "int2", "evicted window"}
    expected |= {"shrunk"} if num_slots < 20 and window > 1 else set()
    if sliding_window:  # there are always free blocks
        expected = expected - {"preempt"} | {"gone"}
    expected |= {"reject"} if threshold > 1 else set()
    assert expected <= set(happened), happened


@pytest.mark.parametrize(("sink", "threshold", "floor"), [(64, 1, 2), (0, 1, 1), (16, 4, 3), (16, 17, 3), (16, 18, 4)])
def test_the_floor_holds_whatever_a_decode_writes(sink: int, threshold: int, floor: int) -> None:
    """With floor_slots slots for a request no schedule leaves a decode without a place for its own tokens."""
    contract = HotContract(sink, 100, P)
    assert contract.floor_slots_per_request(threshold) == floor
    for tokens in range(3 * P, 4 * P):
        for query in {1, max(threshold - 1, 1), threshold}:
            request = Request(list(range(1, 9)), tokens, query)
            table = SlotTable.empty(contract, 12, floor, CPU)
            block_table = torch.tensor([request.blocks], dtype=torch.int32)
            starts = torch.tensor([0, query], dtype=torch.int32)
            lens = torch.tensor([request.after], dtype=torch.int32)
            table.allocate(block_table, lens, starts, threshold)
            written = {request.blocks[j // P] for j in range(tokens, request.after)}
            assert {b for b, slot in enumerate(table.slot_of_block[:-1].tolist()) if slot >= 0} >= written


def test_no_copy_of_another_token_is_read_whatever_its_words() -> None:
    """All rows have the same words. Blocks are freed, reused and shared, requests preempted, drafts rejected."""
    happened: Counter[str] = Counter()
    for seed in range(8):
        world = World(seed, HotContract(20, 40, P), 11, 2, 4, alike=True)
        for _ in range(50):
            world.step()
        happened += world.happened
    assert {"hot", "int2", "share", "preempt", "reject", "evicted window", "shrunk"} <= set(happened), happened


def allocate(table: SlotTable, requests: list[Request], filled: list[bool] | None = None) -> None:
    """`filled`: which slots hold copies; all, if left out."""
    rows = [r.blocks + [0] * (COLUMNS - len(r.blocks)) for r in requests]
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.query)
    table.written[:-1] = torch.tensor(filled or [True] * table.num_slots)[:, None]
    table.allocate(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor([r.after for r in requests], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        1,
    )


def holders(table: SlotTable) -> list[int]:
    return table.block_of_slot[:-1].tolist()


def test_victims_go_in_the_documented_order() -> None:
    """Free, then without a copy, then the stalest window, then the stalest sinks; never a slot that this step needs."""
    contract = HotContract(sink=P, window=1, block_size=P)
    table = SlotTable.empty(contract, 40, 6, CPU)
    allocate(table, [Request([1, 2], 20, 1)])  # sink block 1, window block 2
    allocate(table, [Request([3, 4], 20, 1)])
    assert holders(table) == [1, 2, 3, 4, -1, -1]
    allocate(table, [Request([5, 6], 20, 1)])
    assert holders(table) == [1, 2, 3, 4, 5, 6], "free slots go first"
    filled = [True, True, True, True, False, True]
    allocate(table, [Request([7], 3, 1)], filled)  # one block: sink and tail in one
    assert holders(table) == [1, 2, 3, 4, 7, 6], "a sink without copies goes before any window"
    allocate(table, [Request([8], 3, 1)])
    assert holders(table) == [1, 8, 3, 4, 7, 6], "then the stalest window"
    allocate(table, [Request([9, 10], 20, 1)])
    assert holders(table) == [1, 8, 3, 9, 7, 10], "then the other windows"
    allocate(table, [Request([11], 3, 1), Request([12], 3, 1)])
    assert holders(table) == [12, 8, 3, 9, 7, 11], "the last window, then the stalest sink"
    allocate(table, [Request([n], 3, 1) for n in (13, 14, 15)] + [Request([n], 3, 1) for n in (12, 11)])
    assert holders(table) == [12, 15, 13, 9, 14, 11], "sinks by age, but none that is needed now"
    assert int(table.evictions) == 9


def test_limits_shrink_evenly_and_do_not_depend_on_what_the_pool_holds() -> None:
    """Two requests at 200 tokens need 2 sink blocks and 5 window blocks each (64 = 1 + 63: 4 steps, 5 blocks)."""
    contract = HotContract(sink=20, window=64, block_size=P)
    requests = [Request(list(range(1, 14)), 200, 1), Request(list(range(21, 34)), 200, 1)]
    # token 200 is the last: 201 tokens end 9 tokens into block 12; windows of 1, 17, 33, 49, 64 tokens from its end
    # reach blocks 12, 11..12, 10..12, 9..12, 8..12
    expected = {4: (16, 1), 6: (16, 17), 8: (16, 33), 10: (16, 49), 12: (16, 64), 14: (20, 64), 20: (20, 64)}
    for num_slots, limits in expected.items():
        fresh, used = (SlotTable.empty(contract, 60, num_slots, CPU) for _ in range(2))
        for block in range(40, 40 + num_slots):
            allocate(used, [Request([block], 3, 1)])
        for table in (fresh, used):
            allocate(table, requests)
            assert tuple(table.limits.tolist()) == limits, num_slots
            assert int(table.shrunk_steps) == (num_slots < 14)
        odd, _ = expected_step(contract, requests, 1, num_slots + 1)[1:]
        assert odd == limits, "one slot more is no use: what one request gets, all get"


@pytest.mark.parametrize(("slots", "limits"), [(6, (64, 256)), (15, (640, 256)), (2, (64, 1)), (21, (1024, 256))])
def test_far_sinks_never_take_the_window(slots: int, limits: tuple[int, int]) -> None:
    """Blocks of 64: a window of 256 reaches five, sinks of 1,024 have sixteen."""
    table = SlotTable.empty(HotContract(1024, 256, 64), 64, slots, CPU)
    blocks = torch.arange(1, 64, dtype=torch.int32)[None]
    lens, starts = torch.tensor([4000], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    table.allocate(blocks, lens, starts, 1)
    assert tuple(table.limits.tolist()) == limits


def test_blocks_behind_a_sliding_window_need_no_slot() -> None:
    """vLLM's workers go on listing them: the sinks here, behind 48 tokens."""
    contract = HotContract(sink=P, window=17, block_size=P)
    for sliding_window, wanted in ((None, {1, 4, 5, 6, 9, 10}), (48, {4, 5, 9, 10})):
        table = SlotTable.empty(contract, 20, 6, CPU, sliding_window=sliding_window)
        allocate(table, [Request([1, 2, 3, 4, 5], 68, 1), Request([6, 7, 8, 9, 10], 66, 1)])
        assert set(holders(table)) - {-1} == wanted


def test_batches_of_a_pipeline_keep_each_others_slots() -> None:
    """Two batches of four requests take turns over a pool full of proven sinks of requests that are gone. A request
    holds a sink block and at most two of its window's (17 tokens), so a batch's twelve fit its half of the pool."""
    contract = HotContract(sink=P, window=17, block_size=P)
    table = SlotTable.empty(contract, 500, 26, CPU, in_flight=2)
    for block in range(400, 426):
        allocate(table, [Request([block], 3, 1)])
    batches = [[Request(list(range(20 * n + 1, 20 * n + 20)), 40 + 3 * n, 1) for n in range(k, 8, 2)] for k in range(2)]
    needed: list[set[int]] = [set(), set()]
    ever: set[int] = set()
    for step in range(200):
        batch = batches[step % 2]
        allocate(table, batch)
        needed[step % 2] = expected_step(contract, batch, 1, 26)[0]
        ever |= needed[step % 2]
        assert needed[0] | needed[1] <= set(holders(table)), step
        for request in batch:
            request.tokens += 1
    assert int(table.evictions) == len(ever), "each block once: none lost its slot and needed another"
    assert int(table.shrunk_steps) == 0


def test_a_batch_of_a_pipeline_has_its_share_of_the_pool() -> None:
    """As if the pool were half as large: the other batch's requests may come at any time."""
    requests = [Request(list(range(1, 14)), 200, 1), Request(list(range(21, 34)), 200, 1)]
    for num_slots in range(8, 30, 3):
        half, whole = (
            SlotTable.empty(HotContract(20, 64, P), 60, slots, CPU, in_flight)
            for slots, in_flight in ((num_slots // 2, 1), (num_slots, 2))
        )
        for table in (half, whole):
            allocate(table, requests)
        assert torch.equal(half.limits, whole.limits)
        assert torch.equal(half.shrunk_steps, whole.shrunk_steps)


def test_shared_blocks_count_once() -> None:
    contract = HotContract(sink=32, window=17, block_size=P)
    table = SlotTable.empty(contract, 60, 8, CPU)
    prefix = [1, 2, 3]
    allocate(table, [Request([*prefix, 10 + n, 20 + n], 66, 1) for n in range(3)])
    # 67 tokens: a window of 17 reaches blocks 3 and 4 of each; the two sink blocks are the same for all
    assert tuple(table.limits.tolist()) == (32, 17)
    assert sorted(holders(table)) == [1, 2, 10, 11, 12, 20, 21, 22]


def test_padding_and_the_null_block_get_no_slot() -> None:
    table = SlotTable.empty(HotContract(16, 32, P), 20, 8, CPU)
    padding = Request([0] * 3, 0, 0)
    allocate(table, [padding, Request([0, 0, 5], 40, 1), padding])  # blocks freed by a sliding window are null blocks
    assert sorted(holders(table)) == [-1] * 7 + [5]
    mapping = table.map_copies(
        torch.tensor([-1, 5 * P + 8]), torch.tensor([40, 40]), torch.tensor([40, 40]), torch.tensor([41, 41]),
        torch.tensor([True, True]),
    )  # fmt: skip
    slot = int(table.slot_of_block[5])
    assert mapping.tolist() == [-1, slot * P + 8]


def test_pages_and_pool_full_of_ones_hold_no_copy_of_a_written_token() -> None:
    """0xFF words in the page equal those of a slot never written (-1); a written token's never do."""
    world = World(0, HotContract(16, 32, P), 8, 1, 2)
    for tensor in (world.views.meta.view(torch.int16), world.pool.rows.view(torch.int16), world.pool.words):
        tensor.fill_(-1)
    for (codes,) in world.views.planes:
        codes.fill_(0xFF)
    request = Request([3, 4], 0, 20)
    allocate(world.table, [request])
    world.uid = 5
    for j in range(20):  # pages only: as if a connector had brought them
        world.write_page(request.blocks[j // P], j % P)
    for (codes,) in world.views.planes:
        codes.zero_()
    rows = read_rows(world.views, world.pool, world.table, torch.tensor([3, 4]), 20, 20)
    assert not rows.hot.any()
    wanted = from_bits(list(range(6, 26)), torch.float16)
    assert torch.equal(rows.key, wanted[:, None, None].expand_as(rows.key))


@pytest.mark.parametrize(("sink", "window"), [(-1, 5), (0, 0)])
def test_impossible_contracts_are_refused(sink: int, window: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        HotContract(sink, window, P)


def test_the_contract_is_the_documented_formula() -> None:
    """j < S or j >= c + 1 - W, by counting."""
    for before in range(60):
        for tokens in (before, before + 1):
            named = in_contract(torch.arange(tokens), before, 5, 9).tolist()
            assert named == [j < 5 or before - j < 9 for j in range(tokens)]
            assert sum(named[5:]) == max(0, min(tokens - 5, 8 + tokens - before))
