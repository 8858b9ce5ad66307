"""Run by test_kernels_in_engine.py in a process of its own: the GPU's layer and builder in Triton's interpreter.

The CPU platform's engine gets the classes that GPUs use; a small model with random weights runs through them, in
groups of 32 channels; the mean of its second layer's keys turns with the position, and its first layer is given sink
logits. Prints, for each batch, the
number of layer outputs and the largest error in units of what is tolerated; what was seen of keys that are encoded
again; then the reads that were counted, and the reference's.

With `drafts` behind the folder, n-gram drafts of unequal length instead: prints what each step that verifies some is.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.update(TRITON_INTERPRET="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from benchmarks.models.shapes import liven, model_folder, prompts, random_sidecar  # noqa: E402
from gates.observing import Observer, Reencoding  # noqa: E402
from vllm_oscar.integration import warm_up  # noqa: E402
from vllm_oscar.integration.backend import OscarBackend  # noqa: E402
from vllm_oscar.integration.cuda import CudaImpl, CudaMetadataBuilder  # noqa: E402
from vllm_oscar.integration.runtime import OscarRuntime, oscar_impls  # noqa: E402


def rehearse(vllm_config: Any) -> None:
    """Warm-up, with fewer batches than a GPU needs; prints what it left behind: tokens in pages, reads, slots taken."""
    warm_up.batches = lambda builder: iter([([1, 1], 0), ([3], 17)])
    warm_up.warm_up(vllm_config)
    runtime = OscarRuntime.shared(vllm_config)
    builders = runtime.builders.values()
    pages = sum(int(layer.kv_cache.count_nonzero()) for builder in builders for layer in builder.layers)
    tables = [builder._table(builder.impl.pages(builder.layers[0].kv_cache))[0] for builder in builders]
    reads = int(runtime.counters.reads.count_nonzero())
    print("left behind", pages, reads, *(int((table.block_of_slot >= 0).sum()) for table in tables), flush=True)


def check_positions() -> None:
    """Wrap `build`. Keys written for a wrong position would be read back as those keys, by the reference as well."""
    original = CudaMetadataBuilder.build

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = original(self, *args, **kwargs)
        queries = step.query_start_loc.diff().tolist()
        wanted = [j for after, n in zip(step.seq_lens.tolist(), queries, strict=True) for j in range(after - n, after)]
        assert step.position is not None and step.position[: len(wanted)].tolist() == wanted
        return step

    CudaMetadataBuilder.build = build  # type: ignore[method-assign]


def engine(root: Path, key_encoder: str = "metric", **options: Any) -> Any:
    OscarBackend.get_impl_cls = staticmethod(lambda: CudaImpl)  # type: ignore[method-assign]
    OscarBackend.get_builder_cls = staticmethod(lambda: CudaMetadataBuilder)  # type: ignore[method-assign]
    folder = model_folder("tiny", root, head_dim=64)
    sidecar = random_sidecar(folder, turning=3, group_size=32)
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype="oscar",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        block_size=16,
        num_gpu_blocks_override=64,
        additional_config={"oscar": {"sidecar": str(sidecar), "sink": 16, "window": 40, "key_encoder": key_encoder}},
        **options,
    )


def answers(llm: Any, batch: list[Any], tokens: int) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate(batch, sampling, use_tqdm=False)


def drafts(root: Path) -> None:
    observer = Observer(CudaImpl, CudaMetadataBuilder)
    build = CudaMetadataBuilder.build

    def described(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = build(self, *args, **kwargs)
        lengths = step.query_start_loc.diff().tolist()
        if 1 < max(lengths) <= self.runtime.decode_threshold:
            print("step", lengths, step.num_decodes, len(step.calls), flush=True)
        return step

    CudaMetadataBuilder.build = described  # type: ignore[method-assign]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = engine(root, "ls", speculative_config=speculative)  # which is quick here
    llm.apply_model(liven)
    observer.begin(llm)
    # the first says over and over what the model answers, the second what it does not, the others nothing twice
    answers(llm, [{"prompt_token_ids": [7, 9] * 30}, *prompts(2, 22, 5), {"prompt_token_ids": [5, 5, 8] * 4}], 6)
    print("batch", len(observer.seen.errors), max(observer.seen.errors), flush=True)


def main(root: Path) -> None:
    check_positions()
    reencoding = Reencoding()
    observer = Observer(CudaImpl, CudaMetadataBuilder, reencoding)
    llm = engine(root)
    impl = oscar_impls(llm.llm_engine.vllm_config)[0]
    impl.sink_logits = torch.linspace(-2, 6, impl.num_heads, dtype=impl.runtime.dtype)
    rehearse(llm.llm_engine.vllm_config)
    llm.apply_model(liven)
    observer.begin(llm)
    # within eleven steps a batch of 32 is due in each layer, whose last two or three tokens decoding wrote
    for batch, tokens in ((prompts(1, 30), 12), (prompts(1, 80), 2), ([*prompts(2, 14, 5), *prompts(1, 60, 9)], 2)):
        first = len(observer.seen.errors)
        answers(llm, batch, tokens)
        seen = observer.seen.errors[first:]
        print("batch", len(seen), max(seen), flush=True)
        if tokens > 2:
            print("encoded again", json.dumps(vars(reencoding.verdict())), flush=True)
            observer.reencoding = None
    counters = OscarRuntime.shared(llm.llm_engine.vllm_config).counters
    print("reads", counters.reads.tolist(), [sum(kind) for kind in zip(*observer.seen.reads, strict=True)], flush=True)


if __name__ == "__main__":
    (drafts if sys.argv[2:] else main)(Path(sys.argv[1]))
