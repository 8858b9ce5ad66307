"""What vLLM would make of a model, without an engine: `oscar doctor` asks."""

from typing import Any

from vllm.config import CacheConfig, ModelConfig, VllmConfig

from vllm_oscar.integration.refusal import refuse_unsupported_model
from vllm_oscar.integration.seams import DTYPE, install


def configured(model: str) -> Any:
    """The VllmConfig of a model (folder or hub id) with our cache, where such a model can be served.

    Raises:
        UnsupportedError, ValueError: ours, or vLLM's own.
    """
    install()
    model_config = ModelConfig(model, skip_tokenizer_init=True)
    refuse_unsupported_model(model_config)
    return VllmConfig(model_config=model_config, cache_config=CacheConfig(cache_dtype=DTYPE))


def model_runner(vllm_config: Any) -> str:
    """Which of vLLM's model runners would run it here: "V1" or "V2"."""
    return "V2" if getattr(vllm_config, "use_v2_model_runner", False) else "V1"
