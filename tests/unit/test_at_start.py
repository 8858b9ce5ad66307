"""A missing sidecar made by the process that starts an engine: once, and never in vain."""

import fcntl
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.unit.test_calibrate import checkpoint  # noqa: F401
from vllm_oscar.errors import CalibrationError, ConfigError, SidecarMismatchError
from vllm_oscar.integration.calibration import _one_at_a_time, calibrate_missing
from vllm_oscar.sidecar import ModelFingerprint, Sidecar, cached_path

QUICK = "--sequences 2 --length 64 --sink 4 --window 8 --device cpu --dtype float32"


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """A tiny Llama, and a cache folder without a sidecar for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(checkpoint)


def asked_for(model: str, **changes: Any) -> Any:
    """The part of vLLM's ModelConfig that is looked at."""
    usual: dict[str, Any] = {"model": model, "revision": None, "trust_remote_code": False, "hf_overrides": {}}
    return SimpleNamespace(**(usual | changes))


def fingerprint(model: str) -> ModelFingerprint:
    return ModelFingerprint.of(transformers.AutoConfig.from_pretrained(model))


def test_of_two_starts_one_calibrates_and_the_other_waits(model: str) -> None:
    """What is there afterwards is what either of them would have made alone, and nothing else."""
    made = cached_path(model, "v2")  # a revision has one of its own
    code = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from types import SimpleNamespace\n"
        "from vllm_oscar.integration.calibration import calibrate_missing\n"
        f"calibrate_missing(SimpleNamespace(**{vars(asked_for(model, revision='v2'))}), {QUICK!r})"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [start.communicate() for start in starts]
    assert [start.returncode for start in starts] == [0, 0], said
    assert [output for output, _ in said] == ["", ""]
    assert sum(errors.count("layer passes") > 0 for _, errors in said) == 1, "one of them shows progress"
    assert sum(f"wrote {made}" in errors for _, errors in said) == 1
    assert sum("making it, once" in errors for _, errors in said) == 1
    sidecar = Sidecar.load(made, fingerprint(model))
    assert sidecar.metadata["sequences"] == 2
    assert {path.name.removeprefix(made.name) for path in made.parent.iterdir()} == {"", ".lock"}


def test_what_is_there_is_left_alone_and_checked_by_the_start(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also a sidecar of another model, which is then refused by name: it may be somebody's work."""
    other = replace(fingerprint(model), num_layers=7)
    saved = Sidecar.hadamard(other).save(cached_path(model))
    with caplog.at_level(logging.INFO):
        calibrate_missing(asked_for(model), QUICK)
    assert [record.message for record in caplog.records if "oscar" in record.name] == []
    assert Sidecar.load(cached_path(model)).digest == saved.digest
    with pytest.raises(SidecarMismatchError, match="num_layers: 7"):
        Sidecar.load(cached_path(model), fingerprint(model))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--data 'no such.txt'", "ConfigError: --data no such.txt: no such file"),
        ("--windw 3", "exit status 2, see above"),
    ],
    ids=["no such text", "unknown option"],
)
def test_a_failed_calibration_is_the_reason(model: str, options: str, reason: str) -> None:
    with pytest.raises(CalibrationError, match=f"the calibration of {model} failed: {reason}"):
        calibrate_missing(asked_for(model), options)
    assert not cached_path(model).exists()


def test_a_cache_that_cannot_be_written_is_the_reason(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(CalibrationError, match=r"no place for a sidecar .*vllm_oscar.*: set XDG_CACHE_HOME to"):
        calibrate_missing(asked_for(model))


def test_a_configuration_that_the_engine_changes_is_refused_before_a_calibration(model: str) -> None:
    """Its sidecar might be refused after minutes, and at every further start."""
    overrides = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(ConfigError, match=r"--hf-overrides changes .* config\.json, or, .* oscar calibrate"):
        calibrate_missing(asked_for(model, hf_overrides=overrides), QUICK)


def test_a_killed_start_leaves_the_lock_to_its_calibration(model: str) -> None:
    """The next start waits for that instead of calibrating beside it: the lock is inherited."""
    out = cached_path(model)
    with _one_at_a_time(out) as lock:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    with out.with_name(f"{out.name}.lock").open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.communicate(b"\n")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
