"""Memory in real vLLM on a GPU: nothing runs out, where the KV cache has nearly all of it.

    python -m gates.memory [--minutes 5] [--shape qwen3-4b]

Two engines, one after the other, with dummy weights: `--gpu-memory-utilization 0.95`, where vLLM measures what a step
takes, and 64 requests of 1K to 30K tokens are kept running for some minutes; and `--kv-cache-memory-bytes` of all that
the weights leave but 3 GiB, where it measures nothing, with a prompt of 100K beside 64 decodes. Requests take turns in
lengths and chunks, so that steps have every mixture. Says what was free at the worst, and what serving took beyond what
there was at the start. Prints PASS or FAIL per case; ends with 1 if anything failed.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gates.side_by_side import Process, failed, side_by_side

FOLDER = Path("/tmp/oscar-memory")
REQUESTS, LONG, SPARE = 64, 100_000, 3 << 30  # requests at a time; tokens; bytes
CASES = ("utilization 0.95", "free minus 3 GiB")


def weights(folder: Path) -> int:
    """Bytes of a model's weights in BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(2 * parameter.numel() for parameter in model.parameters())


class Crowd:
    """Requests of an engine, REQUESTS at a time."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.number = 0
        self.ended = 0
        self.steps = 0
        self.free = torch.cuda.mem_get_info()[0]

    def add(self, prompt: int, tokens: int) -> None:
        """One more, of a prompt of its own."""
        from vllm import SamplingParams

        ids = [(self.number * 7919 + j * 31 + j * j) % 1000 + 5 for j in range(prompt)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(f"{self.number}", {"prompt_token_ids": ids}, sampling)
        self.number += 1

    def step(self) -> None:
        self.ended += sum(output.finished for output in self.engine.step())
        self.steps += 1
        self.free = min(self.free, torch.cuda.mem_get_info()[0])

    @property
    def running(self) -> int:
        return self.number - self.ended


def mixed_lengths(crowd: Crowd, seconds: float) -> None:
    """Prompts of 1K to 30K, each followed by another; some ask for one token, some for hundreds."""
    generator = torch.Generator().manual_seed(0)
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        while crowd.running < REQUESTS:
            prompt = int(torch.randint(1_000, 30_001, (1,), generator=generator))
            crowd.add(prompt, 1 + int(torch.randint(0, 400, (1,), generator=generator)))
        crowd.step()


def one_long_prompt(crowd: Crowd, seconds: float) -> None:
    """64 decodes, among which a prompt of 100K is computed, and then decodes itself."""
    for _ in range(REQUESTS):
        crowd.add(1_000, 500)
    for _ in range(100):  # all decode
        crowd.step()
    crowd.add(LONG, 64)
    while crowd.running:
        crowd.step()


def run(case: str, folder: Path, sidecar: Path, seconds: float) -> Iterator[tuple[bool, str]]:
    """One engine."""
    from vllm import LLM

    given: dict[str, Any] = {"gpu_memory_utilization": 0.95}
    if case == CASES[1]:
        given = {"kv_cache_memory_bytes": torch.cuda.mem_get_info()[0] - weights(folder) - SPARE}
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype="oscar",
        max_model_len=131_072,
        max_num_seqs=REQUESTS + 1,
        seed=0,
        additional_config={"oscar": {"sidecar": str(sidecar)}},
        **given,
    )
    cache = llm.llm_engine.vllm_config.cache_config
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, crowd = torch.cuda.memory_allocated(), Crowd(llm)
    started = crowd.free
    try:
        (mixed_lengths if case == CASES[0] else one_long_prompt)(crowd, seconds)
        torch.cuda.synchronize()
        problem = ""
    except (torch.OutOfMemoryError, RuntimeError) as error:
        problem = f"; {type(error).__name__}: {str(error)[:300]}"
    peak = torch.cuda.max_memory_allocated() - before
    yield (
        not problem and crowd.ended > 0,
        f"{cache.num_gpu_blocks * cache.block_size:,} tokens of cache, {crowd.ended} requests ended in {crowd.steps} "
        f"steps; free at the start {started / 2**30:.2f} GiB, at the worst {crowd.free / 2**30:.2f}; a step took at "
        f"most {peak / 2**30:.2f} GiB{problem}",
    )


def main() -> int:
    from benchmarks.models.shapes import model_folder, random_sidecar

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--minutes", type=float, default=5, help="of the first case")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:  # in a process of its own
        case, folder, sidecar = args.case
        for passed, line in run(case, Path(folder), Path(sidecar), 60 * args.minutes):
            print(f"{'PASS' if passed else 'FAIL'} {case}: {line}", flush=True)
        sys.stdout.flush()
        os._exit(0)  # an engine that ran out of memory may not end by itself
    FOLDER.mkdir(exist_ok=True)
    folder = model_folder(args.shape, FOLDER)
    sidecar = random_sidecar(folder)
    any_failed = False
    for number, case in enumerate(args.only):
        command = [sys.executable, "-m", "gates.memory", "--case", case, str(folder), str(sidecar)]
        command += ["--minutes", str(args.minutes)]
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        for _, lines in side_by_side({case: Process(command, FOLDER / f"{number}.log", environment)}):
            any_failed |= failed(lines)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
