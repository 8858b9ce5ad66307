"""What a step has in its batch, whichever of vLLM's two model runners makes it: for those who watch an engine."""

import functools
from typing import Any, NamedTuple


class Scheduled(NamedTuple):
    """A request's part of a step.

    Attributes:
        name: vLLM's id of the request
        before: tokens computed before this step
        start, end: first row and last + 1 among the step's rows
    """

    name: str
    before: int
    start: int
    end: int


class Batches:
    """The batches of one model runner, from now on; `of` gives the one that a runner has already.

    V1 keeps its batch in an attribute. V2 makes one for every step and hands it on, so that it is taken where it is
    made.

    Attributes:
        is_v2: which runner it is

    Args:
        runner: vLLM's GPUModelRunner or CPUModelRunner, V1 or V2
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._latest: Any = None
        self._prompts: dict[str, list[int]] = {}
        self.is_v2 = not hasattr(runner, "input_batch")
        if self.is_v2:
            runner.prepare_inputs = self._keeping_the_batch(runner.prepare_inputs)
            runner.add_requests = self._keeping_prompts(runner.add_requests)
        runner.oscar_batches = self

    @classmethod
    def of(cls, runner: Any) -> "Batches":
        return getattr(runner, "oscar_batches", None) or cls(runner)

    def _keeping_the_batch(self, prepare_inputs: Any) -> Any:
        @functools.wraps(prepare_inputs)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            self._latest = prepare_inputs(*args, **kwargs)
            return self._latest

        return prepare

    def _keeping_prompts(self, add_requests: Any) -> Any:
        @functools.wraps(add_requests)
        def add(scheduler_output: Any) -> None:
            add_requests(scheduler_output)
            for request in scheduler_output.scheduled_new_reqs:
                self._prompts[request.req_id] = list(request.prefill_token_ids)

        return add

    def now(self) -> list[Scheduled]:
        """The step that runs, or ran last."""
        if self.is_v2:
            batch = self._latest
            bounds, before = batch.query_start_loc_np, batch.num_computed_tokens_np
        else:
            batch = self._runner.input_batch
            bounds, before = self._runner.query_start_loc.np, batch.num_computed_tokens_cpu
        bounds, before = bounds[: batch.num_reqs + 1].tolist(), before[: batch.num_reqs].tolist()
        return list(map(Scheduled, batch.req_ids[: batch.num_reqs], before, bounds[:-1], bounds[1:]))

    def prompt(self, name: str) -> list[int]:
        """Token ids of a request's prompt."""
        return self._prompts[name] if self.is_v2 else list(self._runner.requests[name].prompt_token_ids)
