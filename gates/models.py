"""Which models work: each family in small, with random weights, an INT2 cache next to one in 16 bits.

    python -m gates.models [--only NAME...]

While the window covers the context every token is read from its BF16 copy, and the cache is exact up to rounding: what
is wrong with a mask, RoPE or a head shows in the log probabilities of a prompt that is prefilled in chunks. Prints the
table of docs/support.md, a row as soon as it is known; ends with 1 where an engine differs or fails.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.families import FAMILIES, SMALL
from benchmarks.models.shapes import random_sidecar, random_weights
from vllm_oscar.errors import UnsupportedError

TOKENS, CHUNK = 150, 48
EXACT = 5e-4  # nats, on average over positions; rounding rows to BF16 in another basis costs up to 2e-4


@dataclass(frozen=True)
class Row:
    """Of the table.

    Attributes:
        good: whether the model is served right, or refused
    """

    name: str
    state: str
    text: str
    good: bool

    def __str__(self) -> str:
        return f"| {self.name} | {self.state} | {self.text} |"


def log_probabilities(folder: Path, **options: Any) -> torch.Tensor:
    """After each token of a prompt but the last, float32 (positions, vocabulary)."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, max_num_seqs=2,
        max_num_batched_tokens=CHUNK, max_logprobs=-1, gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 28,
        **options,
    )  # fmt: skip
    try:
        prompt = {"prompt_token_ids": [(7 * i * i + 3 * i) % 500 + 5 for i in range(TOKENS)]}
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        rows = output.prompt_logprobs
        assert rows is not None
        return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows[1:]])
    finally:
        llm.llm_engine.engine_core.shutdown()


def tried(name: str, config: Mapping[str, Any], folder: Path) -> Row:
    """A model of this configuration, in the folder."""
    (folder / "config.json").write_text(json.dumps(SMALL | dict(config)))
    text_only = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if "vision_config" in config else {}
    if text_only and importlib.util.find_spec("torchvision") is None:
        return Row(name, "not tried", "torchvision is not installed", True)
    try:
        random_weights(folder)
        oscar = {"sidecar": str(random_sidecar(folder)), "sink": 16, "window": 256}
        try:
            ours = log_probabilities(folder, kv_cache_dtype="oscar", additional_config={"oscar": oscar}, **text_only)
        except UnsupportedError as error:
            return Row(name, "refused", str(error).removeprefix("--kv-cache-dtype oscar does not support "), True)
        exact = log_probabilities(folder, kv_cache_dtype="auto", **text_only)
    except Exception as error:  # the table goes on
        traceback.print_exc()
        return Row(name, "FAILS", f"{type(error).__name__}: {error}", False)
    kl = float((exact.exp() * (exact - ours)).sum(-1).mean())
    spread = float(exact.std(0).mean())  # positions differ, or the comparison says nothing
    good = kl < EXACT and spread > 0.1
    return Row(name, "works" if good else "DIFFERS", f"KL {kl:.1e} while copies cover the context", good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    names = parser.parse_args().only
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    print("| | state | |\n|---|---|---|", flush=True)
    good = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            row = tried(name, FAMILIES[name], Path(folder))
        print(row, flush=True)
        good &= row.good
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
