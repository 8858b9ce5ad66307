"""Writing and re-encoding against the reference: the cases, and how to run one."""

from dataclasses import dataclass, replace

import torch

from gates.synthetic import Described, strided_pages, transform, turning_mean
from vllm_oscar.cache_layer import LS_KEY_GAIN, RowCodec
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable, page_words
from vllm_oscar.kernels.encode_metric import BATCH, MetricTables, ReencodeTable, encode_written, reencode, workspace
from vllm_oscar.kernels.write import WriteTables, write
from vllm_oscar.page_layout import KEY, KEY_BITS, VALUE, VALUE_BITS, PageLayout
from vllm_oscar.quantizer import FP16_MAX, MAX_VALUE_SCALE, Metric, decode, encode_ls

LAYERS = 3  # of a re-encoding case
TURNING = 50.0  # size of a turning mean in units of the rows


@dataclass(frozen=True)
class Case(Described):
    """Tokens of one step. encoder is the keys'; `reencoded`: written as ls, then encoded again from the copies;
    turning: pairs of the keys' turning mean; bits: of keys and values."""

    head_size: int = 128
    group_size: int = 0
    block_size: int = 16
    tokens: int = 17
    heads: int = 1
    encoder: str = "ls"
    reencoded: bool = False
    dtype: torch.dtype = torch.float16
    order: str = "padded"
    turning: int = 0
    bits: tuple[int, int] = (2, 2)

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.head_size, self.block_size, self.group_size, *self.bits)


def a_metric(case: Case, generator: torch.Generator) -> Metric:
    d, device = case.head_size, generator.device
    a = torch.randn(case.heads, d, d, generator=generator, device=device)
    a *= torch.linspace(2, 0.3, d, device=device)[:, None]
    return Metric.of(a.mT @ a / d + 0.05 * torch.eye(d, device=device))


def codec(case: Case, which: int, generator: torch.Generator) -> RowCodec:
    """Keys' or values' codec. Values share the encoder only where it is the reference's."""
    minmax = case.encoder == "minmax"
    calibrated = transform(case.heads, case.head_size, case.dtype, generator)
    if which == KEY:
        mean = turning_mean(case.heads, case.head_size, case.turning, TURNING, generator)
        calibrated = replace(calibrated, turning=mean)
    encoder = case.encoder if which == KEY else "minmax" if minmax else "ls"
    return RowCodec(
        calibrated,
        encoder,
        case.layout.group_size,
        1.0 if minmax else (1.05, 1.1)[which],
        (0.96, 0.92)[which],
        (FP16_MAX, MAX_VALUE_SCALE)[which],
        a_metric(case, generator) if encoder == "metric" else None,
        case.bits[which],
    )


def hard_rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random rows (2, tokens, heads, D), as views of a wider tensor; some with what no row should have."""
    *front, size = shape
    wide = torch.randn((*front, size + 8), generator=generator, device=generator.device).to(dtype)
    rows = wide[..., :size]
    tokens = shape[1]
    rows[:, tokens // 2] *= 300
    if tokens > 10:
        rows[0, 3, 0] = float("nan")
        rows[1, 4, 0, 5] = float("inf")
        rows[:, 5] *= 1e4  # values beyond their largest scale, and in FP16 beyond FP16
        rows[:, 6] *= 1e-9
    return rows


def check(case: Case, device: torch.device) -> str:
    """See gates.kernels. Rows are compared with the reference, codes with what the reference makes of these rows."""
    generator = torch.Generator(device=device).manual_seed(case.tokens + case.head_size)
    layout, p, heads, n = case.layout, case.block_size, case.heads, case.tokens
    codecs = codec(case, KEY, generator), codec(case, VALUE, generator)
    key, value = hard_rows((2, n, heads, case.head_size), case.dtype, generator)
    position = torch.randint(0, 1_000_000, (n,), dtype=torch.int32, generator=generator, device=device)
    if turning := codecs[KEY].transform.turning:
        key += turning.at(position).to(case.dtype)
    blocks = -(-n // p) + 2
    pages = strided_pages(layout, blocks, heads, case.order, device)
    untouched = pages.clone()
    pool = HotPool.allocate(layout, blocks, heads, case.dtype, device)
    pool.rows.view(torch.uint8).fill_(0xFF)
    slot_mapping = p + torch.arange(n, device=device)
    hot = (blocks - 1 - slot_mapping // p) * p + slot_mapping % p  # every token has a copy
    if n > 10:
        slot_mapping[7] = hot[7] = -1
    saturated = torch.zeros(1, dtype=torch.int64, device=device)
    later = case.encoder == "metric" and not case.reencoded
    y = torch.full((n + 1, heads, case.head_size), float("nan"), dtype=case.dtype, device=device) if later else None
    scratch = workspace(layout, device)
    scratch.fill_(float("nan"))
    write(
        key, value, pages, layout, pool, slot_mapping, hot, WriteTables.of(*codecs, case.dtype), saturated, y, position
    )
    metric = codecs[0].metric
    if case.encoder == "metric":
        assert metric is not None
        metric_tables = MetricTables.of(metric, layout)
        if y is not None:
            encode_written(y, pages, layout, pool, slot_mapping, hot, metric_tables, 1.05, scratch, saturated)
        else:
            there = slot_mapping[slot_mapping >= 0]
            first = layout.views(pages).meta[there // p, :, there % p, KEY, :, 0]
            copies = pool.rows[hot[hot >= 0] // p, :, KEY, hot[hot >= 0] % p]
            gain, levels = LS_KEY_GAIN[layout.key_bits], 1 << layout.key_bits
            wanted = encode_ls(copies, layout.group_size, gain, FP16_MAX, levels).scale
            assert abs((first / wanted).nanmedian().item() - 1) < 0.001, "codes to be encoded again have another gain"
            _reencode_all(case, pages, pool, metric_tables, scratch)

    views = layout.views(pages)
    there = slot_mapping >= 0
    at, off = slot_mapping[there] // p, slot_mapping[there] % p
    slot, slot_off = hot[there] // p, hot[there] % p
    proof = page_words(views.meta[at])[torch.arange(len(at), device=device), :, off]
    assert torch.equal(pool.words[slot, :, slot_off], proof)
    assert torch.equal(pages[0], untouched[0])
    assert torch.equal(pages[-1], untouched[-1])
    worst = 0.0
    counted = 0
    for which, rows in ((KEY, key), (VALUE, value)):
        copies = pool.rows[slot, :, which, slot_off]
        exact = codecs[which].transform.forward(rows[there], position[there])
        whole = (exact.abs() < 6e4).all(-1)
        error, size = (copies.float() - exact)[whole], exact[whole]
        step = 2.0**-8 if case.dtype == torch.bfloat16 else 2.0**-11
        # rounding; the interpreter cuts off instead of rounding to BF16
        assert (error.norm(dim=-1) < 1.25 * step * size.norm(dim=-1)).all()
        expected = codecs[which].encode(copies)
        counted += int(codecs[which].encode(exact.to(case.dtype)).saturated)
        codes = views.codes(which, (at, slice(None), off))
        meta = views.meta[at, :, off, which]
        same = (codes == expected.codes).float().mean().item()
        assert same > 0.97, f"{1 - same:.1%} of the codes differ"
        got = decode(codes, meta[..., 0], meta[..., 1]) - copies.float()
        wanted = decode(expected.codes, expected.scale, expected.offset) - copies.float()
        if which == KEY and metric is not None:
            got, wanted = (torch.einsum("thd,hde,the->th", e, metric.g, e) for e in (got, wanted))
        else:
            got, wanted = got.square().sum(-1), wanted.square().sum(-1)
        # rows whose errors differ, a tie gone the other way, must not differ much nor on average
        floor = 1e-5 * copies.float().square().sum(-1) + 1e-20
        ratio = (got + floor) / (wanted + floor)
        worst = max(worst, abs(ratio.mean().item() - 1))
        assert worst < 0.01 + 0.1 / ratio.numel() ** 0.5, f"error {worst:.1%} off"
        assert ratio.max() < 2, f"one row's error {ratio.max():.2f} times the reference's"
    if not case.reencoded:
        assert int(saturated) == counted, f"{int(saturated)} rows counted, {counted} are"
    return f"{worst:.1e}"


def _reencode_all(case: Case, pages: torch.Tensor, pool: HotPool, metric: MetricTables, scratch: torch.Tensor) -> None:
    """Decode steps in which layer 1, the case's, is due, until all tokens have left the window."""
    n, device = case.tokens, pages.device
    table = SlotTable.empty(HotContract(0, 1, case.block_size), pages.shape[0], pool.rows.shape[0], device)
    table.slot_of_block[:-1] = torch.arange(pages.shape[0] - 1, -1, -1, device=device)
    same_strides = strided_pages(case.layout, pages.shape[0], case.heads, case.order, device).copy_(pages)
    other = same_strides, HotPool(pool.rows.clone(), pool.words.clone())
    layers = ReencodeTable.of(
        case.layout, [other[0], pages, other[0]], [other[1], pool, other[1]], [metric] * LAYERS, [1.05] * LAYERS
    )
    block_table = torch.arange(1, pages.shape[0] - 1, dtype=torch.int32, device=device)[None]
    # the last batch goes beyond the tokens, into the null block, which has no slot
    table.slot_of_block[0] = -1
    table.written.fill_(1)
    block_table = torch.nn.functional.pad(block_table, (0, -(-BATCH // case.block_size)))
    query_start_loc = torch.tensor([0, 1], dtype=torch.int32, device=device)
    grown = 4
    # tokens before the first of these steps; from 2 on another layer is due
    for before in (2, *range(1, n + BATCH, BATCH)):
        seq_lens = torch.tensor([before + grown], dtype=torch.int32, device=device)
        reencode(layers, table, block_table, seq_lens, query_start_loc, 1, grown, scratch)


def gpu_cases() -> list[Case]:
    """What gates.kernels runs."""
    both = torch.bfloat16, torch.float16
    sizes = (64, 0), (64, 32), (80, 0), (96, 0), (128, 0), (128, 64), (128, 32), (192, 0), (256, 0)
    cases = [
        Case(d, g, p, n, 3, encoder, False, dtype, order)
        for d, g in sizes
        for encoder in ("ls", "metric")
        # blocks of 64 are what a GPU has by default
        for p, n, dtype, order in ((64, 150, both[0], "padded"), (16, 300, both[1], "head-major"))
    ]
    cases += [Case(d, 0, 64, n, 2, "minmax", False, dtype) for d, n, dtype in ((64, 33, both[0]), (128, 200, both[1]))]
    cases += [Case(128, 0, 16, n, 8, "metric", False, both[0]) for n in (1, 15, 2048)]
    cases += [Case(d, g, 64, 150, 3, "metric", True, both[0]) for d, g in sizes]
    cases += [Case(d, 0, 16, 100, 3, "metric", True, both[0]) for d in (64, 128)]
    ways = ("ls", False), ("metric", False), ("metric", True)
    cases += [Case(128, 0, 16, 40, 1, *way, both[0], "huge") for way in ways]
    cases += [
        Case(d, 0, 16, n, 3, encoder, False, dtype, turning=pairs)
        for d, n, encoder, dtype, pairs in (
            (64, 33, "ls", both[0], 1),
            (128, 33, "ls", both[1], 8),
            (128, 300, "metric", both[0], 8),
            (80, 300, "metric", both[1], 3),
            (256, 33, "ls", both[0], 8),
        )
    ]
    cases += [
        Case(d, g, 64, 150, 3, encoder, reencoded, both[0], bits=(key, value))
        for key in KEY_BITS
        for value in VALUE_BITS
        for d, g, encoder, reencoded in (
            (128, 0, "ls", False),
            (128, 0, "metric", False),
            (128, 0, "metric", True),
            (64, 32, "metric", False),
            (80, 0, "metric", True),
            (64, 0, "minmax", False),
        )
        if (key, value) != (2, 2)
    ]
    return cases
