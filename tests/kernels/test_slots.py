"""The slot kernels leave the same state as SlotTable, whatever the schedule."""

import pytest
import torch

from gates.cases.slots import Case, check
from vllm_oscar.errors import PoolError
from vllm_oscar.hot_pool import HotContract, SlotTable
from vllm_oscar.kernels.slots import map_copies

pytestmark = pytest.mark.kernels
CASES = [
    Case(64, 256, 18, block_size=64),
    Case(16, 33, 9),
    Case(0, 1, 6),
    Case(20, 100, 14),
    Case(16, 33, 18, 40, in_flight=2),
    Case(100, 33, 14, sliding_window=50),
    Case(2000, 2000, 30, 8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_state_as_the_reference(case: Case) -> None:
    check(case, torch.device("cpu"))


@pytest.mark.parametrize("short", [0, 1])
def test_a_step_longer_than_its_buffers_is_refused(short: int) -> None:
    """Nothing is written behind the mapping's buffer, nor behind that of the positions."""
    table = SlotTable.empty(HotContract(16, 16, 16), 4, 4, torch.device("cpu"))
    room = [9, 9]
    room[short] = 8
    out, positions = torch.zeros(room[0], dtype=torch.int64), torch.zeros(room[1], dtype=torch.int32)
    starts, places = torch.tensor([0, 9], dtype=torch.int32), torch.full((9,), -1)
    with pytest.raises(PoolError, match="9 tokens, and room to map 8"):
        map_copies(table, places, starts, starts[1:], 1, out, positions)
