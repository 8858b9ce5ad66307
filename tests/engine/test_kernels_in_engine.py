"""The GPU path inside vLLM, as far as a machine without a GPU can show it: in Triton's interpreter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.engine


def interpreted(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What interpreted.py prints; the pool is audited in every step."""
    script = Path(__file__).with_name("interpreted.py")
    # numba, which n-gram drafts bring, has threads that get in torch's way
    given = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_OSCAR_AUDIT": "1", "NUMBA_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(script), str(folder), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **given},
        check=False,
    )


def test_every_layer_output_of_the_gpu_path_agrees_with_the_reference(tmp_path: Path) -> None:
    """A short prompt, chunked prefill over INT2 history and a mixed batch, with keys encoded in the metric. Keys that
    decoding wrote are encoded again, in whole batches of 32, a token later in the second layer.

    Tolerances are those of gates/engine.py, which does the same on a GPU.
    """
    done = interpreted(tmp_path)
    batches = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("batch")]
    assert done.returncode == 0 and len(batches) == 3, done.stderr[-3000:]
    layers = 2
    # (prefill steps + decode steps) x layers: one of 1 + 11; 80 tokens in two chunks; mixed
    assert int(batches[0][0]) == (1 + 11) * layers
    assert int(batches[1][0]) == (2 + 1) * layers
    assert all(float(worst) < 1 for _, worst in batches), batches
    again = json.loads(done.stdout.split("encoded again ")[1].splitlines()[0])
    assert again["late"] == again["misplaced"] == 0, again
    # of two heads: the first layer's tokens 30 and 31 and the second's 30 to 32, in the steps from 39 tokens on at last
    assert again["metric"] >= 2 * 2 * 3 and again["least"] > 0 and again["agreement"] > 0.97, again
    assert "left behind 0 0 0\n" in done.stdout  # the warm-up before it wrote nothing, counted nothing, kept nothing
    counted, wanted = re.findall(r"\[.*?\]", done.stdout[done.stdout.index("reads [") :])[:2]
    assert counted == wanted  # of both layers, of which one counts
    assert re.fullmatch(r"\[[1-9]\d*, [1-9]\d*, 0\]", counted)


def test_drafts_of_unequal_length_are_decoded_together(tmp_path: Path) -> None:
    """N-grams give some requests three drafts and others none; no such step is a prefill, whose history is restored."""
    done = interpreted(tmp_path, "drafts")
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [
        (json.loads(lengths), int(decodes), int(calls))
        for lengths, decodes, calls in re.findall(r"^step (\[.*?\]) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    ]
    assert any(len(set(lengths)) > 1 for lengths, *_ in steps), steps
    assert all(decodes == len(lengths) and calls == 0 for lengths, decodes, calls in steps), steps
    ((count, worst),) = re.findall(r"^batch (\d+) (\S+)$", done.stdout, re.MULTILINE)
    assert int(count) > 2 * len(steps) and float(worst) < 1


@pytest.mark.parametrize(
    ("heads", "ratio", "head_size", "q_len"), [(8, 4, 128, 1), (2, 8, 64, 4), (1, 16, 256, 1), (1, 2, 64, 25)]
)
def test_warm_up_covers_the_variants_of_every_batch_size(heads: int, ratio: int, head_size: int, q_len: int) -> None:
    """Of every one that serving can have: 300 queries of 25 tokens are more than a step's 2,048, and 300 of which one
    has 25 are not."""
    from vllm_oscar.integration.warm_up import batches
    from vllm_oscar.kernels.decode import compiled_for
    from vllm_oscar.page_layout import PageLayout

    device, layout = torch.device("cpu"), PageLayout(head_size, 64)
    workspaces = SimpleNamespace(prefill=SimpleNamespace(capacity=8192))
    impl = SimpleNamespace(num_kv_heads=heads, ratio=ratio, layout=layout, workspaces=workspaces)
    builder = SimpleNamespace(
        device=device,
        runtime=SimpleNamespace(decode_threshold=q_len),
        impl=impl,
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=300, max_num_batched_tokens=2048),
            model_config=SimpleNamespace(max_model_len=16384),
        ),
    )
    rehearsed = list(batches(builder))  # type: ignore[arg-type]

    def variant(seqs: int, queries: int) -> tuple[int, ...]:
        return queries, *compiled_for(seqs, queries, heads, ratio, layout, device)

    assert max(sum(queries) for queries, _ in rehearsed) <= 2048
    needed = {variant(seqs, queries) for queries in range(1, q_len + 1) for seqs in range(1, 301)}
    decodes = [queries for queries, before in rehearsed if queries[0] <= q_len]
    assert {variant(len(queries), queries[0]) for queries in decodes} == needed
    assert len(decodes) == len(needed)
    # few and many tokens, each without history, with some, and with more than one call restores
    assert {(queries[0], before) for queries, before in rehearsed if queries[0] > q_len} == {
        (tokens, before) for tokens in (q_len + 1, q_len + 128) for before in (0, 1, 8192)
    }
