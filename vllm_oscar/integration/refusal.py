"""How everything that an INT2 cache cannot serve is refused: at start-up, by name, with what to use instead.

What a configuration shows is refused here, before any engine process exists and before a sidecar is looked for. What
only a layer shows is refused by the engine process: `backend.refuse_unsupported`, `layer.refuse_unsupported_layer`,
`refuse_other_layers`.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.platforms import current_platform

from vllm_oscar.errors import UnsupportedError
from vllm_oscar.integration.seams import DTYPE, FIRST_GPU, UNVERIFIED, asks_for_pages, shapes_pages, vllm_version
from vllm_oscar.page_layout import BLOCK_SIZES, HEAD_SIZES, is_block_size

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

BF16 = "use --kv-cache-dtype auto"  # the remedy where another quantized cache would not help either
EXAMPLE = "ExampleConnector"  # vLLM's shared storage
# KV connectors of vLLM that are not served yet, and why
CONNECTORS = {
    EXAMPLE: "vLLM files the blocks of a prompt's first step under the whole prompt's name",
    "OffloadingConnector": "blocks that came back from the host's memory were never compared on a GPU",
}
# the remedy where vLLM would plan pages of one size: it then plans a group of pages of several sizes
ONE_KIND = (
    "use --disable-hybrid-kv-cache-manager, with which layers that have a sliding window keep all tokens (in INT2)"
)
# speculative methods whose drafts have no keys and values
DRAFTS_WITHOUT_CACHE = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
# and those with layers of their own, which the field kv_cache_dtype of --speculative-config reaches
DRAFTS_WITH_CACHE = frozenset({"draft_model", "eagle", "eagle3", "mtp"})
# with state layers beside attention; each of them ran: tests/engine/test_hybrids.py, gates/engine.py
HYBRIDS = frozenset({
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "NemotronHForCausalLM",
    "FalconH1ForCausalLM",
})  # fmt: skip
_LISTED = "Qwen3-Next, Qwen3.5, Granite 4, LFM2, Nemotron-H and Falcon-H1"


def refuse(condition: Any, what: str, instead: str = "use --kv-cache-dtype fp8 or auto") -> None:
    """Raise UnsupportedError if the condition holds.

    Args:
        what: ends "... does not support"
        instead: the remedy, a clause
    """
    if condition:
        raise UnsupportedError(f"--kv-cache-dtype {DTYPE} does not support {what}; {instead}")


def refuse_unsupported_engine(vllm_config: "VllmConfig") -> None:
    """Everything about an engine that its configuration shows: platform, model, features."""
    refuse_unsupported_platform(vllm_config.model_config.dtype)
    refuse_unsupported_model(vllm_config.model_config)
    attention, parallel = vllm_config.attention_config, vllm_config.parallel_config
    block_size = vllm_config.cache_config.block_size or 16  # not chosen yet
    refuse(not is_block_size(block_size), f"--block-size {block_size}", f"use {BLOCK_SIZES}")
    refuse(
        # it fills in tensors that vLLM laid out, and never tells layers that their weights are there
        vllm_config.load_config.load_format == "tensorizer",
        "tensorized weights",
        "use --load-format auto",
    )
    chosen = attention.backend
    refuse(chosen is not None, f"another attention backend ({getattr(chosen, 'name', '')})", "leave it out")
    refuse(attention.use_non_causal, "non-causal attention")
    refuse_unsupported_drafts(vllm_config)
    drafts_apart = drafts_have_layers(vllm_config)
    skipped = vllm_config.cache_config.kv_cache_dtype_skip_layers
    # vLLM pads all pages to the largest where layers differ in kind as well: nothing would be saved
    some_slide = len(set(_layer_types(vllm_config))) > 1
    refuse(
        (skipped or drafts_apart) and vllm_config.model_config.is_hybrid,
        "attention layers in 16 bits (--kv-cache-dtype-skip-layers, or a draft's) beside state layers: vLLM would make "
        "INT2 pages as large as theirs",
        "leave them out",
    )
    refuse(
        some_slide and drafts_apart and (skipped or not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
        "drafts with layers in 16 bits where only some layers of the target have a sliding window: vLLM would make "
        "INT2 pages as large as theirs",
        f"{ONE_KIND}, and no --kv-cache-dtype-skip-layers",
    )
    refuse(
        # from 0.28 on it gives layers with a window smaller blocks, which fit INT2's pages
        some_slide and skipped and not keeps_windows_in_16_bits(vllm_config),
        "layers in 16 bits (--kv-cache-dtype-skip-layers) where only some layers have a sliding window: vLLM would "
        "make INT2 pages as large as theirs",
        "leave them out: layers with a sliding window are served in INT2 too"
        + (", or alone in 16 bits (--kv-cache-dtype-skip-layers sliding_window)" if asks_for_pages() else ""),
    )
    refuse(
        parallel.decode_context_parallel_size > 1,
        "decode context parallelism",
        "leave --decode-context-parallel-size at 1 and use tensor parallelism",
    )
    refuse(
        parallel.prefill_context_parallel_size > 1,
        "prefill context parallelism",
        "leave --prefill-context-parallel-size at 1 and use tensor parallelism",
    )
    refuse(parallel.use_ubatching, "dual batch overlap", "leave --enable-dbo and --ubatch-size out")
    refuse(
        envs.VLLM_BATCH_INVARIANT, "batch-invariant answers", "unset VLLM_BATCH_INVARIANT, or use --kv-cache-dtype auto"
    )
    refuse(
        # such layers get slots and query rows of their own, and neither fits the layer whose cache they read
        vllm_config.cache_config.kv_sharing_fast_prefill,
        "fast prefill of layers that share another's KV",
        "leave --kv-sharing-fast-prefill out",
    )
    refuse(
        getattr(vllm_config.cache_config, "calculate_kv_scales", False),  # up to 0.27
        "--calculate-kv-scales: INT2 rows have scales of their own",
        "leave it out",
    )
    refuse_unsupported_connectors(vllm_config)


def drafts_have_layers(vllm_config: "VllmConfig") -> bool:
    """Whether drafts have keys and values of their own, which stay in 16 bits beside the target's pages."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in DRAFTS_WITH_CACHE


def refuse_unsupported_drafts(vllm_config: "VllmConfig") -> None:
    """Drafts whose keys and values would be ours, or are the target's."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    method, draft = speculative.method, speculative.draft_model_config
    served = DRAFTS_WITHOUT_CACHE | DRAFTS_WITH_CACHE
    instead = f"use one of {', '.join(sorted(served))}"
    refuse(method in ("dflash", "dspark"), f"drafts of whole blocks (speculative method {method!r}) yet", instead)
    refuse(method not in served, f"speculative method {method!r}: it may write rows of its own into our pages", instead)
    refuse(
        drafts_have_layers(vllm_config) and speculative.kv_cache_dtype in (None, DTYPE),
        f"drafts (speculative method {method!r}) in its own pages: no sidecar describes their layers",
        'put "kv_cache_dtype": "auto" into --speculative-config',
    )
    refuse(
        method == "draft_model" and vllm_config.use_v2_model_runner and vllm_version().release[:2] == (0, 31),
        "draft models with model runner V2 of vLLM 0.31, which gives them the target's cache dtype",
        "set VLLM_USE_V2_MODEL_RUNNER=0, or use vLLM 0.32",
    )
    refuse(
        method == "mtp" and getattr(draft.hf_config, "model_type", None) == "gemma4_mtp",
        "Gemma-4's drafting head, which reads the target's keys and values",
        'use {"method": "ngram"} or an EAGLE head in --speculative-config',
    )


def refuse_unsupported_connectors(vllm_config: "VllmConfig") -> None:
    """KV connectors that could hand a block to an engine that reads it in another way, or that were never tried."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    flag = "--kv-transfer-config" if vllm_config.cache_config.kv_offloading_size is None else "--kv-offloading-size"
    name, given = transfer.kv_connector, transfer.kv_connector_extra_config
    instead = f"leave {flag} out, or use --kv-cache-dtype fp8"
    refuse(name not in CONNECTORS or transfer.kv_connector_module_path, f"the KV connector {name} ({flag})", instead)
    refuse(vllm_config.model_config.is_hybrid, f"KV connectors ({flag}) of hybrid models", instead)
    refuse(not shapes_pages(), f"KV connectors ({flag}) before vLLM 0.29", instead)
    refuse(
        drafts_have_layers(vllm_config),
        f"KV connectors ({flag}) with drafts that have layers of their own, yet",
        f'leave {flag} out, or use {{"method": "ngram"}} in --speculative-config',
    )
    refuse(
        name == EXAMPLE and vllm_config.parallel_config.world_size > 1,
        f"{name} on several GPUs ({flag}): all of them would write the same files",
        instead,
    )
    refuse(
        name == EXAMPLE and vllm_config.lora_config is not None,
        f"{name} with adapters ({flag}): it knows blocks by their tokens alone",
        instead,
    )
    refuse(
        given.get("spec_name", "CPUOffloadingSpec") != "CPUOffloadingSpec",
        f"offloading with {given.get('spec_name')}: blocks would outlive the engine, and no name says of which sidecar "
        "they are",
        "leave spec_name out, which offloads to memory of the engine's own",
    )
    refuse(
        not given.get("offload_prompt_only", True),
        "offloading of answers: their keys may be encoded again while they are copied",
        "leave offload_prompt_only out",
    )
    refuse(given.get("canonical_layout"), "offloading in vLLM's canonical layout", "leave canonical_layout out")
    refuse(
        os.environ.get(UNVERIFIED) != "1",
        f"the KV connector {name} ({flag}) yet: {CONNECTORS[name]}",
        f"leave {flag} out, or try it with {UNVERIFIED}=1 in the environment",
    )


def refuse_padded_pages(spec: Any) -> None:
    """Pages that vLLM made as large as those of other layers, once it has planned them.

    Args:
        spec: vLLM's, of layers of ours
    """
    refuse(
        spec.page_size_padded not in (None, spec.unpadded_page_size_bytes),
        f"pages of {spec.unpadded_page_size_bytes} bytes beside layers in 16 bits, a draft's or others, for which vLLM "
        f"makes them {spec.page_size_padded} large",
        f"{ONE_KIND}, or leave those layers out",
    )


def refuse_pages_of_several_sizes(vllm_config: "VllmConfig", token_bytes: set[int]) -> None:
    """Layers with different numbers of bits lie side by side where all of them attend alike. Else vLLM plans pages of
    one size, and would make all as large as the largest.

    Args:
        token_bytes: of a KV head, in each layer
    """
    refuse(
        len(token_bytes) > 1 and (vllm_config.model_config.is_hybrid or len(set(_layer_types(vllm_config))) > 1),
        "a sidecar whose layers have different numbers of bits where only some layers attend to all tokens: vLLM "
        "would make all pages as large as the largest",
        "calibrate with the same bits for all layers (oscar calibrate --bits k3v2)",
    )


def _layer_types(vllm_config: "VllmConfig") -> list[str]:
    """How each layer attends, where they differ."""
    return getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or []


def keeps_windows_in_16_bits(vllm_config: "VllmConfig") -> bool:
    """Whether some layers have a sliding window, and layers in 16 bits are among these, where vLLM can plan it."""
    types, skipped = _layer_types(vllm_config), vllm_config.cache_config.kv_cache_dtype_skip_layers
    if len(set(types)) < 2 or not skipped or not asks_for_pages():
        return False
    slide = [str(index) for index, kind in enumerate(types) if kind == "sliding_attention"]
    return set(skipped) <= {"sliding_window", *slide}


def refuse_unsupported_platform(dtype: torch.dtype) -> None:
    """Platforms without kernels of ours, and what the kernels are not made for.

    Args:
        dtype: of the model
    """
    refuse(
        not (current_platform.is_cpu() or current_platform.is_cuda()),
        f"the platform {current_platform.device_name}",
        "use NVIDIA GPUs or the CPU build",
    )
    refuse(
        current_platform.is_cuda() and not current_platform.has_device_capability(FIRST_GPU),
        f"GPUs older than compute capability {FIRST_GPU[0]}.{FIRST_GPU[1]} (Ampere)",
    )
    refuse(
        current_platform.is_cuda() and dtype == torch.float32, "FP32 on GPUs", "use --dtype bfloat16, or the CPU build"
    )


def refuse_unsupported_model(model_config: "ModelConfig") -> None:
    """Models whose attention has no INT2 form, as far as their configuration tells: `oscar doctor` asks too."""
    text = model_config.hf_text_config
    kind = model_config.attn_type
    refuse(kind == "attention_free", "models without attention (Mamba): there is no KV cache", BF16)
    if model_config.is_hybrid:
        name = model_config.architecture
        refuse(
            name not in HYBRIDS,
            f"hybrid models (Mamba or linear attention beside attention) other than {_LISTED}",
            BF16,
        )
        refuse(not shapes_pages(), f"{name} before vLLM 0.29, which splits blocks into pages", "use vLLM 0.29 or later")
    refuse(kind not in ("decoder", "hybrid"), f"{kind} attention", BF16)
    refuse(model_config.use_mla, "MLA models")
    refuse(model_config.uses_alibi, "ALiBi", BF16)
    refuse(model_config.is_mm_prefix_lm, "bidirectional attention over images")
    refuse(model_config.rswa_window is not None, "windows beside a reference (RSWA)", BF16)
    refuse(getattr(text, "attention_chunk_size", None), "attention in chunks (Llama 4)", BF16)
    head_size = model_config.get_head_size()
    refuse(head_size not in HEAD_SIZES, f"head size {head_size} (supported: {', '.join(map(str, HEAD_SIZES))})")


def refuse_other_layers(layers: Iterable[Any]) -> None:
    """Layers of a model that chooses their backend itself, but takes the cache's dtype from the engine: rows would be
    stored as bytes. MiMo-V2's, whose values are of another size than keys, and MiniMax-M3's sparse ones."""
    from vllm_oscar.integration.layer import OscarImpl

    for layer in layers:
        other = getattr(layer, "kv_cache_dtype", None) == DTYPE and not isinstance(
            getattr(layer, "impl", None), OscarImpl
        )
        refuse(other, f"{type(layer).__name__} layers with a backend of the model's choice", BF16)
