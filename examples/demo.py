"""SmolLM2 over an INT2 cache, next to BF16: answers, memory, quality. `make demo` runs it; a few minutes on two cores.

python examples/demo.py --model .model/SmolLM2-135M-Instruct
"""

import argparse
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported, and the next one when torch is
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the sizes that are given here

import torch
from transformers import AutoTokenizer

from vllm_oscar.calibrate.data import builtin_text
from vllm_oscar.evaluation.engine import Engine, started
from vllm_oscar.evaluation.measure import Result, measure
from vllm_oscar.evaluation.methods import parse
from vllm_oscar.evaluation.windows import held_out
from vllm_oscar.sidecar import Sidecar, find_sidecar

PARAGRAPH = "\n\n"
PASSAGE = builtin_text("held_out")[20000:23500].partition(PARAGRAPH)[2].rpartition(PARAGRAPH)[0]  # whole paragraphs
PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Why is the sky blue? Explain it to a child in two sentences.",
    # long enough to be answered from INT2: the two before fit into the BF16 copies of sink and window
    f"{PASSAGE}{PARAGRAPH}What is the text above about? Answer in one sentence.",
)
MEMORY = 1 << 30  # bytes for the KV cache, with whatever belongs to it


@dataclass(frozen=True)
class Served:
    """What one engine showed.

    Attributes:
        answers: to PROMPTS
        tokens: that fit into the cache
        token_bytes: of a token over all layers
        pool_bytes: of the BF16 copies, which MEMORY includes
    """

    answers: list[str]
    tokens: int
    token_bytes: float
    pool_bytes: int


def serve(model: str, kv_cache_dtype: str) -> Served:
    """Start an engine, ask it PROMPTS, look at its cache."""
    from vllm import SamplingParams

    with started(
        model,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=2048,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=MEMORY,
    ) as llm:
        chats: Any = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=64), use_tqdm=sys.stderr.isatty())
        cache = llm.llm_engine.vllm_config.cache_config
        tokens = cache.num_gpu_blocks * cache.block_size
        return Served(
            [output.outputs[0].text.strip() for output in outputs],
            tokens,
            llm.apply_model(cache_bytes)[0] / tokens,
            Engine(llm).statistics().get("pool_bytes", 0),
        )


def cache_bytes(model: torch.nn.Module) -> int:
    """Bytes of all layers' pages."""
    caches: list[Any] = [module.kv_cache for module in model.modules() if hasattr(module, "kv_cache")]
    return sum(cache.nbytes for cache in caches)


def show(bf16: Served, int2: Served, quality: list[Result]) -> None:
    """Print the answers side by side, and the table."""
    for prompt, first, second in zip(PROMPTS, bf16.answers, int2.answers, strict=True):
        before, _, question = prompt.rpartition(PARAGRAPH)
        passage = f"[{len(before):,} characters of the Python reference] " if before else ""
        print(f"\n> {passage}{question}\n  BF16:  {first}\n  OSCAR: {second}")
    reference, oscar = quality
    lines = [
        ("", "BF16", "OSCAR"),
        (
            f"tokens in {MEMORY >> 20} MiB, BF16 copies included",
            f"{bf16.tokens:,}",
            f"{int2.tokens:,} ({int2.tokens / bf16.tokens:.2f}x)",
        ),
        ("  of that BF16 copies of sink and window", "", f"{int2.pool_bytes / 2**20:.0f} MiB"),
        ("bytes of a token, all layers", f"{bf16.token_bytes:,.0f}", f"{int2.token_bytes:,.0f}"),
        ("bits of an element", f"{reference.bits:g}", f"{oscar.bits:g}"),
        ("perplexity of held-out text", f"{reference.perplexity:.2f}", f"{oscar.perplexity:.2f}"),
        ("KL to BF16, nats", "0", f"{oscar.kl:.4f} +- {oscar.kl_error:.4f}"),
        ("same most likely token", "100%", f"{100 * oscar.top1:.1f}%"),
        ("cache reads that were INT2", "", f"{100 * (oscar.int2_reads or 0):.0f}%"),
    ]
    print()
    for name, left, right in lines:
        print(f"{name:<44}{left:>12}{right:>20}")
    print(
        f"Quality: {oscar.windows} windows of {oscar.context} tokens, scored from position {oscar.first} on, 16 tokens "
        "a step, so that all but the newest come out of the cache."
    )


def main() -> None:
    """Serve twice, measure twice, print."""
    parser = argparse.ArgumentParser(description="INT2 next to BF16 on a small model.")
    parser.add_argument("--model", required=True, help="folder with a sidecar in it (make demo makes both)")
    parser.add_argument("--windows", type=int, default=2, help="of held-out text (default: 2)")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # vLLM's use of torch

    served = {}
    for number, dtype in enumerate(("auto", "oscar"), 1):
        start = time.perf_counter()
        print(f"\n[{number}/3] answers with kv_cache_dtype={dtype!r}", flush=True)
        served[dtype] = serve(options.model, dtype)
        print(f"      {time.perf_counter() - start:.0f} s", flush=True)
    print("\n[3/3] quality, forced through the cache: BF16, then OSCAR", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    windows = held_out(tokenizer, "prose", options.windows, context=2048)
    oscar = parse("oscar", Sidecar.load(find_sidecar(options.model)))
    quality = []
    for result in measure(options.model, [oscar], {"prose": windows}):
        print(f"      {result.method}: {result.seconds:.0f} s", flush=True)
        quality.append(result)
    show(served["auto"], served["oscar"], quality)


if __name__ == "__main__":
    main()
