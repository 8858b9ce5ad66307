#!/usr/bin/env python3
"""The CPU platform next to BF16: a decode step, a prefill, and the quality part of `oscar eval`.

    python -m benchmarks.speed.cpu_speed .model/SmolLM2-135M-Instruct

One request; the quality part is two windows of 2,048 tokens, 16 tokens a step. One engine after the other in this
process. Prints milliseconds, medians for the first two, and their ratios.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the sizes that are given here

import torch

from vllm_oscar.evaluation.engine import forced_through_cache, started

PROMPT, ANSWER, PREFILLS = 512, 64, 3  # tokens, tokens, prompts
LONG = 1536  # tokens of a prompt that is only prefilled
WINDOWS, CONTEXT = 2, 2048


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def measure(model: str, dtype: str, eager: bool, windows: int) -> dict[str, float]:
    """Of one kind of cache."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(0)

    def prompt(tokens: int) -> Any:
        return {"prompt_token_ids": torch.randint(100, 20000, (tokens,), generator=generator).tolist()}

    took = {}
    with started(
        model,
        kv_cache_dtype=dtype,
        max_model_len=2048,
        max_num_seqs=8,
        enforce_eager=eager,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
    ) as llm:
        one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        llm.generate([prompt(PROMPT)], one, use_tqdm=False)
        engine = llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
        engine.add_request("one", prompt(PROMPT), sampling)
        steps = []
        while engine.has_unfinished_requests():
            steps.append(milliseconds(engine.step))
        took["decode step"] = statistics.median(steps[2:])
        took["prefill"] = statistics.median(
            milliseconds(lambda: llm.generate([prompt(LONG)], one, use_tqdm=False)) for _ in range(PREFILLS)
        )
    if windows:
        tokens = torch.randint(100, 20000, (windows, CONTEXT), generator=generator)
        with forced_through_cache(model, dtype, CONTEXT) as evaluated:
            took["quality"] = milliseconds(lambda: evaluated.record(tokens))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with a sidecar in it")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile the model (the demo does not)")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"of the quality part (default: {WINDOWS})")
    options = parser.parse_args()
    bf16, oscar = (measure(options.model, dtype, not options.compiled, options.windows) for dtype in ("auto", "oscar"))
    print(f"threads: {torch.get_num_threads()}\n{'':<12}{'BF16 ms':>10}{'OSCAR ms':>10}{'ratio':>8}")
    for name, reference in bf16.items():
        print(f"{name:<12}{reference:>10.1f}{oscar[name]:>10.1f}{oscar[name] / reference:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
