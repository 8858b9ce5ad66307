"""English text that every CPython has: one file to calibrate with, another to be measured on.

    python examples/text.py calibration .model/calibration.txt
    python examples/text.py heldout .model/heldout.txt

`calibration` is the language reference (`pydoc_data.topics`), `heldout` the longer docstrings of the standard
library's modules. The two share no paragraph.
"""

import argparse
import ast
import pydoc_data.topics
import sysconfig
from pathlib import Path

MINIMUM = 300  # characters of a docstring worth reading


def paragraphs(text: str) -> list[str]:
    """What blank lines separate, stripped."""
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def calibration() -> str:
    """The language reference, topics in alphabetical order, about 450 KB."""
    return "\n\n".join(topic.strip() for _, topic in sorted(pydoc_data.topics.topics.items()))


def docstrings(source: Path) -> list[str]:
    """Docstrings of a module, its classes and its functions, in the order of `ast.walk`."""
    nodes = ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]


def heldout() -> str:
    """Docstrings of the standard library's top-level modules, without paragraphs that are in `calibration`."""
    seen = set(paragraphs(calibration()))
    kept = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for text in docstrings(source):
            if len(text) >= MINIMUM:
                new = [part for part in paragraphs(text) if part not in seen]
                seen.update(new)
                kept.extend(new)
    return "\n\n".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write English text found in the Python standard library.")
    parser.add_argument("kind", choices=("calibration", "heldout"))
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    text = calibration() if arguments.kind == "calibration" else heldout()
    arguments.destination.parent.mkdir(parents=True, exist_ok=True)
    arguments.destination.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.destination}, {len(text):,} characters")


if __name__ == "__main__":
    main()
