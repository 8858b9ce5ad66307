#!/usr/bin/env python3
"""Correctness in real vLLM on a GPU: every layer's output in every step against the torch reference.

    python benchmarks/verify_engine.py

Small models with random weights run eagerly through prompts, chunks, decode, prefix hits, preemption and mixed
batches. After each layer's forward, the reference (attention.read_rows and attend) reads the same pages and copies
and must agree, and so must the counts of reads; the forward and the builder must not wait for the device. A second
run with CUDA graphs must give the same texts, and no kernel may be compiled after the engine reports ready. The
engines run side by side, a process each. Prints PASS or FAIL per case; ends with 1 if anything failed.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHINDUCTOR_COMPILE_THREADS="2", VLLM_LOGGING_LEVEL="WARNING")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import GEMMA2  # noqa: E402

# Relative errors, by norm. Rounding a decode's output to BF16 costs 0.002; a prefill restores history to BF16 rows,
# whose rounding random queries with scores of some tens amplify.
DECODE, PREFILL = 0.01, 0.05

# name -> changes of the model, options of the engine
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # blocks of 16: sixteen sequences of 724 tokens just fit; with others cached they preempt
    "D128": ({}, {"block_size": 16, "num_gpu_blocks_override": 900}),
    "D64": ({"head_dim": 64, "num_key_value_heads": 4}, {}),
    "D256, GQA 8, FP16": ({"head_dim": 256, "num_key_value_heads": 1}, {"dtype": "float16"}),
    "windows and soft cap": (GEMMA2, {}),
    "a layer in BF16": ({}, {"kv_cache_dtype_skip_layers": ["0"]}),
    "means that turn": ({}, {}),
    "steps of 8,192": ({}, {"max_model_len": 8448, "max_num_batched_tokens": 8192}),
    "drafts": (
        {},
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ),
}

TURNING = {"means that turn": 3}  # pairs of the sidecar's keys, in every other layer

WAITS: set[str] = set()  # where the host waited for the device


@contextlib.contextmanager
def noting_waits() -> Iterator[None]:
    """Note operations that wait for the device."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    WAITS.update(f"{w.filename}:{w.lineno}" for w in seen if "called a synchronizing" in str(w.message))


def check_layers(impl_class: Any, errors: list[float], reads: list[list[int]]) -> None:
    """Wrap the layer's forward: recompute it with the reference, note the error in units of what is tolerated, and
    the reads (see StoredRows.reads)."""
    import torch

    from vllm_oscar.attention import attend, read_rows

    original = impl_class.forward

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, **kwargs: Any
    ) -> Any:
        with noting_waits():
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
            reads.append(stored.reads(before, self.runtime.config.sink, self.sliding_window).tolist())
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


def check_builder(builder_class: Any) -> None:
    """Wrap `build`: it waits for the device only where drafts of several lengths share a batch."""
    original = builder_class.build

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        with noting_waits() if self.runtime.decode_threshold == 1 else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    builder_class.build = build


def run(name: str, folder: Path, sidecar: Path, eager: bool) -> dict[str, list[list[int]]]:
    """All cases on one engine; returns their answers."""
    from vllm import LLM, SamplingParams

    from benchmarks.shapes import liven

    errors: list[float] = []
    reads: list[list[int]] = []
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 240,
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "additional_config": {"oscar": {"sidecar": str(sidecar)}},
    } | SETTINGS[name][1]
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype="oscar",
        max_num_seqs=16,
        gpu_memory_utilization=0.2,  # of what is free at the start; the size below is what counts
        kv_cache_memory_bytes=2 << 30,
        enforce_eager=eager,
        seed=0,
        **options,
    )
    llm.apply_model(liven)
    if eager:
        from vllm_oscar.integration.cuda import CudaImpl, CudaMetadataBuilder
        from vllm_oscar.integration.runtime import OscarRuntime

        counters = OscarRuntime.shared(llm.llm_engine.vllm_config).counters
        made_up = counters.reads.clone()  # by requests that vLLM warms up with
        check_layers(CudaImpl, errors, reads)
        check_builder(CudaMetadataBuilder)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = {}
    cases = {
        "short prompts": prompts(3, 40),
        "chunked prefill with history": prompts(2, 1700),
        "prefix hit": prompts(2, 1700),
        "mixed lengths": [*prompts(4, 30, 5), *prompts(1, 1300, 9), *prompts(3, 600, 3)],
        "sixteen sequences": prompts(16, 890, 2),
    }
    if options["max_num_batched_tokens"] > 4096:  # an encoder's program then takes several tiles
        cases = {"a step of 8,192": prompts(8, 1024, 7), "a prompt of 8,192": prompts(1, 8192, 7)}
    for case, batch in cases.items():
        first = len(errors)
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        answers[case] = [list(o.outputs[0].token_ids) for o in outputs]
        if eager:
            seen = errors[first:]
            verdict = "PASS" if seen and max(seen) < 1 else "FAIL"
            worst = f"worst error {max(seen):.0%} of tolerance" if seen else "nothing was checked"
            print(f"{verdict} {name}: {case}: {len(seen)} layer outputs, {worst}", flush=True)
    if eager:
        counted, wanted = (counters.reads - made_up).tolist(), [sum(kind) for kind in zip(*reads, strict=True)]
        print(f"{'PASS' if counted == wanted else 'FAIL'} {name}: counted reads {counted}, the reference's {wanted}")
        saturated = int(counters.saturated_rows)
        print(f"{'FAIL' if saturated else 'PASS'} {name}: {saturated:,} rows saturated")
        print(f"{'FAIL' if WAITS else 'PASS'} {name}: host waited for the device at: {sorted(WAITS) or 'no place'}")
    return answers


def compiled_late(log: list[str]) -> list[str]:
    """Our kernels that vLLM's JIT monitor saw being compiled after the engine was ready."""
    sources = "".join(path.read_text() for path in (ROOT / "vllm_oscar" / "kernels").glob("*.py"))
    ours = set(re.findall(r"^@triton\.jit.*\ndef (\w+)", sources, re.MULTILINE))
    seen = {match[1] for line in log if (match := re.search(r"compilation during inference: (\w+)", line))}
    return sorted(seen & ours)


def main() -> int:
    from benchmarks.shapes import model_folder, random_sidecar

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", default=["eager", "graphs"], choices=["eager", "graphs"])
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--engine", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:  # in a process of its own
        name, *paths, mode = args.engine
        model, rotations, answers_file = map(Path, paths)
        answers_file.write_text(json.dumps(run(name, model, rotations, mode == "eager")))
        return 0
    root = Path("/tmp/oscar-verify")
    running = {}
    for name in args.only:
        changes, _ = SETTINGS[name]
        folder = model_folder("tiny", root / name.replace(" ", "-"), **changes)
        sidecar = random_sidecar(folder, TURNING.get(name, 0))
        for mode in args.modes:
            out = folder / f"{mode}.json"
            out.unlink(missing_ok=True)
            command = [sys.executable, __file__, "--engine", name, str(folder), str(sidecar), str(out), mode]
            with (folder / f"{mode}.log").open("w") as log:
                running[name, mode] = out, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    failed = False
    answers = {}
    for (name, mode), (out, process) in running.items():
        code = process.wait()
        lines = out.with_suffix(".log").read_text().splitlines()
        print(*(line for line in lines if line.startswith(("PASS", "FAIL"))), sep="\n", flush=True)
        failed |= any(line.startswith("FAIL") for line in lines)
        if code:
            failed = True
            print(f"FAIL {name}, {mode}: ended with {code}", *lines[-25:], sep="\n", flush=True)
        late = compiled_late(lines)
        failed |= bool(late)
        print(f"{'FAIL' if late else 'PASS'} {name}, {mode}: compiled while serving: {late or 'nothing'}", flush=True)
        answers[name, mode] = json.loads(out.read_text()) if out.exists() else {}
    for name in args.only if len(args.modes) == 2 else []:
        for case, eager in answers[name, "eager"].items():
            # torch.compile rounds elsewhere, so texts may part late; a wrong graph parts at once
            pairs = list(zip(eager, answers[name, "graphs"].get(case, []), strict=False))
            same = sum(a[:4] == b[:4] for a, b in pairs)
            verdict = "PASS" if pairs and same >= 0.8 * len(pairs) else "FAIL"
            failed |= verdict == "FAIL"
            print(f"{verdict} {name}: {case}: {same} of {len(pairs)} answers begin alike with CUDA graphs", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
