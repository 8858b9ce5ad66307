"""The write kernel and the metric encoder against the reference, in Triton's interpreter."""

import pytest
import torch

from benchmarks.cases_write import Case, check

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
    ],
    ids=str,
)
def test_pages_and_copies(case: Case) -> None:
    check(case, torch.device("cpu"))
