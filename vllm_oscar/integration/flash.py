"""FlashAttention as vLLM carries it, for the attention inside a prefill; the Triton kernel where it is absent."""

import functools

import torch

from vllm_oscar.kernels.history import Call
from vllm_oscar.kernels.prefill import Attention, attention


def attention_for(head_size: int) -> Attention:
    """What runs a prefill's calls on this machine."""
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_flash_attn_varlen_func_available

        version = get_flash_attn_version(head_size=head_size) if is_flash_attn_varlen_func_available() else None
    except ImportError:
        version = None
    if version is None:
        return attention
    return functools.partial(_flash_attention, version)


def _flash_attention(
    version: int,
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
    """See kernels.prefill.Attention."""
    if not call.aligned and sliding_window is not None:  # a window that ends before the keys do: not expressible
        attention(query, keys, values, call, out, lse, scale, soft_cap, sliding_window)
        return
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    _, log_sum = flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=call.query_starts,
        cu_seqlens_k=call.key_starts,
        max_seqlen_q=call.max_query,
        max_seqlen_k=call.max_key,
        softmax_scale=scale,
        causal=call.aligned,
        window_size=None if sliding_window is None else [sliding_window - 1, 0],
        softcap=soft_cap,
        return_softmax_lse=True,
        fa_version=version,
    )
    lse.copy_(log_sum)
