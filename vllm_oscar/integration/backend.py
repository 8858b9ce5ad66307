"""vLLM's view of the backend: what it is called, what it can do, and where its layer and its builder are."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, AttentionType, MultipleOf

from vllm_oscar.errors import UnsupportedError
from vllm_oscar.integration.refusal import refuse
from vllm_oscar.integration.seams import DTYPE, page_spec
from vllm_oscar.page_layout import HEAD_SIZES, PageLayout

if TYPE_CHECKING:
    from vllm_oscar.integration.layer import OscarImpl


# tokens
_GPU_BLOCK = 64  # decode is 4% slower with blocks of 16, and no faster with larger ones
_CPU_BLOCK = 128  # vLLM's own, which from 0.33 on it sets only after the layers are built


class OscarBackend(AttentionBackend):
    """INT2 pages with BF16 copies of the sink and the recent tokens.

    vLLM names the class while it builds a layer, and asks the class how large the layer's pages are once it is loaded.
    Between the two a layer takes `of` its layout, so that the class knows.

    Beside state layers (Mamba, linear attention, convolutions) vLLM makes a block as long as a state is large, and its
    model runner splits it into kernel blocks: those are ours, of a size that we choose, and everything of ours counts
    in them. Elsewhere a block is a kernel block.

    Attributes:
        layout: of the pages of the layers that have this class
        splits: whether vLLM's blocks are split into ours
    """

    layout: ClassVar[PageLayout | None] = None
    splits: ClassVar[bool] = False

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

    @classmethod
    def of(cls, layout: PageLayout, splits: bool = False) -> type["OscarBackend"]:
        """The backend of layers with such pages."""
        return _backend_of(layout, splits)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM's hook, from 0.28: the spec of a layer with the pages that it has here. Specs in 16 bits, which vLLM
        compares with ours, stay.

        Raises:
            UnsupportedError: vLLM changed the block size after the layers were built.
        """
        if spec.dtype != torch.uint8:
            return spec
        assert cls.layout is not None
        now, built_for = spec.block_size, cls.layout.block_size
        # one token: vLLM asks what it takes
        if now == 1 or (cls.splits and now % built_for == 0):
            return page_spec(spec, now, cls.layout.token_bytes)
        # its own choice for layers with a sliding window does not matter
        if now != built_for and getattr(spec, "sliding_window", None) is None:
            raise UnsupportedError(
                f"vLLM changed the block size from {built_for} to {now} after the layers were built: "
                f"serve with --block-size {now}"
            )
        return page_spec(spec, built_for, cls.layout.token_bytes)

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

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [cls.layout.block_size] if cls.splits and cls.layout else [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return _GPU_BLOCK if current_platform.is_cuda() else _CPU_BLOCK

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


@functools.cache
def _backend_of(layout: PageLayout, splits: bool) -> type[OscarBackend]:
    # vLLM groups layers by the names of their classes
    name = "_".join(["OscarBackend", *map(str, dataclasses.astuple(layout)), *(["split"] if splits else [])])
    return type(name, (OscarBackend,), {"layout": layout, "splits": splits})


# fields of vLLM's AttentionSelectorConfig: what one says is looked at below or in the configuration, or changes nothing
# fmt: off
SELECTOR = frozenset({
    "head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type", "has_sliding_window", "has_sink",
    "use_mla", "use_sparse", "use_mm_prefix", "use_non_causal", "use_per_head_quant_scales", "use_batch_invariant",
    "use_kv_connector", "use_pcp", "use_dcp", "use_rswa",
})
# fmt: on


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
    unknown = [name for name, value in selector._asdict().items() if value and name not in SELECTOR]
    refuse(unknown, f"attention that vLLM describes with {', '.join(unknown)}")
