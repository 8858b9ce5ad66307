"""Real engines in this process, with what they compute recorded.

vLLM's engine core runs inside the test's process, so hooks see every step and settings of the scheduler can change
between two runs of one engine.
"""

import json
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_oscar.attention import StoredRows, read_rows
from vllm_oscar.integration.batches import Batches

Tokens = Sequence[int]


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL in nats of log probabilities (..., vocabulary), for each position."""
    return (p.exp() * (p - q)).sum(-1)


class Engine:
    """A vLLM engine of the test model, by default with an OSCAR cache of blocks of 16 tokens.

    Every step is recorded: the last hidden state that each position of each request got. Requests are named by
    the test.

    Args:
        model: folder of the model
        sidecar: file, or None to leave the option out
        oscar: further options of the plugin
        options: of `vllm.LLM`
    """

    def __init__(
        self, model: Path, sidecar: Path | None, oscar: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        from vllm import LLM

        given = {"sidecar": str(sidecar)} if sidecar else {}
        settings: dict[str, Any] = {
            "kv_cache_dtype": "oscar",
            "block_size": 16,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 130,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "disable_log_stats": False,
        } | options
        if settings["kv_cache_dtype"] == "oscar":
            settings["additional_config"] = {"oscar": {**given, **(oscar or {})}}
        self.llm = LLM(str(model), **settings)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.batches = Batches.of(self.runner)
        assert self.batches.is_v2 == (os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1")
        self.metadata: dict[str, Any] = {}  # of the last step, by layer
        self.model = self.runner.model
        self.hidden: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.chunks: dict[str, list[tuple[int, int]]] = defaultdict(list)  # positions first, last + 1 of each step
        self.forced: dict[str, Tokens] = {}  # prompts and answers of requests that do not answer freely
        self.model.register_forward_hook(self._record, with_kwargs=True)
        self._compute_logits = self.model.compute_logits
        self.model.compute_logits = self._force

    def segments(self) -> list[tuple[str, int, int]]:
        """Name, first and last + 1 row of each request of the step that runs."""
        return [(name.rsplit("-", 1)[0], start, end) for name, _, start, end in self.batches.now()]

    def _record(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        from vllm.forward_context import get_forward_context

        if isinstance(output, tuple):  # with what an EAGLE-3 head takes
            output = output[0]
        self.metadata = get_forward_context().attn_metadata
        for name, start, end in self.segments():
            positions = kwargs["positions"][..., start:end]  # of text, M-RoPE has the same three times
            positions = positions.reshape(-1, end - start)[0].tolist()
            self.chunks[name].append((positions[0], positions[-1] + 1))
            for position, row in zip(positions, output[start:end], strict=True):
                self.hidden[name][position] = row.clone()

    def _force(self, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        logits = self._compute_logits(hidden, *args)
        sampled = self.segments() if self.forced else []
        if len(sampled) != hidden.shape[0]:  # the prompt's own log probabilities, which are left as they are
            return logits
        for row, (name, _, _) in enumerate(sampled):
            following = self.chunks[name][-1][1]
            if name in self.forced and following < len(self.forced[name]):
                logits[row, self.forced[name][following]] = torch.finfo(logits.dtype).max
        return logits

    def add(self, name: str, prompt: Tokens, tokens: int, lora: Any = None, **params: Any) -> None:
        """Queue a request, as `run` does."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.hidden.pop(name, None)
        self.chunks.pop(name, None)
        usual = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        sampling = SamplingParams(**(usual | params), output_kind=RequestOutputKind.FINAL_ONLY)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling, lora_request=lora)

    def run(
        self,
        prompts: Mapping[str, Tokens],
        tokens: int,
        forced: Mapping[str, Tokens] | None = None,
        on_step: Callable[[int], None] | None = None,
        **params: Any,
    ) -> dict[str, Any]:
        """Serve requests together, greedily unless `params` say otherwise.

        Args:
            prompts: name and token ids of each
            tokens: length of each answer; the end-of-text token does not end it
            forced: by name, prompt and answer; the request is made to give that answer
            on_step: called after each step with its number

        Returns:
            vllm.RequestOutput of each request that finished.
        """
        self.forced = dict(forced or {})
        for name, prompt in prompts.items():
            self.add(name, prompt, tokens, **params)
        finished, step = {}, 0
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = output
            step += 1
            if on_step:
                on_step(step)
        return finished

    def answer(self, prompt: Tokens, tokens: int, name: str = "one", **params: Any) -> list[int]:
        """The answer to one prompt, as token ids."""
        return list(self.run({name: prompt}, tokens, **params)[name].outputs[0].token_ids)

    def log_probabilities(self, name: str, first: int, last: int) -> torch.Tensor:
        """Of the token after each of the positions first .. last - 1, float32 (positions, vocabulary)."""
        rows = torch.stack([self.hidden[name][position] for position in range(first, last)])
        return self._compute_logits(rows).float().log_softmax(-1)

    def stored(self, layer: int, name: str, tokens: int, before: int) -> StoredRows:
        """The first `tokens` of a request of the last step as one with `before` tokens behind it reads them."""
        layers = list(self.runner.compilation_config.static_forward_context.items())
        prefix, module = layers[layer]
        row = [segment[0] for segment in self.segments()].index(name)
        impl, p = module.impl, module.impl.layout.block_size
        blocks = self.metadata[prefix].block_table[row, : -(-tokens // p)]
        (table,) = self.runtime._tables.values()
        views = impl.views(module.kv_cache)
        return read_rows(views, impl.pool, table, blocks.long(), tokens, before)

    def chunk_limit(self, tokens: int) -> None:
        """Most tokens of a step; for a request alone this is the length of its prefill chunks."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def metric(self, name: str) -> float:
        """Sum of one of vLLM's own counters."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    @property
    def impls(self) -> list[Any]:
        """The OSCAR layers, in the order of the model."""
        layers = self.runner.compilation_config.static_forward_context.values()
        # experts are layers too, and a draft has layers of its own
        return [layer.impl for layer in layers if hasattr(getattr(layer, "impl", None), "runtime")]

    @property
    def runtime(self) -> Any:
        return self.impls[0].runtime


TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "initializer_range": 0.1, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _architectures_are_looked_at_here() -> Iterator[None]:
    """vLLM imports each architecture in a process of its own to see what it can do: 8 s where nothing is cached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())
        yield


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[[Mapping[str, Any]], Path]:
    """Folder of a small model with random weights: TINY with what the configuration says beside or instead."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(config: Mapping[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(TINY | dict(config)))
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture(scope="session")
def prose(model_path: Path) -> list[int]:
    """About 4,000 token ids of English prose that no calibration saw."""
    from transformers import AutoTokenizer

    from vllm_oscar.calibrate.data import builtin_text

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return list(tokenizer(builtin_text("held_out")[:20000])["input_ids"])


@pytest.fixture(scope="module")
def make_engine(model_path: Path, sidecar_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engine(...) of the test model with the test sidecar; the engines end with the module."""
    engines: list[Engine] = []

    def make(oscar: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        sidecar = None if (oscar or {}).get("rotation") or "sidecar" in (oscar or {}) else sidecar_path
        engines.append(Engine(model_path, sidecar, oscar, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def any_engine() -> Iterator[Callable[..., Engine]]:
    """Engine(...) of any model; the engines end with the test."""
    engines: list[Engine] = []

    def make(model: Path, sidecar: Path | None, oscar: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        engines.append(Engine(model, sidecar, oscar, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm.llm_engine.engine_core.shutdown()
