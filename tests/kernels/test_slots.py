"""The slot kernels leave the same state as SlotTable, whatever the schedule."""

import pytest
import torch

from benchmarks.cases_slots import Case, check

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("case", [Case(64, 64, 64), Case(16, 33, 9), Case(0, 1, 6), Case(20, 100, 14)], ids=str)
def test_same_state_as_the_reference(case: Case) -> None:
    check(case, torch.device("cpu"))
