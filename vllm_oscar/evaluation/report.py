"""Results as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from vllm_oscar.evaluation.measure import Result

HEAD = "cache           bits  INT2 reads        KL       +-   KL p99      ppl    ppl %  top-1 %"


def line(r: Result) -> str:
    """One method's line of the table."""
    share = "-" if r.int2_reads is None else f"{100 * r.int2_reads:.1f}%"
    return (
        f"{r.method:<14}{r.bits:>6.2f}{share:>12}{r.kl:>10.4f}{r.kl_error:>9.4f}{r.kl_p99:>9.3f}"
        f"{r.perplexity:>9.3f}{100 * r.perplexity_change:>+9.2f}{100 * r.top1:>9.2f}"
    )


def table(results: Sequence[Result]) -> str:
    """Fixed-width text, a line for each method."""
    r = results[0]
    note = (
        f"{r.windows} windows of {r.context} tokens, scored from position {r.first} on; KL to bf16; "
        "+- standard error over windows"
    )
    return "\n".join([HEAD, "-" * len(HEAD), *map(line, results), note])


def plot(results: Sequence[Result], path: Path) -> None:
    """KL of each method as a point with its error, on a logarithmic axis, to a picture file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shown = [r for r in results[1:] if r.kl > 0]
    figure = Figure(figsize=(8, 0.8 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.errorbar([r.kl for r in shown], range(len(shown)), xerr=[r.kl_error for r in shown], fmt="o", capsize=3)
    for at, r in enumerate(shown):
        text = f"{r.kl:.4f}, perplexity {100 * r.perplexity_change:+.1f}%, {r.bits:g} bits"
        axes.annotate(text, (r.kl, at), (12, -3), textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(min(r.kl for r in shown) / 2, max(r.kl for r in shown) * 100)  # room for the texts
    axes.set_yticks(range(len(shown)), [r.method for r in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("KL divergence to the BF16 cache (nats)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
