"""What a scheduler does to requests changes no answer.

A request that is preempted, or hits the prefix cache, reads other bytes than one that runs undisturbed: a prefill
reads its own tokens exactly and a decode reads history in INT2. So texts are the same up to sink + window tokens;
beyond, the two runs differ by quantization noise, and the bound is on the KL divergence between them, both forced to
the same text. The window here is tiny, 16 + 32 tokens, so the noise is ten times that of the defaults.

"The same text" is up to ties: the model's logits are bfloat16 numbers around 20, 1/8 apart, and often the two best are
equal. Requests in one batch are then enough to turn a greedy choice (without the plugin, too).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.engine.conftest import divergence
from vllm_oscar import audit
from vllm_oscar.errors import ConfigError
from vllm_oscar.hot_pool import in_contract
from vllm_oscar.page_layout import KEY

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
SINK, WINDOW = 16, 32
OPTIONS = {"sink": SINK, "window": WINDOW, "key_encoder": "ls"}
# KL in nats. Within sink + window both runs read BF16: what is left is y rounded to bfloat16, and the order of sums
# (means over an answer's 27 positions of 0.0008 to 0.0027, by sidecar and prompt; BF16 in other chunks has 0.0014).
# Beyond, both runs have quantization noise; means of 0.001 to 0.056 were measured, and at most 0.58 at one position.
# Copies with the wrong keys cost 6.4, see test_prefix_hit_far_beyond_the_window.
SAME = 4e-3
NOISE = 0.1
TIE = 0.375  # three steps of a bfloat16 logit; a KL of 0.002 is noise of 0.06 on a logit


def assert_close(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    """Mean KL of log probabilities (positions, vocabulary), with none far out."""
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    far = divergence(a, b)
    assert float(far.mean()) < bound
    assert float(far.max()) < 12 * bound


def assert_greedy(answer: list[int], alone: torch.Tensor) -> None:
    """An answer is the greedy one of the log probabilities it gets alone, up to ties."""
    chosen = alone[torch.arange(len(answer)), answer]
    assert float((alone.max(-1).values - chosen).max()) <= TIE


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Engine]) -> Engine:
    """No prefix cache, room for everything: the undisturbed run."""
    return make_engine(OPTIONS)


@pytest.fixture(scope="module")
def cached(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(OPTIONS, enable_prefix_caching=True)


@pytest.fixture
def undisturbed(plain: Engine) -> Callable[..., torch.Tensor]:
    """Log probabilities of an answer when its request runs alone: (answer tokens, vocabulary)."""

    def run(prompt: list[int], answer: list[int]) -> torch.Tensor:
        plain.run({"alone": prompt}, len(answer), forced={"alone": prompt + answer})
        return plain.log_probabilities("alone", len(prompt) - 1, len(prompt) + len(answer) - 1)

    return run


def free_blocks(engine: Engine) -> int:
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.both_runners
def test_prefix_hit_miss_and_no_cache_give_the_same_text(
    cached: Engine, undisturbed: Callable[..., torch.Tensor], prose: list[int]
) -> None:
    prompt, length = prose[:33], SINK + WINDOW - 33
    miss, hit = (cached.run({name: prompt}, length)[name] for name in ("miss", "hit"))
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 32)
    for name, output in (("miss", miss), ("hit", hit)):
        answer = list(output.outputs[0].token_ids)
        alone = undisturbed(prompt, answer)
        got = cached.log_probabilities(name, 32, SINK + WINDOW - 1)
        assert_greedy(answer, alone)
        assert_close(alone, got, SAME)
        if name == "miss":
            assert torch.equal(alone, got), "a miss is the same computation as no cache"


@pytest.mark.both_runners
def test_prefix_hit_far_beyond_the_window(
    cached: Engine, undisturbed: Callable[..., torch.Tensor], prose: list[int]
) -> None:
    prompt = prose[200:420]
    answer = cached.answer(prompt, 20, "miss")
    hit = cached.run({"hit": prompt}, 20, forced={"hit": prompt + answer})["hit"]
    assert hit.num_cached_tokens == 208
    first, last = len(prompt) - 1, len(prompt) + len(answer) - 1
    miss = cached.log_probabilities("miss", first, last)
    assert torch.equal(miss, undisturbed(prompt, answer))
    assert_close(miss, cached.log_probabilities("hit", first, last), NOISE)

    def shift(step: int) -> None:  # each key becomes its neighbour's: what the bound is there to see
        for impl in cached.impls if step == 1 else []:
            impl.pool.rows[:, :, KEY] = impl.pool.rows[:, :, KEY].roll(1, 2)

    cached.run({"wrong": prompt}, 8, forced={"wrong": prompt + answer}, on_step=shift)
    wrong = divergence(miss[1:8], cached.log_probabilities("wrong", first + 1, first + 8))
    assert float(wrong.mean()) > 10 * NOISE  # measured: 6.4


@pytest.mark.both_runners
def test_preemption_within_the_window_gives_the_same_text(
    make_engine: Callable[..., Engine], undisturbed: Callable[..., torch.Tensor], prose: list[int]
) -> None:
    """Five blocks for two requests that need three each."""
    engine = make_engine(OPTIONS, max_model_len=64, num_gpu_blocks_override=6)
    prompts = {"a": prose[:20], "b": prose[500:521]}
    length = SINK + WINDOW - 21
    answers = engine.run(prompts, length)
    assert engine.metric("vllm:num_preemptions") >= 1
    for name, prompt in prompts.items():
        answer = list(answers[name].outputs[0].token_ids)
        alone = undisturbed(prompt, answer)
        assert_greedy(answer, alone)
        assert_close(alone, engine.log_probabilities(name, len(prompt) - 1, len(prompt) + length - 1), SAME)


def test_preemption_of_requests_far_longer_than_the_window(
    make_engine: Callable[..., Engine], undisturbed: Callable[..., torch.Tensor], prose: list[int]
) -> None:
    engine = make_engine(OPTIONS, num_gpu_blocks_override=33)
    prompts = {"a": prose[:240], "b": prose[500:740]}
    answers = engine.run(prompts, 32)
    assert engine.metric("vllm:num_preemptions") >= 1
    again = [name for name in prompts if [first for first, _ in engine.chunks[name]].count(0) > 1]
    assert again, "nobody was computed twice"
    assert free_blocks(engine) == 32
    for name, prompt in prompts.items():
        answer = list(answers[name].outputs[0].token_ids)
        got = engine.log_probabilities(name, len(prompt) - 1, len(prompt) + len(answer) - 1)
        assert_close(undisturbed(prompt, answer), got, NOISE)


@pytest.mark.both_runners
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_abort_of_a_request_that_shares_its_prefix(
    cached: Engine, undisturbed: Callable[..., torch.Tensor], prose: list[int], when: str
) -> None:
    start = {"prefill": 1000, "decode": 1500}[when]
    prefix, length = prose[start : start + 160], 16
    goes = prefix + prose[start + 200 : start + {"prefill": 390, "decode": 240}[when]]
    stays = prefix + prose[start + 400 : start + 420]
    engine, requests = cached.llm.llm_engine, cached.scheduler.requests
    free = free_blocks(cached)
    cached.chunk_limit(96)
    cached.scheduler.scheduler_config.long_prefill_token_threshold = 40  # so that both prefill in one step
    aborted = []

    def on_step(step: int) -> None:
        if step == 2:  # "goes" has computed the prefix, or more
            cached.add("stays", stays, length)
        going = next((request for name, request in requests.items() if name.startswith("goes")), None)
        started = len(cached.chunks["stays"])
        if going and started and (when == "prefill" or (started > 2 and going.num_output_tokens > 2)):
            assert (going.num_output_tokens == 0) == (when == "prefill")
            aborted.append(step)
            engine.abort_request(["goes"])

    answers = cached.run({"goes": goes}, 40, on_step=on_step)
    cached.chunk_limit(512)
    cached.scheduler.scheduler_config.long_prefill_token_threshold = 0
    assert len(aborted) == 1
    assert list(answers) == ["stays"]
    assert answers["stays"].num_cached_tokens == 160
    assert free_blocks(cached) == free, "the aborted request left blocks behind"
    answer = list(answers["stays"].outputs[0].token_ids)
    got = cached.log_probabilities("stays", len(stays) - 1, len(stays) + length - 1)
    assert_close(undisturbed(stays, answer), got, NOISE)


def test_four_samples_of_one_prompt(cached: Engine, undisturbed: Callable[..., torch.Tensor], prose: list[int]) -> None:
    """The four share the prompt's blocks, most of them in INT2; each is what the same text gives alone."""
    prompt, length = prose[800:1100], 8
    output = cached.run({"many": prompt}, length, n=4, temperature=1.0)["many"]
    answers = [list(completion.token_ids) for completion in output.outputs]
    assert len({tuple(answer) for answer in answers}) == 4
    for index, answer in enumerate(answers):
        got = cached.log_probabilities(f"{index}_many", len(prompt) - 1, len(prompt) + length - 1)
        assert_close(undisturbed(prompt, answer), got, NOISE)


SPECULATE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from conftest import Engine
model, sidecar, out = map(Path, sys.argv[2:5])
options, serving, requests, pasts = map(json.loads, sys.argv[5:])
engine = Engine(model, sidecar, options, **serving)
results = []
for prompt, length in requests:
    if not prompt:  # the last answer goes on
        prompt = results[-1]["prompt"] + results[-1]["answer"]
    output = engine.run({"one": prompt}, length)["one"]
    tokens = len(prompt) + length - 1
    results.append({
        "prompt": prompt, "answer": list(output.outputs[0].token_ids), "found": output.num_cached_tokens,
        "logs": engine.log_probabilities("one", len(prompt) - 1, tokens), "chunks": engine.chunks["one"],
        "stored": [tuple(engine.stored(0, "one", tokens, tokens + past)) for past in pasts],
    })
counts = [engine.metric(f"vllm:spec_decode_num_{what}_tokens") for what in ("accepted", "draft")]
torch.save((results, counts), out)
"""


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation(
    model_path: Path,
    sidecar_path: Path,
    tmp_path: Path,
    plain: Engine,
    undisturbed: Callable[..., torch.Tensor],
    prose: list[int],
    method: str,
) -> None:
    """Verification steps of four tokens read their own tokens from the pool; rejected ones are written over: page and
    pool hold what they hold without drafts, and so does what is found later in the prefix cache.

    Compared in the first layer, whose rows depend on token and position alone: 0.0007 apart at most, in norm, where
    another token's key is 0.07 apart and more.

    In a process of its own: vLLM's proposer brings numba, whose threads get in the way of the other engines'. The
    draft model is the test model with other rotary angles, so that some of its drafts are wrong; its cache is BF16.
    """
    serving: dict[str, Any] = {"speculative_config": NGRAM, "enable_prefix_caching": True}
    if method == "draft_model":
        draft = tmp_path / "draft"
        draft.mkdir()
        for file in model_path.iterdir():
            if file.is_file():
                (draft / file.name).symlink_to(file.resolve())
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").unlink()
        config["rope_parameters"]["rope_theta"] = 1e3
        (draft / "config.json").write_text(json.dumps(config))
        # vLLM's own attention on CPUs takes blocks of 32
        serving |= {"speculative_config": {**DRAFT, "model": str(draft)}, "block_size": 32}
    requests = [(prose[:12] * 2 + prose[:4], 20), (prose[:50] * 3 + prose[300:350], 30), ([], 4)]
    pasts = (0, WINDOW)  # as the next step reads it, and as it is read once no window covers it: INT2 but for the sink
    given = [json.dumps(given) for given in (OPTIONS, serving, requests, pasts)]
    command = [
        sys.executable,
        "-c",
        SPECULATE,
        Path(__file__).parent,
        model_path,
        sidecar_path,
        tmp_path / "out",
        *given,
    ]
    # numba's thread pool makes every torch operation wait for a millisecond: 100 s instead of 2 for the ngram case
    environment = os.environ | {audit.ENVIRONMENT_VARIABLE: "1", "NUMBA_NUM_THREADS": "1"}
    subprocess.run([str(part) for part in command], check=True, env=environment)
    results, (accepted, drafted) = torch.load(tmp_path / "out")
    for result, bound in zip(results, (SAME, NOISE, NOISE), strict=True):
        prompt, answer = result["prompt"], result["answer"]
        alone = undisturbed(prompt, answer)
        assert_close(alone, result["logs"], bound)
        tokens = len(prompt) + len(answer) - 1
        if bound == SAME:
            assert tokens + 1 == SINK + WINDOW
            assert_greedy(answer, alone)
        for past, (key, value, hot) in zip(pasts, result["stored"], strict=True):
            wanted = plain.stored(0, "alone", tokens, tokens + past)
            named = in_contract(torch.arange(tokens), tokens + past, SINK, WINDOW)
            assert torch.equal(hot, named[:, None].expand_as(hot))
            assert torch.equal(hot, wanted.hot)
            for got, row in ((key, wanted.key), (value, wanted.value)):
                assert float(((got - row).norm(dim=-1) / row.norm(dim=-1)).max()) < 0.01
    assert results[1]["found"] == 0
    assert results[2]["found"] == 224, "accepted tokens are found in the prefix cache"
    assert 5 < accepted <= drafted - 5


@pytest.mark.both_runners
def test_pages_and_pool_full_of_ones(plain: Engine, prose: list[int]) -> None:
    """Every byte 0xFF (NaN in fp16 and BF16) before serving: not one bit of a logit changes."""
    prompt, length = prose[300:450], 4
    plain.chunk_limit(40)
    plain.run({"before": prompt}, length)
    for layer in plain.runner.compilation_config.static_forward_context.values():
        layer.kv_cache.fill_(0xFF)
        layer.impl.pool.rows.view(torch.int16).fill_(-1)
        layer.impl.pool.words.fill_(-1)
    plain.run({"after": prompt}, length)
    plain.chunk_limit(512)
    last = len(prompt) + length - 1
    before, after = (plain.log_probabilities(name, 0, last) for name in ("before", "after"))
    assert torch.isfinite(after).all()
    assert torch.equal(before, after)


def test_a_pool_too_small_for_full_windows(
    make_engine: Callable[..., Engine], plain: Engine, prose: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 blocks for four requests, which need 4 each: a sink and, for a window of 32, up to 3. All get 17 tokens."""
    from vllm_oscar.integration import runtime

    warnings: list[str] = []
    monkeypatch.setattr(runtime.logger, "warning", lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(runtime, "_WATCH_EVERY", 4)
    with pytest.raises(ConfigError, match="pool_share") as refused:
        make_engine({**OPTIONS, "pool_share": 0.002})
    share = float(re.search(r"raise pool_share to ([0-9.]+)", str(refused.value))[1])  # type: ignore[index]
    engine = make_engine({**OPTIONS, "pool_share": 1.5 * share / 1.05})
    assert engine.runtime.num_slots == 12
    prompts = {name: prose[n * 300 : n * 300 + 90] for n, name in enumerate("abcd")}
    limits = []
    table = next(iter(engine.runtime._tables.values()), None)

    def on_step(step: int) -> None:
        table = next(iter(engine.runtime._tables.values()))
        limits.append(tuple(table.limits.tolist()))

    answers = engine.run(prompts, 12, on_step=on_step)
    assert table is None
    assert limits[-1] == (SINK, 17)
    statistics = engine.runtime.statistics()
    assert statistics["shrunk_steps"] >= 11
    assert statistics["int2_sink_reads"] == 0, "sinks go last"
    assert len([text for text in warnings if "windows were shrunk" in text]) == 1
    for name, prompt in prompts.items():  # degraded, and still sane
        answer = list(answers[name].outputs[0].token_ids)
        plain.run({"alone": prompt}, 12, forced={"alone": prompt + answer})
        span = (len(prompt) - 1, len(prompt) + 11)
        assert_close(plain.log_probabilities("alone", *span), engine.log_probabilities(name, *span), NOISE)
