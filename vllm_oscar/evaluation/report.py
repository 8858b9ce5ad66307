"""Results as a table and as a picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_oscar.evaluation.measure import Result
from vllm_oscar.evaluation.needle import BY_DEPTH, Found

HEAD = "text      cache           bits  INT2 reads        KL       +-   KL p99      ppl    ppl %  top-1 %"


def line(r: Result) -> str:
    """One line of the table; emulated methods have a star."""
    share = "-" if r.int2_reads is None else f"{100 * r.int2_reads:.1f}%"
    name = r.method + "*" * r.emulated
    return (
        f"{r.text:<10}{name:<14}{r.bits:>6.2f}{share:>12}{r.kl:>10.4f}{r.kl_error:>9.4f}{r.kl_p99:>9.3f}"
        f"{r.perplexity:>9.3f}{100 * r.perplexity_change:>+9.2f}{100 * r.top1:>9.2f}"
    )


def table(results: Sequence[Result]) -> str:
    """Fixed-width text: for each text, a line for each method."""
    r = results[0]
    notes = [
        f"{r.windows} windows of {r.context} tokens of each text, scored from position {r.first} on; KL to bf16; "
        "+- standard error over windows"
    ]
    if any(one.emulated for one in results):
        notes.append("* emulated: the method's values in vLLM's BF16 cache; the bits are what a cache of it would take")
    parts: list[str] = [HEAD]
    for text in _texts(results):
        parts += ["-" * len(HEAD), *(line(one) for one in results if one.text == text)]
    return "\n".join([*parts, *notes])


def plot(results: Sequence[Result], path: Path) -> None:
    """KL of each method and text as a point with its error, on a logarithmic axis, to a picture file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shown = [r for r in results if r.kl > 0]
    names = list(dict.fromkeys((r.method, r.bits, r.emulated) for r in shown))
    texts = _texts(shown)
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    for number, text in enumerate(texts):
        of_text = [r for r in shown if r.text == text]
        at = [names.index((r.method, r.bits, r.emulated)) + 0.5 * ((number + 0.5) / len(texts) - 0.5) for r in of_text]
        kl, error = [r.kl for r in of_text], [r.kl_error for r in of_text]
        axes.errorbar(kl, at, xerr=error, fmt="o", markersize=4, capsize=2, label=text)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), [f"{name}{', emulated' * star}, {bits:g} bits" for name, bits, star in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("KL divergence to the BF16 cache (nats)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def heat_map(results: Sequence[Found], path: Path) -> None:
    """Share of right answers by length and place, a row of pictures for each kind and one picture for each method.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    kinds, methods = (list(dict.fromkeys(names)) for names in ((r.kind for r in results), (r.method for r in results)))
    figure = Figure(figsize=(1 + 3 * len(methods), 0.8 + 2.4 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), len(methods), squeeze=False)
    image: Any = None
    for row, kind in zip(panels, kinds, strict=True):
        of_kind = [r for r in results if r.kind == kind]
        lengths, places = sorted({r.length for r in of_kind}), _places(of_kind)
        for axes, method in zip(row, methods, strict=True):
            shares = np.full((len(places), len(lengths)), np.nan)
            for r in of_kind:
                if r.method == method:
                    at = places.index(_place(r)), lengths.index(r.length)
                    shares[at] = r.right / r.asked
                    log_p = "" if r.log_p is None else f"\n{r.log_p:.2f}"
                    axes.text(at[1], at[0], f"{r.right}/{r.asked}{log_p}", ha="center", va="center", fontsize=7)
            image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
            axes.set_yticks(range(len(places)), places, fontsize=7)
            axes.set_title(f"{kind}, {method}", fontsize=9)
        row[0].set_ylabel("in the haystack")
    for axes in panels[-1]:
        axes.set_xlabel("tokens")
    figure.colorbar(image, ax=panels, label="right answers")
    figure.savefig(path, dpi=150)


def needle_table(results: Sequence[Found]) -> str:
    """Fixed-width text: a block for each kind with a line for each length and method and a column for each place."""
    blocks = []
    for kind in dict.fromkeys(r.kind for r in results):
        of_kind = [r for r in results if r.kind == kind]
        places = _places(of_kind)
        head = f"{kind:<14}{'bits':>6}{'length':>8}" + "".join(f"{place:>16}" for place in places)
        head += f"{'all':>7}{'+-':>5}{'log p':>9}{'+-':>7}"
        blocks += [head, "-" * len(head)]
        for length, method in dict.fromkeys((r.length, r.method) for r in of_kind):
            row = {_place(r): r for r in of_kind if (r.length, r.method) == (length, method)}
            first = next(iter(row.values()))
            line = f"{method + '*' * first.emulated:<14}{bits_of(first.bits):>6}{length:>8}"
            blocks.append(line + "".join(f"{_cell(row.get(place)):>16}" for place in places) + _overall(row.values()))
        blocks.append("")
    return "\n".join(blocks[:-1])


def _places(results: Sequence[Found]) -> list[str]:
    """Of one kind, from the haystack's start to its end."""
    return list(
        dict.fromkeys(_place(r) for r in sorted(results, key=lambda r: r.depth if r.kind in BY_DEPTH else -r.back))
    )


def _place(found: Found) -> str:
    return f"at {found.depth:.0%}" if found.kind in BY_DEPTH else f"{found.back:,} back"


def _cell(found: Found | None) -> str:
    if found is None:
        return "-"
    return f"{found.right}/{found.asked}" + ("" if found.log_p is None else f" {found.log_p:7.2f}")


def _overall(cells: Iterable[Found]) -> str:
    """Share of right answers and log probability over all places, with standard errors."""
    cells = list(cells)
    asked = sum(r.asked for r in cells)
    share = sum(r.right for r in cells) / asked
    text = f"{share:>7.0%}{(share * (1 - share) / asked) ** 0.5:>5.0%}"
    known = [r for r in cells if r.log_p is not None]
    if known:
        mean = sum(r.asked * (r.log_p or 0.0) for r in known) / asked
        error = sum((r.asked * (r.log_p_error or 0)) ** 2 for r in known) ** 0.5 / asked
        text += f"{mean:>9.3f}" + (f"{error:>7.3f}" if error else f"{'-':>7}")
    return text


def bits_of(bits: float | None) -> str:
    """For tables."""
    return "-" if bits is None else f"{bits:.2f}"


def _texts(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(r.text for r in results))
