"""The write kernel and the metric encoder against the reference, in Triton's interpreter."""

import random

import pytest
import torch

from gates.cases.write import Case, check
from vllm_oscar.kernels.encode_metric import Rounds

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(tokens=1, heads=3, block_size=64, dtype=torch.bfloat16),
        Case(64, 32, tokens=33, heads=3, order="head-major"),
        Case(128, 32, tokens=16),
        Case(80, tokens=15, heads=3),
        Case(96, tokens=16, dtype=torch.bfloat16),
        Case(192, tokens=17),
        Case(256, tokens=15),
        Case(64, tokens=12, encoder="minmax"),
        Case(64, tokens=33, block_size=64, encoder="metric"),
        Case(64, 32, tokens=15, encoder="metric", dtype=torch.bfloat16),
        Case(80, tokens=1, encoder="metric"),
        Case(64, 32, block_size=64, encoder="metric", reencoded=True),
        Case(tokens=17, heads=3, turning=8),
        Case(64, tokens=17, encoder="metric", turning=1),
        Case(80, tokens=15, turning=3),
        Case(bits=(2, 4), heads=3),
        Case(64, 32, bits=(3, 2), tokens=33, heads=3, order="head-major"),
        Case(80, bits=(3, 4), block_size=64, tokens=15),
        Case(256, bits=(4, 4), tokens=15, dtype=torch.bfloat16),
        Case(64, bits=(3, 2), encoder="minmax", tokens=12),
        Case(64, bits=(3, 4), encoder="metric"),
        Case(80, bits=(4, 2), encoder="metric", block_size=64, tokens=12),
        Case(64, 32, bits=(3, 2), block_size=64, encoder="metric", tokens=33, reencoded=True),
        Case(64, bits=(4, 4), encoder="metric", tokens=33, reencoded=True),
    ],
    ids=str,
)
def test_pages_and_copies(case: Case) -> None:
    check(case, torch.device("cpu"))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 4, 8])
def test_no_tokens_are_left_out_of_the_rounds(in_flight: int, drafts: int) -> None:
    """Batches come and go, in turn or alone; of a step's drafts any number is accepted. Whatever a request's tokens
    were in between, some call looks at it, and seven of eight steps have none."""
    rng = random.Random(in_flight)
    rounds = Rounds(in_flight)
    batches = [{"tokens": 0, "seen": 0}]
    calls = []
    for step in range(4032):
        query = rng.choice([1, 1 + drafts]) if step % 100 < 50 else 1
        grown = rounds.step(query)
        batch = batches.pop(0)  # its turn
        if grown:
            calls.append(grown)
            assert batch["tokens"] - batch["seen"] <= grown, f"step {step}: tokens were left out"
            batch["seen"] = batch["tokens"]
        batch["tokens"] += rng.randint(1, query)
        if rng.random() > 0.02 or not batches:
            batches.append(batch)
        if len(batches) < in_flight and rng.random() < 0.02:
            batches.insert(rng.randrange(len(batches) + 1), {"tokens": 0, "seen": 0})
    assert len(calls) == 4032 / 8
    assert max(calls) <= (1 + drafts) * (9 * in_flight - 1)
