"""Writing, re-encoding, slots and prefill, in microseconds a layer or a step, as CSV.

    python -m benchmarks.speed.kernel_write [--out write.csv]

Times are CUDA-graph replays over rotating inputs; prefill is timed with events next to torch's FlashAttention.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator

import torch

from benchmarks.speed.kernel_decode import graph_time
from gates.cases.write import Case, a_metric, codec
from gates.synthetic import transform
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.kernels import slots
from vllm_oscar.kernels.encode_metric import MetricTables, ReencodeTable, encode_written, reencode, workspace
from vllm_oscar.kernels.history import RestoreTables, plan, restore
from vllm_oscar.kernels.prefill import PrefillWorkspace, attention, merge
from vllm_oscar.kernels.write import WriteTables, write
from vllm_oscar.page_layout import KEY, VALUE, PageLayout

DEVICE = torch.device("cuda")
Row = dict[str, object]


def writing(head_size: int, encoder: str, heads: int = 8) -> Iterator[Row]:
    """write, and with the metric encoder encode_written; the last 256 tokens are hot."""
    case = Case(head_size, heads=heads, encoder=encoder, dtype=torch.bfloat16)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    codecs = codec(case, KEY, generator), codec(case, VALUE, generator)
    layout = case.layout
    write_tables = WriteTables.of(*codecs, case.dtype)
    metric = MetricTables.of(codecs[0].metric, layout) if codecs[0].metric is not None else None
    scratch, saturated = workspace(layout, DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def one(tokens: int) -> Callable[[], None]:
        fused = torch.randn(tokens, 6 * heads, head_size, device=DEVICE, dtype=case.dtype, generator=generator)
        _, key, value = fused.split([4 * heads, heads, heads], 1)
        pages = torch.zeros((tokens // 16 + 2, heads, layout.head_bytes), dtype=torch.uint8, device=DEVICE)
        pool = HotPool.allocate(layout, 32, heads, case.dtype, DEVICE)
        places = torch.arange(tokens, device=DEVICE)
        hot = torch.where(places >= tokens - 256, places % 512, -1)
        y = torch.empty((tokens, heads, head_size), dtype=case.dtype, device=DEVICE)

        def call() -> None:
            later = None if metric is None else y
            write(key, value, pages, layout, pool, places, hot, write_tables, saturated, later)
            if metric is not None:
                encode_written(y, pages, layout, pool, places, hot, metric, 1.05, scratch, saturated)

        return call

    for tokens in (1, 8, 64, 512, 2048, 8192):
        copies = 1 + min(15, (128 << 20) // (tokens * heads * head_size * 8))
        shape = f"D{head_size} H{heads} T{tokens}"
        yield {"what": f"write {encoder}", "shape": shape, "us": graph_time([one(tokens) for _ in range(copies)])}


def reencoding(requests: int, head_size: int = 128, heads: int = 8, layers: int = 36) -> Iterator[Row]:
    """A decode step's share, at the worst and the average phase, and the slots of the same step."""
    case = Case(head_size, heads=heads, encoder="metric", dtype=torch.bfloat16)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    layout, contract = case.layout, HotContract(64, 256, 16)
    tokens = 1024
    per = tokens // 16
    blocks = requests * per + 1
    metric = MetricTables.of(a_metric(case, generator), layout)
    pages = [torch.zeros((blocks, heads, layout.head_bytes), dtype=torch.uint8, device=DEVICE) for _ in range(layers)]
    pools = [HotPool.allocate(layout, requests * 24, heads, case.dtype, DEVICE) for _ in range(layers)]
    for pool in pools:
        pool.rows.normal_(generator=generator)
        pool.words.zero_()
    table = SlotTable.empty(contract, blocks, requests * 24, DEVICE)
    scratch = slots.SlotScratch.of(table)
    block_table = 1 + torch.arange(requests * per, dtype=torch.int32, device=DEVICE).view(requests, per)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
    after = torch.full((requests,), tokens - 5, dtype=torch.int32, device=DEVICE)

    def give() -> None:
        slots.allocate(table, scratch, block_table, after, starts, 1)
        table.written.fill_(1)

    shape = f"D{head_size} H{heads} B{requests}"
    yield {"what": "slots allocate, kept", "shape": shape, "us": graph_time([give])}
    after += 16
    give()  # the next block of every request

    def churn() -> None:
        table.slot_of_block.fill_(-1)
        table.block_of_slot.fill_(-1)
        give()

    yield {"what": "slots allocate, all new", "shape": shape, "us": graph_time([churn])}
    places = torch.arange(requests, device=DEVICE) * 16
    hot = torch.empty_like(places)

    def mapping() -> None:
        slots.map_copies(table, places, starts, after, 1, hot)

    yield {"what": "map_copies", "shape": shape, "us": graph_time([mapping])}

    every = ReencodeTable.of(layout, pages, pools, [metric] * layers, [1.05] * layers)
    space = workspace(layout, DEVICE)

    for due in (2, 1):  # layers
        after.fill_(705 if due == 2 else 721)
        give()
        for page, pool in zip(pages, pools, strict=True):
            page.zero_()
            pool.words.zero_()
        yield {
            "what": f"reencode, {due} of {layers} layers due",
            "shape": shape,
            "us": graph_time([lambda: reencode(every, table, block_table, after, starts, 1, 1, space)]),
        }


def event_time(call: Callable[[], None], rounds: int = 7) -> float:
    call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[rounds // 2]


def prefilling(head_size: int, history: int, chunk: int = 2048, heads: int = 8, ratio: int = 4) -> Iterator[Row]:
    """One call's parts, and torch's FlashAttention over the same keys (its causal mask does not fit a chunk: none)."""
    layout, dtype = PageLayout(head_size, 16), torch.bfloat16
    blocks = history // 16 + 2
    pages = torch.randint(0, 256, (blocks, heads, layout.head_bytes), dtype=torch.uint8, device=DEVICE)
    layout.views(pages).meta.fill_(0.5)
    table = SlotTable.empty(HotContract(64, 256, 16), blocks, 64, DEVICE)
    pool = HotPool.allocate(layout, 64, heads, dtype, DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    restore_tables = RestoreTables.of(
        transform(heads, head_size, dtype, generator), transform(heads, head_size, dtype, generator), dtype
    )
    block_table = 1 + torch.randperm(blocks - 1, device=DEVICE).int()[None]
    fused = torch.randn(chunk, (ratio + 2) * heads, head_size, device=DEVICE, dtype=dtype)
    query, key, value = fused.split([ratio * heads, heads, heads], 1)
    total = history + chunk
    call = plan([total], [0, chunk], 0, total, None, DEVICE)[0]
    space = PrefillWorkspace.allocate(total, chunk, ratio * heads, heads, head_size, dtype, DEVICE)
    out, lse = torch.empty_like(space.out), space.lse[0]
    shape = f"D{head_size} H{heads} r{ratio} {history}+{chunk}"

    def fill() -> None:
        restore(call, key, value, pages, layout, pool, table, block_table, restore_tables, space.restored)

    def attend() -> None:
        attention(query, space.restored[0], space.restored[1], call, out, lse, head_size**-0.5, 0.0, None)

    yield {"what": "restore", "shape": shape, "us": event_time(fill)}
    yield {"what": "attention, Triton, causal", "shape": shape, "us": event_time(attend)}
    yield {"what": "merge", "shape": shape, "us": event_time(lambda: merge(out, lse, space.out, space.lse[1]))}
    q = query.transpose(0, 1)[None]
    keys, values = (t.transpose(0, 1)[None].repeat_interleave(ratio, 1) for t in space.restored)

    def flash() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, keys, values)

    yield {"what": "torch FlashAttention-2, full", "shape": shape, "us": event_time(flash)}


def rows() -> Iterator[Row]:
    for head_size in (128, 64):
        for encoder in ("ls", "metric"):
            yield from writing(head_size, encoder)
    yield from reencoding(8)
    yield from reencoding(64)
    for history in (0, 14336, 30720):
        yield from prefilling(128, history)
    yield from prefilling(64, 30720)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out")
    options = parser.parse_args()
    with open(options.out or "/dev/stdout", "w", buffering=1) as file:  # a crash costs the rows after it
        writer = csv.DictWriter(file, ["what", "shape", "us"], lineterminator="\n")
        writer.writeheader()
        for row in rows():
            writer.writerow(row)
            print(f"{row['what']:32} {row['shape']:28} {row['us']:9.1f} us", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
