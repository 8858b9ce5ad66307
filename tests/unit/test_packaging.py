"""What is installed, by wheel and in place: calibrate/ under vllm_oscar's name, entry points, nothing else."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vllm_oscar

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "LICENSE", "vllm_oscar", "calibrate")


def expected_modules() -> set[str]:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_oscar").rglob("*.py")}
    return found | {f"vllm_oscar/{path.relative_to(ROOT)}" for path in (ROOT / "calibrate").rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    (source / "README.md").write_text("readme\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_no_other_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == expected_modules()
    texts = ROOT / "vllm_oscar" / "evaluation" / "texts"
    assert {f"vllm_oscar/evaluation/texts/{path.name}" for path in texts.iterdir()} <= set(names)
    information = f"vllm_oscar-{vllm_oscar.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"vllm_oscar", information}
    assert f"{information}/licenses/LICENSE" in names


def test_wheel_runs_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, with neither the repository nor its installation in reach (-S keeps the latter's hook out)."""
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import importlib.util, vllm_oscar\n"
        "print(vllm_oscar.__file__, importlib.util.find_spec('vllm_oscar.calibrate').origin)\n"
        "print(importlib.util.find_spec('calibrate'))"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    package = target / "vllm_oscar"
    assert result.stdout.split() == [str(package / "__init__.py"), str(package / "calibrate" / "__init__.py"), "None"]


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_installed_in_place(place: str, tmp_path: Path) -> None:
    """From the repository's root, where a folder calibrate/ is in the way, and from another folder."""
    code = "import vllm_oscar, vllm_oscar.calibrate as c; print(vllm_oscar.__file__, c.__file__, c.__name__)"
    folder = ROOT if place == "root" else tmp_path
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    expected = [
        str(ROOT / "vllm_oscar" / "__init__.py"),
        str(ROOT / "calibrate" / "__init__.py"),
        "vllm_oscar.calibrate",
    ]
    assert result.stdout.split() == expected


def test_calibrate_is_no_top_level_package(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", "import calibrate"], cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'calibrate'" in result.stderr


def test_entry_points() -> None:
    (plugin,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "oscar")
    (script,) = (e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "oscar")
    assert (plugin.value, script.value) == ("vllm_oscar.plugin:register", "vllm_oscar.cli:main")
    assert callable(plugin.load())
    assert importlib.metadata.version("vllm-oscar") == vllm_oscar.__version__
