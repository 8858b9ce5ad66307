"""Calibration text that is not what its name says: one line that names the file, not a traceback."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.attacks.limits import cheap
from vllm_oscar import errors
from vllm_oscar.calibrate.data import open_corpus

TOKENIZER = SimpleNamespace(chat_template=None)


@pytest.mark.parametrize(
    "line",
    [b"[" * 1_000_000, b'{"text": ' + b"9" * 5_000 + b"}", b'{"text": {"text": "a"}}', b'{"messages": [{}]}', b"\0"],
)
def test_rows_that_lie(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    refuse(tmp_path / "a.jsonl")


@pytest.mark.parametrize("content", [b"PAR1" + b"\xff" * 1_000 + b"PAR1", b"PAR1", b"", b"hello"])
def test_parquet_that_lies(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(content)
    refuse(tmp_path / "a.parquet")


def refuse(path: Path) -> None:
    with cheap(), pytest.raises(errors.ConfigError, match=path.name):
        consume(open_corpus(str(path), TOKENIZER).documents)


def consume(documents: Iterable[str]) -> None:
    for _ in documents:
        pass
