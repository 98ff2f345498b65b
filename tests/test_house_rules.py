"""The house rules that a linter does not know, each also broken on purpose to see it work."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vllm_hicache

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("connectors", "kernels", "storage_backends", "benchmarks")
FOLDERS = ("vllm_hicache", *MAPPED)
SCANNED = (*FOLDERS, "tests", "examples")
MAX_LINES = 500
LONG_PATHS = (".py", ".sh")

VAGUE_FILES = {"utils", "util", "common", "helper", "helpers", "misc", "manager", "handler"}
VAGUE_CLASSES = ("Manager", "Handler", "Helper", "Helpers", "Util", "Utils")

STORAGE_CLIENTS = {"redis", "aiobotocore", "botocore", "boto3", "obstore", "mooncake", "nixl"}
TORCH_IN_CORE = {"host_pool", "transfer"}
PLUGIN = "vllm_hicache.plugin"  # vLLM calls it; imports vLLM and the connector when it registers
COMMAND_LINE = "vllm_hicache.cli"  # the files of the command `hicache`, above everything else
SIMULATOR = "vllm_hicache.simulate"  # drives the core; only tests and users import it
TRITON_KERNEL = "vllm_hicache.kernels.triton_units"
LMCACHE_PLUGINS = "vllm_hicache.connectors.lmcache_"
PLANS = {"plan", "planner", "progress", "prefetch", "prefix_index", "storage", "storage_messages"}


class Import:
    """One imported name: ``target`` is the module, ``name`` what is taken from it."""

    def __init__(self, target: str, name: str, line: int, *, at_import: bool) -> None:
        self.target = target
        self.name = name
        self.line = line
        self.at_import = at_import

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    @property
    def dotted(self) -> str:
        return f"{self.target}.{self.name}" if self.name else self.target


def python_files(root: Path, folders: tuple[str, ...] = SCANNED) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    """``connectors/stats.py`` is ``vllm_hicache.connectors.stats``."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] not in MAPPED else ("vllm_hicache", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The folder that a module of the package belongs to; ``core`` for vllm_hicache/ itself."""
    second = module.split(".")[1] if "." in module else ""
    return second if second in MAPPED else "core"


class ImportFinder(ast.NodeVisitor):
    """Collects imports, but for those under ``if TYPE_CHECKING``, which never run."""

    def __init__(self) -> None:
        self.found: list[Import] = []
        self._num_functions = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, "", node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._add(node.module or "", alias.name, node.lineno)

    def visit_If(self, node: ast.If) -> None:
        body = [] if "TYPE_CHECKING" in ast.unparse(node.test) else node.body
        for child in (*body, *node.orelse):
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_later(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_later(node)

    def _visit_later(self, node: ast.AST) -> None:
        self._num_functions += 1
        self.generic_visit(node)
        self._num_functions -= 1

    def _add(self, target: str, name: str, line: int) -> None:
        self.found.append(Import(target, name, line, at_import=not self._num_functions))


@cache
def _imports(text: str) -> tuple[Import, ...]:
    finder = ImportFinder()
    finder.visit(ast.parse(text))
    return tuple(finder.found)


def imports_of(path: Path) -> tuple[Import, ...]:
    return _imports(path.read_text())


def wrong_directions(root: Path) -> list[str]:
    """Core <- kernels, core <- storage_backends, all <- connectors, all <- benchmarks."""
    found = []
    for path in python_files(root, FOLDERS):
        module = module_name(root, path)
        for item in imports_of(path):
            why = _refuse(module, item)
            if why:
                found.append(f"{path.relative_to(root)}:{item.line}: {item.dotted}: {why}")
    return found


def _refuse(module: str, item: Import) -> str:
    layer = layer_of(module)
    if item.top == "numba" and item.at_import:
        return "breaks vLLM's in-process CPU engine"
    drives_vllm = layer in ("connectors", "benchmarks") or (module == PLUGIN and not item.at_import)
    if item.top == "vllm" and not drives_vllm:
        return "only connectors/ and benchmarks/ import vLLM"
    if item.top == "lmcache" and not module.startswith(LMCACHE_PLUGINS):
        return "only what LMCache loads imports LMCache"
    if item.top == "triton" or item.dotted.startswith(TRITON_KERNEL):
        return _refuse_triton(module, layer, item)
    if item.top in STORAGE_CLIENTS and layer not in ("storage_backends", "benchmarks"):
        return "only storage_backends/ imports storage clients, and benchmarks/ beside them"
    if item.top == "torch":
        return _refuse_torch(module, layer)
    if item.top == "vllm_hicache":
        return _refuse_own(module, layer, item)
    return ""


def _refuse_triton(module: str, layer: str, item: Import) -> str:
    if layer not in ("kernels", "benchmarks"):
        return "only kernels/ imports Triton, and benchmarks/ its kernel"
    if item.at_import and module != TRITON_KERNEL:
        return "an installation for CPUs may lack Triton: import it where it runs"
    return ""


def _refuse_torch(module: str, layer: str) -> str:
    if layer == "storage_backends":
        return "the storage process must not load torch"
    if layer == "core" and module.rpartition(".")[2] not in TORCH_IN_CORE:
        return "in the core only host_pool and transfer import torch"
    return ""


def _refuse_own(module: str, layer: str, item: Import) -> str:
    target = layer_of(item.dotted)
    if item.dotted.startswith(SIMULATOR) and not module.startswith(SIMULATOR):
        return "the product must not import its simulator"
    if target == "benchmarks" and layer not in ("core", "benchmarks"):
        return "the product must not import its benchmarks"
    if layer == "core" and target != "core":
        is_top = module == PLUGIN or module.startswith(COMMAND_LINE)
        may_come_later = is_top or target == "storage_backends"
        if item.at_import or not may_come_later:
            return f"the core must not import {target}/"
    if layer in ("kernels", "storage_backends") and target not in ("core", layer):
        return f"{layer}/ must not import {target}/"
    names = item.dotted.split(".")
    if layer == "kernels" and len(names) > 1 and names[1] in PLANS:
        return "kernels know layouts, never plans or storage"
    return ""


def import_cycles(root: Path) -> list[str]:
    """Modules of the package that import each other while they load."""
    modules = {module_name(root, path): path for path in python_files(root, FOLDERS)}
    graph = {}
    for module, path in modules.items():
        early = [item for item in imports_of(path) if item.at_import]
        used = {item.target for item in early} | {item.dotted for item in early}
        graph[module] = (used & modules.keys()) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def long_files(root: Path) -> list[str]:
    found = []
    for path in _sources(root):
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_LINES:
            found.append(f"{path.relative_to(root)}: {num_lines} lines, at most {MAX_LINES}")
    return found


def non_ascii_files(root: Path) -> list[str]:
    return [
        str(path.relative_to(root)) for path in _sources(root) if not path.read_text().isascii()
    ]


def _sources(root: Path) -> list[Path]:
    files = (path for folder in SCANNED for path in (root / folder).rglob("*"))
    return sorted(path for path in files if path.suffix in LONG_PATHS)


def vague_names(root: Path) -> list[str]:
    """Files and classes whose name says nothing."""
    found = []
    for path in python_files(root, FOLDERS):
        where = path.relative_to(root)
        if path.stem in VAGUE_FILES:
            found.append(f"{where}: name a file after what it computes")
        found += [
            f"{where}:{node.lineno}: class {node.name}: name the thing"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef) and node.name.endswith(VAGUE_CLASSES)
        ]
    return found


def borrowed_private_names(root: Path) -> list[str]:
    """Imports of another module's ``_private`` name: what is shared is public."""
    return [
        f"{path.relative_to(root)}:{item.line}: {item.dotted}"
        for path in python_files(root)
        for item in imports_of(path)
        if item.top == "vllm_hicache"
        and any(part.startswith("_") and not part.endswith("__") for part in item.dotted.split("."))
    ]


def bare_imports(root: Path) -> list[str]:
    """Imports of a mapped folder by its bare name; ``kernels`` is another distribution."""
    return [
        f"{path.relative_to(root)}:{item.line}: {item.dotted}"
        for path in python_files(root)
        for item in imports_of(path)
        if item.top in MAPPED
    ]


def wheel_list_gaps(root: Path) -> list[str]:
    """Folders with Python files that the wheel leaves out, or that it names and nobody made."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = set(setuptools["packages"])
    mapped = {name.replace(".", "/"): folder for name, folder in setuptools["package-dir"].items()}
    on_disk = {
        module_name(root, path.parent / "__init__.py") for path in python_files(root, FOLDERS)
    }
    found = [f"{name}: not in [tool.setuptools] packages" for name in sorted(on_disk - listed)]
    found += [f"{name}: listed but has no folder" for name in sorted(listed - on_disk)]
    for name in sorted(listed & on_disk):
        folder = mapped.get(name.replace(".", "/"), name.replace(".", "/"))
        if not (root / folder / "__init__.py").exists():
            found.append(f"{name}: {folder}/ has no __init__.py")
    return found


def unlocked_requirements(root: Path) -> list[str]:
    """Requirements of a CPU checkout that requirements/cpu.txt does not pin."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock = (root / "requirements" / "cpu.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lock if "==" in line}
    asked = [*project["dependencies"], *extras["cpu"], *extras["test"], *extras["dev"]]
    names = {_distribution(requirement) for requirement in asked}
    return sorted(names - pinned)


def _distribution(requirement: str) -> str:
    name = requirement
    for mark in "[<>=!~; ":
        name = name.partition(mark)[0]
    return name.lower().replace("_", "-")


RULES = (
    wrong_directions,
    import_cycles,
    long_files,
    non_ascii_files,
    vague_names,
    borrowed_private_names,
    bare_imports,
    wheel_list_gaps,
    unlocked_requirements,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_checkout_keeps_the_rule(rule):
    assert rule(ROOT) == []


def test_the_rules_look_at_every_folder():
    seen = {path.relative_to(ROOT).parts[0] for path in python_files(ROOT)}
    assert {*FOLDERS, "tests", "examples"} <= seen


LOCK = (ROOT / "requirements" / "cpu.txt").read_text()
BROKEN = [
    (wrong_directions, "vllm_hicache/plan.py", "import vllm"),
    (wrong_directions, "vllm_hicache/plan.py", "def f():\n    from vllm.config import VllmConfig"),
    (wrong_directions, "vllm_hicache/plugin.py", "from vllm.config import VllmConfig"),
    (wrong_directions, "vllm_hicache/plan.py", "import torch"),
    (wrong_directions, "vllm_hicache/plan.py", "try:\n    import torch\nexcept ImportError: ..."),
    (wrong_directions, "vllm_hicache/plan.py", "class A:\n    import numba"),
    (wrong_directions, "vllm_hicache/transfer.py", "import triton.language as tl"),
    (wrong_directions, "kernels/dispatch.py", "import triton"),
    (wrong_directions, "kernels/dispatch.py", "from vllm_hicache.kernels import triton_units"),
    (wrong_directions, "vllm_hicache/plan.py", "from vllm_hicache.kernels import dispatch"),
    (wrong_directions, "vllm_hicache/plan.py", "from vllm_hicache import connectors"),
    (wrong_directions, "vllm_hicache/plan.py", "def f():\n    import vllm_hicache.connectors"),
    (wrong_directions, "vllm_hicache/cli_two.py", "from vllm_hicache import connectors"),
    (wrong_directions, "vllm_hicache/plan.py", "from vllm_hicache.simulate import story"),
    (wrong_directions, "storage_backends/file.py", "import torch"),
    (wrong_directions, "storage_backends/file.py", "from vllm_hicache.kernels import dispatch"),
    (wrong_directions, "kernels/dispatch.py", "from vllm_hicache.plan import StepPlan"),
    (wrong_directions, "kernels/dispatch.py", "import vllm"),
    (wrong_directions, "connectors/stats.py", "import redis"),
    (wrong_directions, "connectors/stats.py", "from vllm_hicache.benchmarks import arms"),
    (wrong_directions, "vllm_hicache/cli_two.py", "from vllm_hicache.benchmarks import arms"),
    (wrong_directions, "benchmarks/arms.py", "import lmcache"),
    (wrong_directions, "connectors/stats.py", "import lmcache"),
    (import_cycles, "vllm_hicache/plan.py", "from vllm_hicache import plan_two"),
    (long_files, "connectors/stats.py", "x = 1\n" * 501),
    (long_files, "tests/run.sh", "true\n" * 501),
    (non_ascii_files, "connectors/stats.py", "x = '\u2192'"),
    (long_files, "benchmarks/restore.py", "x = 1\n" * 501),
    (vague_names, "connectors/utils.py", "x = 1"),
    (vague_names, "connectors/stats.py", "class CopyManager: ..."),
    (borrowed_private_names, "tests/test_a.py", "from vllm_hicache.plan import _number"),
    (borrowed_private_names, "connectors/stats.py", "import vllm_hicache._plan"),
    (bare_imports, "tests/test_a.py", "from kernels.dispatch import choose"),
    (bare_imports, "vllm_hicache/plan.py", "import storage_backends"),
    (wheel_list_gaps, "vllm_hicache/cli/main.py", "x = 1"),
    (wheel_list_gaps, "storage_backends/redis/client.py", "x = 1"),
    (unlocked_requirements, "requirements/cpu.txt", LOCK.replace("numpy==", "numpi==")),
]


@pytest.fixture
def small_checkout(tmp_path):
    """A tree with the five folders, this project's pyproject and lock, and two honest modules."""
    for folder in (*SCANNED, "requirements"):
        (tmp_path / folder).mkdir()
    for folder in (*FOLDERS, "vllm_hicache/simulate"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "vllm_hicache" / "plan_two.py").write_text("from vllm_hicache import plan\n")
    (tmp_path / "vllm_hicache" / "plan.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    )
    (tmp_path / "vllm_hicache" / "plugin.py").write_text(
        "def register():\n    from vllm.plugins import load_general_plugins\n"
    )
    for name in ("pyproject.toml", "requirements/cpu.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_small_honest_checkout_keeps_the_rule(rule, small_checkout):
    assert rule(small_checkout) == []


@pytest.mark.parametrize(
    ("rule", "path", "text"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_rule_sees_that_it_is_broken(rule, path, text, small_checkout):
    (small_checkout / path).parent.mkdir(exist_ok=True, parents=True)
    (small_checkout / path).write_text(text)
    assert len(rule(small_checkout)) == 1


def test_every_rule_is_broken_on_purpose():
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def test_a_listed_package_without_a_folder_is_seen(small_checkout):
    (small_checkout / "kernels" / "__init__.py").unlink()
    assert wheel_list_gaps(small_checkout) == ["vllm_hicache.kernels: listed but has no folder"]


def test_a_folder_without_init_is_seen(small_checkout):
    (small_checkout / "kernels" / "__init__.py").rename(small_checkout / "kernels" / "dispatch.py")
    assert wheel_list_gaps(small_checkout) == ["vllm_hicache.kernels: kernels/ has no __init__.py"]


def test_version_is_the_same_in_package_and_metadata():
    assert vllm_hicache.__version__ == importlib.metadata.version("vllm-hicache")


def test_the_storage_process_loads_neither_torch_nor_vllm():
    modules = [
        module_name(ROOT, path)
        for path in python_files(ROOT, ("vllm_hicache", "storage_backends"))
        if path.stem not in TORCH_IN_CORE
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'vllm', 'triton', 'numba'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-P", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
