"""vLLM's view of the backend: what it is called, what it can do, and where its layer and its builder are."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, AttentionType, MultipleOf

from vllm_oscar.integration.refusal import refuse
from vllm_oscar.integration.seams import DTYPE
from vllm_oscar.page_layout import HEAD_SIZES

if TYPE_CHECKING:
    from vllm_oscar.integration.layer import OscarImpl


# tokens
_GPU_BLOCK = 64  # decode is 4% slower with blocks of 16, and no faster with larger ones
_CPU_BLOCK = 128  # vLLM's own, which from 0.33 on it sets only after the layers are built


class OscarBackend(AttentionBackend):
    """INT2 pages with BF16 copies of the sink and the recent tokens."""

    # a token is written in the same operation that reads it, from the same metadata
    forward_includes_kv_cache_update: bool = True
    accept_output_buffer: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [DTYPE]

    @staticmethod
    def get_name() -> str:
        # a member of AttentionBackendEnum that every supported version has; the class behind it is not asked for
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["OscarImpl"]:
        if current_platform.is_cpu():
            from vllm_oscar.integration.cpu import CpuImpl

            return CpuImpl
        from vllm_oscar.integration.cuda import CudaImpl

        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        if current_platform.is_cpu():
            from vllm_oscar.integration.cpu import CpuMetadataBuilder

            return CpuMetadataBuilder
        from vllm_oscar.integration.cuda import CudaMetadataBuilder

        return CudaMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = DTYPE
    ) -> tuple[int, ...]:
        """Up to 0.28: uint8 (blocks, heads, P, bytes per token); `head_size` is half of that, see seams.page_spec."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """From 0.29: a head's tokens lie together."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return _GPU_BLOCK if current_platform.is_cuda() else _CPU_BLOCK

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


def refuse_unsupported(selected_backend: Any, selector: Any) -> None:
    """Layers that have no INT2 form, refused while the model is built: what no configuration showed before.

    Args:
        selected_backend: what --attention-backend named, or None
        selector: vLLM's AttentionSelectorConfig
    """
    refuse(selected_backend is not None, f"another attention backend ({selected_backend})", "leave it out")
    refuse(selector.use_mla, "MLA models")
    refuse(getattr(selector, "use_sparse", False), "sparse attention")
    refuse(getattr(selector, "use_mm_prefix", False), "bidirectional attention over images")
    refuse(getattr(selector, "use_non_causal", False), "non-causal attention")
    refuse(selector.attn_type not in (None, AttentionType.DECODER), f"{selector.attn_type} attention")
    refuse(
        selector.head_size not in HEAD_SIZES,
        f"head size {selector.head_size} (supported: {', '.join(map(str, HEAD_SIZES))})",
    )
