"""Sidecars that lie: SECURITY.md says that each is refused, at no cost, and that none runs code."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from tests.attacks.limits import cheap
from vllm_oscar import cli, errors
from vllm_oscar.rotation import hadamard
from vllm_oscar.sidecar import METADATA_KEY, ModelFingerprint, Sidecar, cached_path

DESCRIPTION: dict[str, Any] = {
    "format_version": 1, "method": "hadamard", "per": "layer", "group_size": 64, "sink": 64, "window": 256,
    "fingerprint": {"architecture": "llama", "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": 64,
                    "rope": {}},
    "absent_layers": [], "calibration": {},
    "encoders": {f"0.{letter}": {"encoder": "ls", "gain": 1.0, "clip": 1.0} for letter in "kv"},
}  # fmt: skip
TENSORS = {
    f"layers.0.{letter}.{kind}": tensor
    for letter in "kv"
    for kind, tensor in (("mean", torch.zeros(1, 64)), ("transform", hadamard(64).float()[None]))
}


def model(**fields: Any) -> dict[str, Any]:
    return {"fingerprint": DESCRIPTION["fingerprint"] | fields}


def refuse(path: Path, error: type[errors.SidecarError] = errors.SidecarError) -> None:
    with cheap(), pytest.raises(error) as caught:
        Sidecar.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hostile.safetensors"


def write(
    path: Path, metadata: str | None = None, tensors: dict[str, torch.Tensor] | None = None, **fields: Any
) -> None:
    save_file(tensors or TENSORS, path, {METADATA_KEY: metadata or json.dumps(DESCRIPTION | fields)})


def test_what_the_others_are_made_from_is_no_lie(path: Path) -> None:
    write(path)
    with cheap():
        assert Sidecar.load(path).layers.keys() == {0}


@pytest.mark.parametrize(
    "fields",
    [
        model(num_layers=4_000_000),
        model(num_layers=2**31 - 1),
        model(num_layers=4_000_000) | {"encoders": {}},
        model(num_layers=2**31 - 1) | {"absent_layers": list(range(1, 300_000))},
        model(num_kv_heads=2**31 - 1),
        model(num_kv_heads=2**31 - 1) | {"per": "head"},
        model(head_size=2**31 - 1) | {"group_size": 2**31 - 1},
        model(num_layers=10**30),
        {"absent_layers": [0] * 300_000},
        {"encoders": {f"{index}.k": DESCRIPTION["encoders"]["0.k"] for index in range(100_000)}},
    ],
)
def test_files_that_claim_to_be_large(path: Path, fields: dict[str, Any]) -> None:
    write(path, **fields)
    refuse(path)


def test_a_tensor_larger_than_its_model_calls_for(path: Path) -> None:
    """A file of holes, 8 GiB that take no disk: its shapes are known before any of it is read."""
    data = save({**TENSORS, "layers.0.k.spectrum": torch.zeros(1, 64)}, {METADATA_KEY: json.dumps(DESCRIPTION)})
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    start = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["layers.0.k.spectrum"] = {"dtype": "F32", "shape": [1 << 31], "data_offsets": [start, start + (8 << 30)]}
    spectrum = 64 * 4  # of the one that was there
    names = [name for name in header if name != "__metadata__" and name != "layers.0.k.spectrum"]
    end = 0
    for name in names:
        size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        header[name]["data_offsets"], end = [end, end + size], end + size
    assert end == start - spectrum
    header["layers.0.k.spectrum"]["data_offsets"] = [end, end + (8 << 30)]
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end + (8 << 30))
    resource_free_load(path)


def resource_free_load(path: Path) -> None:
    """Without the limit on addresses: the file is mapped, not read."""
    before = resident()
    with pytest.raises(errors.SidecarShapeError, match="spectrum"):
        Sidecar.load(path)
    assert resident() - before < 200 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "metadata",
    [
        "[" * 100_000,
        '{"format_version": ' + "1" * 5_000 + "}",
        '{"format_version": 1e999}',
        json.dumps(DESCRIPTION)[:-1] + ', "sink": ' + "9" * 5_000 + "}",
        json.dumps(DESCRIPTION | {"encoders": {"9" * 5_000 + ".k": {}}}),
        json.dumps(DESCRIPTION | model(rope={"a" * 100_000: float("nan")}) | {"method": "x" * 100_000}),
        json.dumps(DESCRIPTION | {"calibration": "x" * 100_000}),
    ],
)
def test_metadata_that_no_reader_expects(path: Path, metadata: str) -> None:
    write(path, metadata)
    refuse(path, errors.SidecarCorruptError)


def test_messages_about_another_model_are_short(path: Path) -> None:
    write(path, **model(rope={"rope_type": "x" * 1_000_000}))
    with cheap(), pytest.raises(errors.SidecarMismatchError) as caught:
        Sidecar.load(path, ModelFingerprint("llama", 1, 1, 1, 64, {}))
    assert len(str(caught.value)) < 2000


ENTRY = '{"a":{"dtype":"F32","shape":%s,"data_offsets":%s}}'


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"{}", 2**63),
        (b"{}", 200_000_000),
        (b"[" * 50_000, None),
        ((ENTRY % ("[4]", "[-16,0]")).encode(), None),
        ((ENTRY % ("[4]", "[0,999999]")).encode(), None),
        ((ENTRY % ("[4294967296,4294967296]", "[0,64]")).encode(), None),
        (b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},"b":{"dtype":"F32","shape":[8],'
         b'"data_offsets":[32,64]}}', None),
    ],
)  # fmt: skip
def test_containers_that_lie(path: Path, header: bytes, size: int | None) -> None:
    """Headers too large or of no size, offsets outside the file or over each other, sizes that overflow."""
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header + b"\0" * 64)
    refuse(path, errors.SidecarCorruptError)


def test_inspect_shows_nothing_that_a_terminal_acts_on(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`oscar inspect` is what SECURITY.md tells to look at strange files with."""
    calibration = {"data": "\x1b]0;title\x07\x1b[2J", "\x1b[31mred": 1, "long": "x" * 1_000_000}
    architecture = {"fingerprint": DESCRIPTION["fingerprint"] | {"architecture": "llama\x1b[8m"}}
    write(path, calibration=calibration, **architecture)
    with cheap():
        assert cli.main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "title" in shown and "red" in shown
    assert all(line.isprintable() and len(line) < 600 for line in shown.splitlines())


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_code_is_not_run(path: Path, tmp_path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    refuse(path, errors.SidecarCorruptError)
    torch.save(Payload(tmp_path / "ran"), path)
    refuse(path, errors.SidecarCorruptError)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_file(tmp_path: Path) -> None:
    """A named pipe would have the reader wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "none"):
        refuse(tmp_path / name, errors.SidecarNotFoundError)
    refuse(Path("/dev/zero"), errors.SidecarNotFoundError)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "..", "x" * 50 + "/\n\x1b[2J"])
def test_names_of_models_stay_inside_the_cache(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_path(name).resolve().parent == (tmp_path / "vllm_oscar").resolve()
    assert cached_path(name).name.isprintable()
