"""Every code block of README.md, SECURITY.md and docs/ is run, in a folder with a text and a sidecar.

A block is code where it is indented by four spaces (a shell's), or fenced as `sh` or `python`; MODEL in it is the test
model. A comment on the line above it says otherwise:

    <!-- checked: WHY -->       takes long or a GPU: each command's options are parsed, and nothing is done
    <!-- not run: WHY -->       needs what is not here
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_oscar import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- (checked|not run): \S.* -->")


class Block(NamedTuple):
    """Code, and what is to be done with it: "run", "checked" or "not run"."""

    language: str
    code: str
    todo: str


def blocks(text: str) -> Iterator[Block]:
    """The code blocks of a page."""
    parts = re.split(r"^```(\w*)\n(.*?)^```\n", text, flags=re.DOTALL | re.MULTILINE)
    for prose, language, fenced in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        for found in re.finditer(r"\n((?:\S.*)?)\n?\n((?: {4}.*\n(?:\n(?= {4}))?)+)", f"\n{prose}"):
            yield Block("sh", re.sub("^ {4}", "", found[2], flags=re.MULTILINE), _todo(found[1]))
        commands = ("oscar ", "python ", "vllm ", "make ", "pip ")
        assert language or not fenced.startswith(commands), f"code without a language is not run: {fenced}"
        if language in ("sh", "python"):
            yield Block(language, fenced, _todo(prose.rstrip().rpartition("\n")[2]))


def _todo(above: str) -> str:
    return found[1] if (found := MARK.fullmatch(above)) else "run"


class Parsed(Exception):
    """Ends a command once its options are parsed."""


def check(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command's options with its own parser."""
    if command[:3] == ["python", "-m", "vllm_oscar.calibrate"]:
        command = ["oscar", "calibrate", *command[3:]]
    if command[0] == "make":
        subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, check=True, capture_output=True)
    elif command[0] == "oscar":
        for name, value in (("VLLM_OSCAR_CONFIG", "{}"), ("PROMETHEUS_MULTIPROC_DIR", "/nowhere")):
            monkeypatch.setenv(name, value)  # `oscar serve` sets them
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(Parsed):
            cli.main(command[1:])
    elif command[0] == "vllm":
        from vllm.entrypoints.cli.main import main

        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(Parsed):
            main()
    else:
        assert command[0] == "pip", f"{command[0]}: only make, oscar, vllm and pip can be checked"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks(
    page: Path, model_path: Path, sidecar_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(sidecar_path, tmp_path / "oscar.safetensors")
    (tmp_path / "text.txt").write_text("The capital of France is Paris.\n" * 500)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process starts faster than three
        "VLLM_OSCAR_CONFIG": '{"sidecar": "oscar.safetensors"}',
        "TORCHDYNAMO_DISABLE": "1",  # compiling would take a minute
        "VLLM_USE_AOT_COMPILE": "0",
    }
    environment.pop("TRITON_INTERPRET", None)
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args: object, **kwargs: object) -> None:
        parse(*args, **kwargs)  # type: ignore[call-overload]
        raise Parsed

    for block in blocks(page.read_text()):
        code = re.sub(r"\bMODEL\b", str(model_path), block.code)
        if block.todo == "run":
            command = [sys.executable, "-c", code] if block.language == "python" else ["bash", "-euc", code]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
        elif block.todo == "checked":
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            for line in code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    check(words, monkeypatch)
            monkeypatch.undo()


def test_the_site_has_every_page_link_and_block(tmp_path: Path) -> None:
    """MkDocs ends with an error for a link or an anchor that leads nowhere, and for a page that no menu leads to; its
    Markdown is not quite that of others, so that a block could become prose."""
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        html = tmp_path / ("index.html" if page.stem == "README" else f"{page.stem}/index.html")
        fenced = len(re.findall(r"^```.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE))
        indented = sum(f"    {block.code.splitlines()[0]}\n" in page.read_text() for block in blocks(page.read_text()))
        assert html.read_text().count("<pre") == fenced + indented, page


def test_blocks_are_found() -> None:
    """And told apart from prose and from fences of other languages."""
    text = """
Prose.

    run this   # really
    --and this

    and that

<!-- checked: slow -->
    checked
    too

```
no code
    here
```

<!-- not run: no network -->
```python
python
```
"""
    assert list(blocks(text)) == [
        Block("sh", "run this   # really\n--and this\n\nand that\n", "run"),
        Block("sh", "checked\ntoo\n", "checked"),
        Block("python", "python\n", "not run"),
    ]
    assert {block.todo for page in PAGES for block in blocks(page.read_text())} == {"run", "checked", "not run"}
