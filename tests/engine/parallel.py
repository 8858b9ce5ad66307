"""Run by test_parallel.py: FOLDER SIDECAR OPTIONS... Three greedy answers of an engine with each of these options,
printed as JSON.
"""

import json
import os
import sys

os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    # vLLM's CPU platform makes room for what a pipeline's ranks send each other only where it compiles: say that it
    # does, and don't
    TORCHDYNAMO_DISABLE="1",
    VLLM_USE_AOT_COMPILE="0",
)

import multiprocessing
from typing import Any

from vllm import LLM, SamplingParams

PROMPTS = [[(7 * i * i + factor * i) % 500 + 5 for i in range(150)] for factor in (3, 11)]


def answers(folder: str, sidecar: str, options: dict[str, int]) -> list[Any]:
    llm = LLM(
        folder,
        kv_cache_dtype="oscar",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        # with chunks, those of one request would depend on when the other is served
        enable_chunked_prefill=False,
        max_num_batched_tokens=256,
        block_size=16,
        additional_config={"oscar": {"sidecar": sidecar, "sink": 16, "window": 32}},
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
    given = []
    for prompts in (PROMPTS, [PROMPTS[0] + PROMPTS[1][:50]]):  # the third is prefilled onto the first
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        for output in outputs:
            answer = output.outputs[0]
            given.append([list(answer.token_ids), answer.cumulative_logprob, output.num_cached_tokens])
    llm.llm_engine.engine_core.shutdown()
    return given


def main(folder: str, sidecar: str, *options: str) -> None:
    # vLLM spawns a CPU engine's ranks; importing it takes each of them ten seconds, and this process has it
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")  # type: ignore[assignment]
    for one in options:
        print("answers", json.dumps(answers(folder, sidecar, json.loads(one))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
