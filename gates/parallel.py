"""Several GPUs, sleep, and a draft model in real vLLM: the same model as on one GPU?

    python -m gates.parallel [--gpus 2]

One small model with random weights and a prompt of 8,192 tokens in chunks of 512, so that most of what is read is INT2;
tensor parallel with one KV head a rank, with more ranks than KV heads (4 GPUs), pipeline parallel, a worker of Ray's
where that is installed, asleep and awake again, and with a draft model. Compared are the log probabilities of the
prompt's tokens: within sink and window they differ by the rounding of sums in another order, beyond it a few codes may
fall on their other side as well. The engines run side by side, a process each. Prints PASS or FAIL per case; ends with
1 if anything failed.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from gates.side_by_side import Process, compared

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
FOLDER = Path("/tmp/oscar-verify-parallel/tiny")
PROMPT, NEAR = 8192, 320  # tokens; those that only see sink and window
BOUNDS = (0.007, 0.055)  # mean difference of a token's log probability: near, beyond; three times what was measured
ANSWER = 32

ALONE = "one GPU"
RAY = "a Ray worker"
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # GPUs, options
    ALONE: (1, {}),
    "one GPU again, chunks of 256": (1, {"max_num_batched_tokens": 256}),
    "tensor parallel 2": (2, {"tensor_parallel_size": 2}),
    "tensor parallel 4, two KV heads": (4, {"tensor_parallel_size": 4}),
    "pipeline parallel 2": (2, {"pipeline_parallel_size": 2}),
    RAY: (1, {"distributed_executor_backend": "ray"}),
    "asleep and awake again": (1, {"enable_sleep_mode": True}),
    "a draft model": (
        1,
        {
            "speculative_config": {
                "method": "draft_model",
                "model": str(FOLDER),
                "num_speculative_tokens": 3,
                "kv_cache_dtype": "auto",
            }
        },
    ),
}


def make_model() -> Path:
    """The checkpoint: ranks have to load parts of the same weights. Returns its sidecar."""
    from benchmarks.models.shapes import model_folder, random_sidecar, random_weights

    folder = model_folder("tiny", FOLDER.parent)
    random_weights(folder)
    return random_sidecar(folder)


def run(sidecar: str, options: dict[str, Any]) -> dict[str, Any]:
    """Log probabilities of the prompt's tokens, and the answers to it and to two short prompts."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(FOLDER),
        skip_tokenizer_init=True,
        kv_cache_dtype="oscar",
        max_model_len=PROMPT + ANSWER,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.1,  # the cases run side by side
        enable_prefix_caching=False,
        seed=0,
        additional_config={"oscar": {"sidecar": sidecar}},
        **{"max_num_batched_tokens": 512, **options},
    )
    ids = [(7 * i * i + 3 * i) % 1000 + 5 for i in range(PROMPT)]
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    if options.get("enable_sleep_mode"):
        llm.generate([{"prompt_token_ids": ids[:2000]}], sampling, use_tqdm=False)
        llm.sleep(level=1)
        llm.wake_up()
    if "speculative_config" in options:  # vLLM has no log probabilities of prompts with drafts
        sampling.prompt_logprobs = None
    batch = [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[:100]}, {"prompt_token_ids": ids[50:700]}]
    outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in batch]
    likely = [next(iter(one.values())).logprob for one in (outputs[0].prompt_logprobs or [])[1:] if one]
    return {"likely": likely, "answers": [list(output.outputs[0].token_ids) for output in outputs]}


def differences(one: list[float], other: list[float]) -> tuple[float, float]:
    """Mean difference among the first tokens, and among the rest."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return sum(apart[:NEAR]) / NEAR, sum(apart[NEAR:]) / len(apart[NEAR:])


def agrees(name: str, found: dict[str, Any], base: dict[str, Any]) -> bool:
    """Whether an engine says what the one alone says; prints the verdict."""
    begin = sum(a[:4] == b[:4] for a, b in zip(found["answers"], base["answers"], strict=True))
    passed = begin >= 2
    detail = f"{begin} of 3 answers begin alike"
    if found["likely"]:
        near, far = differences(base["likely"], found["likely"])
        passed &= near <= BOUNDS[0] and far <= BOUNDS[1] and all(map(math.isfinite, found["likely"]))
        detail += f", log probabilities {near:.4f} apart within sink and window, {far:.4f} beyond"
    print(f"{'PASS' if passed else 'FAIL'} {name}: {detail}", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="cases that need more are left out")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:  # in a process of its own
        name, sidecar, out = args.case
        Path(out).write_text(json.dumps(run(sidecar, CASES[name][1])))
        return 0
    sidecar = make_model()
    processes, outs = {}, {}
    for number, (name, (gpus, _)) in enumerate(CASES.items()):
        if gpus > args.gpus:
            print(f"LEFT OUT {name}: needs {gpus} GPUs")
            continue
        if name == RAY and importlib.util.find_spec("ray") is None:
            print(f"LEFT OUT {name}: Ray is not installed")
            continue
        out = outs[name] = FOLDER / f"{number}.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gates.parallel", "--case", name, str(sidecar), str(out)]
        processes[name] = Process(command, out.with_suffix(".log"))
    any_failed = False
    for name, found, base in compared(processes, outs, ALONE):
        any_failed |= found is None or not agrees(name, found, base)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
