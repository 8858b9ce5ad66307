"""Run by test_parallel.py: FOLDER SIDECAR OPTIONS. Three greedy answers, printed as JSON."""

import json
import os
import sys

os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    # vLLM's CPU platform makes room for what a pipeline's ranks send each other only where it compiles: say that it
    # does, and don't
    TORCHDYNAMO_DISABLE="1",
    VLLM_USE_AOT_COMPILE="0",
)
PROMPTS = [[(7 * i * i + factor * i) % 500 + 5 for i in range(150)] for factor in (3, 11)]


def main(folder: str, sidecar: str, options: str) -> None:
    from vllm import LLM, SamplingParams

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
        **json.loads(options),
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
    answers = []
    for prompts in (PROMPTS, [PROMPTS[0] + PROMPTS[1][:50]]):  # the third is prefilled onto the first
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        for output in outputs:
            answer = output.outputs[0]
            answers.append([list(answer.token_ids), answer.cumulative_logprob, output.num_cached_tokens])
    print("answers", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
