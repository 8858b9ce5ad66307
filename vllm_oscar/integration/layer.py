"""The attention layer, as far as CPU and GPU share it: what vLLM hands over, what is loaded, how pages are viewed."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_oscar.cache_layer import CacheLayer
from vllm_oscar.errors import UnsupportedError
from vllm_oscar.hot_pool import HotPool
from vllm_oscar.integration.backend import OscarBackend
from vllm_oscar.integration.refusal import BF16, refuse
from vllm_oscar.integration.runtime import OscarRuntime
from vllm_oscar.integration.sleep import lost_in_sleep
from vllm_oscar.page_layout import PageLayout


@contextmanager
def torch_defaults() -> Iterator[None]:
    """PyTorch's own default dtype and device, which vLLM changes while it builds and loads a model."""
    with torch.device("cpu"), set_default_torch_dtype(torch.float32):
        yield


class OscarImpl(AttentionImpl[Any]):
    """One layer. Subclasses add `run`. The constructor's signature is vLLM's.

    Attributes:
        layout: of the layer's pages; its bits are known once the weights are loaded
        cache_layer: (m, T, B) and the encoders, once the weights are loaded
        pool: the layer's BF16 copies, likewise

    Raises:
        UnsupportedError: the layer needs something that an INT2 cache does not have.
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
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        refuse(alibi_slopes is not None, "ALiBi", BF16)
        given = sorted(name for name, value in extra.items() if value is not None)
        refuse(given, str(given), BF16)
        if sinks is not None and sinks.shape != (num_heads,):
            refuse(True, f"attention sinks of shape {tuple(sinks.shape)}", BF16)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.soft_cap = logits_soft_cap or 0.0
        self.sink_logits = sinks  # the model's own parameter: weights come later, and may change
        self.kv_cache_dtype = kv_cache_dtype
        self.target_name = kv_sharing_target_layer_name
        self.vllm_config = get_current_vllm_config()
        with torch_defaults():
            self.runtime = OscarRuntime.shared(self.vllm_config)
        self.layout = PageLayout(head_size, self.runtime.block_size, self.runtime.sidecar.group_size)
        self.target: OscarImpl | None = None
        self.is_shared = False  # whether a later layer reads this one's keys and values
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None  # this step's raw rows, kept for such a layer
        self.cache_layer: CacheLayer
        self.pool: HotPool

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and KV head in a page."""
        return self.layout.token_bytes

    @property
    def backend(self) -> type[OscarBackend]:
        """What vLLM asks about the layer's pages."""
        return OscarBackend.of(self.layout, self.vllm_config.model_config.is_hybrid)

    @property
    def owns_cache(self) -> bool:
        """False where the layer reads another layer's keys and values."""
        return self.target_name is None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Load the layer's (m, T, B) and allocate its buffers: here, because vLLM measures memory next.

        vLLM calls this again when weights are reloaded. Nothing here depends on them, and CUDA graphs hold the tensors.
        """
        if hasattr(self, "pool"):
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        name, module = next((n, layer) for n, layer in layers.items() if getattr(layer, "impl", None) is self)
        with torch_defaults():
            self._load(name, module)

    def _load(self, name: str, module: torch.nn.Module) -> None:
        """Load and allocate for the vLLM layer `module` of that name.

        Raises:
            UnsupportedError: the layer does something that our attention does not.
        """
        refuse_unsupported_layer(module, self.head_size)
        vllm_layer: Any = module
        layers = self.vllm_config.compilation_config.static_forward_context
        if self.target_name is not None:
            target = layers[self.target_name].impl
            target.is_shared = True
            self.target, self.cache_layer, self.pool = target, target.cache_layer, target.pool
            self.layout = self.cache_layer.layout
            vllm_layer.attn_backend = self.backend
            return
        device: torch.device = module.get_buffer("_k_scale").device
        self.runtime.plan_pool(device)
        calibration = self.runtime.calibration(extract_layer_index(name), self.num_kv_heads, device)
        if calibration.key.mean.shape != (self.num_kv_heads, self.head_size):
            raise UnsupportedError(
                f"{name} has {self.num_kv_heads} KV heads of size {self.head_size}, not those of the model's "
                "configuration; use --kv-cache-dtype auto"
            )
        self.cache_layer = CacheLayer.of(
            calibration,
            self.runtime.block_size,
            self.runtime.sidecar.group_size,
            self.runtime.dtype,
            self.runtime.config.key_encoder,
        )
        self.layout = self.cache_layer.layout
        vllm_layer.attn_backend = self.backend
        with lost_in_sleep():  # its copies prove nothing then
            self.pool = HotPool.allocate(
                self.layout, self.runtime.num_slots, self.num_kv_heads, self.runtime.pool_dtype, device
            )
        # buffers, so that vLLM brings them back after a deep sleep
        for counter, counts in vars(self.runtime.counters).items():
            module.register_buffer(f"oscar_{counter}", counts, persistent=False)

    def pages(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """vLLM's tensor uint8 (blocks, heads, P, bytes) as (blocks, heads, head_bytes), with its own strides."""
        blocks, heads, tokens, width = kv_cache.shape
        if tokens != self.layout.block_size or width != self.token_bytes or kv_cache.stride(2) != width:
            raise UnsupportedError(
                f"vLLM laid the KV cache out as {tuple(kv_cache.shape)}, strides {kv_cache.stride()}; OSCAR needs "
                f"blocks of {self.layout.block_size} tokens of {self.token_bytes} bytes: leave "
                "VLLM_KV_CACHE_LAYOUT and layers of other head sizes out"
            )
        return kv_cache.as_strided(
            (blocks, heads, tokens * width), (kv_cache.stride(0), kv_cache.stride(1), 1), kv_cache.storage_offset()
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write a step's tokens, then attend. The signature is vLLM's.

        Args:
            query: (tokens, query heads, D), after RoPE
            key, value: (tokens, KV heads, D)
            output: (tokens, query heads * D) or (tokens, query heads, D), written in place
        """
        assert output is not None and output_scale is None and output_block_scale is None
        if attn_metadata is None:  # vLLM's profiling run
            return output.zero_()
        n = attn_metadata.num_tokens
        shape = (n, self.num_heads, self.head_size)
        rows = self.step_rows(key, value, n)
        self.run(attn_metadata, kv_cache, query[:n].view(shape), *rows, output[:n].view(shape))
        return output

    @abstractmethod
    def run(
        self,
        step: Any,
        kv_cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write a step's tokens where the layer owns its cache, then attend.

        Args:
            step: the platform's metadata
            kv_cache: vLLM's tensor, see `pages`
            query: (tokens, query heads, D), without padding
            key, value: (tokens, KV heads, D)
            output: like query, written
        """

    def step_rows(self, key: torch.Tensor, value: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's raw keys and values (tokens, KV heads, D): the layer's own, or those of the layer it shares."""
        if self.target is not None:
            assert self.target.fresh is not None
            return self.target.fresh
        shape = (tokens, self.num_kv_heads, self.head_size)
        rows = key[:tokens].view(shape), value[:tokens].view(shape)
        self.fresh = rows if self.is_shared else None
        return rows


def refuse_unsupported_layer(module: torch.nn.Module, head_size: int) -> None:
    """Layers that vLLM's choice of a backend does not tell apart from plain decoder attention.

    A layer class that describes its cache itself also masks in its own way: in chunks (Llama 4), with a bidirectional
    prefix, with a window beside a reference, with static sinks. We would attend causally, and answer wrongly.
    """
    from vllm.model_executor.layers.attention import Attention

    layer_class: Any = type(module)
    own_cache = layer_class.get_kv_cache_spec is not Attention.get_kv_cache_spec
    refuse(own_cache, f"{layer_class.__name__} layers", BF16)
    refuse(getattr(module, "head_size_v", head_size) != head_size, "values of another size than keys", BF16)
