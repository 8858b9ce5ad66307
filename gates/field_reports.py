#!/usr/bin/env python3
"""What others reported of vLLM and its peers, tried on an OSCAR cache: one line each (docs/field_reports.md).

    python gates/field_reports.py [GROUP...]        all groups need some minutes on the CPU platform

A group is one engine, or a few. The model is small and has random weights. Ends with 1 if something came out wrong.
"""

import argparse
import gc
import json
import os
import random
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.models.shapes import GEMMA2, model_folder, random_adapter, random_sidecar, random_weights  # noqa: E402

Report = tuple[str, bool, str]  # whose report, whether it came out right, what came out
GROUPS: dict[str, Callable[[Path], Iterator[Report]]] = {}


def group(function: Callable[[Path], Iterator[Report]]) -> Callable[[Path], Iterator[Report]]:
    GROUPS[function.__name__] = function
    return function


def engine(folder: Path, dtype: str = "oscar", oscar: dict[str, Any] | None = None, **options: Any) -> Any:
    from vllm import LLM

    contract = {"sidecar": str(folder / "oscar" / "random.safetensors"), "sink": 16, "window": 32, **(oscar or {})}
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "enforce_eager": True, "block_size": 32, "max_model_len": 512, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "seed": 0, "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip
    if dtype == "oscar":
        settings["additional_config"] = {"oscar": contract}
    return LLM(str(folder), kv_cache_dtype=dtype, **settings | options)


def close(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 1000) for _ in range(count)]


def answers(llm: Any, prompts: list[Any], tokens: int = 8, **more: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
    given = [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]
    return llm.generate(given, sampling, use_tqdm=False)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def runtime(llm: Any) -> Any:
    from vllm_oscar.integration.runtime import OscarRuntime

    return OscarRuntime.shared(llm.llm_engine.vllm_config)


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def free_blocks(llm: Any) -> int:
    return core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@group
def churn(folder: Path) -> Iterator[Report]:
    """Many short requests, prefix caching, every step audited."""
    os.environ["VLLM_OSCAR_AUDIT"] = "1"
    llm = engine(folder, block_size=16, num_gpu_blocks_override=64, enable_prefix_caching=True)
    returning = [ids(150, 9000 + n) for n in range(10)]
    fresh = [tokens_of(answers(llm, [prompt]))[0] for prompt in returning]
    free, differ = free_blocks(llm), 0
    for turn in range(3):
        answers(llm, [ids(10 + n % 60, 1000 * turn + n) for n in range(200)], 4)
        for prompt, wanted in zip(returning, fresh, strict=True):
            differ += tokens_of(answers(llm, [prompt]))[0] != wanted
    counts = runtime(llm).statistics()
    yield (
        "local-inference-lab/vllm#480", differ == 0 and free_blocks(llm) == free,
        f"{differ} of 30 returning answers differ, {free_blocks(llm)} of {free} blocks free, the audit is silent; "
        f"{counts['used_blocks']} of {counts['pool_blocks']} BF16 blocks hold copies nobody needs",
    )  # fmt: skip
    shared = ids(14, 1)
    hits = [answers(llm, [shared + ids(40, seed)])[0].num_cached_tokens for seed in (2, 3)]
    yield "vllm#54607", hits == [0, 0], f"a prefix of 14 tokens that two prompts share, blocks of 16: {hits} found"
    prompt = ids(100, 77)
    found = [answers(llm, [prompt])[0].num_cached_tokens for _ in range(2)]
    yield "home-ops#13384", found == [0, 96], f"num_cached_tokens {found} of 100"
    close(llm)
    del os.environ["VLLM_OSCAR_AUDIT"]
    llm = engine(folder, block_size=16, num_gpu_blocks_override=400, max_num_seqs=32)
    answers(llm, [ids(5 + n % 40, n) for n in range(100)], 3)
    free, before = free_blocks(llm), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(20):
        answers(llm, [ids(5 + n % 40, 100 * turn + n) for n in range(100)], 3)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    slots = runtime(llm).num_slots
    yield (
        "2,000 short requests", free_blocks(llm) == free and grown < 40,
        f"{free_blocks(llm)} of {free} blocks free, {slots} slots as before, memory's peak {grown:.0f} MiB higher",
    )  # fmt: skip
    close(llm)


@group
def embeddings(folder: Path) -> Iterator[Report]:
    """Prompts as embeddings."""
    llm = engine(folder, enable_prompt_embeds=True, enable_prefix_caching=True)
    prompt = ids(100, 5)
    wanted = [tokens_of(answers(llm, [prompt]))[0] for _ in range(2)]  # a miss, which reads its own rows exactly; a hit
    model = core(llm).model_executor.driver_worker.worker.model_runner.model
    rows = model.model.embed_tokens(torch.tensor(prompt)).detach()
    given = [answers(llm, [{"prompt_embeds": rows}])[0] for _ in range(2)]
    same = [tokens == of_tokens for tokens, of_tokens in zip(tokens_of(given), wanted, strict=True)]
    found = [output.num_cached_tokens for output in given]
    yield "vllm#56655", all(same), f"answers equal those to tokens: {same}, tokens found in the cache: {found}"
    close(llm)


@group
def priorities(folder: Path) -> Iterator[Report]:
    """Priority scheduling, with preemption."""
    from vllm import SamplingParams

    llm = engine(
        folder,
        block_size=16,
        num_gpu_blocks_override=24,
        max_model_len=256,
        scheduling_policy="priority",
        disable_log_stats=False,
    )
    prompts = [ids(100, n) for n in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    for n, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling, priority=10 - n)
    done: dict[str, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    complete = sorted(done) == ["0", "1", "2", "3"] and all(len(tokens) == 24 for tokens in done.values())
    first = next(iter(done))
    yield (
        "priority scheduling", preempted > 0 and complete and first == "3",
        f"{preempted:.0f} preemptions, the most urgent of 4 ends first: {first == '3'}, all complete: {complete}",
    )  # fmt: skip
    close(llm)


@group
def drafts(folder: Path) -> Iterator[Report]:
    """A prompt of exactly 1 + k tokens, with k drafts."""
    k = 2
    speculative = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    os.environ["NUMBA_NUM_THREADS"] = "1"
    plain = engine(folder)
    prompts = [[7, 8, 7], [9, 9, 9], ids(3, 3)]
    wanted = tokens_of(answers(plain, prompts, 16))
    close(plain)
    llm = engine(folder, speculative_config=speculative)
    got = tokens_of(answers(llm, prompts, 16))
    alone = [tokens_of(answers(llm, [prompt], 16))[0] for prompt in prompts]
    yield "vllm#53051", got == wanted == alone, f"prompts of {1 + k} tokens: as without drafts {got == wanted}"
    close(llm)


@group
def lora(folder: Path) -> Iterator[Report]:
    """An adapter that is loaded again under its name, with other weights."""
    from safetensors.torch import load_file, save_file
    from vllm.lora.request import LoRARequest

    adapter = random_adapter(folder)
    weights = load_file(adapter / "adapter_model.safetensors")
    prompt = ids(150, 6)
    came = {}
    for dtype in ("oscar", "auto"):
        save_file(weights, adapter / "adapter_model.safetensors")
        llm = engine(folder, dtype, enable_lora=True, max_lora_rank=8, max_loras=1, enable_prefix_caching=True)

        def ask(number: int, llm: Any = llm) -> Any:
            from vllm import SamplingParams

            sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
            request = LoRARequest("same", number, str(adapter))
            return llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False, lora_request=request)[0]

        ask(1)
        save_file({name: -tensor for name, tensor in weights.items()}, adapter / "adapter_model.safetensors")
        llm.llm_engine.remove_lora(1)
        found = ask(1).num_cached_tokens
        llm.reset_prefix_cache()
        came[dtype] = found
        close(llm)
    yield (
        "vllm#42125", came["oscar"] == came["auto"],
        f"{came['oscar']} tokens of the old weights are hit, with auto {came['auto']}: vLLM's own, which keys blocks "
        "by the adapter's name and path; reset_prefix_cache after loading",
    )  # fmt: skip


@group
def memory(folder: Path) -> Iterator[Report]:
    """Sizes of the cache at their edges."""
    del os.environ["VLLM_CPU_KVCACHE_SPACE"]  # it would hold instead of what is given here
    from vllm_oscar.errors import ConfigError
    from vllm_oscar.hot_pool import HotPool
    from vllm_oscar.page_layout import PageLayout

    try:
        close(engine(folder, kv_cache_memory_bytes=1 << 20))
        said = "served"
    except (ConfigError, ValueError) as refused:
        said = str(refused)
    yield "vllm#56698, 1 MB", "pool_share" in said, said
    slot = 2 * HotPool.slot_bytes(PageLayout(128, 32), 2, torch.bfloat16)
    floor = 8 * 2
    engines = [
        engine(folder, oscar={"pool_share": 0.5}, kv_cache_memory_bytes=2 * (floor + 1) * slot, max_model_len=64)
        for _ in range(2)
    ]
    slots = [runtime(llm).num_slots for llm in engines]
    prompts = [ids(50, n) for n in range(8)]
    same = tokens_of(answers(engines[0], prompts)) == tokens_of(answers(engines[1], prompts))
    yield "vllm#56698, floor", slots == [floor + 1] * 2 and same, f"two engines of {slots} slots answer alike: {same}"
    for llm in engines:
        close(llm)
    page = 2 * PageLayout(128, 32).page_bytes(2)
    blocks = 40
    said = ""
    try:
        close(engine(folder, kv_cache_memory_bytes=int(blocks * page / 0.9), max_num_seqs=1, max_model_len=32 * blocks,
                     oscar={"pool_share": 0.15}))  # fmt: skip
    except (ConfigError, ValueError) as refused:
        said = str(refused)
    yield "vllm#55509", "pool_share" in said, said[:300]
    llm = engine(folder, kv_cache_memory_bytes=int(blocks * page / 0.9), max_num_seqs=1, max_model_len=-1,
                 oscar={"pool_share": 0.15})  # fmt: skip
    length = llm.llm_engine.vllm_config.model_config.max_model_len
    yield "vllm#55509, auto", 0 < length < 32 * blocks, f"--max-model-len auto: {length}"
    close(llm)


@group
def blocks(folder: Path) -> Iterator[Report]:
    """Block sizes, and a draft model that asks for our cache."""
    from vllm_oscar.errors import UnsupportedError

    came = {}
    for size in (1, 8, 16, 24, 32, 48, 64, 100, 128, 256):
        try:
            llm = engine(folder, block_size=size)
            came[size] = f"served, {len(tokens_of(answers(llm, [ids(300, 1)]))[0])} tokens"
            close(llm)
        except (UnsupportedError, ValueError) as refused:
            came[size] = type(refused).__name__
    served = [size for size, said in came.items() if said.startswith("served")]
    yield "vllm#42587, blocks", served == [16, 32, 64, 128, 256], str(came)
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2, "kv_cache_dtype": "oscar"}
    try:
        close(engine(folder, speculative_config=draft))
        said = "served"
    except (UnsupportedError, ValueError) as refused:  # vLLM's own, which knows no such dtype of drafts
        said = str(refused)
    yield "vllm#42587, draft", "kv_cache_dtype" in said, said.replace("\n", " ")


@group
def sliding(folder: Path) -> Iterator[Report]:
    """Gemma-2 with 32K batched tokens: blocks that a request needs."""
    gemma = model_folder("tiny", folder.parent / "gemma", **GEMMA2)
    random_weights(gemma)
    random_sidecar(gemma)
    came = {}
    for dtype in ("oscar", "auto"):
        llm = engine(gemma, dtype, max_num_batched_tokens=32768, max_model_len=32768, max_num_seqs=2)
        config = llm.llm_engine.vllm_config
        groups = core(llm).scheduler.kv_cache_config.kv_cache_groups
        came[dtype] = [
            group.kv_cache_spec.max_memory_usage_bytes(config) // group.kv_cache_spec.page_size_bytes
            for group in groups
        ]
        close(llm)
    yield "vllm#49878", came["oscar"] == came["auto"], f"blocks of a request by group: {came}"


@group
def compiled(folder: Path) -> Iterator[Report]:
    """One compile cache for engines that differ in drafts, dtype and sidecar."""
    other = json.loads((folder / "config.json").read_text())
    cache = tempfile.mkdtemp()
    os.environ["VLLM_CACHE_ROOT"] = cache
    second = folder / "oscar" / "second.safetensors"
    random_sidecar(folder, turning=2).rename(second)
    random_sidecar(folder)
    assert other
    prompts = [ids(60, 1), ids(3, 2)]
    came = []
    for k, dtype, sidecar in (
        (2, "oscar", None), (4, "oscar", None), (0, "oscar", None), (0, "auto", None), (0, "oscar", None),
        (0, "oscar", str(second)),
    ):  # fmt: skip
        options: dict[str, Any] = {"enforce_eager": False}
        if k:
            options["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 2, "prompt_lookup_min": 1,
            }  # fmt: skip
        llm = engine(folder, dtype, {"sidecar": sidecar} if sidecar else None, **options)
        came.append(tokens_of(answers(llm, prompts)))
        close(llm)
    same = [answer == came[2] for answer in came]
    yield "vllm#53366", same[0] and same[1] and same[4], f"as the third: {same} (k=2, 4, 0, auto, again, other sidecar)"


@group
def digits(folder: Path) -> Iterator[Report]:
    """Digits and UUIDs that come twice: how many tokens of the second time are the model's first choice. The first time
    lies far behind the window, in an earlier chunk. With the test model (OSCAR_TEST_MODEL, OSCAR_TEST_SIDECAR)."""
    import uuid

    from transformers import AutoTokenizer

    model, sidecar = os.environ["OSCAR_TEST_MODEL"], os.environ["OSCAR_TEST_SIDECAR"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(0)
    for what, items in (
        ("digits", ["".join(draw.choices("0123456789", k=12)) for _ in range(6)]),
        ("UUIDs", [str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(6)]),
    ):
        listed = tokenizer("\n".join(f"Item {n}: {item}" for n, item in enumerate(items))).input_ids
        prompt = listed + ids(200, 4) + listed
        first = len(prompt) - len(listed)
        came = {}
        for dtype in ("auto", "oscar"):
            llm = engine(
                Path(model),
                dtype,
                {"sidecar": sidecar, "sink": 64, "window": 64},
                max_num_batched_tokens=first,
                max_model_len=1024,
            )
            (output,) = answers(llm, [prompt], 1, prompt_logprobs=0)
            ranks = [output.prompt_logprobs[at][prompt[at]].rank for at in range(first + 40, len(prompt))]
            came[dtype] = sum(rank == 1 for rank in ranks) / len(ranks)
            close(llm)
        right = came["oscar"] > came["auto"] - 0.05
        yield f"llama.cpp#23693, {what}", right, f"copied right: {came['oscar']:.0%}, with auto {came['auto']:.0%}"


@group
def together(folder: Path) -> Iterator[Report]:
    """An adapter, structured output and a pipeline of two. With the test model, as this needs a tokenizer; vLLM's CPU
    platform, which compiles nothing with adapters, then has no tensors for what a pipeline's processes pass on."""
    if torch.cuda.device_count() < 2:
        print("LEFT OUT adapter, structured output, pipeline of 2: needs two GPUs")
        return
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    model, sidecar = os.environ["OSCAR_TEST_MODEL"], os.environ["OSCAR_TEST_SIDECAR"]
    beside = folder.parent / "adapter"
    beside.mkdir()
    (beside / "config.json").write_text((Path(model) / "config.json").read_text())
    request = LoRARequest("random", 1, str(random_adapter(beside)))
    pattern = r"(Paris|Lyon|Rome) \d{4}, (Oslo|Bern) \d{8}"
    asked = SamplingParams(temperature=0, max_tokens=32, structured_outputs=StructuredOutputsParams(regex=pattern))
    said = {}
    for ranks in (1, 2):
        llm = engine(
            Path(model), oscar={"sidecar": sidecar, "sink": 64, "window": 64}, skip_tokenizer_init=False,
            enable_lora=True, max_lora_rank=8, max_loras=1, pipeline_parallel_size=ranks, max_num_batched_tokens=128,
        )  # fmt: skip
        prompts: Any = [{"prompt_token_ids": ids(300, seed)} for seed in range(3)]
        outputs = [llm.generate(prompts, asked, use_tqdm=False, lora_request=adapter) for adapter in (request, None)]
        said[ranks] = [output.outputs[0].text for both in outputs for output in both]
        close(llm)
    fit = all(re.fullmatch(pattern, text) for text in said[1])
    yield (
        "adapter, structured output, pipeline of 2", fit and said[1] == said[2],
        f"six answers, with and without an adapter, fit: {fit}; as in one process: {said[1] == said[2]}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help=f"of {', '.join(GROUPS)}")
    names = parser.parse_args().groups or list(GROUPS)
    folder = model_folder("tiny", Path(tempfile.mkdtemp()))
    random_weights(folder)
    random_sidecar(folder)
    failed = 0
    for name in names:
        for report, right, came in GROUPS[name](folder):
            failed += not right
            print(f"{'PASS' if right else 'FAIL'} {report}: {came}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
