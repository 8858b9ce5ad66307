"""The write path: where a token's bytes and its copy go, and that nothing else changes."""

import pytest
import torch

from vllm_oscar.attention import read_rows
from vllm_oscar.cache_layer import LS_KEY_GAIN, CacheLayer
from vllm_oscar.errors import ConfigError
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.quantizer import FP16_MAX, MAX_VALUE_SCALE, decode, encode_ls, encode_metric
from vllm_oscar.rotation import Transform
from vllm_oscar.sidecar import LayerCalibration, TensorCalibration

CPU = torch.device("cpu")
P, HEADS, BLOCKS, SLOTS = 16, 3, 6, 4


def calibration(head_size: int, encoder: str, seed: int) -> TensorCalibration:
    """A mean, a matrix that is no rotation, and a metric."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    eye = torch.eye(head_size)
    root = eye + 0.1 * randn(HEADS, head_size, head_size)
    return TensorCalibration(
        mean=randn(HEADS, head_size),
        transform=eye + 0.05 * randn(HEADS, head_size, head_size),
        encoder=encoder,
        gain=1.05,
        metric=root @ root.mT if encoder == "metric" else None,
    )


class Case:
    """A layer with pages and a pool full of 0xFF, a step's rows and their places."""

    def __init__(
        self, head_size: int = 64, group_size: int = 0, encoder: str = "metric", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.layout = PageLayout(head_size, P, group_size)
        pair = LayerCalibration(calibration(head_size, encoder, 1), calibration(head_size, "ls", 2))
        self.pair, self.dtype = pair, dtype
        self.layer = CacheLayer.of(pair, P, self.layout.group_size, dtype)
        # padded between heads and blocks, as vLLM may lay pages out
        self.storage = torch.full((BLOCKS, HEADS + 1, self.layout.head_bytes + 128), 0xFF, dtype=torch.uint8)
        self.views = self.layout.views(self.storage[:, :HEADS, : self.layout.head_bytes])
        self.pool = HotPool.allocate(self.layout, SLOTS, HEADS, dtype, CPU)
        self.pool.rows.view(torch.int16).fill_(-1)
        generator = torch.Generator().manual_seed(3)
        self.key, self.value = (
            torch.randn(5, HEADS, head_size, generator=generator).to(dtype) for _ in range(2)
        )  # fmt: skip
        self.position = torch.tensor([200, 3, 0, 7, 131072])
        self.places = torch.tensor([3 * P + 15, 1 * P, -1, 4 * P + 7, 3 * P])
        self.hot = torch.tensor([2 * P + 15, -1, 1, -1, 2 * P])

    def write(self) -> int:
        return int(self.layer.write(self.views, self.pool, self.key, self.value, self.position, self.places, self.hot))

    def y(self, which: int) -> torch.Tensor:
        """Transformed rows in the pool's dtype, computed in float64."""
        tensor, x = (self.pair.key, self.key) if which == 0 else (self.pair.value, self.value)
        matrix = tensor.transform.to(self.dtype).double()
        return torch.einsum("thd,hde->the", x.double() - tensor.mean.double(), matrix).to(self.dtype)


@pytest.mark.parametrize(
    ("head_size", "group_size", "encoder", "dtype"),
    [(64, 0, "metric", torch.bfloat16), (64, 32, "ls", torch.bfloat16), (128, 64, "metric", torch.float16),
     (80, 0, "ls", torch.float16)],
    ids=str,
)  # fmt: skip
def test_rows_come_back_from_where_they_were_put(
    head_size: int, group_size: int, encoder: str, dtype: torch.dtype
) -> None:
    case = Case(head_size, group_size, encoder, dtype)
    assert case.write() == 0
    for which, codec in ((0, case.layer.key), (1, case.layer.value)):
        y = case.y(which)
        # float32 against float64: a rounding may fall on the other side, one step of the dtype
        copies = case.pool.rows[[2, 2], :, which, [15, 0]]
        assert (copies.double() - y[[0, 4]].double()).abs().max() < 2**-7 * y.double().abs().max()
        stored = codec.transform.forward((case.key, case.value)[which]).to(dtype)
        assert torch.equal(copies, stored[[0, 4]])
        if codec.encoder == "metric":
            assert codec.metric is not None
            encoded = encode_metric(stored, codec.metric, case.layout.group_size, 1.05)
        else:
            encoded = encode_ls(stored, case.layout.group_size, 1.05, MAX_VALUE_SCALE if which else FP16_MAX)
        for token in (0, 1, 3, 4):
            block, offset = divmod(int(case.places[token]), P)
            assert torch.equal(case.views.codes(which, (block, slice(None), offset)), encoded.codes[token])
            scale, shift = case.views.meta[block, :, offset, which].unbind(-1)
            assert torch.equal(scale, encoded.scale[token])
            assert torch.equal(shift, encoded.offset[token])
            error = decode(encoded.codes[token], scale, shift) - stored[token].float()
            # a Gaussian in 2 bits: 34% of its deviation; the metric trades some of it for directions that count
            assert 0.1 < float(error.norm() / stored[token].float().norm()) < 0.8


def test_nothing_else_is_written() -> None:
    """Skipped tokens, other tokens of the same pages, padding, other slots: every byte is as it was."""
    case = Case()
    before = case.storage.clone()
    case.write()
    changed = case.storage != before
    assert not changed[:, HEADS].any()
    assert not changed[..., case.layout.head_bytes :].any()
    assert changed.any(-1).any(-1).tolist() == [False, True, False, True, True, False]
    meta = case.views.meta.view(torch.int16).flatten(3) != -1
    assert sorted({(b, o) for b, _, o, _ in meta.nonzero().tolist()}) == [(1, 0), (3, 0), (3, 15), (4, 7)]
    copied = case.pool.rows.view(torch.int16) != -1
    assert sorted({(s, o) for s, _, _, o, _ in copied.nonzero().tolist()}) == [(2, 0), (2, 15)]
    words = case.pool.words != -1
    assert sorted({(s, o) for s, _, o, _ in words.nonzero().tolist()}) == [(2, 0), (2, 15)]


def test_a_copy_proves_itself_until_its_token_is_written_again() -> None:
    case = Case()
    case.storage.fill_(0x5A)  # not 0xFF, which are the words of a slot never written
    case.write()
    table = SlotTable.empty(HotContract(16, 16, P), BLOCKS, SLOTS, CPU)
    table.slot_of_block[3], table.block_of_slot[2] = 2, 3
    table.written[2] = 1

    def hot() -> list[bool]:
        rows = read_rows(case.views, case.pool, table, torch.tensor([3]), 16, 15)
        return rows.hot.all(-1).tolist()

    assert hot() == [True] + [False] * 14 + [True]
    # the block is used again: other tokens in the same places, and no copy of them
    case.key, case.hot = case.key.flip(0), torch.full((5,), -1)
    case.write()
    assert hot() == [False] * 16


def test_rows_that_cannot_be_represented_are_counted_and_touch_no_neighbour() -> None:
    clean, case = Case(encoder="ls"), Case(encoder="ls")
    case.key[0, 1, 5] = float("nan")
    case.key[1, 2, 0] = float("inf")
    case.key[2, 0, 0] = float("nan")  # has no place: not written, not counted
    case.value[4, 0] = 3e38
    clean.write()
    assert case.write() == 3
    spoilt = torch.zeros(BLOCKS, HEADS, P, 2, dtype=torch.bool)
    for place, head, which in ((case.places[0], 1, 0), (case.places[1], 2, 0), (case.places[4], 0, 1)):
        spoilt[place // P, head, place % P, which] = True
    same = (case.views.meta == clean.views.meta) | (case.views.meta.isnan() & clean.views.meta.isnan())
    assert torch.equal(~same.flatten(-2).all(-1), spoilt)
    written = case.views.meta.view(torch.int16) != -1
    assert torch.isfinite(case.views.meta[written]).all()
    assert torch.isfinite(case.pool.rows[2, :, :, [0, 15]].float()).all()
    copies, clean_copies = (c.pool.rows[2][:, :, [0, 15]] for c in (case, clean))
    differ = (copies != clean_copies).any(-1)  # (heads, 2, offsets 0 and 15)
    assert sorted(differ.nonzero().tolist()) == [[0, 1, 0], [1, 0, 1]]


def test_value_scales_stay_in_reach_of_the_kernel() -> None:
    """Values whose least-squares scale is above 254 are stored with that, keys are not bounded so."""
    case = Case(encoder="ls")
    case.key *= 1000
    case.value *= 1000
    saturated = case.write()
    written = case.places[case.places >= 0]
    scale = case.views.meta[written // P, :, written % P, :, :, 0]
    assert float(scale[:, :, 0].max()) > MAX_VALUE_SCALE
    assert float(scale[:, :, 1].max()) == MAX_VALUE_SCALE
    assert saturated == int((scale[:, :, 1] == MAX_VALUE_SCALE).sum())


def test_key_encoder_can_be_overridden() -> None:
    case = Case()
    assert CacheLayer.of(case.pair, P, 64, torch.bfloat16).key.encoder == "metric"
    cheap = CacheLayer.of(case.pair, P, 64, torch.bfloat16, "ls")
    assert (cheap.key.encoder, cheap.key.metric, cheap.value.encoder) == ("ls", None, "ls")
    assert CacheLayer.of(case.pair, P, 64, torch.bfloat16).key.gain == 1.05
    assert CacheLayer.of(case.pair, P, 64, torch.bfloat16, "ls").key.gain == LS_KEY_GAIN[2]
    metric = CacheLayer.of(case.pair, P, 64, torch.bfloat16)
    assert [codec.first_gain for codec in (metric.key, cheap.key, metric.value)] == [1.10, 1.10, 1.05]
    without = Case(encoder="ls")
    with pytest.raises(ConfigError, match="leave the option out"):
        CacheLayer.of(without.pair, P, 64, torch.bfloat16, "metric")


def test_transform_is_rounded_before_it_is_inverted() -> None:
    """T B = I for the T that rows are multiplied with; with the unrounded T it would be off by bfloat16's step."""
    tensor = calibration(64, "ls", 5)
    used = CacheLayer.of(LayerCalibration(tensor, tensor), P, 64, torch.bfloat16).key.transform
    assert torch.equal(used.matrix, tensor.transform.bfloat16().float())
    assert (used.matrix.double() @ used.inverse.double() - torch.eye(64)).abs().max() < 1e-6
    assert (tensor.transform.double() @ used.inverse.double() - torch.eye(64)).abs().max() > 1e-4
    assert isinstance(used, Transform)
