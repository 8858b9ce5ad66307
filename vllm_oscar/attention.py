"""Reference attention over INT2 pages, their BF16 copies and the tokens of the step: the specification.

A query reads three kinds of tokens: INT2 rows and BF16 copies, both transformed (y), and, in a prefill, the step's
own raw keys and values. With B the inverse transform, m the mean and a the softmax scale,

    logit of a stored token   a (q B_K') . y_K + a q . m_K
    logit of a raw token      a q . k
    output                    (sum p y_V) B_V + (sum of those p) m_V + sum p v

in one softmax; a soft cap acts on the whole logit. A head of some models has one logit more, which belongs to no token
and is learned ("attention sinks"; not to be confused with sink tokens): a query that finds nothing attends to it, so
that the p of tokens sum to less than one. Kernels may drop a q . m_K where every token is a stored one and there is no
such logit, not however the part of m_K that turns with the token's position (turning).
"""

from typing import NamedTuple

import torch

from vllm_oscar.hot_pool import NO_SLOT, HotPool, SlotTable, in_contract, page_words
from vllm_oscar.page_layout import KEY, VALUE, PageViews
from vllm_oscar.quantizer import decode
from vllm_oscar.rotation import Transform


class StoredRows(NamedTuple):
    """The stored tokens of one request, as a step reads them.

    Attributes:
        key, value: float32 (tokens, heads, D), transformed rows
        hot: bool (tokens, heads), read from a BF16 copy
    """

    key: torch.Tensor
    value: torch.Tensor
    hot: torch.Tensor

    def reads(self, before: int, sink: int, sliding_window: int | None) -> torch.Tensor:
        """How many rows, over tokens and heads, a step reads from BF16 copies, as INT2, and as INT2 although they are
        sinks': int64 (3,).

        Args:
            before: tokens of the request before the step
            sink: tokens of the request that are sinks
            sliding_window: tokens behind it are not read
        """
        first = first_seen(before, sliding_window)
        seen = self.hot[first:]
        sinks = seen[: max(0, sink - first)]
        hot, hot_sinks = int(seen.count_nonzero()), int(sinks.count_nonzero())
        return torch.tensor([hot, seen.numel() - hot, sinks.numel() - hot_sinks], device=seen.device)


def first_seen(before: int, sliding_window: int | None) -> int:
    """The first token that a step's queries see: blocks of older ones only may be gone, with anything in their place.

    Args:
        before: tokens of the request before the step
    """
    return 0 if sliding_window is None else max(0, before + 1 - sliding_window)


def read_rows(
    views: PageViews,
    pool: HotPool,
    table: SlotTable,
    blocks: torch.Tensor,
    tokens: int,
    before: int,
    sliding_window: int | None = None,
) -> StoredRows:
    """Gather and decode the first `tokens` stored tokens of a request; rows before `first_seen` are 0.

    Args:
        views: the layer's pages
        pool, table: the layer's copies and which block has which
        blocks: int64 (ceil(tokens / P),), physical blocks in order
        before: tokens of the request before this step
    """
    meta = views.meta[blocks]  # (blocks, heads, P, 2, groups, 2)

    def rows(which: int) -> torch.Tensor:
        pair = meta[..., which, :, :]
        decoded = decode(views.codes(which, blocks), pair[..., 0], pair[..., 1])  # (blocks, heads, P, D)
        # heads outermost in memory, as the products below read them
        return decoded.transpose(0, 1).flatten(1, 2)[:, :tokens].transpose(0, 1)

    key, value = rows(KEY), rows(VALUE)
    first = first_seen(before, sliding_window)
    key[:first], value[:first] = 0, 0

    sink, window = table.limits.tolist()
    slots = table.slot_of_block[blocks].long()
    p = views.meta.shape[2]
    position = torch.arange(tokens, device=key.device)
    wanted = in_contract(position, before, sink, window) & (position >= first)
    written = (table.written[slots] > 0) & (slots != NO_SLOT)[:, None]  # (blocks, P)
    copied = written.flatten()[:tokens] & wanted
    hot = torch.zeros(key.shape[:2], dtype=torch.bool, device=key.device)
    token = copied.nonzero()[:, 0]
    if token.numel():
        slot, offset = slots[token // p], token % p
        agree = pool.words[slot, :, offset] == page_words(meta)[token // p, :, offset]
        hot[token] = agree.all(-1)
        kept = pool.rows[slot, :, :, offset].float()  # (tokens, heads, 2, D)
        mask = hot[token][..., None]
        key[token] = torch.where(mask, kept[:, :, KEY], key[token])
        value[token] = torch.where(mask, kept[:, :, VALUE], value[token])
    return StoredRows(key, value, hot)


def attend(
    query: torch.Tensor,
    stored: StoredRows,
    key_transform: Transform,
    value_transform: Transform,
    scale: float,
    first_position: int,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    soft_cap: float = 0.0,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one request's queries.

    Args:
        query: (n, query heads, D), after RoPE; query i has position first_position + i
        stored: tokens 0 .. len-1 of the request. Without `fresh` they include the step's own tokens.
        scale: softmax scale
        fresh: raw keys and values (n, KV heads, D) of the step's own tokens (a prefill), or None (a decode)
        soft_cap: 0 for none, else logits become cap * tanh(logit / cap)
        sliding_window: query at i sees only j > i - sliding_window
        sink_logits: (query heads,), one more in each head's softmax, beside the capped ones

    Returns:
        float32 (n, query heads, D)
    """
    tokens, kv_heads, head_size = stored.key.shape
    n, query_heads = query.shape[:2]
    # query head h reads KV head h // (query_heads / kv_heads)
    q = query.float().reshape(n, kv_heads, query_heads // kv_heads, head_size)
    folded = torch.einsum("nhrd,hed->nhre", q, key_transform.inverse)
    positions = torch.arange(tokens, device=query.device)
    if key_transform.turning is None:
        constant = torch.einsum("nhrd,hd->nhr", q, key_transform.mean)[..., None]
    else:
        constant = torch.einsum("nhrd,jhd->nhrj", q, key_transform.centre(positions))
    logits = (torch.einsum("nhrd,jhd->nhrj", folded, stored.key) + constant) * scale
    if fresh is not None:
        logits = torch.cat([logits, torch.einsum("nhrd,jhd->nhrj", q, fresh[0].float()) * scale], -1)
        positions = torch.arange(tokens + n, device=query.device)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    at = first_position + torch.arange(n, device=query.device)[:, None]
    visible = positions <= at
    if sliding_window is not None:
        visible &= positions > at - sliding_window
    logits = logits.masked_fill(~visible[:, None, None], float("-inf"))
    if sink_logits is not None:
        sinks = sink_logits.float().view(kv_heads, -1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    probability = logits.softmax(-1)

    from_stored = probability[..., :tokens]
    output = torch.einsum("nhrj,jhd->nhrd", from_stored, stored.value)
    output = torch.einsum("nhrd,hde->nhre", output, value_transform.inverse)
    output += from_stored.sum(-1, keepdim=True) * value_transform.mean[:, None]
    if fresh is not None:
        output += torch.einsum("nhrj,jhd->nhrd", probability[..., tokens : tokens + n], fresh[1].float())
    return output.reshape(n, query_heads, head_size)


def attend_fused(
    query: torch.Tensor,
    stored: StoredRows,
    key_transform: Transform,
    value_transform: Transform,
    scale: float,
    first_position: int,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """`attend` without soft cap and sink logits, by torch's fused attention, to rounding.

    Raw tokens are transformed as stored ones are, so that every token has the same a q . m_K, which softmax does not
    see, and the same m_V.
    """
    n, query_heads, head_size = query.shape
    key, value = stored.key.transpose(0, 1), stored.value.transpose(0, 1)  # (KV heads, tokens, D)
    if fresh is not None:
        new = torch.arange(first_position, first_position + n, device=query.device)
        key = torch.cat([key, key_transform.forward(fresh[0], new).transpose(0, 1)], 1)
        value = torch.cat([value, value_transform.forward(fresh[1], new).transpose(0, 1)], 1)
    kv_heads, tokens = key.shape[:2]
    q = query.float().transpose(0, 1).reshape(kv_heads, -1, head_size)  # (KV heads, query heads of each * n, D)
    folded = (q @ key_transform.inverse.mT).view(1, query_heads, n, head_size)

    causal = n == tokens > 1 and sliding_window is None and key_transform.turning is None
    mask = None
    if not causal and (n > 1 or sliding_window is not None):
        positions = torch.arange(tokens, device=query.device)
        at = torch.arange(first_position, first_position + n, device=query.device)[:, None]
        mask = positions <= at
        if sliding_window is not None:
            mask &= positions > at - sliding_window
    if key_transform.turning is not None:
        centre = key_transform.turning.at(torch.arange(tokens, device=query.device)).permute(1, 2, 0)
        turned = (q @ centre).view(1, query_heads, n, tokens) * scale
        mask = turned if mask is None else turned.masked_fill(~mask, float("-inf"))
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key[None], value[None], mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    output = output.view(kv_heads, -1, head_size) @ value_transform.inverse + value_transform.mean[:, None]
    return output.view(query_heads, n, head_size).transpose(0, 1)
