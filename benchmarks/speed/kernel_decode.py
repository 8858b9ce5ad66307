"""Decode attention over INT2, beside a BF16 decode and a kernel that only reads: microseconds a layer, as CSV.

    python -m benchmarks.speed.kernel_decode [--out decode.csv] [--quick] [--bits [--programs 8 12 16]]

Times are CUDA-graph replays over copies of the cache that together exceed the L2 several times. "bytes" are what has
to be read: INT2 rows, and for tokens with a BF16 copy the copy and both sets of scale and offset words.
"""

import argparse
import csv
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.speed.ceilings import Bf16Decode, read_pages
from gates.synthetic import transform, turning_mean
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable, page_words
from vllm_oscar.kernels import segments
from vllm_oscar.kernels.decode import DecodeTables, DecodeWorkspace, column_tiles, decode_attention
from vllm_oscar.kernels.segments import Segments, build_segments
from vllm_oscar.page_layout import KEY_BITS, VALUE_BITS, PageLayout

SINK, WINDOW = 64, 256


@dataclass(frozen=True)
class Shape:
    """turning: pairs of channels in which the keys' mean turns with the position; queries: of each sequence, where they
    are not all q_len, which is then the most; bits: of keys and values."""

    lengths: tuple[int, ...]
    head_size: int = 128
    group_size: int = 0
    block_size: int = 64
    kv_heads: int = 8
    ratio: int = 4
    q_len: int = 1
    soft_cap: float = 0.0
    turning: int = 0
    queries: tuple[int, ...] = ()
    bits: tuple[int, int] = (2, 2)

    def __str__(self) -> str:
        runs = [(n, self.lengths.count(n)) for n in dict.fromkeys(self.lengths)]
        lengths = "+".join(f"{count}x{n}" for n, count in runs[:4]) + ("+..." if len(runs) > 4 else "")
        extra = f" G{self.group_size}" if self.group_size else ""
        extra += f" q{self.q_len}" if self.q_len > 1 else ""
        extra += f" of {self.queries}".replace(",", "") if self.queries else ""
        extra += f" turning {self.turning}" if self.turning else ""
        extra += "" if self.bits == (2, 2) else " k{}v{}".format(*self.bits)
        return f"{lengths} H{self.kv_heads} r{self.ratio} D{self.head_size} P{self.block_size}{extra}"


def graph_time(calls: list[Callable[[], object]], rounds: int = 5) -> float:
    """Microseconds a call, median of rounds."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    repeat = 1
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeat):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeat / len(calls))
        repeat = max(1, min(50, int(2e4 / (times[0] * len(calls)))))
    return sorted(times[1:])[rounds // 2]


class Bench:
    """A shape's tensors: `copies` caches behind one another, as layers have them."""

    def __init__(self, shape: Shape, budget: float = 5e8) -> None:
        device = torch.device("cuda")
        generator = torch.Generator(device=device).manual_seed(0)
        self.shape = shape
        layout = self.layout = PageLayout(shape.head_size, shape.block_size, shape.group_size, *shape.bits)
        heads, p = shape.kv_heads, shape.block_size
        counts = [-(-n // p) for n in shape.lengths]
        per_copy = sum(counts)
        hot = sum(min(n, SINK + WINDOW) for n in shape.lengths)
        cold = sum(shape.lengths) - hot
        self.bytes = heads * (cold * layout.token_bytes + hot * (4 * layout.head_size + 2 * layout.meta_bytes))
        self.copies = max(1, min(24, int(budget // self.bytes)))
        blocks = per_copy * self.copies + 1
        words = torch.randint(
            -(2**31),
            2**31 - 1,
            (blocks, heads, layout.head_bytes // 4),
            dtype=torch.int32,
            device=device,
            generator=generator,
        )
        self.pages = words.view(torch.uint8)
        meta = layout.views(self.pages).meta
        scale = torch.rand(meta.shape[:-1], device=device, generator=generator) * 0.4 + 0.3
        noise = torch.randn(meta.shape[:-1], device=device, generator=generator)
        meta[..., 0] = scale.half()
        meta[..., 1] = (0.2 * noise - 1.5 * scale).half()
        order = 1 + torch.randperm(blocks - 1, device=device, generator=generator).int()
        contract = HotContract(SINK, WINDOW, p)
        hot_blocks, tables = [], []
        for copy in range(self.copies):
            table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
            at = copy * per_copy
            for seq, count in enumerate(counts):
                table[seq, :count] = order[at : at + count]
                at += count
                sinks = table[seq, : min(count, contract.sink_blocks)]
                tail = table[seq, max(0, count - contract.tail_blocks) : count]
                hot_blocks += [sinks, tail]
            tables.append(table)
        self.block_tables = tables
        own = torch.cat(hot_blocks).unique()
        self.table = SlotTable.empty(contract, blocks, own.shape[0], device)
        self.table.written.fill_(1)
        self.table.slot_of_block[own.long()] = torch.arange(own.shape[0], dtype=torch.int32, device=device)
        self.pool = HotPool.allocate(layout, own.shape[0], heads, torch.bfloat16, device)
        self.pool.rows.normal_(generator=generator)
        self.pool.words.copy_(page_words(meta[own.long()]))
        self.seq_lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        seqs = len(counts)
        query_heads = heads * shape.ratio
        each = shape.queries or (shape.q_len,) * seqs
        self.query = torch.randn(sum(each), query_heads, shape.head_size, device=device, generator=generator).bfloat16()
        starts = torch.tensor([0, *each], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        self.starts = starts if shape.queries else None
        self.out = torch.empty_like(self.query)
        key, value = (transform(heads, shape.head_size, torch.bfloat16, generator) for _ in range(2))
        mean = turning_mean(heads, shape.head_size, shape.turning, 1.0, generator)
        self.tables = DecodeTables.of(replace(key, turning=mean), value)
        self.workspace = DecodeWorkspace.allocate(
            layout, heads, shape.ratio, seqs, shape.q_len, device, contract, shape.turning > 0
        )
        programs = heads * column_tiles(shape.q_len, shape.ratio)[1]
        self.segments = Segments.allocate(seqs, programs, layout, device).for_batch(seqs, programs)
        self.build()

    def build(self) -> None:
        build_segments(self.seq_lens, self.shape.q_len, self.table.limits, None, self.segments)

    def call(self, copy: int) -> None:
        shape = self.shape
        decode_attention(
            self.query, self.pages, self.layout, self.pool, self.table, self.block_tables[copy], self.seq_lens,
            shape.q_len, self.segments, self.tables, shape.head_size**-0.5, shape.soft_cap, None, self.workspace,
            self.out, query_starts=self.starts,
        )  # fmt: skip

    def oscar(self) -> float:
        return graph_time([lambda c=c: self.call(c) for c in range(self.copies)])  # type: ignore[misc]

    def read(self) -> float:
        """The ceiling: INT2 bytes only, scaled to the bytes that count."""
        blocks = min(-(-n // self.shape.block_size) for n in self.shape.lengths)
        words = self.pages.view(torch.int32)
        out = torch.empty(1 << 16, dtype=torch.int32, device=words.device)
        head_bytes = self.layout.head_bytes
        time = graph_time(
            [lambda t=t: read_pages(words, t, blocks, head_bytes, out) for t in self.block_tables]  # type: ignore[misc]
        )
        read = blocks * len(self.shape.lengths) * self.shape.kv_heads * (1 << ((head_bytes // 4).bit_length() - 1)) * 4
        return time * self.bytes / read

    def bf16(self) -> float:
        """A BF16 decode of the same batch; NaN where the baseline does not have the shape."""
        shape = self.shape
        if shape.q_len > 1 or shape.head_size & (shape.head_size - 1):
            return float("nan")
        p, d = shape.block_size, shape.head_size
        blocks = sum(-(-n // p) for n in shape.lengths) + 1
        copies = max(1, min(8, int(5e8 // (blocks * p * shape.kv_heads * d * 4))))
        cache = torch.empty(
            copies * blocks, shape.kv_heads, 2, p, d, dtype=torch.bfloat16, device=self.query.device
        ).normal_()
        tables = []
        for copy in range(copies):
            order = torch.randperm(blocks, device=cache.device).int() + copy * blocks
            table, at = torch.zeros_like(self.block_tables[0]), 0
            for seq, n in enumerate(shape.lengths):
                table[seq, : -(-n // p)] = order[at : at + -(-n // p)]
                at += -(-n // p)
            tables.append(table)
        decode = Bf16Decode(len(shape.lengths), shape.kv_heads, shape.ratio, d, max(shape.lengths), cache.device)
        return graph_time(
            [lambda t=t: decode(self.query, cache, t, self.seq_lens, self.out) for t in tables]  # type: ignore[misc]
        )


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and written bytes counted."""
    source = torch.ones(1 << 29, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    time = graph_time([lambda: torch.add(source, 1, out=target)])
    return 2 * source.nbytes / time * 1e6


def shapes(quick: bool, bits: bool) -> list[Shape]:
    k = 1024
    few = [
        Shape((128 * k,) * 8),
        Shape((32 * k,) * 8),
        Shape((4 * k,) * 32),
        Shape((k,) * 8),
        Shape((128 * k,)),
        Shape((128 * k, *(4 * k,) * 7)),
        Shape((128 * k,) * 8, ratio=8),
        Shape((128 * k,) * 8, ratio=16),
        Shape((128 * k,) * 16, head_size=64, block_size=128),
        Shape((128 * k,) * 8, head_size=256, kv_heads=4),
    ]
    if quick:
        return few
    if bits:
        every = [(k, v) for k in KEY_BITS for v in VALUE_BITS]
        return [
            *(Shape((128 * k,) * 8, bits=each) for each in every),
            *(Shape((4 * k,) * 32, bits=each) for each in ((2, 2), (3, 2), (4, 2), (4, 4))),
            *(Shape((128 * k,) * 16, head_size=64, block_size=128, bits=each) for each in ((2, 2), (3, 2), (4, 2))),
        ]
    return [
        *few,
        *(Shape((n * k,) * b) for b in (1, 8, 32) for n in (4, 16, 64)),
        Shape((32 * k,) * 32),
        Shape((128 * k,) * 8, block_size=16),
        Shape((128 * k,) * 8, block_size=256),
        Shape((128 * k,) * 8, group_size=64),
        Shape((128 * k,) * 8, group_size=32),
        Shape((128 * k,) * 8, q_len=4),
        Shape((128 * k,) * 8, q_len=4, queries=(4, 1, 2, 3) * 2),
        Shape((128 * k,) * 8, ratio=8, q_len=4),
        Shape((128 * k,) * 8, ratio=8, q_len=4, queries=(4, 1, 2, 3) * 2),
        *(Shape((n * k,) * 8, turning=8) for n in (1, 32, 128)),
        Shape((128 * k,) * 16, head_size=64, block_size=128, turning=8),
        Shape((128 * k,) * 16, head_size=64, block_size=16, ratio=8),
        Shape((128 * k,) * 8, head_size=80),
        Shape((128 * k,) * 8, head_size=96),
        Shape((128 * k,) * 8, head_size=192, kv_heads=4),
        Shape((k,) * 256),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="CSV file; standard output otherwise")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bits", action="store_true", help="one shape with all numbers of bits of keys and values")
    parser.add_argument("--programs", type=int, nargs="*", help="a multiprocessor's, instead of the kernel's own")
    parser.add_argument("--peak", type=float, default=4.8e12, help="bytes a second of the datasheet")
    options = parser.parse_args()
    name = torch.cuda.get_device_name(0)
    print(f"# {name}, torch {torch.__version__}, copy {copy_bandwidth() / 1e12:.2f} TB/s", file=sys.stderr)
    with open(options.out or "/dev/stdout", "w", buffering=1) as file:  # a crash costs the rows after it
        writer = csv.writer(file)
        writer.writerow(
            ["gpu", "shape", "programs", "MB", "us", "read_us", "bf16_us", "of_peak", "of_read", "bf16_over_oscar"]
        )
        for shape, programs in itertools.product(shapes(options.quick, options.bits), options.programs or [None]):
            if programs:
                segments.programs_per_multiprocessor = lambda layout, n=programs: n  # type: ignore[misc]
            bench = Bench(shape)
            us, read, bf16 = bench.oscar(), bench.read(), bench.bf16()
            used = segments.programs_per_multiprocessor(bench.layout)
            row = [used, round(bench.bytes / 1e6, 1), round(us, 1), round(read, 1), round(bf16, 1)]
            ratios = [round(bench.bytes / us * 1e6 / options.peak, 3), round(read / us, 3), round(bf16 / us, 2)]
            writer.writerow([name, str(shape), *row, *ratios])
            print(f"{shape!s:40}", *row, *ratios, file=sys.stderr, flush=True)
            del bench
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
