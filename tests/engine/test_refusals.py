"""What cannot be served is refused for its own sake, through vLLM's own way from a configuration to an engine.

There is no sidecar anywhere: who is refused must not be told to calibrate first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

from benchmarks.models.hybrids import HYBRIDS
from tests.engine.conftest import TINY
from vllm_oscar.errors import SidecarNotFoundError, UnsupportedError
from vllm_oscar.integration import refusal
from vllm_oscar.integration.refusal import refuse_unsupported_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
FP8, AUTO = "; use --kv-cache-dtype fp8 or auto", "; use --kv-cache-dtype auto"


def named(architecture: str, model_type: str, **config: Any) -> dict[str, Any]:
    """TINY with changes, and without the fields that are None."""
    changed = TINY | {"architectures": [architecture], "model_type": model_type} | config
    return {name: value for name, value in changed.items() if value is not None}


LLAMA = named("LlamaForCausalLM", "llama")
MODELS: list[tuple[dict[str, Any], str]] = [
    (
        named("DeepseekV3ForCausalLM", "deepseek_v3", n_routed_experts=4, n_group=1, topk_group=1, head_dim=None),
        f"MLA models{FP8}",
    ),
    (named("BloomForCausalLM", "bloom", n_head=2, head_dim=None), f"ALiBi{AUTO}"),
    (named("FalconForCausalLM", "falcon", alibi=True, head_dim=None, num_attention_heads=2), f"ALiBi{AUTO}"),
    (named("BertModel", "bert", head_dim=None, num_attention_heads=2), f"encoder_only attention{AUTO}"),
    (
        named("WhisperForConditionalGeneration", "whisper", d_model=128, decoder_attention_heads=2, vocab_size=51865),
        f"encoder_decoder attention{AUTO}",
    ),
    (named("MambaForCausalLM", "mamba"), f"models without attention (Mamba): there is no KV cache{AUTO}"),
    (
        named("JambaForCausalLM", "jamba", num_experts=2),
        "hybrid models (Mamba or linear attention beside attention) other than Qwen3-Next, Qwen3.5, Granite 4, LFM2, "
        f"Nemotron-H and Falcon-H1{AUTO}",
    ),
    (
        named("PaliGemmaForConditionalGeneration", "paligemma", text_config=TINY | {"model_type": "gemma"}),
        f"bidirectional attention over images{FP8}",
    ),
    (named("Llama4ForCausalLM", "llama4_text", attention_chunk_size=64), f"attention in chunks (Llama 4){AUTO}"),
    (LLAMA | {"rswa_window": 64}, f"windows beside a reference (RSWA){AUTO}"),
    (LLAMA | {"head_dim": 72}, f"head size 72 (supported: 64, 80, 96, 128, 192, 256){FP8}"),
]
EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def offloading(**extra: Any) -> dict[str, Any]:
    """--kv-transfer-config of vLLM's own offloading."""
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, **extra},
    }  # fmt: skip


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"attention_backend": "CPU_ATTN"}, "another attention backend (CPU_ATTN); leave it out"),
    ({"attention_config": {"use_non_causal": True}}, f"non-causal attention{FP8}"),
    (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "leave --decode-context-parallel-size at 1 and use tensor parallelism",
    ),
    ({"block_size": 48}, "--block-size 48; use 16, 32, 64, 128 or another power of two"),
    ({"load_format": "tensorizer"}, "tensorized weights; use --load-format auto"),
    ({"kv_sharing_fast_prefill": True}, "leave --kv-sharing-fast-prefill out"),
    (
        {"kv_transfer_config": CONNECTOR | {"kv_connector": "LMCacheConnectorV1"}},
        "the KV connector LMCacheConnectorV1 (--kv-transfer-config); leave --kv-transfer-config out",
    ),
    (
        {"tensor_parallel_size": 2, "kv_transfer_config": CONNECTOR},
        "ExampleConnector on several GPUs (--kv-transfer-config): all of them would write the same files",
    ),
    (
        {"kv_transfer_config": CONNECTOR | {"kv_connector_module_path": EXAMPLE}},
        "the KV connector ExampleConnector (--kv-transfer-config); leave --kv-transfer-config out",
    ),
    (
        {"enable_lora": True, "kv_transfer_config": CONNECTOR},
        "ExampleConnector with adapters (--kv-transfer-config): it knows blocks by their tokens alone",
    ),
    (
        {"kv_transfer_config": CONNECTOR},
        "yet: vLLM files the blocks of a prompt's first step under the whole prompt's name; leave "
        "--kv-transfer-config out, or try it with VLLM_OSCAR_UNVERIFIED=1",
    ),
    ({"kv_transfer_config": offloading(spec_name="TieringOffloadingSpec")}, "; leave spec_name out"),
    ({"kv_transfer_config": offloading(offload_prompt_only=False)}, "; leave offload_prompt_only out"),
    ({"kv_transfer_config": offloading(canonical_layout=True)}, "; leave canonical_layout out"),
    (
        {"kv_offloading_size": 1},
        "leave --kv-offloading-size out, or try it with VLLM_OSCAR_UNVERIFIED=1 in the environment",
    ),
]


LAYERS: list[tuple[dict[str, Any], str]] = [
    (named("HrmTextForCausalLM", "hrm_text"), f"PrefillPrefixLMAttention layers{AUTO}"),
    (
        named(
            "MiMoV2FlashForCausalLM",
            "mimo_v2_flash",
            v_head_dim=32,
            hybrid_layer_pattern=[0] * 4,
            moe_layer_freq=[0] * 4,
            layernorm_epsilon=1e-6,
        ),
        f"Attention layers with a backend of the model's choice{AUTO}",
    ),
]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Path]:
    """Folder of a configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(config: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def configured(folder: Path, **options: Any) -> VllmConfig:
    """As far as an engine's configuration, for which vLLM needs no weights."""
    from vllm import EngineArgs

    common = {"kv_cache_dtype": "oscar", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    return EngineArgs(str(folder), **common | options).create_engine_config()


def test_a_model_that_could_be_served_wants_a_sidecar(written: Callable[..., Path]) -> None:
    with pytest.raises(SidecarNotFoundError, match=r"oscar calibrate .* or let the start make it"):
        configured(written(LLAMA))


@pytest.mark.parametrize(("config", "says"), MODELS, ids=[config["model_type"] for config, _ in MODELS])
def test_models(written: Callable[..., Path], config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        configured(written(config))


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=[says[-30:] for _, says in OPTIONS])
def test_options(written: Callable[..., Path], options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        configured(written(LLAMA | {"num_key_value_heads": 1}), **options)


def test_another_way_to_offload(written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is the flag that was given, not the one that vLLM makes of it."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    says = r"SimpleCPUOffloadConnector \(--kv-offloading-size\); leave --kv-offloading-size out"
    with pytest.raises(UnsupportedError, match=says):
        configured(written(LLAMA), kv_offloading_size=1)


def test_layers_of_a_hybrid_model_in_16_bits(written: Callable[..., Path]) -> None:
    config = TINY | HYBRIDS["qwen3_next"](128, 4)
    with pytest.raises(SidecarNotFoundError):
        configured(written(config))
    with pytest.raises(UnsupportedError, match=r"attention layers in 16 bits .* beside state layers"):
        configured(written(config), kv_cache_dtype_skip_layers=["1"])


def test_hybrid_models_before_vllm_splits_blocks_as_specs_say(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_oscar.integration.refusal.shapes_pages", lambda: False)
    config = TINY | HYBRIDS["lfm2"](128, 4)
    with pytest.raises(UnsupportedError, match=r"Lfm2ForCausalLM before vLLM 0\.29, .*; use vLLM 0\.29 or later"):
        configured(written(config))


def test_batch_invariance(written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """How a long context is divided among programs depends on who else is served."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedError, match="batch-invariant answers; unset VLLM_BATCH_INVARIANT"):
        configured(written(LLAMA))


def test_a_proposer_of_the_users(written: Callable[..., Path]) -> None:
    drafts = {"method": "custom_class", "model": "some.Proposer", "num_speculative_tokens": 1}
    with pytest.raises(UnsupportedError, match=r"'custom_class': it may write rows .* use one of draft_model, eagle,"):
        configured(written(LLAMA), speculative_config=drafts)


@pytest.mark.parametrize(
    ("drafts", "says"),
    [
        ({"method": "eagle", "kv_cache_dtype": "oscar"}, 'put "kv_cache_dtype": "auto" into --speculative-config'),
        ({"method": "eagle", "kv_cache_dtype": None}, 'put "kv_cache_dtype": "auto" into --speculative-config'),
        ({"method": "mtp", "model_type": "gemma4_mtp"}, "Gemma-4's drafting head, which reads the target's keys"),
        ({"method": "dflash"}, "drafts of whole blocks (speculative method 'dflash') yet; use one of draft_model"),
        ({"method": "dspark"}, "drafts of whole blocks (speculative method 'dspark') yet; use one of draft_model"),
        (
            {"method": "draft_model"},
            "model runner V2 of vLLM 0.31, which gives them the target's cache dtype; set VLLM",
        ),
        ({"method": "extract_hidden_states"}, "'extract_hidden_states': it may write rows of its own into our pages"),
    ],
    ids=lambda value: value["method"] if isinstance(value, dict) else "",
)
def test_drafts_that_need_a_checkpoint_or_another_vllm(
    monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Any], says: str
) -> None:
    """A configuration as far as it is looked at."""
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=drafts.get("model_type", "llama")))
    speculative = SimpleNamespace(**{"kv_cache_dtype": "auto", "draft_model_config": model} | drafts)
    config: Any = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=True)
    monkeypatch.setattr(refusal, "vllm_version", lambda: Version("0.31.2"))
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        refusal.refuse_unsupported_drafts(config)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        (
            "parallel_config",
            {"prefill_context_parallel_size": 2},
            "prefill context parallelism; leave .* at 1 and use te",
        ),
        ("parallel_config", {"enable_dbo": True}, "dual batch overlap; leave --enable-dbo and --ubatch-size out"),
        ("parallel_config", {"ubatch_size": 2}, "dual batch overlap; leave --enable-dbo and --ubatch-size out"),
        ("cache_config", {"calculate_kv_scales": True}, "--calculate-kv-scales: .*; leave it out"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_the_cpu_platform_or_this_version_does_not_let_through(
    written: Callable[..., Path], part: str, change: dict[str, Any], says: str
) -> None:
    """A configuration as vLLM made it, and one field as other platforms and versions have it."""
    config = configured(written(LLAMA), additional_config={"oscar": {"rotation": "hadamard"}})
    refuse_unsupported_engine(config)
    vars(getattr(config, part)).update(change)
    with pytest.raises(UnsupportedError, match=says):
        refuse_unsupported_engine(config)


@pytest.mark.parametrize(("config", "says"), LAYERS, ids=[config["model_type"] for config, _ in LAYERS])
def test_what_only_layers_show(
    written: Callable[..., Path], any_engine: Callable[..., Engine], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        any_engine(written(config), None, {"rotation": "hadamard"}, load_format="dummy", skip_tokenizer_init=True)
