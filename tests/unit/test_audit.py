"""An audit is silent over a sound pool (test_hot_pool.py) and names the rule that is broken in any other."""

from collections.abc import Callable

import pytest
import torch

from vllm_oscar.audit import check_copies, check_places, check_table
from vllm_oscar.errors import PoolError
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable, page_words
from vllm_oscar.page_layout import KEY, VALUE, PageLayout, pack
from vllm_oscar.quantizer import encode_ls

CPU = torch.device("cpu")
P, BLOCKS, SLOTS = 16, 10, 4


@pytest.fixture
def table() -> SlotTable:
    """Blocks 7 and 3 have slots 0 and 1."""
    made = SlotTable.empty(HotContract(sink=20, window=50, block_size=P), BLOCKS, SLOTS, CPU)
    made.allocate(
        torch.tensor([[7, 3]], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32),
        torch.tensor([0, 20], dtype=torch.int32),
        1,
        torch.zeros(SLOTS, dtype=torch.bool),
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
    check_places(table, torch.tensor(pages), torch.tensor(copies))
    with pytest.raises(PoolError, match=f"broken rule: {rule}"):
        check_places(table, torch.tensor([*pages, page]), torch.tensor([*copies, copy]))


def stale(pool: HotPool, which: int) -> None:
    pool.rows[1, 0, which, 9] = pool.rows[1, 0, which, 8]


def not_a_number(pool: HotPool, which: int) -> None:
    pool.rows[1, 0, which, 9] = float("nan")


@pytest.mark.parametrize(("which", "name"), [(KEY, "key"), (VALUE, "value")])
@pytest.mark.parametrize("damage", [stale, not_a_number])
def test_a_proven_copy_is_of_the_row_in_the_page(
    table: SlotTable, damage: Callable[[HotPool, int], None], which: int, name: str
) -> None:
    layout = PageLayout(64, P)
    views = layout.views(torch.zeros((BLOCKS, 1, layout.head_bytes), dtype=torch.uint8))
    pool = HotPool.allocate(layout, SLOTS, 1, torch.bfloat16, CPU)
    rows = torch.randn((BLOCKS, 2, P, 1, 64), generator=torch.Generator().manual_seed(0))
    for kind in (KEY, VALUE):
        encoded = encode_ls(rows[:, kind].flatten(0, 1), 64)
        views.codes[kind].copy_(pack(encoded.codes).view(BLOCKS, P, 1, -1).transpose(1, 2))
        pair = torch.stack([encoded.scale, encoded.offset], -1).view(BLOCKS, P, 1, -1, 2)
        views.meta[:, :, :, kind] = pair.transpose(1, 2)
    blocks = [7, 3]
    pool.rows[:2] = rows[blocks].permute(0, 3, 1, 2, 4).bfloat16()
    pool.words[:2] = page_words(views.meta)[blocks]
    check_copies(table, pool, views)
    damage(pool, which)
    with pytest.raises(PoolError, match=f"a proven {name} is the page's"):
        check_copies(table, pool, views)
    pool.words[1, 0, 9, 0] += 1  # then nobody reads it
    check_copies(table, pool, views)
