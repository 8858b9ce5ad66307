"""Every kernel variant compiled before the engine serves: a rehearsal with batches that write nothing."""

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_oscar.integration.runtime import OscarRuntime
from vllm_oscar.kernels.compilation import compiled_together, interpreted
from vllm_oscar.kernels.decode import compiled_for

if TYPE_CHECKING:
    from vllm_oscar.integration.cuda import CudaMetadataBuilder

logger = logging.getLogger("vllm.oscar")


def warm_up(vllm_config: Any) -> None:
    """Run all layers over batches that between them need every variant of every kernel: once to have them compiled side
    by side, then for their launches.

    All tokens are those of vLLM's null block and none is stored.
    """
    start = time.perf_counter()
    runtime = OscarRuntime.shared(vllm_config)
    if not interpreted():
        with compiled_together():
            _rehearse_all(runtime)
    _rehearse_all(runtime)
    runtime.forget_slots()  # the null block's
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    runtime.announce("Triton kernels")
    logger.info(
        "OSCAR kernels are compiled and ran, in %.1f s; a start on this machine finds them in Triton's cache",
        time.perf_counter() - start,
    )


def batches(builder: "CudaMetadataBuilder") -> Iterator[tuple[list[int], int]]:
    """(new tokens of each request, stored tokens of each) of the batches to rehearse."""
    config, impl = builder.vllm_config, builder.impl
    threshold = builder.runtime.decode_threshold
    most = config.scheduler_config.max_num_batched_tokens
    seen = set()
    for q_len in range(1, min(threshold, most) + 1):
        for seqs in range(1, min(config.scheduler_config.max_num_seqs, most - q_len + 1) + 1):
            variant = compiled_for(seqs, q_len, impl.num_kv_heads, impl.ratio, impl.head_size, builder.device)
            if (q_len, variant) not in seen:
                seen.add((q_len, variant))
                yield ([q_len] * seqs if q_len * seqs <= most else [q_len] + [1] * (seqs - 1)), 0
    longest = config.model_config.max_model_len
    for query in sorted({min(threshold + 1, most), min(threshold + 128, most)}):
        # without history, with some, and with more than one call restores
        for before in (0, 1, impl.workspaces.prefill.capacity):
            if query > threshold and before + query <= longest:
                yield [query], before


def _rehearse_all(runtime: OscarRuntime) -> None:
    for builder in runtime.builders.values():
        for queries, before in batches(builder):
            _rehearse(builder, queries, before)


def _rehearse(builder: "CudaMetadataBuilder", queries: list[int], before: int) -> None:
    """One step of all layers for requests of `before` stored and queries[i] new tokens, none of them written."""
    tokens, requests, device = sum(queries), len(queries), builder.device
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(queries, dtype=torch.int32) + before
    longest = int(seq_lens.max())
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=longest,
        block_table_tensor=torch.zeros(
            (requests, -(-longest // builder.impl.layout.block_size)), dtype=torch.int32, device=device
        ),
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        seq_lens_cpu_upper_bound=seq_lens,
    )
    step = builder.build(0, common)
    for layer in builder.layers:
        impl = layer.impl
        sizes = [impl.num_heads, impl.num_kv_heads, impl.num_kv_heads]
        rows = torch.zeros((tokens, sum(sizes), impl.head_size), dtype=impl.runtime.dtype, device=device)
        query, key, value = rows.split(sizes, 1)  # as vLLM's projection leaves them
        output = torch.empty(query.shape, dtype=query.dtype, device=device)
        impl.run(step, layer.kv_cache, query, key, value, output)
