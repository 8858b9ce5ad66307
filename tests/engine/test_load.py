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
from vllm_oscar.hot_pool import HotContract, HotPool, in_contract
from vllm_oscar.page_layout import PageLayout

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
REQUESTS, MEMORY = 24, 1 << 30  # VLLM_CPU_KVCACHE_SPACE of these tests
CONTRACT = HotContract(sink=64, window=256, block_size=16)
SLOTS = 56  # start-up wants 48: a block of the sink and one of the window for each
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """An eighth of the slots that its requests need, blocks for all at once, and every step audited."""
    layers, heads = 30, 3
    share = (SLOTS + 0.5) * layers * HotPool.slot_bytes(PageLayout(64, 16), heads, torch.bfloat16) / MEMORY
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(audit.ENVIRONMENT_VARIABLE, "1")
        return make_engine(
            {"pool_share": share, "key_encoder": "ls"},
            num_gpu_blocks_override=650,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=2048,  # the last one starts before the first one ends
            enable_prefix_caching=True,
        )


def slots_needed(engine: Engine) -> int:
    """Distinct blocks whose copies the contract names for the running requests."""
    named = set()
    for request in engine.scheduler.running:
        (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens = request.num_computed_tokens
        hot = in_contract(torch.arange(tokens), tokens, CONTRACT.sink, CONTRACT.window).nonzero()[:, 0]
        named |= {blocks[position // CONTRACT.block_size] for position in hot.tolist()}
    return len(named)


def test_markers_stay_with_their_requests(engine: Engine, model_path: Path) -> None:
    """24 requests at once, each with a code of its own to repeat; some are aborted, some share a prefix, all blocks
    come back."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rng = random.Random(0)
    codes = ["".join(rng.sample(LETTERS, 6)) for _ in range(REQUESTS)]
    prompts = {}
    for n, code in enumerate(codes):
        opening = "Codes are secret. " * (20 if n % 3 == 0 else 0)  # longer than the sink
        start = f"The code of locker {n} is"
        prompts[str(n)] = tokenizer(opening + f"{start} {code}. " * rng.randint(20, 24) + start)["input_ids"]
    assert engine.runtime.num_slots == SLOTS
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    going = {"5", "11", "20"}
    running: list[int] = []
    needed: list[int] = []
    aborted: set[str] = set()

    def on_step(step: int) -> None:
        requests = engine.scheduler.running
        running.append(len(requests))
        needed.append(slots_needed(engine))
        if len(requests) == REQUESTS:
            aborted.update(going & {request.request_id.rsplit("-", 1)[0] for request in requests})
            engine.llm.llm_engine.abort_request(sorted(going))

    outputs = engine.run(prompts, 10, on_step=on_step)
    statistics = engine.runtime.statistics()
    right = sum(codes[int(name)] in output.outputs[0].text for name, output in outputs.items())
    print(f"{right} of {len(outputs)} codes repeated; {running} run, {needed} slots needed; {statistics}")
    assert max(running) == REQUESTS
    assert max(needed) >= 8 * SLOTS
    assert aborted == going, "running when they were aborted"
    assert set(outputs) == set(prompts) - going
    for name, output in outputs.items():
        text = output.outputs[0].text
        assert output.outputs[0].finish_reason == "length"
        assert not [code for n, code in enumerate(codes) if str(n) != name and code in text], name
    assert right >= 0.9 * len(outputs)
    assert statistics["shrunk_steps"] >= len(running) - 2
    assert statistics["int2_reads"] > 10 * statistics["bf16_reads"]  # 13 times; half of all with full windows
    assert pool.get_num_free_blocks() == free


def test_an_audited_engine_stops_when_a_rule_is_broken(engine: Engine) -> None:
    """The null block gets a slot behind everybody's back."""
    assert len(engine.answer([1, 2, 3], 2)) == 2
    (table,) = engine.runtime._tables.values()
    with torch.inference_mode():
        table.slot_of_block[0] = 0
    with pytest.raises(PoolError, match="the null block has no slot"):
        engine.answer([1, 2, 3], 2)
