#!/usr/bin/env python3
"""Correctness in real vLLM on a GPU: every layer's output in every step against the torch reference.

    python benchmarks/verify_engine.py

A small model with random weights runs eagerly through prompts, chunks, decode, prefix hits, preemption and mixed
batches. After each layer's forward, the reference (attention.read_rows and attend) reads the same pages and copies
and must agree. A second run with CUDA graphs must give the same texts. Prints PASS or FAIL per case.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_OSCAR_UNVERIFIED_CUDA="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Relative errors, by norm. Rounding a decode's output to BF16 costs 0.002; a prefill restores history to BF16 rows,
# whose rounding random queries with scores of some tens amplify.
DECODE, PREFILL = 0.01, 0.05


def check_layers(impl_class: Any, errors: list[float]) -> None:
    """Wrap the layer's forward: recompute it with the reference, note the error in units of what is tolerated."""
    import torch

    from vllm_oscar.attention import attend, read_rows

    original = impl_class.forward

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, **kwargs: Any
    ) -> Any:
        out = original(self, layer, query, key, value, kv_cache, metadata, **kwargs)
        if metadata is None:
            return out
        views = self.layout.views(self.pages(kv_cache))
        lengths = metadata.seq_lens.tolist()
        starts = metadata.query_start_loc.tolist()
        for request, after in enumerate(lengths):
            start, end = starts[request : request + 2]
            if end <= start:
                continue
            before, decodes = after - (end - start), request < metadata.num_decodes
            tokens = after if decodes else before
            blocks = metadata.block_table[request, : -(-tokens // self.layout.block_size)].long()
            stored = read_rows(views, self.pool, metadata.table, blocks, tokens, before)
            heads = (end - start, -1, self.head_size)
            fresh = None if decodes else (key[start:end].view(heads), value[start:end].view(heads))
            wanted = attend(
                query[start:end].view(heads),
                stored,
                self.cache_layer.key.transform,
                self.cache_layer.value.transform,
                self.scale,
                before,
                fresh,
                self.soft_cap,
                self.sliding_window,
            )
            got = kwargs["output"][start:end].view(heads).float()
            error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-6))
            errors.append(error / (DECODE if decodes else PREFILL))
            assert torch.isfinite(got).all(), "a layer's output is not finite"
        return out

    impl_class.forward = forward


def prompts(count: int, length: int, shift: int = 0) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(i * 37 + j * 11 + shift) % 1000 + 5 for j in range(length)]} for i in range(count)]


def run(folder: Path, sidecar: Path, eager: bool) -> dict[str, list[list[int]]]:
    """All cases on one engine; returns their answers."""
    from vllm import LLM, SamplingParams

    from benchmarks.shapes import liven

    errors: list[float] = []
    if eager:
        from vllm_oscar.integration.cuda import CudaImpl

        check_layers(CudaImpl, errors)
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype="oscar",
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        block_size=16,
        num_gpu_blocks_override=900,  # sixteen sequences of 724 tokens just fit; with others cached they preempt
        gpu_memory_utilization=0.3,
        enforce_eager=eager,
        seed=0,
        additional_config={"oscar": {"sidecar": str(sidecar)}},
    )
    llm.apply_model(liven)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = {}
    for name, batch in {
        "short prompts": prompts(3, 40),
        "chunked prefill with history": prompts(2, 1700),
        "prefix hit": prompts(2, 1700),
        "mixed lengths": [*prompts(4, 30, 5), *prompts(1, 1300, 9), *prompts(3, 600, 3)],
        "sixteen sequences, preempted": prompts(16, 890, 2),
    }.items():
        first = len(errors)
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        answers[name] = [list(o.outputs[0].token_ids) for o in outputs]
        if eager:
            seen = errors[first:]
            verdict = "PASS" if seen and max(seen) < 1 else "FAIL"
            print(f"{verdict} {name}: {len(seen)} layer outputs, worst error {max(seen):.0%} of tolerance", flush=True)
    return answers


def main() -> None:
    from benchmarks.shapes import model_folder, random_sidecar

    if len(sys.argv) > 1:  # one run in a process of its own
        *paths, mode = sys.argv[1:]
        model, rotations, answers_file = map(Path, paths)
        answers_file.write_text(json.dumps(run(model, rotations, mode == "eager")))
        return
    root = Path("/tmp/oscar-verify")
    for changes in ({}, {"head_dim": 64, "num_key_value_heads": 4}):
        folder = model_folder("tiny", root, **changes)
        sidecar = random_sidecar(folder)
        print(f"-- {folder.name}", flush=True)
        answers = []
        for mode in ("eager", "graphs"):
            print(f"   {mode}", flush=True)
            out = root / f"{mode}.json"
            out.unlink(missing_ok=True)
            subprocess.run([sys.executable, __file__, str(folder), str(sidecar), str(out), mode], check=False)
            answers.append(json.loads(out.read_text()) if out.exists() else {})
        eager, graphs = answers
        for name in eager:
            # torch.compile rounds elsewhere, so texts may part late; a wrong graph parts at once
            pairs = list(zip(eager[name], graphs.get(name, []), strict=False))
            same = sum(a[:4] == b[:4] for a, b in pairs)
            verdict = "PASS" if pairs and same >= 0.8 * len(pairs) else "FAIL"
            print(f"{verdict} {name}: {same} of {len(pairs)} answers begin alike with CUDA graphs", flush=True)


if __name__ == "__main__":
    main()
