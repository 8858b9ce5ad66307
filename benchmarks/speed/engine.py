"""Speed in real vLLM, with dummy weights: capacity, decode steps, short requests, prefill; one KV dtype a process.

    python -m benchmarks.speed.engine --shape qwen3-4b --dtypes auto oscar --out engine.csv

Contexts of decode steps are not prefilled: the scheduler is told that they are computed, and gets blocks of their
own with zeroed pages, whose zero words prove the zeroed copies. What a step reads is the same; what it answers is not
looked at. Everything else (prefill, short requests) runs as users run it.

    python -m benchmarks.speed.engine --dtypes auto oscar --parts heads --drafts 3

gives both the same drafting head of one layer, in 16 bits, and accepts the same share of its drafts, chosen by chance.
`--parts offloading` has 20 GiB of the host's memory for blocks. Both change the engine: run them by themselves.
"""

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

H100_KV_BYTES = 452512 * 36 * 8 * 2 * 128 * 2  # what BF16 has left on an 80 GB H100 at utilization 0.9, Qwen3-4B
FIELDS = ["dtype", "what", "value", "unit"]
DECODE = [(8, 1024), (32, 4096), (8, 32768), (4, 100000)]
HEADS = [(8, 1024), (4, 100000)]


def pretend_computed(llm: Any) -> None:
    """From now on, a new request's tokens but the last few count as computed; their blocks come with its first step."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    original = manager.get_computed_blocks

    def get_computed_blocks(request: Any, *limits: Any) -> tuple[Any, ...]:
        none, _, *rest = original(request, *limits)  # what else a version takes and returns
        return none, (request.num_tokens - 1) // block_size * block_size, *rest

    manager.get_computed_blocks = get_computed_blocks


def zero_cache(llm: Any) -> None:
    """Zero pages and copies, so that a copy proves itself (see the module's docstring)."""
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        if hasattr(layer, "kv_cache"):
            layer.kv_cache.zero_()
            pool = getattr(layer.impl, "pool", None)
            if pool is not None:
                pool.words.zero_()


@contextlib.contextmanager
def decoding(llm: Any, batch: int, context: int, answer: int) -> Iterator[Callable[[], object]]:
    """A batch in the middle of its answers; yields the function that makes one decode step."""
    from vllm import SamplingParams

    zero_cache(llm)
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    for i in range(batch):
        prompt = {"prompt_token_ids": [(i * 7 + j) % 1000 + 5 for j in range(context)]}
        engine.add_request(f"{batch}x{context}-{i}-{time.time()}", prompt, sampling)
    for _ in range(24):  # all admitted, and the clocks up
        engine.step()
    yield engine.step
    while engine.has_unfinished_requests():
        engine.step()


def decode_step(llm: Any, batch: int, context: int, steps: int = 40) -> float:
    """Milliseconds of a decode step."""
    import torch

    with decoding(llm, batch, context, steps + 40) as step:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps * 1e3


def drafting(llm: Any, batch: int, context: int, steps: int = 40) -> float:
    """Tokens per second of a batch whose steps verify drafts."""
    import torch

    drafts = llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens
    with decoding(llm, batch, context, (1 + drafts) * (steps + 40)) as step:
        torch.cuda.synchronize()
        start = time.perf_counter()
        before = after = _answered(step())
        for _ in range(steps):
            after = max(after, _answered(step()))
        torch.cuda.synchronize()
        return (after - before) / (time.perf_counter() - start)


def _answered(outputs: Any) -> int:
    """Tokens that a batch has answered so far."""
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def profile(llm: Any, batch: int, context: int, steps: int = 10) -> None:
    """Print the kernels of a decode step, the longest first."""
    import torch

    trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with decoding(llm, batch, context, 80) as step, trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = sorted(trace.key_averages(), key=lambda k: -k.self_device_time_total)
    print(f"-- {batch} x {context}: kernels of a step")
    for kernel in kernels[:25]:
        total, count = kernel.self_device_time_total / steps, kernel.count / steps
        print(f"{total:9.1f} us  {count:6.1f} times  {total / max(count, 1e-9):8.2f} us  {kernel.key[:90]}", flush=True)


def saturated_rows(llm: Any) -> int:
    """Rows that held something not representable, so far; 0 for other caches. A random model should have none."""
    from vllm_oscar.integration.runtime import oscar_impls

    impls = oscar_impls(llm.llm_engine.vllm_config)
    return int(impls[0].runtime.counters.saturated_rows) if impls else 0


def timed_generate(llm: Any, batch: int, prompt: int, answer: int, repeats: int) -> float:
    """Milliseconds of a whole generate call, the median; prompts differ, so that no prefix is reused."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    times = []
    for r in range(repeats + 1):
        prompts = [
            {"prompt_token_ids": [(r * 131 + i * 17 + j * 3) % 1000 + 5 for j in range(prompt)]} for i in range(batch)
        ]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[1:])[repeats // 2]


def returning(llm: Any, prompt: int, repeats: int) -> float:
    """Milliseconds to the first token of a prompt that is in the host's memory and not on the GPU, the median."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    others = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
    batch = [{"prompt_token_ids": [(j * 5) % 1000 + 5 for j in range(prompt)]}]
    llm.generate(batch, sampling, use_tqdm=False)
    times = []
    for _ in range(repeats + 1):
        # steps in which what was stored gets there
        llm.generate([{"prompt_token_ids": [7] * 100}], others, use_tqdm=False)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        (output,) = llm.generate(batch, sampling, use_tqdm=False)
        times.append((time.perf_counter() - start) * 1e3)
        assert output.num_cached_tokens > 0.9 * prompt, f"{output.num_cached_tokens} tokens came back"
    return sorted(times[1:])[repeats // 2]


def measure(args: argparse.Namespace) -> None:
    """All figures of one dtype, written as they come: a crash costs those after it."""
    import torch
    from vllm import LLM

    from benchmarks.models.heads import head_folder
    from benchmarks.models.shapes import liven, model_folder, random_sidecar

    folder = model_folder(args.shape, Path(args.root))
    options: dict[str, Any] = {}
    if args.dtype == "oscar":
        oscar = {"sidecar": str(random_sidecar(folder)), **json.loads(args.oscar)}
        options["additional_config"] = {"oscar": oscar}
    if "heads" in args.parts:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": str(head_folder(folder, "eagle3")),
            "num_speculative_tokens": args.drafts,
            # whatever a random head drafts: as many are accepted with every cache
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 1 + args.accepted * args.drafts,
        }
    if "offloading" in args.parts:
        os.environ["VLLM_OSCAR_UNVERIFIED"] = "1"
        options |= {"kv_offloading_size": 20, "enable_prefix_caching": True}
    start = time.perf_counter()
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=args.dtype,
        max_model_len=131072,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=args.chunk,
        kv_cache_memory_bytes=None if args.utilization else H100_KV_BYTES,
        gpu_memory_utilization=args.utilization or 0.5,  # else vLLM only asks whether as much is free
        seed=0,
        **{"enable_prefix_caching": False, **options},
    )
    llm.apply_model(liven)

    def row(what: str, value: float, unit: str) -> None:
        found = {"dtype": args.dtype, "what": what, "value": round(value, 3), "unit": unit}
        with open(args.out, "a", newline="") as file:
            csv.DictWriter(file, FIELDS).writerow(found)
        print(found, flush=True)

    cache = llm.llm_engine.vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    row("start", time.perf_counter() - start, "s")
    row("capacity", tokens, "tokens")
    row("block size", cache.block_size, "tokens")
    row("saturated rows after the start", saturated_rows(llm), "rows")
    if "short" in args.parts:
        row("8 x (1024 in, 128 out)", timed_generate(llm, 8, 1024, 128, 3), "ms")
        row("saturated rows after short requests", saturated_rows(llm), "rows")
    if "prefill" in args.parts:
        row("prefill 32768", timed_generate(llm, 1, 32768, 1, 3), "ms")
    if "offloading" in args.parts:
        row("first token of 32768, computed", timed_generate(llm, 1, 32768, 1, 3), "ms")
        row("first token of 32768, from the host", returning(llm, 32768, 3), "ms")
    if "long" in args.parts:
        row("100000 in, 8 out", timed_generate(llm, 1, 100000, 8, 1), "ms")
    pretend_computed(llm)
    most = tokens // 100128
    if "decode" in args.parts:
        for batch, context in [*DECODE, (most, 100000)]:
            if batch * (context + 128) <= tokens and batch <= args.seqs:
                step = decode_step(llm, batch, context)
                row(f"decode {batch} x {context}", step, "ms")
        row("throughput at 100000", most / step * 1e3, "tokens/s")
    if "heads" in args.parts:
        for batch, context in HEADS:
            row(f"{args.drafts} drafts, {batch} x {context}", drafting(llm, batch, context), "tokens/s")
    if "profile" in args.parts:
        profile(llm, 8, 1024)
        profile(llm, 4, 100000)
    row("memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--dtypes", nargs="+", default=["auto", "oscar"])
    parser.add_argument(
        "--parts", nargs="*", default=["short", "prefill", "decode"], help="also: profile, long, heads, offloading"
    )
    parser.add_argument("--drafts", type=int, default=3, help="of an EAGLE-3 head, for the part heads")
    parser.add_argument("--accepted", type=float, default=0.5, help="share of them that is accepted")
    parser.add_argument("--seqs", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--utilization", type=float, help="gpu_memory_utilization, instead of an H100's KV memory")
    parser.add_argument("--oscar", default="{}", help="oscar options, JSON")
    parser.add_argument("--root", default="/tmp/oscar-bench")
    parser.add_argument("--out", default="engine.csv")
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dtype:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        measure(args)
        return
    with open(args.out, "w", newline="") as file:
        csv.DictWriter(file, FIELDS).writeheader()
    for dtype in args.dtypes:
        subprocess.run([sys.executable, "-m", "benchmarks.speed.engine", *sys.argv[1:], "--dtype", dtype], check=False)


if __name__ == "__main__":
    main()
