"""Run by test_kernels_in_engine.py in a process of its own: the GPU's layer and builder in Triton's interpreter.

The CPU platform's engine gets the classes that GPUs use; a small model with random weights runs through them, and the
mean of its second layer's keys turns with the position. Prints, for each batch, the number of layer outputs and the
largest error in units of what is tolerated; then the reads that were counted, and the reference's, and for how many
tokens keys were encoded again.
"""

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.update(TRITON_INTERPRET="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

from vllm import LLM, SamplingParams  # noqa: E402

from benchmarks.shapes import liven, model_folder, random_sidecar  # noqa: E402
from benchmarks.verify_engine import check_layers, prompts  # noqa: E402
from vllm_oscar.integration import warm_up  # noqa: E402
from vllm_oscar.integration.backend import OscarBackend  # noqa: E402
from vllm_oscar.integration.cuda import CudaImpl, CudaMetadataBuilder  # noqa: E402
from vllm_oscar.integration.runtime import OscarRuntime  # noqa: E402
from vllm_oscar.kernels import encode_metric  # noqa: E402


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


def note_reencoding(grown: list[int]) -> None:
    """Wrap `reencode`."""
    original = encode_metric.reencode

    def reencode(*args: Any) -> None:
        grown.append(args[-2])
        original(*args)

    encode_metric.reencode = reencode


def main(root: Path) -> None:
    OscarBackend.get_impl_cls = staticmethod(lambda: CudaImpl)  # type: ignore[method-assign]
    OscarBackend.get_builder_cls = staticmethod(lambda: CudaMetadataBuilder)  # type: ignore[method-assign]
    folder = model_folder("tiny", root, head_dim=64)
    sidecar = random_sidecar(folder, turning=3)
    check_positions()
    grown: list[int] = []
    note_reencoding(grown)
    errors: list[float] = []
    reads: list[list[int]] = []
    check_layers(CudaImpl, errors, reads)
    llm = LLM(
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
        additional_config={"oscar": {"sidecar": str(sidecar), "sink": 16, "window": 32}},
    )
    rehearse(llm.llm_engine.vllm_config)
    llm.apply_model(liven)
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    for batch in (prompts(2, 20), prompts(1, 80), [*prompts(2, 14, 5), *prompts(1, 60, 9)]):
        first = len(errors)
        llm.generate(batch, sampling, use_tqdm=False)
        seen = errors[first:]
        print("batch", len(seen), max(seen), flush=True)
    counters = OscarRuntime.shared(llm.llm_engine.vllm_config).counters
    print("reads", counters.reads.tolist(), [sum(kind) for kind in zip(*reads, strict=True)], flush=True)
    print("encoded again", grown, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
