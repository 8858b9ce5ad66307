"""Prefill attention over stored history against the reference, in Triton's interpreter."""

import pytest
import torch

from gates.cases.prefill import Case, check
from vllm_oscar.kernels.history import plan

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(64, kv_heads=3, ratio=1, requests=((100, 40), (33, 15)), capacity=50),
        Case(64, 32, ratio=4, requests=((130, 7),), sliding_window=40),
        Case(64, requests=((130, 7), (5, 3)), capacity=32, sliding_window=60, soft_cap=5.0),
        Case(80, requests=((20, 1), (31, 33)), capacity=500, decoding=1, soft_cap=3.0, dtype=torch.bfloat16),
        Case(96, ratio=1, order="head-major"),
        Case(192, requests=((17, 3),)),
        Case(256, requests=((15, 3),), block_size=32),
        Case(kv_heads=2, requests=((130, 17), (5, 3)), turning=8),
        Case(64, requests=((100, 40),), capacity=50, sliding_window=60, soft_cap=5.0, turning=3),
        Case(80, requests=((31, 9),), turning=1),
        Case(64, kv_heads=3, layers=0),
        Case(requests=((100, 40),), bias=300.0),
        Case(requests=((100, 40),), saturated=True),
        Case(64, kv_heads=2, ratio=8, requests=((100, 40), (33, 15)), capacity=50, sinks=True),
        Case(64, requests=((130, 7), (5, 3)), capacity=32, sliding_window=60, soft_cap=5.0, sinks=True),
        Case(bits=(2, 4), kv_heads=3),
        Case(64, bits=(3, 2), kv_heads=2, turning=3),
        Case(80, bits=(3, 4), block_size=64),
        Case(bits=(4, 2), group_size=32, order="head-major"),
        Case(64, 32, bits=(4, 4), block_size=64),
        Case(requests=((100, 40), (5, 3)), capacity=50, bias=10.0, sinks=True),
    ],
    ids=str,
)
def test_attention(case: Case) -> None:
    check(case, torch.device("cpu"))


def test_calls_cover_every_key_once() -> None:
    after, starts = [7, 300, 90, 16], [0, 1, 41, 41, 57]  # the third has no query
    calls = plan(after, starts, 1, 64, None, torch.device("cpu"))
    seen: dict[int, list[int]] = {}
    for call in calls:
        assert call.max_key <= 64
        rows = [row for row, _, _, count, *_ in call.tiles.tolist() for row in range(row, row + count)]
        assert rows == list(range(call.key_starts[-1]))
        for _, request, position, count, *_ in call.tiles.tolist():
            seen.setdefault(request, []).extend(range(position, position + count))
    assert seen == {1: list(range(300)), 3: list(range(16))}
    assert [call.continues for call in calls] == [False] + [True] * (len(calls) - 2) + [False]
