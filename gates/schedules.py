"""Model runners and async scheduling in real vLLM: is a request told the same whatever goes on around it?

    python -m gates.schedules [--only "V2, async, 3 drafts" ...] [--model FOLDER --sidecar FILE]

{V1, V2} x {async, not} x n-gram drafts {none, 1, 3, 5}, an engine each, in which requests join in every step and end in
most; some find their prefix in the cache. Then prompts as short as drafts, and prompts whose last chunk is: vLLM calls
batches of such prompts decodes, by their shape. Alone, and four at a time. What is compared, token by token, is the log
probability that V1 without drafts gives to each request alone.

Within sink and window, sums in another order are all that may differ; beyond them, a few codes may fall on their other
side as well, and drafts move the step in which keys are encoded again. Answers may part where the one alone was
undecided. Prints PASS or FAIL per case; ends with 1 if anything failed. Without a GPU: the torch reference, V2 in
Triton's interpreter (which does not take its kernel for n-grams), no async scheduling.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gates.side_by_side import Process, compared

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("/tmp/oscar-schedules")
SINK, WINDOW, CHUNK, PREFIX = 64, 256, 128, 640  # tokens; CHUNK: of a prompt in a step
DRAFTS = (0, 1, 3, 5)
# difference of a token's log probability, mean and worst: near, where all is read in BF16, and far. Measured without a
# GPU, V2, and V1 with three drafts: near 0.0013 and 0.016 (a bit of a BF16 logit), far 0.0127 and 0.110
BOUNDS = {"near": (0.01, 0.1), "far": (0.06, 0.6)}
ON_GPU = torch.cuda.is_available()


class Engine(NamedTuple):
    """How requests are scheduled."""

    v2: bool = False
    is_async: bool = False
    drafts: int = 0

    def __str__(self) -> str:
        return f"V{1 + self.v2}, {'async' if self.is_async else 'sync'}, {self.drafts or 'no'} drafts"


ENGINES = {
    str(engine): engine
    for engine in (
        Engine(v2, is_async, drafts)
        for v2 in (False, True)
        for is_async in ((False, True) if ON_GPU else (False,))
        for drafts in (DRAFTS if ON_GPU or not v2 else (0,))
    )
}
ALONE = "each alone"


@dataclass(frozen=True)
class Request:
    """A prompt and the length of its answer."""

    prompt: tuple[int, ...]
    tokens: int

    @property
    def is_near(self) -> bool:
        return len(self.prompt) + self.tokens <= SINK + WINDOW


def phrases(length: int, seed: int) -> tuple[int, ...]:
    """A prompt that says the same few things again and again, so that n-grams are found."""
    generator = torch.Generator().manual_seed(seed)
    said = [torch.randint(5, 1000, (12,), generator=generator).tolist() for _ in range(3)]
    order = torch.randint(0, 3, (length // 12 + 1,), generator=generator).tolist()
    return tuple([token for which in order for token in said[which]][:length])


def crowd() -> list[Request]:
    """Requests of all lengths, short answers beside long ones, so that one ends in most steps; every fifth has a prefix
    that is in the cache."""
    prefix = phrases(PREFIX, 0)
    requests = []
    for number in range(60):
        length = (17, 150, 700, 40, 260)[number % 5] + 7 * number
        prompt = phrases(length, 100 + number)
        if number % 5 == 4:
            prompt = (*prefix, *prompt[: length // 3])
        requests.append(Request(prompt, 1 + 11 * number % 37))
    return requests


def short(shift: int) -> list[Request]:
    """Prompts of exactly 1 to k + 2 tokens, for the largest k."""
    return [Request(phrases(length, shift + length), 12) for length in range(1, max(DRAFTS) + 3)]


def short_chunk(shift: int) -> list[Request]:
    """Prompts whose last chunk has 1 to k + 1 tokens, after one chunk and after four."""
    lengths = [chunks * CHUNK + rest for chunks in (1, 4) for rest in range(1, max(DRAFTS) + 2)]
    return [Request(phrases(length, shift + length), 12) for length in lengths]


# by name: the requests, and how many of them start together; none: one joins in every step
CASES: dict[str, tuple[list[Request], int | None]] = {
    "one joins in every step": (crowd(), None),
    "short prompts, alone": (short(1000), 1),
    "short prompts, four at a time": ([request for i in range(4) for request in short(2000 + 100 * i)], 4),
    "short last chunks, alone": (short_chunk(3000), 1),
    "short last chunks, four at a time": ([r for i in range(4) for r in short_chunk(10000 + 1000 * i)], 4),
}


def serve(llm: Any, requests: list[Request], together: int | None) -> list[dict[str, Any]]:
    """Answers in the order of the requests.

    Args:
        together: that start together, the next ones once these have ended; None: one joins in every step
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    answers: dict[int, dict[str, Any]] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        joining = 1 if together is None else 0 if engine.has_unfinished_requests() else together
        for number, request in waiting[:joining]:
            sampling = SamplingParams(
                temperature=0, max_tokens=request.tokens, ignore_eos=True, detokenize=False, logprobs=5,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            engine.add_request(f"{number}", {"prompt_token_ids": list(request.prompt)}, sampling)
        waiting = waiting[joining:]
        for output in engine.step():
            if output.finished:
                (answer,) = output.outputs
                answers[int(output.request_id)] = {
                    "tokens": list(answer.token_ids),
                    "likely": [
                        {str(token): one.logprob for token, one in position.items()} for position in answer.logprobs
                    ],
                    "found": output.num_cached_tokens,
                }
    return [answers[number] for number in range(len(requests))]


def run(engine: Engine, alone: bool, model: str, sidecar: str) -> dict[str, Any]:
    """All cases on one engine: answers by case, and how many tokens were drafted and accepted."""
    from vllm import LLM

    drafts = {
        "method": "ngram_gpu" if ON_GPU else "ngram",
        "num_speculative_tokens": engine.drafts,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    compilation: dict[str, Any] = {"mode": 0}
    if ON_GPU:  # V1 compiles its kernel for n-grams, and starts with no other mode
        compilation = {"mode": 3 if engine.drafts and not engine.v2 else 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        kv_cache_dtype="oscar",
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=CHUNK,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.03,  # the engines run side by side
        async_scheduling=engine.is_async,
        speculative_config=drafts if engine.drafts else None,
        compilation_config=compilation,
        disable_log_stats=False,
        seed=0,
        additional_config={"oscar": {"sidecar": sidecar, "sink": SINK, "window": WINDOW, "pool_share": 0.4}},
    )
    config = llm.llm_engine.vllm_config
    assert config.scheduler_config.async_scheduling == engine.is_async and config.use_v2_model_runner == engine.v2
    serve(llm, [Request(phrases(PREFIX, 0), 1)], 1)  # from now on this prefix is in the cache
    answers = {case: serve(llm, requests, 1 if alone else together) for case, (requests, together) in CASES.items()}
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    names = [f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted")]
    return {"answers": answers, "drafts": [counts.get(name, 0) for name in names]}


class Difference(NamedTuple):
    """Of one answer to the same request: for each token, and whether the answers part where the base was decided."""

    apart: list[float]
    parted: bool
    wrongly: bool


def difference(answer: dict[str, Any], base: dict[str, Any], worst: float) -> Difference:
    """Compare until the answers part.

    Args:
        worst: log probabilities so far apart may change places
    """
    apart: list[float] = []
    for token, likely, base_token, base_likely in zip(
        answer["tokens"], answer["likely"], base["tokens"], base["likely"], strict=True
    ):
        if token != base_token:
            lost = base_likely[str(base_token)] - base_likely.get(str(token), float("-inf"))
            return Difference(apart, True, lost > 2 * worst)
        apart.append(abs(likely[str(token)] - base_likely[str(token)]))
    return Difference(apart, False, False)


def verdicts(found: dict[str, Any], base: dict[str, Any], drafts: int) -> Iterator[tuple[bool, str]]:
    """For each case, near and far."""
    for case, (requests, _) in CASES.items():
        answers, wanted = found["answers"][case], base["answers"][case]
        hits = [[answer["found"] for answer in each] for each in (answers, wanted)]
        if any(hits[1]):
            yield hits[0] == hits[1], f"{case}: {sum(map(bool, hits[0]))} requests found a prefix in the cache"
        for where, (mean, worst) in BOUNDS.items():
            differences = [
                difference(answer, one, worst)
                for request, answer, one in zip(requests, answers, wanted, strict=True)
                if (request.is_near and not one["found"]) == (where == "near")
            ]
            apart = [value for one in differences for value in one.apart]
            if not apart:
                continue
            parted, wrongly = sum(one.parted for one in differences), sum(one.wrongly for one in differences)
            average, most = sum(apart) / len(apart), max(apart)
            yield (
                average <= mean and most <= worst and not wrongly,
                f"{case}, {where}: {len(differences)} requests, {len(apart)} tokens {average:.4f} apart (of {mean}), "
                f"at most {most:.4f} (of {worst}); {parted} answers part, {wrongly} wrongly",
            )
    if drafts:
        drafted, accepted = found["drafts"]
        yield 0 < accepted < drafted, f"{accepted:.0f} of {drafted:.0f} drafted tokens accepted"


def default_model() -> tuple[str, str]:
    """A checkpoint with random weights, and its sidecar."""
    from benchmarks.models.shapes import model_folder, random_sidecar, random_weights

    folder = model_folder("tiny", FOLDER)
    random_weights(folder)
    return str(folder), str(random_sidecar(folder))


def environment(engine: Engine) -> dict[str, str]:
    """Which runner; without a GPU, V2 needs Triton's interpreter in place of a backend."""
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": str(int(engine.v2)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if engine.drafts and not ON_GPU:
        chosen["NUMBA_NUM_THREADS"] = (
            "1"  # vLLM's proposer: each torch operation would wait a millisecond for its threads
        )
    if engine.v2 and not ON_GPU:
        path = os.pathsep.join(filter(None, [str(ROOT / "tests" / "triton_cpu"), os.environ.get("PYTHONPATH")]))
        chosen |= {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--model", help="folder; default: two layers with random weights")
    parser.add_argument("--sidecar", help="with --model")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:  # in a process of its own
        name, out = args.engine
        alone = name == ALONE
        answered = run(Engine() if alone else ENGINES[name], alone, args.model, args.sidecar)
        Path(out).write_text(json.dumps(answered))
        return 0
    FOLDER.mkdir(exist_ok=True)
    model, sidecar = (args.model, args.sidecar) if args.model else default_model()
    processes, outs = {}, {}
    for number, name in enumerate([ALONE, *args.only]):
        outs[name] = FOLDER / f"{number}.json"
        outs[name].unlink(missing_ok=True)
        command = [sys.executable, "-m", "gates.schedules", "--engine", name, str(outs[name])]
        command += ["--model", str(model), "--sidecar", str(sidecar)]
        processes[name] = Process(command, FOLDER / f"{number}.log", environment(ENGINES.get(name, Engine())))
    any_failed = False
    for name, found, base in compared(processes, outs, ALONE):
        any_failed |= found is None
        if found is not None:
            for passed, line in verdicts(found, base, ENGINES[name].drafts):
                any_failed |= not passed
                print(f"{'PASS' if passed else 'FAIL'} {name}: {line}", flush=True)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
