"""An audit is silent over a sound pool (test_hot_pool.py) and names the rule that is broken in any other."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vllm_oscar.audit import check_copies, check_places, check_table, stored_rows
from vllm_oscar.cache_layer import CacheLayer, RowCodec
from vllm_oscar.errors import PoolError
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.page_layout import KEY, VALUE, PageLayout, PageViews
from vllm_oscar.quantizer import FP16_MAX, MAX_VALUE_SCALE, Metric, decode
from vllm_oscar.rotation import Transform

CPU = torch.device("cpu")
P, BLOCKS, SLOTS, SIZE = 16, 10, 4, 64


@pytest.fixture
def table() -> SlotTable:
    """Blocks 7 and 3 have slots 0 and 1."""
    made = SlotTable.empty(HotContract(sink=20, window=50, block_size=P), BLOCKS, SLOTS, CPU)
    made.allocate(
        torch.tensor([[7, 3]], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32),
        torch.tensor([0, 20], dtype=torch.int32),
        1,
    )
    assert made.block_of_slot.tolist() == [7, 3, -1, -1, -1]
    check_table(made)
    return made


@pytest.mark.parametrize(
    ("name", "index", "value", "rule"),
    [
        ("slot_of_block", 0, 2, "the null block has no slot"),
        ("slot_of_block", 5, SLOTS, "a block's slot is one of the pool's"),
        ("block_of_slot", 2, BLOCKS, "a slot's block is one of the cache's"),
        ("slot_of_block", 5, 0, "a block's slot holds that block"),
        ("block_of_slot", 2, 7, "a slot's block has that slot"),
        ("written", 2, 1, "a slot without a block has no copies"),
        ("slot_of_block", BLOCKS, 1, "masked writes leave nothing"),
        ("block_of_slot", SLOTS, 7, "masked writes leave nothing"),
        ("limits", 0, 19, "the sink limit is the contract's, or whole blocks"),
        ("limits", 0, 0, "the sink limit is the contract's, or whole blocks"),
        ("limits", 1, 51, "the window limit is the contract's, or 1 and whole blocks"),
        ("limits", 1, 32, "the window limit is the contract's, or 1 and whole blocks"),
        ("limits", 1, 33, "no window shrinks before the sink"),
        ("last_step", 1, 2, "no slot was needed in a step to come"),
        ("shrunk_steps", 0, 2, "no more steps shrank the limits than there were"),
        ("evictions", 0, SLOTS + 1, "no step evicts more than the pool holds"),
    ],
)
def test_each_rule_of_the_table(table: SlotTable, name: str, index: int, value: int, rule: str) -> None:
    getattr(table, name)[index] = value
    with pytest.raises(PoolError, match=f"broken rule: {rule} .*report it"):
        check_table(table)


def test_limits_that_shrank_are_sound(table: SlotTable) -> None:
    for sink, window in ((16, 1), (16, 33), (16, 50), (20, 50)):
        table.limits.copy_(torch.tensor([sink, window]))
        check_table(table)


@pytest.mark.parametrize(
    ("page", "copy", "rule"),
    [
        (-1, 0 * P + 5, "only tokens that are written to a page are copied"),
        (7 * P + 5, SLOTS * P + 5, "a copy goes into a slot of the pool"),
        (7 * P + 5, 1 * P + 5, "a copy goes into its block's slot"),
        (7 * P + 5, 0 * P + 6, "a copy has its token's place in the block"),
        (7 * P + 4, 0 * P + 4, "no two copies go into one place"),
    ],
)
def test_each_rule_of_a_steps_new_tokens(table: SlotTable, page: int, copy: int, rule: str) -> None:
    pages, copies = [7 * P + 4, 3 * P, 9 * P, -1], [4, P, -1, -1]
    table.written[:2] = 1
    check_places(table, torch.tensor(pages), torch.tensor(copies))
    with pytest.raises(PoolError, match=f"broken rule: {rule}"):
        check_places(table, torch.tensor([*pages, page]), torch.tensor([*copies, copy]))


def cache_layer(encoder: str, group_size: int = SIZE) -> CacheLayer:
    """Keys and values as they are; keys' errors cost a hundred times as much in the first half of the channels."""
    identity = Transform.rounded(torch.zeros(1, SIZE), torch.eye(SIZE)[None], torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    root = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator)).Q * torch.logspace(0, -3, SIZE)
    metric = Metric.of((root @ root.mT)[None]) if encoder == "metric" else None
    key = RowCodec(identity, encoder, group_size, 1.0375, 0.96, FP16_MAX, metric)
    value = RowCodec(identity, "minmax" if encoder == "minmax" else "ls", group_size, 1.1, 0.92, MAX_VALUE_SCALE, None)
    return CacheLayer(PageLayout(SIZE, P, group_size), key, value)


def written(table: SlotTable, layer: CacheLayer, rows: torch.Tensor) -> tuple[HotPool, PageViews]:
    """Pool and pages with keys and values (2, 2 P, 1, D) in blocks 7 and 3, every one with a copy."""
    views = layer.layout.views(torch.zeros((BLOCKS, 1, layer.layout.head_bytes), dtype=torch.uint8))
    pool = HotPool.allocate(layer.layout, SLOTS, 1, torch.bfloat16, CPU)
    token = torch.arange(2 * P)
    block = torch.tensor([7, 3])[token // P]
    places = block * P + token % P, table.slot_of_block[block] * P + token % P
    table.written[:2] = 1
    layer.write(views, pool, rows[0], rows[1], token, *places)
    return pool, views


def first_rows(table: SlotTable, tokens: int) -> torch.Tensor:
    """Of the request that has blocks 7 and 3."""
    return stored_rows(table, torch.tensor([[7, 3], [0, 0]], dtype=torch.int32), torch.tensor([tokens, 0]))


def test_rows_of_requests_are_those_before_their_step(table: SlotTable) -> None:
    stored = first_rows(table, P + 3)
    assert stored.sum() == P + 3 and stored[7].all() and stored[3, :3].all()


def test_a_copy_that_is_not_marked_is_named(table: SlotTable) -> None:
    with pytest.raises(PoolError, match="a copy is marked as one"):
        check_places(table, torch.tensor([7 * P + 4]), torch.tensor([4]))


def stale(pool: HotPool, which: int) -> None:
    pool.rows[1, 0, which, 9] = pool.rows[1, 0, which, 8]


def not_a_number(pool: HotPool, which: int) -> None:
    pool.rows[1, 0, which, 9] = float("nan")


@pytest.mark.parametrize(("which", "name"), [(KEY, "key"), (VALUE, "value")])
@pytest.mark.parametrize("damage", [stale, not_a_number])
def test_a_proven_copy_is_of_the_row_in_the_page(
    table: SlotTable, damage: Callable[[HotPool, int], None], which: int, name: str
) -> None:
    layer = cache_layer("ls")
    pool, views = written(table, layer, torch.randn((2, 2 * P, 1, SIZE), generator=torch.Generator().manual_seed(0)))
    check_copies(table, pool, views, layer, first_rows(table, 2 * P))
    damage(pool, which)
    with pytest.raises(PoolError, match=f"a proven {name} is the page's"):
        check_copies(table, pool, views, layer, first_rows(table, 2 * P))
    for kept, spoilt in ((table.written, 0), (pool.words[:, 0, :, 0], 1)):  # then nobody reads it
        was = kept[1, 9].item()
        kept[1, 9] = spoilt
        check_copies(table, pool, views, layer, first_rows(table, 2 * P))
        kept[1, 9] = was
    check_copies(table, pool, views, layer, first_rows(table, P + 9))  # nor a row that no request has


def hard_rows() -> torch.Tensor:
    """Keys and values (2, tokens, 1, D) of which INT2 keeps little: one channel that is all of the row, four that
    cancel, a constant, nothing, what no row should have."""
    rows = torch.randn((2, 2 * P, 1, SIZE), generator=torch.Generator().manual_seed(1))
    rows[:, :12] *= torch.tensor([30.0] + [0.1] * (SIZE - 1))
    rows[:, 12:16] = 0
    rows[:, 12, :, 5] = 3
    rows[:, 13, :, [5, 6, 37, 38]] = torch.tensor([3.0, -3.0, 3.0, -3.0])
    rows[:, 14] = 2
    rows[:, 16:20] *= 1e5
    rows[:, 20, :, 7] = float("inf")
    rows[:, 21] *= 1e-6
    return rows


@pytest.mark.parametrize("group_size", [SIZE, 32])
@pytest.mark.parametrize(("encoder", "first"), [("ls", False), ("minmax", False), ("metric", False), ("metric", True)])
def test_no_true_copy_is_called_wrong(table: SlotTable, encoder: str, group_size: int, first: bool) -> None:
    """Whatever the row and the encoder; `first`: keys have the codes that a decode step of the kernels writes."""
    layer = cache_layer(encoder, group_size)
    codec = layer.key
    if first:
        layer = replace(layer, key=replace(codec, encoder="ls", gain=codec.first_gain))
    pool, views = written(table, layer, hard_rows())
    layer = replace(layer, key=codec)
    page = decode(views.codes(KEY, [7, 3]), views.meta[[7, 3], :, :, KEY, :, 0], views.meta[[7, 3], :, :, KEY, :, 1])
    copy = pool.rows[:2, :, KEY].float()
    if encoder == "minmax" or (encoder == "metric" and not first):
        assert ((page - copy).norm(dim=-1) > copy.norm(dim=-1)).any(), "a distance alone does not tell"
    check_copies(table, pool, views, layer, first_rows(table, 2 * P))
    pool.rows[:2, :, :, :12] = pool.rows[:2, :, :, :12].roll(1, 3)
    with pytest.raises(PoolError, match="a proven key is the page's"):
        check_copies(table, pool, views, layer, first_rows(table, 2 * P))
