# mypy: disable-error-code="no-untyped-def"
"""Attention of prefilling requests: restored history and the step's own tokens, in calls of bounded size.

Each call restores some keys and values (see history) and runs attention over them, FlashAttention where the caller
has it and the Triton kernel here where not. A request whose keys do not fit one call is merged by log-sum-exp, and so
is a head's sink logit (see `attention`), with the first of a request's calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from vllm_oscar.hot_pool import HotPool, SlotTable
from vllm_oscar.kernels.history import Call, RestoreTables, restore
from vllm_oscar.kernels.product import product
from vllm_oscar.kernels.reads import ReadCounter
from vllm_oscar.page_layout import PageLayout

_LOG2E = tl.constexpr(1.4426950408889634)
_FLOOR = tl.constexpr(-1e30)  # of a running maximum; scores of unseen keys are -inf


@triton.jit
def _soft_capped(logit, cap):
    """cap * tanh(logit / cap)"""
    return cap * (1.0 - 2.0 / (tl.exp2(logit * (2.0 * _LOG2E / cap)) + 1.0))


@triton.jit
def _tile(
    q, k, v, base, limit, i, shift, window, scale, cap, m, total, acc, d, k_token, v_token,
    D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """N more keys, from base on. m, total: running maximum (base 2) and sum; acc: sum of p v."""
    j = base + tl.arange(0, N)
    real = (d < D)[None, :]
    there = j < limit
    row = j.to(tl.int64)[:, None]
    keys = tl.load(k + row * k_token + d[None, :], mask=there[:, None] & real, other=0.0)
    logit = product(q, tl.trans(keys), tl.zeros([q.shape[0], N], tl.float32)) * scale
    if CAPPED:
        logit = _soft_capped(logit, cap)
    x = logit * _LOG2E
    if MASKED:
        seen = there[None, :] & (j[None, :] <= i[:, None] + shift)
        if WINDOWED:
            seen = seen & (j[None, :] > i[:, None] + shift - window)
        x = tl.where(seen, x, float("-inf"))
    new = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - new[:, None])
    keep = tl.exp2(m - new)
    values = tl.load(v + row * v_token + d[None, :], mask=there[:, None] & real, other=0.0)
    acc = product(p.to(values.dtype), values, acc * keep[:, None])
    return new, total * keep + tl.sum(p, 1), acc


@triton.jit
def _attention(
    query, keys, values, out, lse, query_starts, key_starts, shifts, scale, cap, window,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, lse_head,
    D: tl.constexpr, D_PAD: tl.constexpr, RATIO: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid (query tiles of the longest, query heads, requests)."""
    request = tl.program_id(2)
    h = tl.program_id(1)
    q_start = tl.load(query_starts + request)
    q_len = tl.load(query_starts + request + 1) - q_start
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest first
    if first >= q_len:
        return
    k_start = tl.load(key_starts + request)
    k_len = tl.load(key_starts + request + 1) - k_start
    shift = tl.load(shifts + request)
    i = first + tl.arange(0, M)
    d = tl.arange(0, D_PAD)
    valid = (i < q_len)[:, None] & (d < D)[None, :]
    token = (q_start + i).to(tl.int64)
    q = tl.load(query + token[:, None] * q_token + h * q_head + d[None, :], mask=valid, other=0.0)
    k = keys + k_start.to(tl.int64) * k_token + h // RATIO * k_head
    v = values + k_start.to(tl.int64) * v_token + h // RATIO * v_head

    end = tl.minimum(k_len, first + M + shift)  # behind the last key that any of the queries sees
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first + shift - window + 1, 0) // N * N
    whole = begin  # [begin, whole) need no mask
    if not WINDOWED:
        whole = tl.maximum(tl.minimum(k_len, first + shift + 1), 0) // N * N
    m = tl.full([M], _FLOOR, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    for base in tl.range(begin, whole, N, num_stages=STAGES):
        m, total, acc = _tile(
            q, k, v, base, k_len, i, shift, window, scale, cap, m, total, acc, d, k_token, v_token,
            D, N, False, CAPPED, WINDOWED,
        )  # fmt: skip
    for base in tl.range(whole, end, N, num_stages=STAGES):
        m, total, acc = _tile(
            q, k, v, base, k_len, i, shift, window, scale, cap, m, total, acc, d, k_token, v_token,
            D, N, True, CAPPED, WINDOWED,
        )  # fmt: skip
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(out + token[:, None] * out_token + h * out_head + d[None, :], acc.to(out.dtype.element_ty), mask=valid)
    log = tl.where(some, (m + tl.log2(tl.where(some, total, 1.0))) / _LOG2E, float("-inf"))
    tl.store(lse + h * lse_head + token, log, mask=i < q_len)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    soft_cap: float,
    sliding_window: int | None,
) -> None:
    """Attention of a call's queries to the keys in the workspace.

    Args:
        query: run dtype (tokens, query heads, D), the call's queries
        keys, values: run dtype (rows, heads, D)
        out: (tokens, query heads, D), written
        lse: float32 (query heads, tokens), written: log of the sum of exponentials, -inf where no key is seen
    """
    heads, size = query.shape[1:]
    _attention[(triton.cdiv(call.max_query, 128), heads, call.shifts.shape[0])](
        query, keys, values, out, lse, call.query_starts, call.key_starts, call.shifts, scale, soft_cap,
        sliding_window or 0, query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), out.stride(0), out.stride(1), lse.stride(0),
        D=size, D_PAD=triton.next_power_of_2(size), RATIO=heads // keys.shape[1], M=128, N=64 if size <= 128 else 32,
        CAPPED=soft_cap != 0, WINDOWED=sliding_window is not None, STAGES=3 if size <= 128 else 2, num_warps=8,
    )  # fmt: skip


@triton.jit
def _merge(
    out, lse, more, more_lse, out_token, out_head, more_token, more_head, lse_head, more_lse_head,
    D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """grid (tokens, heads)."""
    t = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    mine = tl.load(lse + h * lse_head + t)
    other = tl.load(more_lse + h * more_lse_head + t)
    top = tl.maximum(tl.maximum(mine, other), _FLOOR)
    a = tl.exp(mine - top)
    b = tl.exp(other - top)
    total = tl.maximum(a + b, 1e-30)
    to = out + t.to(tl.int64) * out_token + h * out_head + d
    x = tl.load(to, mask=d < D, other=0.0).to(tl.float32)
    y = tl.load(more + t.to(tl.int64) * more_token + h * more_head + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(to, ((x * a + y * b) / total).to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + h * lse_head + t, top + tl.log(total))


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Two disjoint sets of keys -> both, in place on out (tokens, heads, D) and lse (heads, tokens)."""
    tokens, heads, size = out.shape
    _merge[(tokens, heads)](
        out, lse, more, more_lse, out.stride(0), out.stride(1), more.stride(0), more.stride(1), lse.stride(0),
        more_lse.stride(0), D=size, D_PAD=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip


@triton.jit
def _add_sinks(
    query, mean, sink_logits, out, lse, scale, q_token, q_head, out_token, out_head, lse_head,
    RATIO: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """grid (tokens, heads)."""
    t = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    sink = tl.load(sink_logits + h).to(tl.float32)
    if CENTRED:  # other logits have all lost as much
        q = tl.load(query + t.to(tl.int64) * q_token + h * q_head + d, mask=d < D, other=0.0).to(tl.float32)
        sink -= tl.sum(q * tl.load(mean + h // RATIO * D + d, mask=d < D, other=0.0), 0) * scale
    mine = tl.load(lse + h * lse_head + t)
    top = tl.maximum(mine, sink)
    share = tl.exp(mine - top)
    total = share + tl.exp(sink - top)
    to = out + t.to(tl.int64) * out_token + h * out_head + d
    x = tl.load(to, mask=d < D, other=0.0).to(tl.float32)
    tl.store(to, (x * (share / total)).to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + h * lse_head + t, top + tl.log(total))


def add_sinks(
    query: torch.Tensor,
    mean: torch.Tensor | None,
    sink_logits: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> None:
    """One more logit in each head's softmax, whose value is zero, in place.

    Args:
        query: (tokens, heads, D)
        mean: m_K, float32 (KV heads, D), where `restore` left it out of the keys; else None
        sink_logits: (heads,), contiguous
        out: (tokens, heads, D)
        lse: float32 (heads, tokens)
    """
    tokens, heads, size = query.shape
    _add_sinks[(tokens, heads)](
        query, mean, sink_logits, out, lse, scale, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        lse.stride(0), RATIO=1 if mean is None else heads // mean.shape[0], D=size,
        D_PAD=triton.next_power_of_2(size), CENTRED=mean is not None, num_warps=1,
    )  # fmt: skip


class Attention(Protocol):
    """What `prefill` runs in each call; `attention` above is one. For other libraries see Call.aligned."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        soft_cap: float,
        sliding_window: int | None,
    ) -> None: ...


@dataclass(frozen=True)
class PrefillWorkspace:
    """Buffers for all layers of a model.

    Attributes:
        restored: run dtype (2, capacity, heads, D)
        out: run dtype (tokens, query heads, D), of calls that continue
        lse: float32 (2, query heads, tokens)
    """

    restored: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(
        cls,
        capacity: int,
        tokens: int,
        query_heads: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PrefillWorkspace":
        """`capacity` keys in a call, at least `tokens`, the most that a step has."""
        return cls(
            torch.empty((2, capacity, heads, head_size), dtype=dtype, device=device),
            torch.empty((tokens, query_heads, head_size), dtype=dtype, device=device),
            torch.empty((2, query_heads, tokens), dtype=torch.float32, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.restored.shape[1]


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    pool: HotPool,
    table: SlotTable,
    block_table: torch.Tensor,
    tables: RestoreTables,
    calls: Sequence[Call],
    workspace: PrefillWorkspace,
    out: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sliding_window: int | None = None,
    run: Attention = attention,
    reads: ReadCounter | None = None,
    sink_logits: torch.Tensor | None = None,
) -> None:
    """Attention of a step's prefilling requests.

    Args:
        query, key, value: run dtype (tokens, heads, D), the whole step's, with raw keys and values
        calls: see history.plan
        out: (tokens, query heads, D); the rows of the calls' queries are written
        reads: where the layer counts
        sink_logits: (query heads,), see `attention.attend`
    """
    centred = not soft_cap  # a soft cap acts on the whole logit
    for call in calls:
        restore(call, key, value, pages, layout, pool, table, block_table, tables, workspace.restored, reads, centred)
        asked = slice(call.first_query, call.last_query)
        count = call.last_query - call.first_query
        # libraries load whole tiles, and multiply what is behind a request's last key by zero: no NaN may be there
        keys, values = workspace.restored[:, : call.keys]
        mine, lse = out[asked], workspace.lse[0, :, :count]
        if call.continues:
            more, more_lse = workspace.out[:count], workspace.lse[1, :, :count]
            run(query[asked], keys, values, call, more, more_lse, scale, soft_cap, sliding_window)
            merge(mine, lse, more, more_lse)
        else:
            run(query[asked], keys, values, call, mine, lse, scale, soft_cap, sliding_window)
            if sink_logits is not None:
                add_sinks(query[asked], tables.mean[0] if centred else None, sink_logits, mine, lse, scale)
