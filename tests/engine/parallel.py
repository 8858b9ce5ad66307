"""Run by test_tensor_parallel.py: FOLDER SIDECAR RANKS. One greedy answer, printed as JSON."""

import json
import os
import sys

os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")


def main(folder: str, sidecar: str, ranks: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        kv_cache_dtype="oscar",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        block_size=16,
        tensor_parallel_size=int(ranks),
        additional_config={"oscar": {"sidecar": sidecar, "sink": 16, "window": 32}},
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
    prompt = [(7 * i * i + 3 * i) % 500 + 5 for i in range(150)]
    answer = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
    print("answer", json.dumps([list(answer.token_ids), answer.cumulative_logprob]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
