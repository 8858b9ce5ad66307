"""One step's metadata, and its builder: slots are handed out here, once a step, outside any CUDA graph."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder

from vllm_oscar.hot_pool import SlotTable, page_words
from vllm_oscar.integration.runtime import OscarRuntime

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_oscar.integration.layer import OscarImpl


@dataclass
class OscarMetadata(AttentionMetadata):
    """What the layers need to know about a step.

    Attributes:
        num_tokens: new tokens, without padding
        seq_lens: int32 (requests,), tokens after this step
        query_start_loc: int32 (requests + 1,)
        block_table: int32 (requests, blocks)
        slot_mapping: int64 (tokens,)
        hot_slot_mapping: int64 (tokens,), see SlotTable.hot_slot_mapping
        table: which block has which slot
        decode_threshold: longest query that reads its own tokens from the pool
        seq_lens_cpu, query_start_loc_cpu: the same numbers for the host
    """

    num_tokens: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    hot_slot_mapping: torch.Tensor
    table: SlotTable
    decode_threshold: int
    seq_lens_cpu: list[int]
    query_start_loc_cpu: list[int]


class OscarMetadataBuilder(AttentionMetadataBuilder[OscarMetadata]):
    """Builds OscarMetadata for the layers of one KV-cache group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.runtime = OscarRuntime.shared(vllm_config)
        speculative = vllm_config.speculative_config
        self.decode_threshold = 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)

    def _first_layer(self) -> Any:
        return self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]

    def build(
        self, common_prefix_len: int, common_attn_metadata: "CommonAttentionMetadata", fast_build: bool = False
    ) -> OscarMetadata:
        common = common_attn_metadata
        layer = self._first_layer()
        impl: OscarImpl = layer.impl
        views = impl.views(layer.kv_cache)
        table = self.runtime.table(self.layer_names, layer.kv_cache.shape[0], self.device)
        seq_lens, query_start_loc = common.seq_lens.int(), common.query_start_loc.int()
        proven = impl.pool.proven_slots(page_words(views.meta), table)
        table.allocate(common.block_table_tensor, seq_lens, query_start_loc, self.decode_threshold, proven)

        num_tokens = common.num_actual_tokens
        query_lens = query_start_loc[1:] - query_start_loc[:-1]
        request = torch.repeat_interleave(query_lens.long(), output_size=num_tokens)
        after = seq_lens[request]
        before = after - query_lens[request]
        position = before + torch.arange(num_tokens, device=self.device) - query_start_loc[request]
        slot_mapping = common.slot_mapping[:num_tokens]
        hot = table.hot_slot_mapping(
            slot_mapping, position, before, after, (query_lens <= self.decode_threshold)[request]
        )
        self.runtime.report()
        return OscarMetadata(
            num_tokens=num_tokens,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            block_table=common.block_table_tensor,
            slot_mapping=slot_mapping,
            hot_slot_mapping=hot,
            table=table,
            decode_threshold=self.decode_threshold,
            seq_lens_cpu=seq_lens.tolist(),
            query_start_loc_cpu=query_start_loc.tolist(),
        )
