"""The decode kernels against `attention.attend`, in Triton's interpreter."""

import itertools

import pytest
import torch

from gates.cases.decode import Case, check
from vllm_oscar.kernels import merge
from vllm_oscar.kernels.segments import Segments, build_segments, granule, tile_tokens
from vllm_oscar.page_layout import PageLayout

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dtype=torch.float16, kv_heads=3, order="padded"),
        Case(group_size=64, lengths=(17, 140), order="head-major", kv_heads=3),
        Case(group_size=32, lengths=(33,), ratio=1, block_size=32),
        Case(block_size=64, lengths=(200, 1, 0, 63)),
        Case(head_size=64),
        Case(head_size=64, group_size=32, lengths=(140, 33), ratio=3, block_size=64, kv_heads=3),
        Case(head_size=80, lengths=(100, 17)),
        Case(head_size=96, lengths=(100, 15)),
        Case(head_size=192, lengths=(90, 16)),
        Case(head_size=256, lengths=(90, 33)),
        Case(lengths=(90, 33), ratio=16),
        *(Case(lengths=(33,), ratio=ratio) for ratio in (5, 6, 12, 14)),
        Case(lengths=(33, 16), sink=0, window=1),
        Case(lengths=(90, 33), sink=64, window=256),
        Case(lengths=(33, 160), soft_cap=5.0, dtype=torch.float16),
        Case(lengths=(33, 160, 9), sliding_window=20),
        Case(lengths=(200, 100), sliding_window=90, window=200, sink=64),
        Case(head_size=64, lengths=(33, 160), sliding_window=20, soft_cap=5.0),
        Case(lengths=(33, 3), q_len=3),
        Case(lengths=(33, 100), q_len=5, ratio=8),
        Case(head_size=64, lengths=(33, 2), q_len=2, sliding_window=10),
        Case(lengths=(200, 1, 0, 33), kv_heads=3, ratio=7, turning=8),
        Case(head_size=64, lengths=(420, 33), ratio=7, turning=8),
        Case(head_size=64, group_size=32, lengths=(140, 3), q_len=3, kv_heads=2, turning=1),
        Case(lengths=(300, 33), q_len=5, ratio=8, turning=3),
        Case(lengths=(33, 160), soft_cap=5.0, dtype=torch.float16, turning=8),
        Case(lengths=(20000, 9), sliding_window=90, sink=0, window=1, turning=3),
        Case(head_size=80, lengths=(100, 17), sink=64, window=256, turning=2),
        Case(head_size=256, lengths=(90, 33), ratio=16, turning=8),
        Case(kv_heads=3, layers=0),
        Case(lengths=(33, 160), saturated=True),
        Case(head_size=64, lengths=(33, 160), dtype=torch.float16, saturated=True),
        Case(lengths=(33, 160), value_size=1e-7),
        Case(head_size=64, lengths=(145, 200), sliding_window=20),  # granules begin in blocks that are gone
        Case(head_size=64, lengths=(145, 200), sliding_window=20, q_len=3, soft_cap=5.0),
        Case(head_size=64, lengths=(145, 200), sliding_window=20, q_len=9, queries=(1, 2)),
        Case(head_size=64, lengths=(33, 160, 0), ratio=8, sinks=True),
        Case(lengths=(33, 100), q_len=5, ratio=8, sliding_window=40, turning=3, sinks=True),
        Case(lengths=(33, 160), soft_cap=5.0, dtype=torch.float16, sinks=True),
        Case(lengths=(33, 100, 17, 3), kv_heads=2, q_len=3, queries=(1, 3, 2, 3)),
        # the first one's window begins with a block, the one before it is gone; five queries would reach into it
        Case(lengths=(148, 160, 5), kv_heads=3, ratio=8, q_len=5, queries=(1, 5, 2), sliding_window=20, turning=3),
        Case(head_size=64, lengths=(33, 2, 160, 0), ratio=5, q_len=4, queries=(4, 2, 1, 1), soft_cap=5.0, sinks=True),
        Case(bits=(2, 4), lengths=(90, 33), block_size=64),
        Case(bits=(3, 2), lengths=(140, 17), block_size=64, kv_heads=3, order="padded"),
        Case(bits=(3, 4), lengths=(90, 33), q_len=3, order="head-major", kv_heads=2),
        Case(bits=(4, 2), group_size=32, lengths=(33,), turning=8, dtype=torch.float16),
        Case(bits=(4, 4), lengths=(200, 1, 0, 63), block_size=64, soft_cap=5.0),
        Case(bits=(3, 2), head_size=64, group_size=32, lengths=(140, 33), block_size=64, ratio=7),
        Case(bits=(4, 4), head_size=64, lengths=(140, 33), sliding_window=50),
        Case(bits=(3, 2), head_size=80, lengths=(100, 17), block_size=64),
        Case(bits=(4, 2), head_size=96, lengths=(100, 15)),
        Case(bits=(3, 4), head_size=192, lengths=(90, 16)),
        Case(bits=(4, 2), head_size=256, lengths=(90, 33), ratio=16),
    ],
    ids=str,
)
def test_decode_matches_reference(case: Case) -> None:
    check(case, torch.device("cpu"))


def test_few_sequences_are_merged_column_by_column_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose one sequence has hundreds of segments; here it has twelve, and rounds of eight."""
    given = merge.shares(1, 2, 4, 128, 24)
    assert given == (1, 64, 32, 1)
    monkeypatch.setattr(merge, "shares", lambda *sizes: (1, 64, 8, 1))
    check(Case(lengths=(3000,), kv_heads=2, ratio=4, sink=64, window=256), torch.device("cpu"))


@pytest.mark.parametrize("sliding_window", [None, 100])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("head_size", [64, 128])
def test_segments_cover_every_token_once(head_size: int, q_len: int, sliding_window: int | None) -> None:
    lengths = [5000, 0, 4, 63, 64, 65, 700, 20000]
    sink, window = 64, 256
    segments = Segments.allocate(20, 2, PageLayout(head_size, 16), torch.device("cpu")).for_batch(len(lengths), 2)
    limits = torch.tensor([sink, window], dtype=torch.int32)
    build_segments(torch.tensor(lengths, dtype=torch.int32), q_len, limits, sliding_window, segments)
    rows, tile = segments.table.tolist(), tile_tokens(head_size)
    used = [row for row in rows if row[0] >= 0]
    assert len(used) == segments.first[-1] <= len(rows)
    for seq, length in enumerate(lengths):
        own = rows[segments.first[seq] : segments.first[seq + 1]]
        assert bool(own) == (length > 0)
        if not own:
            continue
        first_seen = max(0, length - q_len + 1 - sliding_window) if sliding_window else 0
        assert own[0][1] <= first_seen
        assert own[-1][4] == length
        for before, after in itertools.pairwise(own):
            assert before[4] == after[1]
        for number, lo, fast_lo, fast_hi, hi in own:
            assert number == seq
            assert lo <= fast_lo <= fast_hi <= hi
            assert (fast_hi - fast_lo) % tile == 0
            assert (lo - fast_hi) % granule(head_size) == 0
            if fast_lo < fast_hi:  # tokens that need no second look
                assert fast_lo % tile == 0
                assert fast_lo >= sink
                assert fast_hi <= length - q_len + 1 - window
                assert sliding_window is None or fast_lo >= length - sliding_window


def test_segments_are_balanced() -> None:
    lengths = torch.tensor([128 * 1024] + [4096] * 7, dtype=torch.int32)
    segments = Segments.allocate(8, 1, PageLayout(128, 16), torch.device("cpu")).for_batch(8, 1)
    build_segments(lengths, 1, torch.tensor([64, 256], dtype=torch.int32), None, segments)
    tokens = [row[4] - row[1] for row in segments.table.tolist() if row[0] == 0]
    assert len(tokens) == segments.table.shape[0] - 7
    assert max(tokens) - min(tokens[1:-1]) <= tile_tokens(128)
