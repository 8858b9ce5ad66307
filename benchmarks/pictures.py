"""The README's two pictures, drawn from the figures that are committed beside the scripts that measured them.

    python -m benchmarks.pictures [FOLDER]      docs by default; needs 'vllm-oscar[plot]'

A row that is appended to a file takes part: of rows that say the same of the same cache, the last one counts.
"""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
TEXTS = ROOT / "benchmarks" / "quality" / "texts_h200.csv"
NEEDLES = ROOT / "benchmarks" / "quality" / "needles_h200.csv"
SPEED = ROOT / "benchmarks" / "speed" / "engine_h200.csv"
Rows = list[dict[str, str]]

QUALITY_OF = "Qwen2.5-Coder-1.5B"
ELEMENTS = 28 * 2 * 2 * 128  # of a token: layers, KV heads, keys and values, head size
NEEDLE_LENGTH = 32768
NAMES = {  # as the files have them, and as readers know them
    "bf16": "BF16", "auto": "BF16", "fp8": "FP8", "turboquant_4bit_nc": "TurboQuant", "kivi": "KIVI", "kvarn": "KVarN",
    "int4": "INT4 with rotation", "reference": "published OSCAR", "oscar": "vllm-oscar", "oscar auto:2.5": "auto:2.5",
    "oscar k3v2": "k3v2",
}  # fmt: skip
OURS = "#d1495b"
COLOURS = {
    "bf16": "#30638e", "auto": "#30638e", "fp8": "#6c9a8b", "turboquant_4bit_nc": "#b8b8b8",
    "oscar": OURS, "oscar auto:2.5": OURS, "oscar k3v2": OURS,
}  # fmt: skip
MARKERS = {"oscar": "D", "oscar auto:2.5": "^", "oscar k3v2": "s"}
SPEED_OF = "qwen3-4b (dummy weights)"
REQUESTS = {  # `what` in the file, sequences (of each cache where it is None) and the axis' words
    "decode 8 x 1024": (8, "8 x 1K"), "decode 32 x 4096": (32, "32 x 4K"), "decode 8 x 32768": (8, "8 x 32K"),
    "decode 4 x 100000": (4, "4 x 100K"), "throughput at 100000": (None, "100K each,\nas many as fit"),
}  # fmt: skip


def read(path: Path) -> Rows:
    """A file's rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tokens_in_a_gigabyte(bits: float) -> float:
    """Of QUALITY_OF, without the BF16 copies, whose number does not grow with the context."""
    return 8e9 / (bits * ELEMENTS)


def losses(texts: Rows) -> dict[str, tuple[float, float]]:
    """Bits and KL on prose, by method."""
    rows = [row for row in texts if row["model"] == QUALITY_OF and row["text"] == "prose" and row["method"] in NAMES]
    return {row["method"]: (float(row["bits"]), float(row["kl"])) for row in rows}


def found(needles: Rows) -> dict[str, tuple[float, float]]:
    """Bits, and the needles found as a share of those that BF16 found in the same runs, by method."""
    rows = [row for row in needles if row["model"] == QUALITY_OF and int(row["length"]) == NEEDLE_LENGTH]
    by_bf16 = {row["run"]: int(row["right"]) for row in rows if row["method"] == "bf16"}
    of = {row["method"]: [each for each in rows if each["method"] == row["method"]] for row in rows}
    return {
        method: (float(own[0]["bits"]), sum(int(r["right"]) for r in own) / sum(by_bf16[r["run"]] for r in own))
        for method, own in of.items()
    }


def speeds(rows: Rows) -> dict[str, dict[str, float]]:
    """Tokens/s by cache and kind of request. A remark in brackets behind the cache's name is that of a variant, which
    counts where there is nothing else."""
    result: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: "(" not in row["dtype"]):  # stable: plain ones last, in the file's order
        cache = row["dtype"].partition(" (")[0]
        if row["model"] == SPEED_OF and row["what"] in REQUESTS and cache in NAMES:
            value, (sequences, _) = float(row["value"]), REQUESTS[row["what"]]
            result.setdefault(cache, {})[row["what"]] = 1000 * sequences / value if sequences else value
    return result


def quality(figure: Figure) -> None:
    """KL and needles against tokens in memory, two panels."""
    texts, needles = read(TEXTS), read(NEEDLES)
    emulated = {row["method"] for row in [*texts, *needles] if row["emulated"]}
    kl, shares = losses(texts), found(needles)
    left, right = figure.subplots(1, 2)
    legend = {}
    for number, method in enumerate(method for method in NAMES if method in kl.keys() | shares.keys()):
        colour = COLOURS.get(method, f"C{number}")
        style = {"color": colour, "markerfacecolor": "white" if method in emulated else colour}
        for axes, points, unit in ((left, kl, 1), (right, shares, 100)):
            if method in points:
                bits, value = points[method]
                (dot,) = axes.plot(tokens_in_a_gigabyte(bits) / 1000, unit * value, MARKERS.get(method, "o"), **style)
                legend[f"{NAMES[method]}, {bits:g} bits"] = dot
    for axes in (left, right):
        axes.set_xlabel("thousand tokens in a GB of cache")
        axes.set_xlim(0, 275)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    left.set_ylim(20, 1e-3)
    left.set_ylabel("KL to the BF16 cache, prose (nats; up is better)")
    right.set_ylim(0, 105)
    right.set_ylabel(f"needles found in {NEEDLE_LENGTH:,} tokens (% of BF16's)")
    figure.legend(legend.values(), legend.keys(), loc="outside right", frameon=False, fontsize=8)
    figure.suptitle(f"{QUALITY_OF} through vLLM on an H200; open: emulated in a BF16 cache", fontsize=9)


def speed(figure: Figure) -> None:
    """Tokens/s against context, a bar for each cache."""
    by_cache = speeds(read(SPEED))
    axes = figure.subplots()
    caches = [cache for cache in NAMES if cache in by_cache]
    width = 0.8 / len(caches)
    for number, cache in enumerate(caches):
        shown = [(n, by_cache[cache][what]) for n, what in enumerate(REQUESTS) if what in by_cache[cache]]
        at = [n + width * (number + 0.5) - 0.4 for n, _ in shown]
        bars = axes.bar(at, [value for _, value in shown], width, label=NAMES[cache], color=COLOURS.get(cache))
        axes.bar_label(bars, [f"{value:,.0f}" for _, value in shown], fontsize=6.5, padding=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(REQUESTS)), [words for _, words in REQUESTS.values()])
    axes.set_xlabel("requests that decode together x tokens of context")
    axes.set_ylabel("tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Decoding on an H200, Qwen3-4B's shape, 66.7 GB of cache", fontsize=9)
    figure.legend(loc="outside right", frameon=False, fontsize=8)


PICTURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "quality_memory.svg": (quality, (9, 4)),
    "speed_context.svg": (speed, (9, 3.6)),
}


def main(folder: Path) -> None:
    """Draw all; the same figures and matplotlib give the same bytes."""
    options: dict[str, Any] = {"svg.hashsalt": "vllm-oscar", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(options):
        for name, (draw, size) in PICTURES.items():
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            figure.savefig(folder / name, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs")
