"""Who may import whom: DESIGN's import rule, read from the sources, so that laziness hides nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVING = {"plugin", "cli"}  # modules that may import integration, as may evaluation

# package or kind -> what of vllm_oscar it may import, and which third parties
BASE_PARTIES = {"torch", "numpy", "safetensors", "huggingface_hub", "packaging"}
OPTIONAL = {"vllm_oscar.compiled_quantizer": {"numba", "llvmlite"}}  # imported where it is there
RULES: dict[str, tuple[set[str], set[str]]] = {
    "base": ({"base"}, BASE_PARTIES),
    "kernels": ({"base", "kernels"}, BASE_PARTIES | {"triton"}),
    "calibrate": ({"base", "calibrate"}, BASE_PARTIES | {"transformers", "accelerate", "tqdm", "pyarrow", "datasets"}),
    "integration": (
        {"base", "kernels", "integration"},
        BASE_PARTIES | {"vllm", "pydantic", "psutil", "prometheus_client"},
    ),
    "evaluation": (
        {"base", "calibrate", "integration", "evaluation"},
        BASE_PARTIES | {"vllm", "transformers", "tqdm", "matplotlib", "openai"},
    ),
    "serving": ({"base", "calibrate", "integration", "evaluation", "serving"}, BASE_PARTIES | {"vllm", "transformers"}),
}


def kind(module: str) -> str:
    """The package that a dotted module below vllm_oscar belongs to; "base" or "serving" for the modules on top."""
    first = module.split(".")[1] if "." in module else "__init__"
    if first in RULES:
        return first
    return "serving" if first in SERVING else "base"


def modules() -> dict[str, Path]:
    """Every module of the distribution by its installed name."""
    found = {}
    for folder, package in ((ROOT / "vllm_oscar", "vllm_oscar"), (ROOT / "calibrate", "vllm_oscar.calibrate")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(module: str, path: Path) -> set[str]:
    """Dotted names of all modules that a source imports, wherever in it and whenever."""
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parent, node.module] if node.module else parent)
            members = {f"{source}.{alias.name}" for alias in node.names}
            # `from package import module` imports the module, `from package import name` the package
            found.update(member if member in MODULES else source for member in members)
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_import_rule(module: str) -> None:
    inside, outside = RULES[kind(module)]
    for name in imports(module, MODULES[module]):
        top = name.split(".")[0]
        if top == "vllm_oscar":
            assert name == "vllm_oscar" or kind(name) in inside, f"{module} imports {name}"
        elif top not in sys.stdlib_module_names:
            assert top in outside | OPTIONAL.get(module, set()), f"{module} imports {name}"


def test_the_rule_sees_what_it_forbids(tmp_path: Path) -> None:
    """Every way of writing an import, also inside a function."""
    source = tmp_path / "odd.py"
    source.write_text(
        "import vllm.config as c\n"
        "from vllm_oscar import integration, __version__\n"
        "def f():\n"
        "    from .integration.seams import DTYPE\n"
        "    from . import plugin\n"
    )
    assert imports("vllm_oscar.odd", source) == {
        "vllm.config",
        "vllm_oscar.integration",
        "vllm_oscar",
        "vllm_oscar.integration.seams",
        "vllm_oscar.plugin",
    }
    assert kind("vllm_oscar.integration.seams") == "integration"
    assert kind("vllm_oscar.sidecar") == kind("vllm_oscar") == "base"


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("vllm_oscar.plugin", {"torch", "vllm", "triton", "transformers"}),
        ("vllm_oscar.sidecar, vllm_oscar.attention, vllm_oscar.hot_pool", {"vllm", "transformers"}),
        ("vllm_oscar.cache_layer", {"numba"}),
    ],
)
def test_imports_stay_lazy(imported: str, absent: set[str]) -> None:
    """vLLM imports the plugin in every process of every use, also where OSCAR is not asked for."""
    code = f"import sys, {imported}; print({absent!r} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
