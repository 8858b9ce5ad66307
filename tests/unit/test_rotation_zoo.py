"""RotationZoo files: both formats in and out, the metric from the eigenvalues, files that lie."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_oscar import errors
from vllm_oscar.calibrate.rotation_zoo import Rotations, from_sidecar, main, to_sidecar
from vllm_oscar.calibrate.solve import Recipe, unit_diagonal
from vllm_oscar.rotation import reference_rotation, regularised
from vllm_oscar.sidecar import ModelFingerprint, Sidecar

FINGERPRINT = ModelFingerprint("llama", 2, 4, 2, 64, {})


def covariance(seed: int, count: int) -> torch.Tensor:
    x = torch.randn(count, 200, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x * torch.logspace(0, -1.5, 64, dtype=torch.float64)
    return x.mT @ x / 200


def zoo(version: int, **changes: Any) -> dict[str, Any]:
    layers = {}
    for index in range(2):
        sigma = covariance(index, 1 if version == 1 else 2)
        rotation, values = reference_rotation(sigma).float(), torch.linalg.eigvalsh(sigma).float()
        if version == 1:
            rotation, values = rotation[0], values[0]
        layers[index] = {"layer_id": index, "rotation": rotation, "eigenvalues": values}
    return {"format_version": version, "objective": "query covariance", "layers": layers} | changes


def recipe(key_encoder: str = "minmax") -> Recipe:
    return Recipe.of("reference", key_encoder, per="head", group_size=64)


@pytest.mark.parametrize("version", [1, 2])
def test_there_and_back(tmp_path: Path, version: int) -> None:
    torch.save(zoo(version), tmp_path / "a.pt")
    file = Rotations.load(tmp_path / "a.pt")
    sidecar = to_sidecar(file, file, FINGERPRINT, recipe(), 64, 256).save(tmp_path / "s")
    assert sidecar.method == "reference"
    assert sidecar.per == {1: "layer", 2: "head"}[version]
    assert (sidecar.layers[0].key.encoder, sidecar.layers[0].key.clip) == ("minmax", 0.96)
    keys, values = from_sidecar(Sidecar.load(tmp_path / "s"))
    for exported in (keys, values):
        exported.save(tmp_path / "b.pt")
        again = torch.load(tmp_path / "b.pt", weights_only=True)
        assert again["format_version"] == version
        assert again["objective"] == "query covariance"
        for index, layer in zoo(version)["layers"].items():
            assert torch.equal(again["layers"][index]["rotation"], layer["rotation"])
            assert torch.equal(again["layers"][index]["eigenvalues"], layer["eigenvalues"])


@pytest.mark.parametrize("descending", [False, True])
def test_eigenvalues_give_the_metric(tmp_path: Path, descending: bool) -> None:
    """G from the eigenvalues alone equals R' Sigma R, in whichever order they are stored."""
    content = zoo(2)
    if descending:
        for layer in content["layers"].values():
            layer["eigenvalues"] = layer["eigenvalues"].flip(-1)
    torch.save(content, tmp_path / "a.pt")
    file = Rotations.load(tmp_path / "a.pt")
    metric = to_sidecar(file, file, FINGERPRINT, recipe("metric"), 64, 256).save(tmp_path / "s").layers[1].key.metric
    sigma = regularised(covariance(1, 2))
    rotation = reference_rotation(covariance(1, 2))
    assert metric is not None
    torch.testing.assert_close(metric, unit_diagonal(rotation.mT @ sigma @ rotation).float(), rtol=1e-3, atol=1e-4)


def broken(path: Path, change: Any) -> Path:
    content = zoo(2)
    change(content)
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda z: z.update(format_version=3), errors.SidecarCorruptError),
        (lambda z: z.update(format_version=1), errors.SidecarShapeError),
        (lambda z: z.update(layers={}), errors.SidecarCorruptError),
        (lambda z: z.update(layers=[1]), errors.SidecarCorruptError),
        (lambda z: z["layers"].update({"x": z["layers"][0]}), errors.SidecarCorruptError),
        (lambda z: z["layers"].update({1: z["layers"][0]}), errors.SidecarCorruptError),
        (lambda z: z["layers"].update({1: 3}), errors.SidecarCorruptError),
        (lambda z: z["layers"][1].pop("rotation"), errors.SidecarCorruptError),
        (lambda z: z["layers"][1].update(eigenvalues=torch.ones(2, 32)), errors.SidecarShapeError),
    ],
)
def test_files_that_lie(tmp_path: Path, change: Any, error: type[errors.OscarError]) -> None:
    with pytest.raises(error):
        Rotations.load(broken(tmp_path / "a.pt", change))


def test_rotations_must_be_the_models_and_orthogonal(tmp_path: Path) -> None:
    file = Rotations.load(broken(tmp_path / "a.pt", lambda z: None))
    for other in (ModelFingerprint("llama", 3, 4, 2, 64, {}), ModelFingerprint("llama", 2, 4, 4, 64, {})):
        with pytest.raises(errors.SidecarMismatchError):
            to_sidecar(file, file, other, recipe(), 64, 256)
    with pytest.raises(errors.SidecarMismatchError, match="size 64"):
        to_sidecar(file, file, ModelFingerprint("llama", 2, 4, 2, 128, {}), recipe(), 64, 256)
    file.rotations[1][0, 0] *= 1.01
    with pytest.raises(errors.SidecarNotOrthogonalError):
        to_sidecar(file, file, FINGERPRINT, recipe(), 64, 256).save(tmp_path / "s")
    file.rotations[1][0, 0] = float("nan")
    with pytest.raises(errors.SidecarNonFiniteError):
        to_sidecar(file, file, FINGERPRINT, recipe(), 64, 256).save(tmp_path / "s")
    assert not (tmp_path / "s").exists()


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/vllm_oscar_was_here",)


def test_hostile_and_broken_files(tmp_path: Path) -> None:
    torch.save({"format_version": 2, "layers": Payload()}, tmp_path / "payload.pt")
    torch.save(zoo(1), tmp_path / "whole.pt")
    (tmp_path / "short.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:5000])
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("payload", "short", "text", "empty"):
        with pytest.raises(errors.SidecarCorruptError, match=name):
            Rotations.load(tmp_path / f"{name}.pt")
    assert not os.path.exists("/tmp/vllm_oscar_was_here")
    with pytest.raises(errors.SidecarNotFoundError):
        Rotations.load(tmp_path / "none.pt")


def test_old_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(zoo(1), tmp_path / "a.pt")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cpu"))
    with pytest.raises(errors.UnsupportedError, match=re.escape("2.10")):
        Rotations.load(tmp_path / "a.pt")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=256
    )
    config.save_pretrained(tmp_path / "model")
    torch.save(zoo(1), tmp_path / "k.pt")
    torch.save(zoo(2), tmp_path / "v.pt")
    files = ["--keys", str(tmp_path / "k.pt"), "--values", str(tmp_path / "v.pt")]
    assert (
        main(["import", str(tmp_path / "model"), *files, "--out", str(tmp_path / "s"), "--key-encoder", "metric"]) == 0
    )
    sidecar = Sidecar.load(tmp_path / "s")
    assert sidecar.per == "head"
    assert sidecar.layers[0].key.encoder == "metric"
    (tmp_path / "back").mkdir()
    back = ["--keys", str(tmp_path / "back/k.pt"), "--values", str(tmp_path / "back/v.pt")]
    assert main(["export", str(tmp_path / "s"), *back]) == 0
    assert Rotations.load(tmp_path / "back/v.pt").per == "head"
    Sidecar.hadamard(FINGERPRINT).save(tmp_path / "h")
    assert main(["export", str(tmp_path / "h"), *back]) == 1
    assert "--method reference" in capsys.readouterr().err
