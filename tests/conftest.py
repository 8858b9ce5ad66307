"""The real model of the engine tests and a sidecar for it, each made once.

OSCAR_TEST_MODEL (a model folder) and OSCAR_TEST_SIDECAR (a file) take their place. With VLLM_USE_V2_MODEL_RUNNER=1 the
engines have the model runner that vLLM uses on GPUs.
"""

import hashlib
import os

# Kernels run in Triton's interpreter, which has to be chosen before anything imports triton. vLLM's CPU build does not
# use triton.
os.environ["TRITON_INTERPRET"] = "1"
# Workers of `pytest -n` share the machine: a thread each, on any core. vLLM would bind every engine to the same ones.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".model" / "SmolLM2-135M-Instruct"
# Two workers take the files in this order, so that neither waits: the first one makes the sidecar, kernels need none,
# and small files come last.
ORDER = ("engine/test_scheduling.py", "kernels/", "engine/", "serve/", "")
SEQUENCES = 3  # of 2,048 tokens; with more the quality is the same

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # its kernels are Triton's, see the module, here and in children
    INTERPRETER = ROOT / "tests" / "triton_cpu" / "sitecustomize.py"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(INTERPRETER.parent), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(INTERPRETER))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See ORDER."""

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(ROOT / "tests").as_posix()
        return next(place for place, start in enumerate(ORDER) if path.startswith(start))

    items.sort(key=place)


def run(*command: object) -> None:
    """Run a command of this environment in the repository's root; its output is pytest's to show."""
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def one_worker() -> FileLock:
    """Held while files are made that all workers use."""
    MODEL.parent.mkdir(exist_ok=True)
    return FileLock(MODEL.parent / "lock")


def calibration_digest() -> str:
    """Changes with the code that a sidecar's content depends on, so that no test reads a stale one."""
    sources = [
        *sorted((ROOT / "calibrate").glob("*.py")),
        *(ROOT / "vllm_oscar" / f"{n}.py" for n in ("rotation", "sidecar")),
    ]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16: 30 layers, 9 query and 3 KV heads of size 64."""
    if given := os.environ.get("OSCAR_TEST_MODEL"):
        return Path(given)
    with one_worker():
        run("examples/convert_smollm2.py", MODEL)
    return MODEL


@pytest.fixture(scope="session")
def sidecar_path(model_path: Path) -> Path:
    """The default calibration of `model_path` on SEQUENCES, beside it."""
    if given := os.environ.get("OSCAR_TEST_SIDECAR"):
        return Path(given)
    sidecar = model_path.with_name(f"{model_path.name}.{SEQUENCES}-sequences.{calibration_digest()}.safetensors")
    with one_worker():
        if not sidecar.exists():
            run("-m", "vllm_oscar.calibrate", model_path, "--sequences", SEQUENCES, "--out", sidecar)
    return sidecar
