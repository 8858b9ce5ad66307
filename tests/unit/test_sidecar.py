"""The sidecar format: round trips, every way a file can be wrong, and the look-up."""

import json
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_oscar import errors, sidecar
from vllm_oscar.rotation import hadamard
from vllm_oscar.sidecar import (
    FILE_NAME,
    METADATA_KEY,
    LayerCalibration,
    ModelFingerprint,
    Sidecar,
    TensorCalibration,
    cached_path,
    find_sidecar,
)
from vllm_oscar.turning import TurningMean

FINGERPRINT = ModelFingerprint("llama", 2, 4, 2, 64, {"rope_type": "default", "rope_theta": 1e4})


def tensor(heads: int, size: int, encoder: str, seed: int) -> TensorCalibration:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(heads, size, size, generator=generator)
    return TensorCalibration(
        mean=torch.randn(heads, size, generator=generator),
        transform=hadamard(size).float() + 0.005 * noise,
        encoder=encoder,
        gain=1.05,
        metric=noise @ noise.mT / size + torch.eye(size) if encoder == "metric" else None,
        spectrum=torch.rand(heads, size, generator=generator),
    )


def make(fingerprint: ModelFingerprint = FINGERPRINT, **changes: Any) -> Sidecar:
    heads, size = fingerprint.num_kv_heads, fingerprint.head_size
    layers = {
        i: LayerCalibration(tensor(heads, size, "metric", i), tensor(heads, size, "ls", 100 + i))
        for i in range(fingerprint.num_layers)
        if i not in changes.get("absent", ())
    }
    return replace(Sidecar(layers, fingerprint, "aware", size, 64, 256, metadata={"tokens": 5}), **changes)


def rewrite(path: Path, tensors: dict[str, torch.Tensor] | None = None, drop: str = "", **fields: Any) -> None:
    """Change a valid file: tensors added or replaced, one dropped, metadata fields replaced."""
    content = load_file(path)
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    content.update(tensors or {})
    content.pop(drop, None)
    metadata = json.loads(header["__metadata__"][METADATA_KEY]) | fields
    save_file(content, path, {METADATA_KEY: json.dumps(metadata)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / FILE_NAME
    make().save(target)
    return target


def test_round_trip(path: Path) -> None:
    original, loaded = make(), Sidecar.load(path, FINGERPRINT)
    assert loaded.fingerprint == FINGERPRINT and loaded.metadata == {"tokens": 5}
    assert (loaded.method, loaded.per, loaded.group_size, loaded.sink, loaded.window) == ("aware", "head", 64, 64, 256)
    assert loaded.digest == original.digest
    for index, layer in original.layers.items():
        for mine, theirs in ((layer.key, loaded.layers[index].key), (layer.value, loaded.layers[index].value)):
            assert (mine.encoder, mine.gain, mine.clip) == (theirs.encoder, theirs.gain, theirs.clip)
            assert mine.named().keys() == theirs.named().keys()
            for name, value in mine.named().items():
                assert torch.equal(value, theirs.named()[name])
    assert not list(path.parent.glob("*.tmp")) and not list(path.parent.glob(".*.tmp"))


def test_one_transform_for_all_heads_is_expanded(tmp_path: Path) -> None:
    target = tmp_path / "s.safetensors"
    written = Sidecar.hadamard(FINGERPRINT).save(target)
    assert load_file(target)["layers.0.k.transform"].shape == (1, 64, 64)
    assert load_file(target)["layers.0.k.mean"].shape == (2, 64)
    for layer in written.layers.values():
        assert layer.key.transform.shape == layer.value.transform.shape == (2, 64, 64)
        assert torch.equal(layer.key.transform[1], hadamard(64).float())
    assert written.method == "hadamard" and written.layers[0].key.encoder == "ls"


def test_hadamard_in_memory_has_a_digest() -> None:
    assert Sidecar.hadamard(FINGERPRINT).digest == Sidecar.hadamard(FINGERPRINT).digest
    assert Sidecar.hadamard(FINGERPRINT).digest != Sidecar.hadamard(FINGERPRINT, sink=4).digest
    assert Sidecar.hadamard(FINGERPRINT, group_size=32).layers[0].key.transform[0, 1, :32].std() == 0


def test_layers_equal_to_heads_is_no_ambiguity(tmp_path: Path) -> None:
    fingerprint = replace(FINGERPRINT, num_layers=2, num_kv_heads=2)
    for per in ("head", "layer"):
        make(fingerprint, per=per).save(tmp_path / per)
        assert Sidecar.load(tmp_path / per).layers[1].key.transform.shape == (2, 64, 64)
    rewrite(tmp_path / "layer", per="head")
    with pytest.raises(errors.SidecarShapeError, match=r"\(1, 64, 64\)"):
        Sidecar.load(tmp_path / "layer")


def test_shard_takes_the_heads_of_a_rank(path: Path) -> None:
    layer = Sidecar.load(path).layers[1]
    part = layer.shard(1, 2)
    assert torch.equal(part.key.transform, layer.key.transform[1:]) and part.key.mean.shape == (1, 64)
    assert part.key.metric is not None and part.key.metric.shape == (1, 64, 64)
    assert part.value.metric is None and part.value.gain == layer.value.gain


def test_absent_layers_must_be_listed(tmp_path: Path) -> None:
    target = tmp_path / "s"
    assert list(make(absent=(1,)).save(target).layers) == [0]
    rewrite(target, absent_layers=[])
    with pytest.raises(errors.SidecarCorruptError, match="tensors are missing: 2 layers"):
        Sidecar.load(target)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(errors.SidecarNotFoundError):
        Sidecar.load(tmp_path / "none")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
def test_truncated(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep >= 1 or keep == 0 else keep * len(data))])
    with pytest.raises(errors.SidecarCorruptError, match="calibrate again"):
        Sidecar.load(path)


def hostile(header: bytes, size: int | None = None, body: bytes = b"\0" * 64) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + body


ENTRY = '{"a":{"dtype":"F32","shape":%s,"data_offsets":%s}}'


@pytest.mark.parametrize(
    "content",
    [
        b"not a safetensors file at all",
        hostile(b"{}", size=2**63),
        hostile(b"{}", size=2**64 - 1),
        hostile(b"{}", size=200_000_000),
        hostile(b"[]"),
        hostile(b"\xff\xfe{}"),
        hostile((ENTRY % ("[4]", "[-16,0]")).encode()),
        hostile((ENTRY % ("[4]", "[0,999999]")).encode()),
        hostile((ENTRY % ("[4]", "[16,0]")).encode()),
        hostile((ENTRY % ("[4294967296,4294967296]", "[0,64]")).encode()),
        hostile((ENTRY % ("[-4]", "[0,16]")).encode()),
        hostile(b"[" * 50_000),
        b"\x80\x04pickle",
    ],
)
def test_hostile_files(tmp_path: Path, content: bytes) -> None:
    target = tmp_path / "h"
    target.write_bytes(content)
    with pytest.raises(errors.SidecarCorruptError):
        Sidecar.load(target)


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 5000,
        '{"format_version": 3}',
        '{"format_version": "1"}',
        '{"format_version": true}',
        '{"format_version": 1}',
    ],
)
def test_bad_metadata(path: Path, metadata: str) -> None:
    save_file(load_file(path), path, {METADATA_KEY: metadata})
    with pytest.raises(errors.SidecarCorruptError):
        Sidecar.load(path)


def test_no_metadata(path: Path) -> None:
    save_file(load_file(path), path)
    with pytest.raises(errors.SidecarCorruptError, match="some other"):
        Sidecar.load(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "magic"},
        {"method": 3},
        {"per": "token"},
        {"sink": -1},
        {"window": True},
        {"window": 1.5},
        {"group_size": 0},
        {"group_size": 48},
        {"group_size": 16},
        {"group_size": 2**40},
        {"absent_layers": [7]},
        {"absent_layers": ["0"]},
        {"absent_layers": 0},
        {"fingerprint": {}},
        {"fingerprint": []},
        {"encoders": {}},
        {"encoders": {"0.k": "ls"}},
        {"calibration": None},
    ],
)
def test_bad_metadata_fields(path: Path, fields: dict[str, Any]) -> None:
    rewrite(path, **fields)
    with pytest.raises(errors.SidecarCorruptError):
        Sidecar.load(path)


@pytest.mark.parametrize(("encoder", "says"), [("metric", "no metric encoder"), ("minmax", "minmax has no gain")])
def test_what_no_kernel_does_is_refused(tmp_path: Path, encoder: str, says: str) -> None:
    value = tensor(2, 64, encoder, 0)
    layers = {index: replace(layer, value=value) for index, layer in make().layers.items()}
    with pytest.raises(errors.SidecarCorruptError, match=says):
        replace(make(), layers=layers).save(tmp_path / "s")


@pytest.mark.parametrize(
    "change", [{"gain": float("nan")}, {"gain": 0.0}, {"gain": "1"}, {"clip": 2.0}, {"encoder": "best"}]
)
def test_bad_encoder_settings(path: Path, change: dict[str, Any]) -> None:
    good = {"encoder": "ls", "gain": 1.0, "clip": 1.0}
    rewrite(path, encoders={f"{i}.{letter}": good | change for i in range(2) for letter in "kv"})
    with pytest.raises(errors.SidecarCorruptError):
        Sidecar.load(path)


def dialled(*bits: tuple[int, int]) -> Sidecar:
    """With such bits of keys and values in each layer."""
    layers = {
        index: LayerCalibration(replace(layer.key, bits=bits[index][0]), replace(layer.value, bits=bits[index][1]))
        for index, layer in make().layers.items()
    }
    return replace(make(), layers=layers)


def test_bits_are_kept_layer_by_layer(tmp_path: Path) -> None:
    """In a file of version 2; one of 2 bits is a file of version 1, which older versions read."""
    written = dialled((3, 2), (4, 4)).save(tmp_path / "mixed")
    assert [(layer.key.bits, layer.value.bits) for layer in written.layers.values()] == [(3, 2), (4, 4)]
    # D = 64: 8 units of as many bytes as a key and a value have bits, and 8 bytes of scales and offsets
    assert [layout.token_bytes for layout in written.layouts(16)] == [8 * 5 + 8, 8 * 8 + 8]
    assert written.bits_per_element == (3.0 + 4.5) / 2
    assert written.bits_in_words == "3.75 bits (3 to 4.5)"
    assert dialled((3, 2), (3, 2)).bits_in_words == "3 bits"

    def described(path: Path) -> dict[str, Any]:
        with safe_open(path, "pt") as file:
            found: dict[str, Any] = json.loads(file.metadata()[METADATA_KEY])
        return found

    assert described(tmp_path / "mixed")["format_version"] == 2
    assert described(tmp_path / "mixed")["encoders"]["0.k"]["bits"] == 3
    make().save(tmp_path / "plain")
    assert described(tmp_path / "plain")["format_version"] == 1
    assert "bits" not in described(tmp_path / "plain")["encoders"]["0.k"]
    assert dialled((2, 2), (2, 2)).digest == make().digest != written.digest


@pytest.mark.parametrize("bits", [{"k": 1}, {"k": 5}, {"v": 3}, {"k": "3"}, {"v": 2.0}, {"k": None}, {"k": True}])
def test_bits_that_no_page_has_are_refused(tmp_path: Path, bits: dict[str, Any]) -> None:
    path = tmp_path / "s"
    dialled((3, 2), (4, 4)).save(path)
    good = {"k": 4, "v": 2} | bits
    settings = {"k": ("metric", 1.05), "v": ("ls", 1.05)}
    rewrite(
        path,
        encoders={
            f"{i}.{letter}": {"encoder": encoder, "gain": gain, "clip": 1.0, "bits": good[letter]}
            for i in range(2)
            for letter, (encoder, gain) in settings.items()
        },
    )
    with pytest.raises(errors.SidecarCorruptError, match="bits"):
        Sidecar.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "qwen2"),
        ("num_layers", 3),
        ("num_heads", 8),
        ("num_kv_heads", 1),
        ("head_size", 128),
        ("rope", {"rope_type": "yarn", "rope_theta": 1e4}),
    ],
)
def test_other_model_names_the_field(path: Path, field: str, value: Any) -> None:
    with pytest.raises(errors.SidecarMismatchError, match=field):
        Sidecar.load(path, replace(FINGERPRINT, **{field: value}))


def test_missing_and_unknown_tensors(path: Path) -> None:
    saved = path.read_bytes()
    for drop in ("layers.1.v.transform", "layers.0.k.mean", "layers.0.k.metric"):
        path.write_bytes(saved)
        rewrite(path, drop=drop)
        with pytest.raises(errors.SidecarCorruptError, match=drop):
            Sidecar.load(path)
    for name in ("layers.2.k.mean", "layers.00.k.mean", "layers.0.v.metric", "payload"):
        path.write_bytes(saved)
        rewrite(path, {name: torch.zeros(2, 64)})
        with pytest.raises(errors.SidecarCorruptError, match="unknown"):
            Sidecar.load(path)


@pytest.mark.parametrize("kind", ["transform", "mean", "metric", "spectrum"])
def test_wrong_shape_dtype_and_values(path: Path, kind: str) -> None:
    name, saved = f"layers.1.k.{kind}", path.read_bytes()
    good = load_file(path)[name]
    for bad in (good[:1], good[..., :32].contiguous(), good[0], good.new_zeros(0)):
        path.write_bytes(saved)
        rewrite(path, {name: bad})
        with pytest.raises(errors.SidecarShapeError, match=name):
            Sidecar.load(path)
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        path.write_bytes(saved)
        rewrite(path, {name: good.to(dtype)})
        with pytest.raises(errors.SidecarCorruptError, match="float32"):
            Sidecar.load(path)
    for value in (float("nan"), float("inf"), -float("inf")):
        path.write_bytes(saved)
        bad = good.clone()
        bad.view(-1)[-1] = value
        rewrite(path, {name: bad})
        with pytest.raises(errors.SidecarNonFiniteError, match=name):
            Sidecar.load(path)


def test_matrices_are_looked_at_by_one_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK's own threads are slower on a busy machine, and MKL's have hung there."""
    seen, original = set(), torch.linalg.cholesky_ex

    def noting(matrices: torch.Tensor) -> Any:
        seen.add(torch.get_num_threads())
        return original(matrices)

    monkeypatch.setattr("torch.linalg.cholesky_ex", noting)
    monkeypatch.setattr(
        "torch.set_num_threads", torch._C.set_num_threads
    )  # an engine in this process may have taken it
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Sidecar.load(path)
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


def test_good_transforms_are_not_inverted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 3,200 inverses of a 13B model took 20 s in every process."""

    def never(matrices: torch.Tensor) -> Any:
        raise AssertionError("an inverse")

    for name in ("inv_ex", "inv", "cond", "svdvals"):
        monkeypatch.setattr(f"torch.linalg.{name}", never)
    Sidecar.load(path)


@pytest.mark.parametrize("per", ["head", "layer"])
def test_a_rank_keeps_its_own_heads(tmp_path: Path, per: str) -> None:
    """The same numbers, in as much memory as they take, and the whole file's digest."""
    turning(replace(FINGERPRINT, num_kv_heads=4), per=per).save(tmp_path / "s")
    whole, part = Sidecar.load(tmp_path / "s"), Sidecar.load(tmp_path / "s", heads=range(1, 3))
    assert part.digest == whole.digest
    for index in (0, 1):
        own, same = part.shard(index, range(1, 3)), whole.shard(index, range(1, 3))
        for mine, theirs in ((own.key, same.key), (own.value, same.value)):
            for name, tensor in mine.named().items():
                assert torch.equal(tensor, theirs.named()[name])
                assert tensor.untyped_storage().nbytes() <= tensor.nbytes
    assert torch.equal(part.shard(1, range(2, 3)).key.mean, whole.layers[1].key.mean[2:3])
    nothing = Sidecar.load(tmp_path / "s", heads=range(0)).layers[1].key
    assert sum(tensor.numel() for name, tensor in nothing.named().items() if name != "frequency") == 0


def test_the_digest_is_of_the_file_that_was_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that ends meanwhile puts another file in its place."""

    def opened(*given: Any, **options: Any) -> Any:
        other = path.with_name("other")
        other.write_bytes(make(window=128).serialised())
        other.replace(path)
        return safe_open(*given, **options)

    monkeypatch.setattr(sidecar, "safe_open", opened)
    with pytest.raises(errors.SidecarCorruptError, match="replaced while it was read"):
        Sidecar.load(path)


def test_no_tensor_is_read_before_all_shapes_are_known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cannot ask for more memory than its model's sidecar takes."""
    rewrite(path, {"layers.1.v.spectrum": torch.zeros(9)})
    opened = safe_open(path, framework="pt")
    unread = SimpleNamespace(metadata=opened.metadata, keys=opened.keys, get_slice=opened.get_slice)
    monkeypatch.setattr(sidecar, "safe_open", lambda *_, **__: nullcontext(unread))
    with pytest.raises(errors.SidecarShapeError, match="spectrum"):
        Sidecar.load(path)


def with_singular_values(smallest: float) -> torch.Tensor:
    left = torch.linalg.qr(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.ones(64)
    values[5] = smallest
    return torch.matmul(left * values, hadamard(64).float())


@pytest.mark.parametrize("smallest", [0.0, 1e-30, 1e-4, 1 / 101])
def test_singular_transform(path: Path, smallest: float) -> None:
    rewrite(path, {"layers.0.v.transform": with_singular_values(smallest)})
    with pytest.raises(errors.SidecarSingularError, match=r"layers\.0\.v\.transform, head 0"):
        Sidecar.load(path)


def test_condition_number_just_below_the_bound(path: Path) -> None:
    rewrite(path, {"layers.0.v.transform": with_singular_values(1 / 98)})
    Sidecar.load(path)


@pytest.mark.parametrize("scale", [0.0, 1e30])
def test_extreme_transform(path: Path, scale: float) -> None:
    rewrite(path, {"layers.0.k.transform": scale * torch.ones(2, 64, 64)})
    with pytest.raises(errors.SidecarSingularError):
        Sidecar.load(path)


@pytest.mark.parametrize("method", ["reference", "hadamard"])
def test_methods_that_promise_rotations(path: Path, method: str) -> None:
    rewrite(path, method=method)
    with pytest.raises(errors.SidecarNotOrthogonalError, match=r"layers\.\d\.[kv]\.transform"):
        Sidecar.load(path)


def test_bad_metrics(path: Path) -> None:
    eye = torch.eye(64).repeat(2, 1, 1)
    skew = eye.clone()
    skew[0, 3, 4] = 0.1
    indefinite = eye.clone()
    indefinite[1, 5, 5] = -1
    for bad in (skew, indefinite, torch.zeros(2, 64, 64)):
        rewrite(path, {"layers.1.k.metric": bad})
        with pytest.raises(errors.SidecarSingularError, match="positive definite"):
            Sidecar.load(path)


def test_a_failed_save_keeps_what_was_there(path: Path) -> None:
    before = path.read_bytes()
    broken = make()
    broken.layers[0].key.transform.zero_()
    with pytest.raises(errors.SidecarSingularError):
        broken.save(path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def config(**fields: Any) -> SimpleNamespace:
    base = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
    }
    return SimpleNamespace(**(base | fields))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"rope_theta": 10000, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8}},
            {"rope_parameters": {"rope_type": "linear", "type": "linear", "rope_theta": 5e5, "factor": 8.0}},
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
        ),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                }
            },
        ),
        (
            {"rope_theta": 1e6},
            {"rope_parameters": {kind: {"rope_theta": 1e6} for kind in ("sliding_attention", "full_attention")}},
        ),
    ],
)
def test_fingerprint_of_old_and_new_configs(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert ModelFingerprint.of(config(**old)) == ModelFingerprint.of(config(**new))


def test_fingerprint_defaults_nesting_and_json() -> None:
    flat = config(rope_theta=1e4)
    assert ModelFingerprint.of(flat).head_size == 64
    assert ModelFingerprint.of(config(rope_theta=1e4, head_dim=128)).head_size == 128
    assert ModelFingerprint.of(config(num_key_value_heads=None)).num_kv_heads == 4
    assert ModelFingerprint.of(SimpleNamespace(model_type="gemma3", text_config=flat)) == ModelFingerprint.of(flat)
    lists = ModelFingerprint.of(config(rope_theta=1e4, rope_scaling={"type": "longrope", "short_factor": (1, 2.5)}))
    assert json.loads(json.dumps(lists.rope)) == lists.rope
    with pytest.raises(errors.UnsupportedError, match="heads"):
        ModelFingerprint.of(config(num_key_value_heads=[1, 2]))


def test_look_up_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(errors.SidecarNotFoundError) as caught:
        find_sidecar(str(model))
    assert f"oscar calibrate {model} " in str(caught.value)
    assert f"oscar serve {model}" in str(caught.value)
    assert '"calibrate": true' in str(caught.value)
    assert '"rotation": "hadamard"' in str(caught.value)

    cached = cached_path(str(model))
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert find_sidecar(str(model)) == cached
    (model / FILE_NAME).parent.mkdir()
    (model / FILE_NAME).touch()
    assert find_sidecar(str(model)) == model / FILE_NAME
    explicit = tmp_path / "mine.safetensors"
    explicit.touch()
    assert find_sidecar(str(model), str(explicit)) == explicit
    assert find_sidecar("org/name", str(model)) == model / FILE_NAME
    with pytest.raises(errors.SidecarNotFoundError, match="no such sidecar"):
        find_sidecar(str(model), str(tmp_path / "gone.safetensors"))


def test_names_from_the_hub_stay_inside_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("org/name", "../../etc/passwd", "a b;c", "/root/x"):
        assert cached_path(name).parent == tmp_path / "vllm_oscar"
    assert cached_path("org/name").name == "org--name.safetensors"
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    assert cached_path(str(snapshot)) == cached_path("org/name")


def test_a_revision_has_a_sidecar_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are others. With HF_HUB_OFFLINE vLLM names the snapshot's folder, and the revision as before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached_path("org/name").parent.mkdir()
    cached_path("org/name").touch()
    with pytest.raises(errors.SidecarNotFoundError, match="oscar calibrate org/name --revision v2 "):
        find_sidecar("org/name", revision="v2")
    cached_path("org/name", "v2").touch()
    assert find_sidecar("org/name", revision="v2") == tmp_path / "vllm_oscar" / "org--name--v2.safetensors"
    assert find_sidecar("org/name") == cached_path("org/name")
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    assert cached_path(str(snapshot), "v2") == cached_path("org/name", "v2")


def test_explicit_hub_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked = []

    def download(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert find_sidecar("m", "org/rotations") == tmp_path / FILE_NAME
    assert asked == [("org/rotations", FILE_NAME)]

    def offline(repository: str, name: str) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(errors.SidecarNotFoundError, match="offline"):
        find_sidecar("m", "org/rotations")


def turning(fingerprint: ModelFingerprint = FINGERPRINT, pairs: int = 3, **changes: Any) -> Sidecar:
    """Layer 1's keys have a mean that turns."""
    plain = make(fingerprint, **changes)
    generator = torch.Generator().manual_seed(7)
    frequency = torch.rand(pairs, generator=generator)
    vectors = torch.randn(fingerprint.num_kv_heads, pairs, 2, fingerprint.head_size, generator=generator)
    key = replace(plain.layers[1].key, turning=TurningMean(frequency, vectors))
    return replace(plain, layers=plain.layers | {1: replace(plain.layers[1], key=key)})


def test_a_mean_that_turns_is_kept_and_sharded(tmp_path: Path) -> None:
    """Vectors belong to heads, frequencies to the layer, also where transforms are one for all heads."""
    for name in ("head", "layer"):
        written = turning(per=name)
        written.save(tmp_path / name)
        read = Sidecar.load(tmp_path / name, FINGERPRINT)
        key, own = read.layers[1].key.named(), written.layers[1].key.named()
        assert torch.equal(key["frequency"], own["frequency"])
        assert torch.equal(key["turning"], own["turning"])
        assert not {"frequency", "turning"} & read.layers[0].key.named().keys()
        part = read.layers[1].shard(1, 2).key.named()
        assert torch.equal(part["frequency"], key["frequency"])
        assert torch.equal(part["turning"], key["turning"][1:2])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"drop": "layers.1.k.frequency"}, errors.SidecarCorruptError),
        ({"drop": "layers.1.k.turning"}, errors.SidecarCorruptError),
        ({"tensors": {"layers.1.v.frequency": torch.zeros(3)}}, errors.SidecarCorruptError),
        ({"tensors": {"layers.1.k.turning": torch.zeros(2, 2, 2, 64)}}, errors.SidecarShapeError),
        ({"tensors": {"layers.1.k.frequency": torch.zeros(1, 3)}}, errors.SidecarShapeError),
        ({"tensors": {"layers.1.k.frequency": torch.full((3,), torch.inf)}}, errors.SidecarNonFiniteError),
        (
            {"tensors": {"layers.1.k.frequency": torch.zeros(9), "layers.1.k.turning": torch.zeros(2, 9, 2, 64)}},
            errors.SidecarShapeError,
        ),
    ],
)
def test_a_mean_that_turns_is_whole_or_refused(
    tmp_path: Path, change: dict[str, Any], error: type[errors.SidecarError]
) -> None:
    """Both tensors or none, of keys only, at most eight pairs."""
    turning().save(tmp_path / "s")
    rewrite(tmp_path / "s", **change)
    with pytest.raises(error, match=r"layers\.1\.[kv]\.(frequency|turning)"):
        Sidecar.load(tmp_path / "s")


@pytest.mark.parametrize(
    ("total", "first"),
    [(8, [0, 2, 4, 6]), (4, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (1, [0, 0, 0, 0])],
)
def test_each_of_four_ranks_keeps_the_heads_that_vllm_gives_it(
    total: int, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer heads than ranks, neighbours hold copies of one."""
    pytest.importorskip("vllm")
    from vllm_oscar.integration import runtime

    monkeypatch.setattr(runtime, "get_tensor_model_parallel_world_size", lambda: 4)
    fingerprint = replace(FINGERPRINT, num_kv_heads=total)
    for rank, start in enumerate(first):
        monkeypatch.setattr(runtime, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        assert runtime.rank_heads(fingerprint) == range(start, start + max(1, total // 4))
