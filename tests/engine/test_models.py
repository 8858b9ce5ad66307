"""Models other than the test model, small and with random weights: what their attention asks for is honoured.

The window covers the whole context, so every token is read from its BF16 copy and the cache is exact up to rounding:
a mask, a soft cap or a mean that is wrong shows at once. KL to the same engine with a BF16 cache, over all positions
of a prompt that is prefilled in chunks, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.shapes import random_sidecar

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
TOKENS, CHUNK = 150, 40
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64, "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48, "hidden_act": "silu"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}
# Rounding rows to BF16 in another basis; measured up to 1.2e-4. Ignoring the window costs 0.07 and more, the cap 0.1.
EXACT = 5e-4


def log_probabilities(engine: Engine) -> torch.Tensor:
    """After each position of a prompt."""
    engine.chunk_limit(CHUNK)
    engine.run({"one": [(7 * i * i + 3 * i) % 500 + 5 for i in range(TOKENS)]}, 1)
    return engine.log_probabilities("one", 0, TOKENS)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GEMMA2, {}),
        (MISTRAL, {}),
        (QWEN3, {"dtype": "float16"}),
        (QWEN3 | {"num_attention_heads": 16, "num_key_value_heads": 1}, {}),
        (QWEN3 | {"head_dim": 80}, {"dtype": "float32"}),
        (QWEN3, {"kv_cache_dtype_skip_layers": ["0", "3"]}),
    ],
    ids=["gemma2", "mistral", "float16", "gqa16", "float32-head80", "skip-layers"],
)
def test_a_cache_that_reads_only_copies_is_exact(
    tiny_model: Callable[..., Path], any_engine: Callable[..., Engine], config: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = tiny_model(config)
    common = {"skip_tokenizer_init": True, "dtype": options.get("dtype", "bfloat16"), "block_size": 32}
    exact = log_probabilities(any_engine(folder, None, kv_cache_dtype="auto", **common))
    copies = {"sink": 16, "window": 256}
    ours = log_probabilities(any_engine(folder, random_sidecar(folder), copies, **common | options))
    kl = (exact.exp() * (exact - ours)).sum(-1)
    spread = exact.std(0).mean()  # positions differ, or the comparison says nothing
    print(f"mean {float(kl.mean()):.2g}, worst {float(kl.max()):.2g}, spread {float(spread):.2g}")
    assert spread > 0.1
    assert kl.mean() < EXACT
