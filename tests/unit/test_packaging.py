"""What is installed, by sdist, wheel and in place: calibrate/ under vllm_oscar's name, entry points, nothing else."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import vllm_oscar
from vllm_oscar.sidecar import FORMAT_VERSIONS

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "LICENSE", "vllm_oscar", "calibrate")


def expected_modules() -> set[str]:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_oscar").rglob("*.py")}
    return found | {f"vllm_oscar/{path.relative_to(ROOT)}" for path in (ROOT / "calibrate").rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist that was built from a copy of the sources, without network."""
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
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=source, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist],
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
    assert {f"{information}/licenses/LICENSE", "vllm_oscar/py.typed"} <= set(names)


def needed(name: str) -> set[str]:
    """The distributions of this environment that one asks for, directly or not."""
    found: set[str] = set()
    todo = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    while todo:
        requirement = todo.pop()
        known = canonicalize_name(requirement.name)
        if known not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(known)
            todo += [Requirement(text) for text in importlib.metadata.requires(known) or ()]
    return found


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with the wheel and what it asks for (links to what is here), and no vLLM."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed("vllm-oscar"):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))  # type: ignore[arg-type]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    return folder / "bin"


def test_an_environment_with_what_the_wheel_asks_for_says_that_vllm_is_missing(
    empty_environment: Path, tmp_path: Path
) -> None:
    """And everything that needs no vLLM works."""

    def said(*command: str, status: int = 0) -> str:
        done = subprocess.run(
            [empty_environment / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert said("oscar", "--version") == f"vllm-oscar {vllm_oscar.__version__}\n"
    code = (
        "import vllm_oscar.attention, vllm_oscar.sidecar, vllm_oscar.kernels.decode, vllm_oscar.calibrate.solve\n"
        "from vllm_oscar.plugin import register; register()"
    )
    missing = "vLLM is not installed; install vllm>=0.26,<0.34"
    assert missing in said("python", "-c", code)
    assert f"[ FAIL ] vLLM: {missing}" in said("oscar", "doctor", status=1)
    assert said("oscar", "serve", "model", status=1) == f"error: {missing}\n"
    remedy = "error: transformers is not installed: pip install 'vllm-oscar[calibrate]'\n"
    assert said("oscar", "calibrate", "model", status=1) == remedy


def test_the_image_is_built_from_what_the_wheel_is_built_from() -> None:
    from vllm_oscar.integration.seams import VERIFIED_ON_GPUS

    text = (ROOT / "Dockerfile").read_text()
    copied = {name for line in re.findall("^COPY (.*) ", text, re.MULTILINE) for name in line.split()}
    assert copied == {*SOURCES, "README.md"}
    version = Version(text.partition("VLLM_VERSION=v")[2].split()[0])
    assert version.release[:2] in [verified.release[:2] for verified in VERIFIED_ON_GPUS], "a release that ran on GPUs"


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


def test_the_changelog_says_what_to_do_with_sidecars_of_older_versions() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## [{vllm_oscar.__version__}] - " in text
    assert f"\n| {vllm_oscar.__version__} | {', '.join(map(str, FORMAT_VERSIONS))} | " in text
