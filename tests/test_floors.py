"""Rules on the source: which modules may import which, use torch, or read the environment."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cgtool"

FLOORS = {
    "cli": 6,
    "toolkit": 5,
    "decorator": 5,
    "api": 4,
    "models": 4,
    "compiler": 3,
    "serving": 3,
    "trace": 2,
    "split": 2,
    "runtime": 2,
    "remote": 2,
    "executors": 2,
    "store": 1,
    "graph": 1,
    "guards": 1,
    "plan": 0,
}
#: Folders (and floor 0) that load without torch.
TORCH_FREE = {"cli", "toolkit", "executors", "remote", "store", "plan", ""}
#: Programs of a bench's children, which measure torch; the rest of their folder loads without it.
MEASURING = {f"toolkit/bench/{name}.py" for name in ("_torch", "calls", "child")}
#: Modules that need an optional dependency.
NEEDS_EXTRA = {"remote/http.py", "remote/buckets.py", "remote/oci.py", "toolkit/image.py"}
#: Modules that a start from a warm cache must not import.
HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton")
LIGHT_FOLDERS = {"runtime", "guards", "graph", "serving"}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MAX_LINES = 500


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    lazy: bool
    typing_only: bool


@dataclass(frozen=True)
class File:
    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder of a stage, the name of a module with its own floor, or "" for floor 0."""
        first = self.path.split("/")[0].removesuffix(".py")
        return first if first in FLOORS else ""

    @property
    def floor(self) -> int:
        return FLOORS.get(self.room, 0)

    @property
    def is_door(self) -> bool:
        return self.path in {"__init__.py", "__main__.py"}

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, lazy=False, typing_only=False))

    @cached_property
    def attributes(self) -> list[tuple[str, int]]:
        """Every attribute that is read or set, as a dotted name, and its line."""
        return [(_dotted(node), node.lineno) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)]


def _imports(node: ast.AST, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy, typing_only)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            for alias in child.names:  # a name may be a submodule, such as cgtool.cli.text
                yield Import(f"{module}.{alias.name}", child.lineno, lazy, typing_only)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), lazy=lazy, typing_only=True)
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), lazy=lazy, typing_only=typing_only)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, lazy=lazy or inside, typing_only=typing_only)


def _is(module: str, *roots: str) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imports_only_from_floors_below(file: File) -> Iterator[str]:
    if file.is_door:
        return
    for found in file.imports:
        if found.module.startswith("."):
            yield f"{file.path}:{found.line}: write {found.module} as an absolute import"
        elif _is(found.module, "cgtool") and found.module != "cgtool.__version__":
            room = found.module.split(".")[1] if "." in found.module else ""
            other = FLOORS.get(room, 0)
            own = room == file.room or other == file.floor == 0
            if room not in FLOORS and not (PACKAGE / f"{room}.py").is_file():
                yield f"{file.path}:{found.line}: {found.module} is imported from the package, not from its module"
            elif other >= file.floor and not own:
                yield f"{file.path}:{found.line}: floor {file.floor} imports {found.module} of floor {other}"


def doors_import_nothing_early(file: File) -> Iterator[str]:
    if file.is_door:
        for found in file.imports:
            allowed = found.typing_only or found.lazy or _is(found.module, "cgtool.cli.main.main")
            if _is(found.module, "cgtool") and not allowed:
                yield f"{file.path}:{found.line}: imports {found.module} at import time"


def starts_without_torch(file: File) -> Iterator[str]:
    for found in file.imports:
        if (
            file.room in TORCH_FREE
            and file.path not in MEASURING
            and not (found.lazy or found.typing_only)
            and _is(found.module, "torch", "numpy")
        ):
            yield f"{file.path}:{found.line}: imports {found.module} at import time"
        if file.floor == 0 and not file.is_door and _is(found.module, "torch"):
            yield f"{file.path}:{found.line}: floor 0 must not import {found.module}"


def loads_with_torch_alone(file: File) -> Iterator[str]:
    if file.room in LIGHT_FOLDERS and file.path != "graph/sympy_text.py":
        for found in file.imports:
            if _is(found.module, *HEAVY) and not found.typing_only:
                yield f"{file.path}:{found.line}: imports {found.module}"


def keeps_private_torch_in_its_shim(file: File) -> Iterator[str]:
    if Path(file.path).name == "_torch.py" or file.path == "graph/sympy_text.py":  # the shim to torch's sympy
        return
    for found in file.imports:
        if _is(found.module, "torch") and _private(found.module) and not found.typing_only:
            yield f"{file.path}:{found.line}: imports {found.module}, which belongs in _torch.py"
    for name, line in file.attributes:
        if _is(name, "torch") and _private("torch." + name.rpartition(".")[2]):
            yield f"{file.path}:{line}: touches {name}, which belongs in _torch.py"


def _private(module: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in module.split("."))


def leaves_the_environment_to_its_reader(file: File) -> Iterator[str]:
    if file.path == "host.py":
        return
    for found in file.imports:
        if found.module in {f"os.{name}" for name in ENVIRONMENT}:
            yield f"{file.path}:{found.line}: imports {found.module}"
    for name, line in file.attributes:
        if name.startswith("os.") and name.removeprefix("os.") in ENVIRONMENT:
            yield f"{file.path}:{line}: touches {name}"


def has_no_pickle(file: File) -> Iterator[str]:
    for found in file.imports:
        if found.module.split(".")[0] in PICKLES:
            yield f"{file.path}:{found.line}: imports {found.module}"
    for name, line in file.attributes:
        if name in {"torch.load", "torch.save"}:
            yield f"{file.path}:{line}: {name} is pickle"


def asserts_nothing(file: File) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Assert):
            yield f"{file.path}:{node.lineno}: assert vanishes under -O; raise an error of cgtool.errors"


def says_what_it_owns(file: File) -> Iterator[str]:
    if not ast.get_docstring(file.tree):
        yield f"{file.path}: has no module docstring"


def fits_in_a_head(file: File) -> Iterator[str]:
    lines = file.text.count("\n")
    if lines > MAX_LINES:
        yield f"{file.path}: has {lines} lines; the limit is {MAX_LINES}"


RULES = [
    imports_only_from_floors_below,
    doors_import_nothing_early,
    starts_without_torch,
    loads_with_torch_alone,
    keeps_private_torch_in_its_shim,
    leaves_the_environment_to_its_reader,
    has_no_pickle,
    asserts_nothing,
    says_what_it_owns,
    fits_in_a_head,
]


def _file(path: str, text: str) -> File:
    return File(path, text, ast.parse(text, path))


@pytest.fixture(scope="module")
def package() -> list[File]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [_file(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_of_the_package_keeps_the_rule(rule, package):
    broken = dict.fromkeys(problem for file in package for problem in rule(file))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        pytest.param(imports_only_from_floors_below, "store/a.py", "import cgtool.compiler.manager", id="upwards"),
        pytest.param(imports_only_from_floors_below, "store/a.py", "from cgtool.guards import kinds", id="sideways"),
        pytest.param(imports_only_from_floors_below, "api.py", "from cgtool.models import hf", id="files of one floor"),
        pytest.param(imports_only_from_floors_below, "plan.py", "def f():\n    import cgtool.store.key", id="lazily"),
        pytest.param(imports_only_from_floors_below, "split/a.py", "from . import b", id="relative"),
        pytest.param(imports_only_from_floors_below, "compiler/a.py", "from cgtool import load", id="through the door"),
        pytest.param(doors_import_nothing_early, "__init__.py", "from cgtool.config import X", id="door"),
        pytest.param(starts_without_torch, "toolkit/a.py", "import torch", id="torch"),
        pytest.param(starts_without_torch, "cli/a.py", "try:\n    from torch import nn\nexcept E: pass", id="in a try"),
        pytest.param(starts_without_torch, "model.py", "def f():\n    import torch.nn", id="torch on floor 0"),
        pytest.param(loads_with_torch_alone, "runtime/a.py", "def f():\n    import torch._dynamo", id="dynamo"),
        pytest.param(loads_with_torch_alone, "graph/_torch.py", "from torch import _inductor", id="inductor"),
        pytest.param(loads_with_torch_alone, "guards/a.py", "import sympy", id="sympy"),
        pytest.param(keeps_private_torch_in_its_shim, "trace/a.py", "from torch._dynamo import x", id="private module"),
        pytest.param(keeps_private_torch_in_its_shim, "split/a.py", "from torch.fx.node import _f", id="private name"),
        pytest.param(keeps_private_torch_in_its_shim, "split/a.py", "import torch\ntorch._C.x()", id="private chain"),
        pytest.param(leaves_the_environment_to_its_reader, "api.py", "import os\nos.environ['A']", id="environ"),
        pytest.param(leaves_the_environment_to_its_reader, "cli/a.py", "from os import getenv", id="getenv"),
        pytest.param(has_no_pickle, "store/a.py", "def f():\n    import pickle", id="pickle"),
        pytest.param(has_no_pickle, "compiler/a.py", "import torch\ntorch.save(a, b)", id="torch.save"),
        pytest.param(asserts_nothing, "store/a.py", "def f():\n    assert x", id="assert"),
        pytest.param(says_what_it_owns, "store/a.py", "x = 1", id="docstring"),
        pytest.param(fits_in_a_head, "store/a.py", "x = 1\n" * (MAX_LINES + 1), id="length"),
    ],
)
def test_a_rule_sees_what_breaks_it(rule, path, text):
    assert len(list(rule(_file(path, text)))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param("plan.py", "import cgtool.plan.pieces", id="floor 0 within itself"),
        pytest.param("store/a.py", "from cgtool.store.key import Factor", id="a folder within itself"),
        pytest.param("toolkit/a.py", "def f():\n    import torch\n    from cgtool.compiler import x", id="lazily"),
        pytest.param("cli/a.py", "from cgtool import __version__", id="the version"),
        pytest.param("graph/a.py", "if TYPE_CHECKING:\n    import sympy", id="for types only"),
        pytest.param("trace/_torch.py", "import torch._dynamo\ntorch._C.x()", id="a shim"),
        pytest.param("host.py", "import os\nos.environ", id="the reader of the environment"),
        pytest.param("__init__.py", "def f():\n    import cgtool.api", id="a lazy door"),
    ],
)
def test_what_is_allowed_breaks_no_rule(path, text):
    file = _file(path, f'"""Owns something."""\n{text}\n')
    assert [problem for rule in RULES for problem in rule(file)] == []


def _modules_after(code: str) -> set[str]:
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import cgtool; cgtool.CompilationConfig(level=3); cgtool.ModelSpec", id="import cgtool"),
        pytest.param("import cgtool.store.layout, cgtool.toolkit.listing", id="cgtool.store"),
        pytest.param("from cgtool.cli.main import main; assert main(['--help']) == 0", id="cgtool --help"),
        pytest.param("from cgtool.cli.main import main; main(['warm', '--help'])", id="cgtool warm --help"),
        pytest.param("from cgtool.cli.main import main; main(['inspect', 'cache'])", id="cgtool inspect cache"),
    ],
)
def test_starts_without_loading_torch(code):
    heavy = {"torch", "numpy", "sympy", "transformers"}
    assert heavy.isdisjoint(_modules_after(code))


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import cgtool", id="import cgtool"),
        pytest.param("from cgtool.cli.main import main; assert main(['--help']) == 0", id="cgtool --help"),
        pytest.param("from cgtool.cli.main import main; main(['export', '--help'])", id="cgtool export --help"),
    ],
)
def test_starts_without_loading_what_decodes_records(code):
    assert "msgspec" not in _modules_after(code)


def test_every_module_of_a_torch_free_room_loads_without_torch(package):
    names = [
        "cgtool." + file.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for file in package
        if file.room in TORCH_FREE and not file.is_door and file.path not in MEASURING | NEEDS_EXTRA
    ]
    loaded = _modules_after("import " + ", ".join(names))
    assert set(names) <= loaded
    assert "torch" not in loaded
