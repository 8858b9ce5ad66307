"""RotationZoo files that lie: pickles, so `weights_only`, and nothing in them is made larger than the file."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attacks.limits import cheap
from vllm_oscar import errors
from vllm_oscar.calibrate.rotation_zoo import Rotations


def zoo(rotation: Any = None, values: Any = None, key: Any = 0, layer_id: Any = 0, **more: Any) -> dict[str, Any]:
    layer = {
        "layer_id": layer_id,
        "rotation": torch.eye(64) if rotation is None else rotation,
        "eigenvalues": torch.ones(64) if values is None else values,
    }
    return {"format_version": 1, "objective": "", "layers": {key: layer}} | more


def refuse(path: Path) -> None:
    with cheap(), pytest.raises(errors.SidecarError) as caught:
        Rotations.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_what_the_others_are_made_from_is_no_lie(tmp_path: Path) -> None:
    torch.save(zoo(), tmp_path / "a.pt")
    with cheap():
        assert Rotations.load(tmp_path / "a.pt").rotations[0].shape == (1, 64, 64)


def repeated(size: int) -> torch.Tensor:
    """(size, size) numbers that are one number in the file."""
    return torch.zeros(1).half().expand(size, size)


def aliased() -> dict[str, Any]:
    """Many layers that are one in the file, and many in memory."""
    one = torch.zeros(1024, 1024, dtype=torch.float16)
    layers = {n: {"layer_id": n, "rotation": one[:1023, :1023], "eigenvalues": torch.ones(1023)} for n in range(500)}
    return {"format_version": 1, "layers": layers}


HUGE = 10**4999
LIES: dict[str, Callable[[], dict[str, Any]]] = {
    "one number, 400 million times": lambda: zoo(repeated(20_000), torch.zeros(1).half().expand(20_000)),
    "one row, 20,000 times": lambda: zoo(torch.zeros(20_000).half().expand(20_000, 20_000), torch.zeros(20_000)),
    "a key of 5,000 digits": lambda: zoo(key="9" * 5000, layer_id="9" * 5000),
    "a number of 5,000 digits": lambda: zoo(key=HUGE, layer_id=HUGE),
    "digits of no number": lambda: zoo(key="\u00b2", layer_id="\u00b2"),
    "a negative layer": lambda: zoo(key=-1, layer_id=-1),
    "a true layer": lambda: zoo(key=True, layer_id=True),
    "a tensor for a key": lambda: zoo(key=torch.zeros(3)),
    "a tensor for layer_id": lambda: zoo(layer_id=torch.zeros(3)),
    "a tensor for the version": lambda: zoo(format_version=torch.ones(3)),
    "a sparse tensor": lambda: zoo(
        torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), torch.zeros(1), (20_000, 20_000))
    ),
    "a tensor without numbers": lambda: zoo(torch.empty(20_000, 20_000, device="meta")),
    "whole numbers": lambda: zoo(torch.eye(64, dtype=torch.int8)),
    "complex numbers": lambda: zoo(torch.eye(64, dtype=torch.complex64)),
    "layers of layers": lambda: zoo(rotation={"rotation": torch.eye(64)}),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_files_that_lie(lie: str, tmp_path: Path) -> None:
    torch.save(LIES[lie](), tmp_path / "a.pt")
    refuse(tmp_path / "a.pt")


def test_layers_that_share_their_numbers(tmp_path: Path) -> None:
    torch.save(aliased(), tmp_path / "a.pt")
    refuse(tmp_path / "a.pt")


def test_a_compressed_file(tmp_path: Path) -> None:
    """PyTorch reads what it does not write: 1 MB of zeros, deflated, is 256 MB in memory."""
    size = 8_000
    torch.save(zoo(torch.zeros(size, size), torch.zeros(size)), tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as plain,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert (tmp_path / "b.pt").stat().st_size < 4 << 20
    refuse(tmp_path / "b.pt")


def test_entries_that_are_one(tmp_path: Path) -> None:
    """A directory that names the same bytes a hundred times."""
    torch.save(zoo(torch.zeros(1024, 1024), torch.zeros(1024)), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        archive.filelist.extend([largest] * 100)
        archive._didModify = True  # type: ignore[attr-defined]
    refuse(tmp_path / "a.pt")


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_not_run(zipped: bool, tmp_path: Path) -> None:
    content = {"format_version": 2, "layers": Payload(tmp_path / "ran")}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    refuse(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
