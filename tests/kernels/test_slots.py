"""The slot kernels leave the same state as SlotTable, whatever the schedule."""

import pytest
import torch

from benchmarks.cases_slots import Case, check

pytestmark = pytest.mark.kernels
CASES = [Case(64, 256, 18, block_size=64, stride=1 << 27), Case(16, 33, 9), Case(0, 1, 6), Case(20, 100, 14)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_state_as_the_reference(case: Case) -> None:
    check(case, torch.device("cpu"))
