"""A sidecar that is damaged, or that changes: what the engine's start says, and what a running engine does."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_oscar.errors import SidecarCorruptError, SidecarNonFiniteError
from vllm_oscar.sidecar import Sidecar

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def overlapping(data: bytes) -> bytes:
    """The second tensor lies where the first one does."""

    def overlap(header: dict[str, Any]) -> None:
        means = sorted(name for name in header if name.endswith(".mean"))
        header[means[1]]["data_offsets"] = header[means[0]]["data_offsets"]

    return with_header(data, overlap)


def bomb(data: bytes) -> bytes:
    """A tensor of 2^80 elements."""

    def inflate(header: dict[str, Any]) -> None:
        header["layers.0.k.mean"]["shape"] = [2**40, 2**40]

    return with_header(data, inflate)


@pytest.mark.parametrize(
    "damage",
    [overlapping, bomb, lambda data: struct.pack("<Q", 2**62) + data[8:], lambda data: b""],
    ids=["overlapping", "huge tensor", "huge header", "empty"],
)
def test_a_damaged_file_is_named(
    make_engine: Callable[..., Engine], sidecar_path: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(damage(sidecar_path.read_bytes()))
    with pytest.raises(SidecarCorruptError, match=rf"{broken}: not a whole safetensors file .*; calibrate again"):
        make_engine({"sidecar": str(broken)})


def test_nan_is_named(make_engine: Callable[..., Engine], sidecar_path: Path, tmp_path: Path) -> None:
    broken, tensors = tmp_path / "broken.safetensors", load_file(sidecar_path)
    tensors["layers.3.v.transform"][1, 2, 3] = torch.nan
    data = sidecar_path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    save_file(tensors, broken, header["__metadata__"])
    with pytest.raises(SidecarNonFiniteError, match=r"broken.*layers\.3\.v\.transform holds NaN .*calibrate again"):
        make_engine({"sidecar": str(broken)})


def test_replaced_while_serving(
    make_engine: Callable[..., Engine], sidecar_path: Path, tmp_path: Path, prose: list[int]
) -> None:
    """The running engine keeps what it loaded, whatever becomes of the file. The next one has the new content, and
    shares with the first nothing that vLLM keeps between starts under a hash of its configuration."""
    path = tmp_path / "mine.safetensors"
    shutil.copy(sidecar_path, path)
    first = make_engine({"sidecar": str(path)})
    before = first.answer(prose[:400], 8)
    kept = first.hidden["one"][406]

    replaced = Sidecar.hadamard(first.runtime.sidecar.fingerprint).save(path)
    assert first.answer(prose[:400], 8) == before
    assert torch.equal(first.hidden["one"][406], kept)
    with path.open("r+b") as file:  # in place, as by cp: a mapping of the file would see it
        file.truncate(100)
    assert first.answer(prose[:400], 8) == before
    assert torch.equal(first.hidden["one"][406], kept)

    replaced.save(path)
    second = make_engine({"sidecar": str(path)})
    second.answer(prose[:400], 8)
    assert not torch.equal(second.hidden["one"][406], kept)
    assert second.runtime.sidecar.digest == replaced.digest != first.runtime.sidecar.digest
    assert second.runtime.vllm_config.compute_hash() != first.runtime.vllm_config.compute_hash()
