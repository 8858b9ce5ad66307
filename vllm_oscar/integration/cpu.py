"""The CPU platform: the reference, request by request, with its forms that numba and torch have compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder

from vllm_oscar import attention as reference
from vllm_oscar.attention import StoredRows, attend, attend_fused
from vllm_oscar.cache_layer import CacheLayer
from vllm_oscar.hot_pool import SlotTable
from vllm_oscar.integration.layer import OscarImpl
from vllm_oscar.integration.refusal import refuse_padded_pages
from vllm_oscar.integration.runtime import OscarRuntime
from vllm_oscar.page_layout import PageViews

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


@cache
def _pages() -> tuple[Callable[..., torch.Tensor], Callable[..., StoredRows]]:
    """How rows are written and read; cache_layer says it where numba is missing."""
    try:
        from vllm_oscar import compiled_pages
    except ImportError:
        return CacheLayer.write, reference.read_rows
    return compiled_pages.write, compiled_pages.read_rows


@dataclass
class CpuMetadata(AttentionMetadata):
    """What the layers need to know about a step.

    Attributes:
        num_tokens: new tokens, without padding
        seq_lens: of each request, tokens after this step
        query_start_loc: of each request, where its new tokens start; one more at the end
        block_table: int32 (requests, blocks)
        position: int64 (tokens,), of each new token in its request
        slot_mapping: int64 (tokens,)
        hot_slot_mapping: int64 (tokens,), see SlotTable.map_copies
        table: which block has which slot
        decode_threshold: longest query that reads its own tokens from the pool
    """

    num_tokens: int
    seq_lens: list[int]
    query_start_loc: list[int]
    block_table: torch.Tensor
    position: torch.Tensor
    slot_mapping: torch.Tensor
    hot_slot_mapping: torch.Tensor
    table: SlotTable
    decode_threshold: int


class CpuMetadataBuilder(AttentionMetadataBuilder[CpuMetadata]):
    """Hands out slots, once a step, for the layers of one KV-cache group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_padded_pages(kv_cache_spec)
        self.runtime = OscarRuntime.shared(vllm_config)
        if not self.runtime.builders:
            self.runtime.announce("torch reference on CPU")
        self.runtime.builders[layer_names[0]] = self

    def build(
        self, common_prefix_len: int, common_attn_metadata: "CommonAttentionMetadata", fast_build: bool = False
    ) -> CpuMetadata:
        common, threshold = common_attn_metadata, self.runtime.decode_threshold
        layer = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]
        table = self.runtime.table(self.layer_names, layer.kv_cache.shape[0], self.device)
        seq_lens, query_start_loc = common.seq_lens.int(), common.query_start_loc.int()
        table.allocate(common.block_table_tensor, seq_lens, query_start_loc, threshold)

        num_tokens = common.num_actual_tokens
        query_lens = query_start_loc[1:] - query_start_loc[:-1]
        request = torch.repeat_interleave(query_lens.long(), output_size=num_tokens)
        after = seq_lens[request]
        before = after - query_lens[request]
        position = before + torch.arange(num_tokens) - query_start_loc[request]
        slot_mapping = common.slot_mapping[:num_tokens]
        short = (query_lens <= threshold)[request]
        hot_slot_mapping = table.map_copies(slot_mapping, position, before, after, short)
        self.runtime.audit(self.layer_names, table, common, hot_slot_mapping)
        self.runtime.watch()
        return CpuMetadata(
            num_tokens=num_tokens,
            seq_lens=seq_lens.tolist(),
            query_start_loc=query_start_loc.tolist(),
            block_table=common.block_table_tensor,
            position=position,
            slot_mapping=slot_mapping,
            hot_slot_mapping=hot_slot_mapping,
            table=table,
            decode_threshold=threshold,
        )


class CpuImpl(OscarImpl):
    """One layer."""

    def views(self, kv_cache: torch.Tensor) -> PageViews:
        """Typed views of vLLM's tensor."""
        return self.layout.views(self.pages(kv_cache))

    def run(
        self,
        step: CpuMetadata,
        kv_cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """See OscarImpl.run."""
        views = self.views(kv_cache)
        write, _ = _pages()
        if self.owns_cache:
            self.runtime.counters.saturated_rows += write(
                self.cache_layer, views, self.pool, key, value, step.position, step.slot_mapping, step.hot_slot_mapping
            )
        for request, after in enumerate(step.seq_lens):
            start, end = step.query_start_loc[request : request + 2]
            if end > start:
                rows = slice(start, end)
                output[rows] = self._attend(views, step, request, after, query[rows], key[rows], value[rows])

    def _attend(
        self,
        views: PageViews,
        step: CpuMetadata,
        request: int,
        after: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        before = after - query.shape[0]
        decodes = query.shape[0] <= step.decode_threshold
        tokens = after if decodes else before
        blocks = step.block_table[request, : -(-tokens // self.layout.block_size)].long()
        _, read_rows = _pages()
        stored = read_rows(views, self.pool, step.table, blocks, tokens, before, self.sliding_window)
        self.runtime.counters.reads += stored.reads(before, self.runtime.config.sink, self.sliding_window)
        transforms = self.cache_layer.key.transform, self.cache_layer.value.transform
        fresh = None if decodes else (key, value)
        given = (query, stored, *transforms, self.scale, before, fresh)
        if self.soft_cap or self.sink_logits is not None:
            return attend(*given, self.soft_cap, self.sliding_window, self.sink_logits)
        return attend_fused(*given, self.sliding_window)
