"""What always holds of the BF16 pool, rule by rule: for tests, and for engines that run with VLLM_OSCAR_AUDIT=1.

Everything here reads the device and waits for it.
"""

import os

import torch

from vllm_oscar.cache_layer import CacheLayer, RowCodec
from vllm_oscar.errors import PoolError
from vllm_oscar.hot_pool import NO_SLOT, HotPool, SlotTable, page_words
from vllm_oscar.page_layout import KEY, VALUE, PageViews
from vllm_oscar.quantizer import decode, encode_ls

ENVIRONMENT_VARIABLE = "VLLM_OSCAR_AUDIT"


def asked_for() -> bool:
    """Whether the environment asks for audits."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "") not in ("", "0")


def _holds(rule: str, where: torch.Tensor) -> None:
    if not bool(where.all()):
        places = (~where).nonzero()[:4].tolist()
        raise PoolError(f"BF16 pool, broken rule: {rule} (at {places}); this is a bug, please report it")


def check_table(table: SlotTable) -> None:
    """Between two calls of `allocate`.

    Raises:
        PoolError: names the rule that is broken.
    """
    contract, p = table.contract, table.contract.block_size
    slot, block = table.slot_of_block[:-1].long(), table.block_of_slot[:-1].long()
    blocks, slots = (torch.arange(of.shape[0], device=of.device) for of in (slot, block))
    _holds("the null block has no slot", slot[:1] == NO_SLOT)
    _holds("a block's slot is one of the pool's", (slot >= NO_SLOT) & (slot < slots.shape[0]))
    _holds("a slot's block is one of the cache's", (block >= -1) & (block < blocks.shape[0]))
    _holds("a block's slot holds that block", (slot == NO_SLOT) | (block[slot.clamp(min=0)] == blocks))
    _holds("a slot's block has that slot", (block < 0) | (slot[block.clamp(min=0)] == slots))
    _holds("a slot without a block has no copies", (block >= 0) | (table.written[:-1] == 0).all(-1))
    _holds("as many slots are taken as blocks have one", ((slot >= 0).sum() == (block >= 0).sum())[None])
    _holds("masked writes leave nothing", torch.stack([table.slot_of_block[-1], table.block_of_slot[-1]]) == -1)

    sink, window = table.limits[:1], table.limits[1:]
    whole_blocks = (sink > 0) & (sink < contract.sink) & (sink % p == 0)
    _holds("the sink limit is the contract's, or whole blocks", (sink == contract.sink) | whole_blocks)
    whole_blocks = (window >= 1) & (window < contract.window) & ((window - 1) % p == 0)
    _holds("the window limit is the contract's, or 1 and whole blocks", (window == contract.window) | whole_blocks)
    _holds("no window shrinks before the sink", (window == contract.window) | (sink <= p))
    last, step = table.last_step[:-1], table.step
    _holds("no slot was needed in a step to come", (last >= 0) & (last <= step))
    _holds("no more steps shrank the limits than there were", (table.shrunk_steps >= 0) & (table.shrunk_steps <= step))
    most = step.long() * table.num_slots
    _holds("no step evicts more than the pool holds", (table.evictions >= 0) & (table.evictions <= most))


def check_places(table: SlotTable, slot_mapping: torch.Tensor, hot_slot_mapping: torch.Tensor) -> None:
    """A step's new tokens: each copy goes into the slot of its token's block, and no two into one place.

    Raises:
        PoolError: names the rule that is broken.
    """
    p = table.contract.block_size
    hot = hot_slot_mapping >= 0
    place, page = hot_slot_mapping[hot], slot_mapping[hot]
    _holds("only tokens that are written to a page are copied", page >= 0)
    _holds("a copy goes into a slot of the pool", place < table.num_slots * p)
    _holds("a copy goes into its block's slot", table.block_of_slot[place // p] == page // p)
    _holds("a copy has its token's place in the block", place % p == page % p)
    _holds("a copy is marked as one", table.written[place // p, place % p] > 0)
    _holds("no two copies go into one place", torch.tensor([place.unique().numel() == place.numel()]))


def _encoded_from(copy: torch.Tensor, codec: RowCodec, page: torch.Tensor) -> torch.Tensor:
    """Whether page rows are what the encoder makes of copies, bool (tokens, heads); both are (tokens, heads, D).

    The kernels' encoders and these agree in all but some codes of a row. Another token's row is twice as far as this
    allows.
    """
    size = codec.group_size
    forms = [codec.encode(copy)]
    if codec.metric is not None:  # a decode step of the kernels writes least-squares codes first
        forms.append(encode_ls(copy, size, codec.first_gain, codec.max_scale, codec.levels))
    same = torch.zeros(copy.shape[:2], dtype=torch.bool, device=copy.device)
    for form in forms:
        row = decode(form.codes, form.scale, form.offset)
        spread = (row - row.mean(-1, keepdim=True)).square().sum(-1)
        same |= (page - row).square().sum(-1) <= spread + 1e-4 * row.square().sum(-1)
    return same


def stored_rows(table: SlotTable, block_table: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Which rows requests have, bool (blocks, P).

    Args:
        block_table: int (requests, blocks)
        before: int (requests,), tokens that each has stored
    """
    p = table.contract.block_size
    first = torch.arange(block_table.shape[1], device=before.device) * p
    count = (before[:, None] - first).clamp(0, p)  # of each block
    stored = torch.zeros(table.slot_of_block.shape[0] - 1, dtype=torch.int64, device=before.device)
    held = count > 0
    stored.scatter_reduce_(0, block_table[held].long(), count[held].long(), "amax")
    return torch.arange(p, device=before.device) < stored[:, None]


def check_copies(
    table: SlotTable, pool: HotPool, views: PageViews, cache_layer: CacheLayer, stored: torch.Tensor
) -> None:
    """A layer between two steps: a copy whose words agree with its page's is a copy of the row that is in the page.

    Of rows that requests have: what a block holds that nobody has may be anything, a state of a hybrid model's other
    layers for one, which overwrites codes and leaves words alone.

    That is so where the two are near, of the copy's norm (another token's is at about 1.4 of it). Of some rows no INT2
    form is near, by that measure: then the copy is encoded again.

    Args:
        stored: see `stored_rows`

    Raises:
        PoolError: names the rule that is broken.
    """
    slots = (table.block_of_slot[:-1] >= 0).nonzero()[:, 0]
    blocks = table.block_of_slot[slots].long()
    meta = views.meta[blocks]
    kept = stored[blocks] & (table.written[slots] > 0)
    proven = (pool.words[slots] == page_words(meta)).all(-1) & kept[:, None]  # (slots, heads, P)
    for which, codec, name in ((KEY, cache_layer.key, "key"), (VALUE, cache_layer.value, "value")):
        pair = meta[..., which, :, :]
        page = decode(views.codes(which, blocks), pair[..., 0], pair[..., 1])
        copy = pool.rows[slots][:, :, which].float()
        right = ~proven | ((page - copy).square().sum(-1) <= copy.square().sum(-1))  # (slots, heads, P)
        slot, offset = (~right).any(1).nonzero().unbind(1)
        if slot.numel():
            rows = pool.rows[slots[slot], :, which, offset]
            right[slot, :, offset] |= _encoded_from(rows, codec, page[slot, :, offset])
        _holds(f"a proven {name} is the page's", right)
