"""Both of vLLM's model runners, as far as those who watch an engine look at them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_oscar.integration.batches import Batches, Scheduled

PROMPTS = {"a-1": [5, 6, 7, 8], "b-2": [9, 10]}
Chunk = tuple[str, int, int]  # request, first position, last + 1


class V1:
    """Keeps its batch; arrays have room for more."""

    def __init__(self) -> None:
        self.requests = {name: SimpleNamespace(prompt_token_ids=ids) for name, ids in PROMPTS.items()}
        self.input_batch: Any = SimpleNamespace(num_reqs=0, req_ids=[], num_computed_tokens_cpu=np.zeros(9))
        self.query_start_loc = SimpleNamespace(np=np.zeros(9, dtype=np.int32))

    def run(self, *chunks: Chunk) -> None:
        bounds = np.cumsum([0, *(end - start for _, start, end in chunks)])
        self.query_start_loc.np[: len(bounds)] = bounds
        self.input_batch.num_reqs = len(chunks)
        self.input_batch.req_ids = [name for name, _, _ in chunks]
        self.input_batch.num_computed_tokens_cpu[: len(chunks)] = [start for _, start, _ in chunks]


class V2:
    """Makes a batch for every step, padded to some graph's size, and keeps none."""

    def add_requests(self, scheduler_output: Any) -> None:
        pass

    def prepare_inputs(self, scheduler_output: Any, *version: Any) -> Any:
        chunks = scheduler_output.chunks
        return SimpleNamespace(
            req_ids=[name for name, _, _ in chunks],
            num_reqs=len(chunks),
            query_start_loc_np=np.cumsum([0, *(end - start for _, start, end in chunks), 0, 0]),
            num_computed_tokens_np=np.array([start for _, start, _ in chunks]),
        )

    def run(self, *chunks: Chunk) -> None:
        new = [SimpleNamespace(req_id=name, prefill_token_ids=PROMPTS[name]) for name, start, _ in chunks if not start]
        output = SimpleNamespace(chunks=chunks, scheduled_new_reqs=new)
        self.add_requests(output)
        self.prepare_inputs(output, "what a version adds")


@pytest.mark.parametrize("runner", [V1(), V2()], ids=["V1", "V2"])
def test_a_step_tells_whose_its_rows_are(runner: Any) -> None:
    batches = Batches.of(runner)
    assert Batches.of(runner) is batches  # wrapped once
    runner.run(("a-1", 0, 3), ("b-2", 0, 2))
    assert batches.now() == [Scheduled("a-1", 0, 0, 3), Scheduled("b-2", 0, 3, 5)]
    assert [batches.prompt(name) for name in ("a-1", "b-2")] == [[5, 6, 7, 8], [9, 10]]
    runner.run(("b-2", 2, 3), ("a-1", 3, 4))
    assert batches.now() == [Scheduled("b-2", 2, 0, 1), Scheduled("a-1", 3, 1, 2)]
    runner.run(("a-1", 4, 5))
    assert batches.now() == [Scheduled("a-1", 4, 0, 1)]
    assert batches.prompt("a-1") == [5, 6, 7, 8]
