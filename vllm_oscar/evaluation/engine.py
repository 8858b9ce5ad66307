"""vLLM in this process, forced through its cache, with the hidden states of every token recorded.

A prompt that is prefilled in one chunk attends to its own raw keys and values and never reads what was stored, so
that any cache looks perfect. Here every request advances CHUNK tokens a step, as many requests side by side, and
prefix caching is off: all but a token's own chunk comes out of the cache. Logits are a matrix product away from the
hidden states and are compared in this process, some positions at a time, instead of as millions of logprob objects.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_oscar.evaluation.codecs import Codec
from vllm_oscar.evaluation.listening import EvaluationError, Listener
from vllm_oscar.evaluation.metrics import Scores
from vllm_oscar.evaluation.rewriting import rewrite
from vllm_oscar.integration.batches import Batches
from vllm_oscar.sidecar import ModelFingerprint

if TYPE_CHECKING:
    from vllm import LLM

CHUNK = 16  # tokens that a request advances in a step
CONCURRENT = 8  # requests side by side
FIRST = 512  # first position that is scored: most of what it reads has left sink and window
_POSITIONS = 256  # whose logits are compared at once


class Recorder:
    """Collects the hidden states that the model returns, by window and position.

    Rows of a step belong to whichever requests vLLM put into it. Either of its model runners knows their order; the
    token ids beside the rows prove it.

    Attributes:
        hidden: (windows, context, hidden size), in the model's dtype, on the CPU

    Args:
        runner: vLLM's model runner
        windows: int64 (windows, context), the prompts
    """

    def __init__(self, runner: Any, windows: torch.Tensor) -> None:
        self.hidden = torch.empty(0)
        self._batches = Batches.of(runner)
        self._windows = windows
        self._times_seen = torch.zeros(windows.shape, dtype=torch.int64)
        self._window_of: dict[str, int] = {}

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook of the model."""
        ids, positions = kwargs["input_ids"].cpu(), kwargs["positions"].cpu()
        if not self.hidden.numel():
            self.hidden = torch.zeros(*self._windows.shape, output.shape[-1], dtype=output.dtype)
        for name, _, start, end in self._batches.now():
            window = self._window(name)
            at = slice(int(positions[start]), int(positions[start]) + end - start)
            if not torch.equal(self._windows[window, at], ids[start:end].long()):
                raise EvaluationError(f"rows of request {name} are not the tokens of window {window}")
            self.hidden[window, at] = output[start:end].to("cpu", copy=True)
            self._times_seen[window, at] += 1

    def _window(self, request: str) -> int:
        if request not in self._window_of:
            prompt = torch.tensor(self._batches.prompt(request))
            taken = set(self._window_of.values())
            self._window_of[request] = next(
                index for index, window in enumerate(self._windows)
                if index not in taken and torch.equal(window, prompt)
            )  # fmt: skip
        return self._window_of[request]

    def check(self) -> None:
        """Every token ran exactly once: none was recomputed after a preemption or taken from a prefix cache."""
        if not (self._times_seen == 1).all():
            raise EvaluationError(
                f"{int((self._times_seen != 1).sum())} tokens did not run exactly once; give the engine more KV memory"
            )


@dataclass(frozen=True)
class Answer:
    """What a request answered.

    Attributes:
        ids: its tokens
        hidden: (tokens, hidden size), the state that each of them was chosen from, in the model's dtype, on the CPU
        ended: whether the model ended it, rather than the limit of tokens
    """

    ids: list[int]
    hidden: torch.Tensor
    ended: bool


@contextmanager
def started(model: str, **options: Any) -> Iterator["LLM"]:
    """vLLM in this process, ended and cleaned up afterwards, so that another one can follow.

    Args:
        model: folder or hub id
        options: vLLM's
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the model is in another process
    from vllm import LLM

    llm = LLM(model, use_tqdm_on_load=sys.stderr.isatty(), **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextmanager
def forced_through_cache(
    model: str,
    kv_cache_dtype: str,
    context: int,
    oscar: Mapping[str, Any] | None = None,
    chunk: int = CHUNK,
    concurrent: int = CONCURRENT,
) -> Iterator["Engine"]:
    """An engine for prompts of `context` tokens that reads all but the last few of them from its cache.

    Args:
        model: folder or hub id
        kv_cache_dtype: vLLM's option
        oscar: the plugin's options, of an OSCAR cache
        chunk: tokens that a request advances in a step
        concurrent: requests side by side
    """
    with started(
        model,
        kv_cache_dtype=kv_cache_dtype,
        # half of the memory for BF16 copies: no window is shrunk
        additional_config={"oscar": {"pool_share": 0.5, **(oscar or {})}} if kv_cache_dtype == "oscar" else {},
        max_model_len=context + 1,
        max_num_seqs=concurrent,
        max_num_batched_tokens=chunk * concurrent,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=_memory(model, concurrent * (context + 2048)),
    ) as llm:
        _hold_a_lone_request_back(llm.llm_engine.engine_core.engine_core.scheduler, chunk, concurrent)
        yield Engine(llm)


def _hold_a_lone_request_back(scheduler: Any, chunk: int, concurrent: int) -> None:
    """vLLM drops `long_prefill_token_threshold` for a request that has nobody beside it (0.32), which would then take
    `concurrent` chunks a step and read as much less from its cache."""
    schedule = scheduler.schedule

    def limited(*args: Any, **kwargs: Any) -> Any:
        alone = len(scheduler.running) + len(scheduler.waiting) == 1
        scheduler.max_num_scheduled_tokens = chunk if alone else chunk * concurrent
        return schedule(*args, **kwargs)

    scheduler.schedule = limited


class Engine:
    """A vLLM engine of this process, for measurements; `started` and `forced_through_cache` make one."""

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm

    def record(self, windows: torch.Tensor) -> torch.Tensor:
        """Run the windows as prompts.

        Args:
            windows: int64 (windows, context), token ids

        Returns:
            (windows, context, hidden size), what the model's head makes logits of, on the CPU

        Raises:
            EvaluationError: a token did not run, or ran twice.
        """
        from vllm import SamplingParams

        def listen(worker: Any) -> tuple[Recorder, Any]:
            recorder = Recorder(worker.model_runner, windows)
            model = worker.model_runner.get_model()
            return recorder, model.register_forward_hook(recorder, with_kwargs=True)

        recorder, handle = self.llm.collective_rpc(listen)[0]
        try:
            prompts = [{"prompt_token_ids": window.tolist()} for window in windows]
            sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
            self.llm.generate(prompts, sampling, use_tqdm=sys.stderr.isatty())
        finally:
            handle.remove()
        recorder.check()
        return recorder.hidden

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        forced: Sequence[Sequence[int]] | None = None,
        temperature: float = 0.0,
    ) -> list[Answer]:
        """Answer prompts, freely or with the tokens given.

        Args:
            prompts: token ids
            tokens: of an answer, at most
            forced: the answers' token ids, of at most `tokens` each; None: the model's own choice
            temperature: of the choice; 0: greedy

        Raises:
            EvaluationError: a token did not run, or ran twice.
        """
        first = [len(prompt) - 1 for prompt in prompts]
        with self._listening(first, forced) as listener:
            outputs = self._run(
                prompts, lambda i: {"max_tokens": tokens if forced is None else len(forced[i]), "seed": i,
                                    "temperature": temperature, "ignore_eos": forced is not None}
            )  # fmt: skip
        answers = []
        for number, (output, states) in enumerate(zip(outputs, listener.hidden(), strict=True)):
            ids = list(output.token_ids)
            if forced is not None and ids != list(forced[number]):
                raise EvaluationError(f"request {number} answered {ids}, not {list(forced[number])}")
            answers.append(Answer(ids, states[: len(ids)], output.finish_reason == "stop"))
        return answers

    def reread(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Read answers as if they were part of the prompts.

        Args:
            prompts, answers: token ids

        Returns:
            Of each, (answer's tokens, hidden size): the states that its tokens would be chosen from, as in `Answer`.
        """
        whole = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
        with self._listening([len(prompt) - 1 for prompt in prompts], None) as listener:
            self._run(whole, lambda i: {"max_tokens": 1, "temperature": 0.0})
        return [states[: len(answer)] for states, answer in zip(listener.hidden(), answers, strict=True)]

    def _run(self, prompts: Sequence[Sequence[int]], params: Callable[[int], dict[str, Any]]) -> list[Any]:
        """Serve requests named by their number, each with its `SamplingParams`; what vLLM put out for each."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, finished = self.llm.llm_engine, {}
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(**params(number), detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, sampling)
        while engine.has_unfinished_requests():
            finished.update({int(output.request_id): output.outputs[0] for output in engine.step()})
        return [finished[number] for number in range(len(prompts))]

    @contextmanager
    def _listening(self, first: Sequence[int], forced: Sequence[Sequence[int]] | None) -> Iterator[Listener]:
        def listen(worker: Any) -> tuple[Listener, Any, torch.nn.Module]:
            listener = Listener(worker.model_runner, first, forced)
            model = worker.model_runner.get_model()
            compute = model.compute_logits
            model.compute_logits = lambda *args, **kwargs: listener.choose(compute(*args, **kwargs))
            return listener, model.register_forward_hook(listener, with_kwargs=True), model

        listener, handle, model = self.llm.collective_rpc(listen)[0]
        try:
            yield listener
        finally:
            handle.remove()
            del model.compute_logits  # the class's own again

    def log_probabilities(self, answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model thought of an answer's tokens.

        Returns:
            log probabilities, float32 (tokens,); and whether each was the likeliest, bool (tokens,). On the CPU
        """
        parts = []
        for start in range(0, len(answer.ids), _POSITIONS):
            logits = self.logits(answer.hidden[start : start + _POSITIONS]).float().log_softmax(-1)
            ids = torch.tensor(answer.ids[start : start + _POSITIONS], device=logits.device)
            given = logits.gather(-1, ids[:, None])[:, 0]
            parts.append((given.cpu(), (given == logits.amax(-1)).cpu()))
        log_probabilities, likeliest = zip(*parts, strict=True)
        return torch.cat(log_probabilities), torch.cat(likeliest)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (positions, hidden size) -> logits (positions, vocabulary)."""

        def head(model: torch.nn.Module) -> torch.Tensor:
            device = next(model.parameters()).device
            with torch.inference_mode():
                return model.compute_logits(hidden.to(device))  # type: ignore[operator]

        return self.llm.apply_model(head)[0]

    def compare(
        self, windows: torch.Tensor, reference: torch.Tensor, hidden: torch.Tensor, first: int = FIRST
    ) -> Scores:
        """Score the positions first ... context - 2 of all windows.

        Args:
            windows: int64 (windows, context), token ids
            reference, hidden: (windows, >= context - 1, hidden size), from `record`
        """

        def window(index: int) -> Scores:
            parts = []
            for start in range(first, windows.shape[1] - 1, _POSITIONS):
                rows = slice(start, min(start + _POSITIONS, windows.shape[1] - 1))
                ours, theirs = self.logits(hidden[index, rows]), self.logits(reference[index, rows])
                following = windows[index, rows.start + 1 : rows.stop + 1].to(ours.device)
                parts.append(Scores.of(theirs, ours, following))
            return Scores.cat(parts)

        return Scores.stack([window(index) for index in range(len(windows))])

    def emulate(self, codec: Codec, sink: int, window: int) -> None:
        """Store all but the sink and the last `window` tokens as `codec` does, see `rewriting`. For a BF16 cache."""
        self.llm.collective_rpc(lambda worker: rewrite(worker, codec, sink, window))

    def statistics(self) -> dict[str, int]:
        """What the OSCAR cache counted so far; empty for other caches."""

        def runtime(model: torch.nn.Module) -> dict[str, int]:
            for module in model.modules():
                found = getattr(getattr(module, "impl", None), "runtime", None)
                if found is not None:
                    return dict(found.statistics())
            return {}

        return self.llm.apply_model(runtime)[0]


def _memory(model: str, tokens: int) -> int:
    """Bytes of a BF16 cache of so many tokens."""
    from transformers import AutoConfig

    shape = ModelFingerprint.of(AutoConfig.from_pretrained(model))
    return tokens * shape.num_layers * shape.num_kv_heads * shape.head_size * 2 * 2
