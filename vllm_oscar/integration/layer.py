"""The attention layer: writes a step's tokens, then reads the cache, through vLLM's own `Attention` module."""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_oscar.attention import attend, read_rows
from vllm_oscar.cache_layer import CacheLayer
from vllm_oscar.errors import UnsupportedError
from vllm_oscar.hot_pool import HotPool
from vllm_oscar.integration.metadata import OscarMetadata
from vllm_oscar.integration.runtime import OscarRuntime
from vllm_oscar.page_layout import PageViews


class OscarImpl(AttentionImpl[OscarMetadata]):
    """One layer of the CPU platform: the torch reference, request by request.

    The constructor's signature is vLLM's.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "oscar",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        if alibi_slopes is not None:
            raise UnsupportedError("--kv-cache-dtype oscar does not support ALiBi; use --kv-cache-dtype auto")
        if any(value is not None for value in extra.values()):
            raise UnsupportedError(
                f"--kv-cache-dtype oscar does not support attention with {sorted(extra)}; use --kv-cache-dtype auto"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.soft_cap = logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        self.target_name = kv_sharing_target_layer_name
        self.target: OscarImpl
        self.vllm_config = get_current_vllm_config()
        self.runtime = OscarRuntime.shared(self.vllm_config)
        self.layout = self.runtime.layout(head_size)
        self.cache_layer: CacheLayer
        self.pool: HotPool
        self.is_shared = False  # whether a later layer reads this one's keys and values
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None  # this step's raw rows, kept for such a layer
        self._views: tuple[int, PageViews] | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and KV head in a page."""
        return self.layout.token_bytes

    @property
    def owns_cache(self) -> bool:
        """False where the layer reads another layer's keys and values."""
        return self.target_name is None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Load the layer's (m, T, B) and allocate its copies: here, because vLLM measures memory next."""
        layers = self.vllm_config.compilation_config.static_forward_context
        name, module = next((n, layer) for n, layer in layers.items() if getattr(layer, "impl", None) is self)
        if self.target_name is not None:
            target = layers[self.target_name].impl
            self.cache_layer, self.pool = target.cache_layer, target.pool
            self.target, target.is_shared = target, True
            return
        device = module._k_scale.device
        self.runtime.plan_pool(device)
        calibration = self.runtime.calibration(extract_layer_index(name), self.num_kv_heads)
        self.cache_layer = CacheLayer.of(calibration, self.layout, self.runtime.dtype, self.runtime.config.key_encoder)
        self.pool = HotPool.allocate(
            self.layout, self.runtime.num_slots, self.num_kv_heads, self.runtime.pool_dtype, device
        )

    def views(self, kv_cache: torch.Tensor) -> PageViews:
        """Typed views of vLLM's tensor uint8 (blocks, heads, P, bytes), whatever its block and head strides."""
        if self._views is None or self._views[0] != kv_cache.data_ptr():
            blocks, heads, tokens, width = kv_cache.shape
            if tokens != self.layout.block_size or width != self.token_bytes or kv_cache.stride(2) != width:
                raise UnsupportedError(
                    f"vLLM laid the KV cache out as {tuple(kv_cache.shape)}, strides {kv_cache.stride()}; OSCAR needs "
                    f"blocks of {self.layout.block_size} tokens of {self.token_bytes} bytes: leave "
                    "VLLM_KV_CACHE_LAYOUT and layers of other head sizes out"
                )
            pages = kv_cache.as_strided(
                (blocks, heads, tokens * width), (kv_cache.stride(0), kv_cache.stride(1), 1), kv_cache.storage_offset()
            )
            self._views = kv_cache.data_ptr(), self.layout.views(pages)
        return self._views[1]

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: OscarMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's tokens.

        Args:
            query: (tokens, query heads, D), after RoPE
            key, value: (tokens, KV heads, D)
            output: (tokens, query heads * D) or (tokens, query heads, D), written in place
        """
        assert output is not None and output_scale is None and output_block_scale is None
        if attn_metadata is None:  # vLLM's profiling run
            return output.zero_()
        step = attn_metadata
        views = self.views(kv_cache)
        n = step.num_tokens
        query = query[:n].view(n, self.num_heads, self.head_size)
        result = output[:n].view(n, self.num_heads, self.head_size)
        if self.owns_cache:
            key, value = (t[:n].view(n, self.num_kv_heads, self.head_size) for t in (key, value))
            self.fresh = (key, value) if self.is_shared else None
            saturated = self.cache_layer.write(
                views, self.pool, key, value, step.slot_mapping, step.hot_slot_mapping
            )
            self.runtime.counters.saturated_rows += int(saturated)
        else:
            assert self.target.fresh is not None
            key, value = self.target.fresh
        for request, after in enumerate(step.seq_lens_cpu):
            start, end = step.query_start_loc_cpu[request : request + 2]
            if end > start:
                rows = slice(start, end)
                result[rows] = self._attend(views, step, request, after, query[rows], key[rows], value[rows])
        return output

    def _attend(
        self,
        views: PageViews,
        step: OscarMetadata,
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
        stored = read_rows(views, self.pool, step.table, blocks, tokens, before)
        self._count(stored.hot)
        return attend(
            query,
            stored,
            self.cache_layer.key.transform,
            self.cache_layer.value.transform,
            self.scale,
            first_position=before,
            fresh=None if decodes else (key, value),
            soft_cap=self.soft_cap,
            sliding_window=self.sliding_window,
        ).to(query.dtype)

    def _count(self, hot: torch.Tensor) -> None:
        counters = self.runtime.counters
        bf16 = int(hot.sum())
        counters.bf16_reads += bf16
        counters.int2_reads += hot.numel() - bf16
        sinks = hot[: self.runtime.config.sink]
        counters.int2_sink_reads += sinks.numel() - int(sinks.sum())
