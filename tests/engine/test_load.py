"""Many requests on a BF16 pool far too small for them: slower windows, more INT2, and nobody sees another's tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from vllm_oscar import audit
from vllm_oscar.errors import PoolError
from vllm_oscar.hot_pool import HotContract, HotPool
from vllm_oscar.page_layout import PageLayout

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
REQUESTS, MEMORY = 48, 1 << 30  # VLLM_CPU_KVCACHE_SPACE of these tests
SLOTS = REQUESTS * HotContract(64, 256, 16).slots_per_request // 8
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """An eighth of the slots that its requests need, too few blocks for all at once, and every step audited."""
    layers, heads = 30, 3
    share = (SLOTS + 0.5) * layers * HotPool.slot_bytes(PageLayout(64, 16), heads, torch.bfloat16) / MEMORY
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(audit.ENVIRONMENT_VARIABLE, "1")
        return make_engine(
            {"pool_share": share},
            num_gpu_blocks_override=400,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=512,
            enable_prefix_caching=True,
        )


def test_markers_stay_with_their_requests(engine: Engine, model_path: Path) -> None:
    """48 requests, each with a code of its own to repeat; some are aborted, some share a prefix, all blocks come
    back."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rng = random.Random(0)
    codes = ["".join(rng.sample(LETTERS, 6)) for _ in range(REQUESTS)]
    prompts = {}
    for n, code in enumerate(codes):
        opening = "Codes are secret. " * (8 if n % 3 == 0 else 0)  # a shared prefix, far beyond the sink
        text = opening + f"The code of locker {n} is {code}. " * rng.randint(3, 8) + f"The code of locker {n} is"
        prompts[str(n)] = tokenizer(text)["input_ids"]
    assert engine.runtime.num_slots == SLOTS
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    aborted = {"5", "17", "40"}

    def on_step(step: int) -> None:
        if step == 12:
            engine.llm.llm_engine.abort_request(sorted(aborted))

    outputs = engine.run(prompts, 9, on_step=on_step)
    assert set(outputs) - aborted == set(prompts) - aborted
    texts = {name: output.outputs[0].text for name, output in outputs.items() if name not in aborted}
    assert all(output.outputs[0].finish_reason == "length" for name, output in outputs.items() if name in texts)
    for name, text in texts.items():
        assert not [code for n, code in enumerate(codes) if str(n) != name and code in text], name
    right = sum(codes[int(name)] in text for name, text in texts.items())
    statistics = engine.runtime.statistics()
    print(f"{right} of {len(texts)} codes repeated; {statistics}")
    assert right >= 0.9 * len(texts)
    assert statistics["shrunk_steps"] > 0
    assert pool.get_num_free_blocks() == free


def test_an_audited_engine_stops_when_a_rule_is_broken(engine: Engine) -> None:
    """The null block gets a slot behind everybody's back."""
    assert len(engine.answer([1, 2, 3], 2)) == 2
    (table,) = engine.runtime._tables.values()
    with torch.inference_mode():
        table.slot_of_block[0] = 0
    with pytest.raises(PoolError, match="the null block has no slot"):
        engine.answer([1, 2, 3], 2)
