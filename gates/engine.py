"""Correctness in real vLLM on a GPU: every layer's output in every step against the torch reference.

    python -m gates.engine

Small models with random weights run through prompts, chunks, decode, prefix hits, preemption and mixed batches, with
CUDA graphs as vLLM has them by default, or without torch.compile where that is beside the point; some eagerly as well.
After each step, also one that a graph replayed, the reference reads the same pages and copies and must agree
(see observing.py), and so must the counts of reads. The forward and the builder must not wait for the device, nor
take memory in a decode step; no kernel may be compiled after the engine reports ready. Some settings change weights,
sleep, serve adapters, run short of BF16 copies, or follow keys until they are encoded again. The engines run side by
side, a process each. Prints PASS or FAIL per case; ends with 1 if anything failed.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from benchmarks.models.heads import MIMO, head_folder, head_weights
from benchmarks.models.hybrids import HYBRIDS
from benchmarks.models.shapes import GEMMA2, GPT_OSS, SHAPES, prompts
from gates.side_by_side import Process, failed, side_by_side

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHINDUCTOR_COMPILE_THREADS="2", VLLM_LOGGING_LEVEL="WARNING")
os.environ["VLLM_OSCAR_UNVERIFIED"] = "1"  # this is where it is verified
ROOT = Path(__file__).resolve().parent.parent
Ask = Callable[..., list[Any]]  # prompts and arguments of LLM.generate -> its outputs
Verdicts = Iterator[tuple[bool, str]]
DECODE_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}  # no torch.compile: faster
LONG = 1700  # tokens of a prompt in four chunks


def answers(outputs: list[Any]) -> list[Any]:
    """Token ids, and their log probability: random models say the same whatever they read, but not as surely."""
    return [(list(one.token_ids), round(one.cumulative_logprob, 4)) for one in (out.outputs[0] for out in outputs)]


def found(outputs: list[Any]) -> int:
    """Tokens that the prefix cache had."""
    return sum(output.num_cached_tokens for output in outputs)


def new_weights_and_sleep(llm: Any, folder: Path, ask: Ask) -> Verdicts:
    """Graphs replay over weights, calibration and pool that were moved, lost and brought back."""
    from safetensors.torch import load_file

    def negated() -> Iterator[tuple[str, Any]]:
        for name, tensor in load_file(folder / "model.safetensors").items():
            yield name, -tensor if name.endswith("v_proj.weight") else tensor

    def reload(**given: Any) -> None:
        llm.collective_rpc("reload_weights", kwargs=given)
        llm.reset_prefix_cache()

    batch = prompts(2, LONG, 4)
    llm.reset_prefix_cache()
    before = answers(ask(batch))
    again = ask(batch)
    yield found(again) > 0, f"the prefix cache has {found(again)} tokens"
    reload(weights_iterator=negated())
    yield answers(ask(batch)) != before, "with other weights, other answers"
    reload()
    yield answers(ask(batch)) == before, "with the old weights from the disk, the old answers"
    llm.sleep(level=1)
    llm.wake_up()
    after = ask(batch)
    yield answers(after) == before, "after sleep, the same answers"
    yield found(after) == 0, f"after sleep, the prefix cache has {found(after)} tokens"
    again = ask(batch)
    yield found(again) > 0, f"then it has {found(again)}"
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    reload()
    llm.wake_up(tags=["kv_cache"])
    after = ask(batch)
    yield answers(after) == before, "after deep sleep and a reload, the same answers"
    yield found(after) == 0, f"after deep sleep, the prefix cache has {found(after)} tokens"


def adapter(llm: Any, folder: Path, ask: Ask) -> Verdicts:
    from vllm.lora.request import LoRARequest

    from benchmarks.models.shapes import random_adapter

    request = LoRARequest("random", 1, str(random_adapter(folder)))
    batch = prompts(2, LONG, 4)
    llm.reset_prefix_cache()
    plain, adapted = answers(ask(batch)), ask(batch, lora_request=request)
    yield answers(adapted) != plain, "an adapter gives other answers"
    yield found(adapted) == 0, f"the adapter's prefix cache has {found(adapted)} tokens of the model's"
    llm.reset_prefix_cache()
    yield answers(ask(batch)) == plain, "without it, the model's own again"


def shrunk(llm: Any, folder: Path, ask: Ask) -> Verdicts:
    from vllm_oscar.integration.runtime import OscarRuntime

    counts = OscarRuntime.shared(llm.llm_engine.vllm_config).statistics()
    yield counts["shrunk_steps"] > 0, f"the window shrank in {counts['shrunk_steps']} steps"
    yield counts["evicted_blocks"] > 0, f"{counts['evicted_blocks']} copies were given up"


def offloaded(llm: Any, folder: Path, ask: Ask) -> Verdicts:
    """Prompts come back from the host's memory into pages full of ones: as they left, and nothing else with them."""
    import torch

    from vllm_oscar.integration.runtime import oscar_impls

    layers = [
        layer
        for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        if getattr(layer, "impl", None) in oscar_impls(llm.llm_engine.vllm_config)
    ]
    block_size = layers[0].impl.layout.block_size

    def rows() -> list[torch.Tensor]:
        return [layer.kv_cache.flatten(1).cpu() for layer in layers]

    batch = prompts(2, LONG, 8)
    llm.reset_prefix_cache()
    ask(batch)
    ask(prompts(1, 40, 99))  # steps in which what was stored gets there
    before = rows()
    llm.reset_prefix_cache()
    for layer in layers:
        layer.kv_cache.fill_(0xFF)
    back = ask(batch)
    tokens = found(back)
    yield tokens >= len(batch) * (LONG - 2 * block_size), f"{tokens} of {len(batch) * LONG} tokens came back"
    moved, allocated = tokens // block_size, len(batch) * -(-(LONG + 24) // block_size) + 1  # and the null block
    for number, (old, new) in enumerate(zip(before, rows(), strict=True)):
        written = new[(new != 0xFF).any(1)]
        known = {bytes(row.numpy()) for row in old}
        same = sum(bytes(row.numpy()) in known for row in written)
        yield same >= moved, f"layer {number}: {same} pages as they were, {moved} moved"
        yield written.shape[0] <= allocated, f"layer {number}: {written.shape[0]} pages written, {allocated} allocated"
    local = ask(batch)
    yield found(local) >= tokens, f"then the prefix cache has {found(local)} tokens"
    yield answers(local) == answers(back), "answers from the prefix cache are those from the host's memory"


@dataclass(frozen=True)
class Setting:
    """What one engine runs.

    Attributes:
        model: changes of the "tiny" model
        options: of the engine; oscar: of ours
        turning: pairs in which the sidecar's keys turn, in every other layer
        group_size: the sidecar's
        bits: of the sidecar's keys and values; layers take them in turn
        modes: with CUDA graphs, eagerly
        weights: whether they are on the disk; else they are vLLM's dummies
        mxfp4: whether those of experts are in MXFP4
        head: speculative method and number of drafts, where a head beside the model drafts
        more: what comes after the usual cases
        reencoded: whether decoding goes on until keys leave the window, to see them encoded again
        audited: whether the pool is, in every step
        since: the first vLLM that runs it
    """

    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    oscar: dict[str, Any] = field(default_factory=dict)
    turning: int = 0
    group_size: int = 0
    bits: tuple[tuple[int, int], ...] = ((2, 2),)
    modes: tuple[str, ...] = ("graphs",)
    weights: bool = False
    mxfp4: bool = False
    head: tuple[str, int] | None = None
    more: Callable[[Any, Path, Ask], Verdicts] | None = None
    reencoded: bool = False
    audited: bool = False
    since: str = "0.26"


BOTH = ("graphs", "eager")
# on the host, which knows how many each request has
SEVERAL = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFTS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DEEPER = {"num_hidden_layers": 4}  # an EAGLE-3 head takes the states of three
GPT_OSS_4 = GPT_OSS | DEEPER | {"layer_types": ["sliding_attention", "full_attention"] * 2}
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}  # where layers that slide keep all tokens


def hybrid(family: str, blocks: int = 60, **options: Any) -> Setting:
    """A model with states beside attention. Its blocks have hundreds of tokens (LFM2's 64), so that sixteen sequences
    do not fit and some are preempted."""
    return Setting(
        HYBRIDS[family](SHAPES["tiny"]["hidden_size"], SHAPES["tiny"]["num_hidden_layers"]),
        DECODE_GRAPHS | {"num_gpu_blocks_override": blocks} | options,
        weights=True,
        since="0.29",
    )


# reaches from before the window to keys that were written by decoding and have left it
Reencoded = functools.partial(Setting, options=DECODE_GRAPHS, oscar={"sink": 16, "window": 64}, reencoded=True)
SETTINGS: dict[str, Setting] = {
    # blocks of 16: sixteen sequences of 724 tokens just fit; with others cached they preempt
    "D128": Setting(options={"block_size": 16, "num_gpu_blocks_override": 900}, modes=BOTH),
    "D64": Setting({"head_dim": 64, "num_key_value_heads": 4}),
    "D256, GQA 8, FP16": Setting({"head_dim": 256, "num_key_value_heads": 1}, {"dtype": "float16"}),
    "windows and soft cap": Setting(GEMMA2),
    "gpt-oss": Setting(GPT_OSS, modes=BOTH, weights=True),
    "gpt-oss, MXFP4, drafts": Setting(GPT_OSS, {"speculative_config": DRAFTS}, weights=True, mxfp4=True),
    "windows in BF16": Setting(GEMMA2, {"kv_cache_dtype_skip_layers": ["sliding_window"]}, since="0.28"),
    "a layer in BF16": Setting(options={"kv_cache_dtype_skip_layers": ["0"]}),
    "means that turn": Setting(turning=3),
    "steps of 8,192": Setting(options={"max_model_len": 8448, "max_num_batched_tokens": 8192}),
    "drafts of several lengths": Setting(options={"speculative_config": SEVERAL}, modes=("eager",)),
    "drafts": Setting(options={"speculative_config": DRAFTS}, modes=BOTH),
    "EAGLE-3, 1 draft": Setting(DEEPER, head=("eagle3", 1)),
    "EAGLE-3, 3 drafts": Setting(DEEPER, head=("eagle3", 3), modes=BOTH),
    "EAGLE-3, 5 drafts, short of blocks": Setting(
        DEEPER, {"block_size": 16, "num_gpu_blocks_override": 900}, head=("eagle3", 5)
    ),
    "EAGLE, D64, 3 drafts": Setting({"head_dim": 64}, DECODE_GRAPHS, head=("eagle", 3)),
    "MTP, 1 draft": Setting(MIMO, head=("mtp", 1)),
    "MTP, 3 drafts": Setting(MIMO, head=("mtp", 3)),
    "gpt-oss, EAGLE-3, 3 drafts": Setting(GPT_OSS_4, ONE_GROUP, head=("eagle3", 3), weights=True),
    "D80, turning, new weights, sleep": Setting(
        {"head_dim": 80}, DECODE_GRAPHS | {"enable_sleep_mode": True}, turning=3, weights=True,
        more=new_weights_and_sleep,
    ),
    "D96, LoRA": Setting(
        {"head_dim": 96}, DECODE_GRAPHS | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}, more=adapter
    ),
    "D192, FP8 weights": Setting({"head_dim": 192}, DECODE_GRAPHS | {"quantization": "fp8"}, weights=True),
    # 39 blocks of 64 tokens where sixteen requests need 96
    "groups of 64, short of copies": Setting(
        options=DECODE_GRAPHS, oscar={"pool_share": 0.0025}, group_size=64, more=shrunk, audited=True
    ),
    "pages of two sizes": Setting(bits=((3, 2), (4, 4)), modes=BOTH),
    "pages of two sizes, D64, drafts": Setting(
        {"head_dim": 64}, DECODE_GRAPHS | {"speculative_config": DRAFTS}, bits=((4, 2), (2, 4))
    ),
    "offloading": Setting(options={"kv_offloading_size": 1}, more=offloaded, audited=True, since="0.29"),
    "offloading, pages of two sizes": Setting(
        options=DECODE_GRAPHS | {"kv_offloading_size": 1}, bits=((3, 2), (4, 4)), more=offloaded, since="0.29"
    ),
    "Qwen3-Next": replace(hybrid("qwen3_next"), modes=BOTH),
    "Qwen3-Next, drafts": hybrid("qwen3_next", speculative_config=DRAFTS),
    "Qwen3.5": hybrid("qwen3_5"),
    "Qwen3.5, experts, audited": replace(hybrid("qwen3_5_moe"), audited=True),
    "Granite 4": hybrid("granitemoehybrid"),
    "LFM2": hybrid("lfm2", 240),
    "Nemotron-H": replace(hybrid("nemotron_h"), modes=BOTH),
    "Nemotron-H, drafts, audited": replace(hybrid("nemotron_h", speculative_config=DRAFTS), audited=True),
    "Falcon-H1": hybrid("falcon_h1"),
    "encoded again": Reencoded(),
    "encoded again, 3 bits": Reencoded(bits=((3, 2),)),
    "encoded again, groups of 32": Reencoded(group_size=32),
    "encoded again, D64, groups of 32": Reencoded({"head_dim": 64}, group_size=32),
}  # fmt: skip


def run(setting: Setting, folder: Path, sidecar: Path, eager: bool) -> Verdicts:
    """All cases on one engine."""
    from vllm import LLM, SamplingParams

    from benchmarks.models.shapes import liven
    from gates.observing import Observer, Reencoding
    from vllm_oscar.integration.cuda import CudaImpl, CudaMetadataBuilder
    from vllm_oscar.integration.runtime import OscarRuntime

    observer = Observer(CudaImpl, CudaMetadataBuilder)
    seen = observer.seen
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 240,
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
    } | setting.options
    if setting.head:
        method, drafts = setting.head
        options["speculative_config"] = {"method": method, "num_speculative_tokens": drafts}
        if method != "mtp":  # whose head is in the model's own files
            head = (head_weights if setting.weights else head_folder)(folder, method)
            options["speculative_config"]["model"] = str(head)
    llm = LLM(
        str(folder),
        load_format="auto" if setting.weights else "dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype="oscar",
        max_num_seqs=16,
        gpu_memory_utilization=0.2,  # of what is free at the start; the size below is what counts
        kv_cache_memory_bytes=2 << 30,
        enforce_eager=eager,
        seed=0,
        additional_config={
            "oscar": {"sidecar": str(sidecar), **setting.oscar},
            "gdn_prefill_backend": "triton",  # of linear attention beside ours: not every machine has flashinfer's
        },
        **options,
    )
    if not setting.weights:
        llm.apply_model(liven)
    counters = OscarRuntime.shared(llm.llm_engine.vllm_config).counters
    made_up = counters.reads.clone()  # by requests that vLLM warms up with
    observer.begin(llm)

    def ask(batch: list[Any], tokens: int = 24, **given: Any) -> list[Any]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
        return llm.generate(batch, sampling, use_tqdm=False, **given)

    cases = {
        "short prompts": prompts(3, 40),
        "chunked prefill with history": prompts(2, LONG),
        "prefix hit": prompts(2, LONG),
        "mixed lengths": [*prompts(4, 30, 5), *prompts(1, 1300, 9), *prompts(3, 600, 3)],
        "sixteen sequences": prompts(16, 890, 2),
    }
    if options["max_num_batched_tokens"] > 4096:  # an encoder's program then takes several tiles
        cases = {"a step of 8,192": prompts(8, 1024, 7), "a prompt of 8,192": prompts(1, 8192, 7)}
    if setting.reencoded:
        observer.reencoding = Reencoding()
        # of eight lengths: keys become due in every step between two calls of `reencode`
        ask([prompt for length in range(50, 58) for prompt in prompts(1, length, 2 * length)], tokens=110)
        verdict, observer.reencoding = observer.reencoding.verdict(), None
        yield verdict.sound, f"keys that decoding wrote, in each step: {verdict}"
    for case, batch in cases.items():
        first = len(seen.errors)
        ask(batch)
        errors = seen.errors[first:]
        worst = f"worst error {max(errors):.0%} of tolerance" if errors else "nothing was checked"
        yield bool(errors) and max(errors) < 1, f"{case}: {len(errors)} layer outputs, {worst}"
    if setting.more:
        first = len(seen.errors)
        yield from setting.more(llm, folder, ask)
        errors = seen.errors[first:]
        yield (
            max(errors, default=0) < 1,
            f"meanwhile: {len(errors)} layer outputs, worst error {max(errors, default=0):.0%} of tolerance",
        )
    counted, wanted = (counters.reads - made_up).tolist(), [sum(kind) for kind in zip(*seen.reads, strict=True)]
    yield counted == wanted, f"counted reads {counted}, the reference's {wanted}"
    yield not int(counters.saturated_rows), f"{int(counters.saturated_rows):,} rows saturated"
    yield (seen.replayed > 0) != eager, f"{seen.replayed} steps replayed by a CUDA graph"
    if not setting.audited:  # audits wait for the device, and take memory
        yield not seen.waits, f"host waited for the device at: {sorted(seen.waits) or 'no place'}"
        yield not seen.allocations, f"memory taken in decode steps by: {sorted(seen.allocations) or 'nobody'}"


def compiled_late(log: list[str]) -> list[str]:
    """Our kernels that vLLM's JIT monitor saw being compiled after the engine was ready."""
    sources = "".join(path.read_text() for path in (ROOT / "vllm_oscar" / "kernels").glob("*.py"))
    ours = set(re.findall(r"^@triton\.jit.*\ndef (\w+)", sources, re.MULTILINE))
    seen = {match[1] for line in log if (match := re.search(r"compilation during inference: (\w+)", line))}
    return sorted(seen & ours)


def main() -> int:
    from benchmarks.models.shapes import model_folder, random_sidecar, random_weights, to_mxfp4
    from vllm_oscar.integration.seams import vllm_version

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--engine", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:  # in a process of its own
        name, folder, sidecar, mode = args.engine
        for passed, line in run(SETTINGS[name], Path(folder), Path(sidecar), mode == "eager"):
            print(f"{'PASS' if passed else 'FAIL'} {name}, {mode}: {line}", flush=True)
        return 0
    root = Path("/tmp/oscar-verify")
    processes = {}
    for name in args.only:
        setting = SETTINGS[name]
        if vllm_version() < Version(setting.since):
            print(f"LEFT OUT {name}: needs vLLM {setting.since}")
            continue
        folder = model_folder("tiny", root / re.sub(r"\W+", "-", name), **setting.model)
        sidecar = random_sidecar(folder, setting.turning, setting.group_size, setting.bits)
        if setting.weights:
            random_weights(folder)
        if setting.mxfp4:
            to_mxfp4(folder)
        environment = {"VLLM_OSCAR_AUDIT": "1"} if setting.audited else {}
        for mode in setting.modes:
            command = [sys.executable, "-m", "gates.engine", "--engine", name, str(folder), str(sidecar), mode]
            processes[f"{name}, {mode}"] = Process(command, folder / f"{mode}.log", environment)
    any_failed = False
    for name, lines in side_by_side(processes):
        late = compiled_late(lines)
        print(f"{'FAIL' if late else 'PASS'} {name}: compiled while serving: {late or 'nothing'}", flush=True)
        any_failed |= failed(lines) or bool(late)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
