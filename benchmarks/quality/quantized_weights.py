"""Quantized weights and an INT2 cache: KL to the same weights over a 16-bit cache, in nats.

    python -m benchmarks.quality.quantized_weights MODEL [--sidecar FILE] [--formats awq gptq fp8]

The model's linear layers are rounded to nearest in each format (examples/awq.py), and the sidecar of the unquantized
model serves them all. Each prints what `oscar eval` prints of one text: an engine of 16 tokens a step over each cache.
"""

import argparse
import runpy
import tempfile
from pathlib import Path

from benchmarks.models.checkpoints import FORMATS
from vllm_oscar.evaluation.measure import measure
from vllm_oscar.evaluation.methods import parse
from vllm_oscar.evaluation.windows import held_out
from vllm_oscar.sidecar import Sidecar, find_sidecar

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder")
    parser.add_argument("--sidecar", help="the model's sidecar; without it: where serving looks for it")
    parser.add_argument("--formats", nargs="+", default=["awq", "gptq", "fp8"], choices=["awq", *FORMATS])
    parser.add_argument("--windows", type=int, default=4, help="of 2,048 tokens, of each text")
    options = parser.parse_args()
    convert = runpy.run_path(str(ROOT / "examples" / "awq.py"))["convert"]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = {name: held_out(tokenizer, name, options.windows, 2048) for name in ("prose", "code")}
    oscar = parse("oscar", Sidecar.load(find_sidecar(str(options.model), options.sidecar)))
    print(f"{'weights':<8}{'text':<8}{'cache bits':>11}{'KL':>9}{'+-':>9}{'p99':>9}{'perplexity':>12}{'change':>9}")
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            quantized = Path(folder) / name
            convert(options.model, quantized, *FORMATS.get(name, ()))
            for result in measure(str(quantized), [oscar], texts):
                print(
                    f"{name:<8}{result.text:<8}{result.bits:>11.2f}{result.kl:>9.4f}{result.kl_error:>9.4f}"
                    f"{result.kl_p99:>9.4f}{result.perplexity:>12.3f}{result.perplexity_change:>+9.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
