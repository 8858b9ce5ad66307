"""Results as a table and as a picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_oscar.evaluation.measure import Result

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


def _texts(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(r.text for r in results))
