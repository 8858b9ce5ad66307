"""What the model makes of answers: the hidden state behind each token, freely chosen or forced.

Everything that was measured on answers can be computed from these states: log probabilities of any token are a matrix
product away, for this cache and for the one it is compared with.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_oscar.errors import OscarError
from vllm_oscar.integration.batches import Batches


class EvaluationError(OscarError, RuntimeError):
    """The engine did not run what it was given as asked, so that the numbers would mean something else."""


class Listener:
    """Collects the hidden states from some position of each request on, and may choose its tokens for it.

    Requests are named by their number: "0", "1", ...; vLLM may add a suffix behind a dash.

    Args:
        runner: vLLM's model runner
        first: of each request, the first position whose state is kept
        forced: of each request, the tokens that follow position `first`, one after the other; None: its own choice
    """

    def __init__(self, runner: Any, first: Sequence[int], forced: Sequence[Sequence[int]] | None = None) -> None:
        self._batches = Batches.of(runner)
        self._first = first
        self._forced = forced
        self._ahead: list[tuple[int, int]] = []  # of the step that runs: request, and position of its last row
        self._kept: list[list[torch.Tensor]] = [[] for _ in first]
        self._next = list(first)  # position that is to be seen next

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook of the model."""
        positions = kwargs["positions"].cpu()
        self._ahead = []
        rows, owners = [], []
        for name, _, start, end in self._batches.now():
            request, last = int(name.split("-")[0]), int(positions[end - 1])
            self._ahead.append((request, last))
            seen = last + 1 - max(int(positions[start]), self._first[request])
            if seen > 0:
                if last + 1 - seen != self._next[request]:
                    raise EvaluationError(
                        f"request {request} did not run position {self._next[request]} exactly once; "
                        "give the engine more KV memory"
                    )
                self._next[request] = last + 1
                rows.append(slice(end - seen, end))
                owners.append((request, seen))
        if rows:
            states = torch.cat([output[row] for row in rows]).to("cpu", copy=True)  # one copy a step
            for (request, _), part in zip(owners, states.split([seen for _, seen in owners]), strict=True):
                self._kept[request].append(part)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Make the forced tokens the likeliest ones.

        Args:
            logits: (requests of the step, vocabulary), changed in place
        """
        if self._forced is None:
            return logits
        if len(logits) != len(self._ahead):
            raise EvaluationError(f"{len(logits)} rows of logits for {len(self._ahead)} requests")
        for row, (request, last) in enumerate(self._ahead):
            at = last - self._first[request]
            if 0 <= at < len(self._forced[request]):
                logits[row, self._forced[request][at]] = torch.finfo(logits.dtype).max
        return logits

    def hidden(self) -> list[torch.Tensor]:
        """Of each request, (positions from `first` on, hidden size), in the model's dtype, on the CPU."""
        return [torch.cat(parts) for parts in self._kept]
