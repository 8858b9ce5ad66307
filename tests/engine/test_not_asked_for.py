"""With the plugin installed but not asked for, vLLM computes bit for bit what it computes without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import hashlib, sys, typing
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=256, max_num_seqs=2, enforce_eager=True, num_gpu_blocks_override=40)
digest = hashlib.sha256()
def record(module, args, output):
    digest.update(output.float().contiguous().numpy().tobytes())
llm.apply_model(lambda model: model.register_forward_hook(record) and None)
prompts = [{"prompt_token_ids": list(range(500, 600))}, {"prompt_token_ids": list(range(900, 930))}]
answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
from vllm.config.cache import CacheDType
tokens = [list(answer.outputs[0].token_ids) for answer in answers]
print("RESULT", "oscar" in typing.get_args(CacheDType), digest.hexdigest(), tokens)
"""


def result(model: Path, **environment: str) -> list[str]:
    given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"} | environment
    command = [sys.executable, "-c", SCRIPT, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | given, check=False)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split(maxsplit=3)


def test_hidden_states_and_tokens_are_the_same_bits(model_path: Path) -> None:
    _, installed, digest, tokens = result(model_path)
    _, absent, wanted_digest, wanted_tokens = result(model_path, VLLM_PLUGINS="")
    assert (installed, absent) == ("True", "False")
    assert digest == wanted_digest
    assert tokens == wanted_tokens
