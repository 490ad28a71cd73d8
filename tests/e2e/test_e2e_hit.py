"""A second warm does nothing, also if the cache, the model and cgtool have moved."""

from __future__ import annotations

import json
import shutil

import pytest
from cli_harness import forked
from e2e_harness import COMPARE, FIXTURES, LLAMA, REPO, SERVED, Ran, compare, environment, inspect, python, warm

pytestmark = pytest.mark.torch

MODEL = f"{SERVED}:llama"
#: Makes imports of these modules raise, but not `find_spec`.
POISON = """
import importlib.machinery
import sys

NAMES = {names!r}

def is_forbidden(name):
    return any(name == forbidden or name.startswith(forbidden + ".") for forbidden in NAMES)

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if is_forbidden(name):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise RuntimeError("the import of " + spec.name + " is forbidden here")

    def exec_module(self, module):
        pass

assert not any(map(is_forbidden, sys.modules)), "imported too early"
sys.meta_path.insert(0, Forbid())
"""
COMMAND = """
from cgtool.cli.main import main
sys.argv[0] = "cgtool"
code = main()
if code:
    sys.exit(code)
"""
#: Modules that tracing, splitting and compiling need.
TRACING = ("cgtool.compiler.stitch", "cgtool.trace", "cgtool.split", "torch._inductor.compile_fx")
COMPILER = (*TRACING, "torch._dynamo", "torch._inductor", "sympy", "triton")


#: How many modules of cgtool a start may import; each costs a quarter of a millisecond.
MOST_MODULES = 48
#: Modules that a hit does not need.
NEVER = (
    *(
        "cgtool.cli",
        "cgtool.toolkit",
        "cgtool.compiler",
        "cgtool.trace",
        "cgtool.split",
        "cgtool.config",
        "cgtool.events",
    ),
    *("cgtool.adaptor_registry", "cgtool.plan.rendering", "cgtool.plan.writing", "cgtool.runtime.explain"),
    *(
        "cgtool.runtime.otherwise",
        "cgtool.store.bundle",
        "cgtool.store.key",
        "cgtool.store.lock",
        "cgtool.store.pruned",
    ),
    *("cgtool.store.signatures", "cgtool.store.units", "cgtool.store.walk"),
)
COUNT = """
import sys
import torch, tiny_llama
spec = tiny_llama.build()
import cgtool
with torch.no_grad():
    cgtool.load(spec.module, cache_dir=sys.argv[1])(*spec.calls[0].args)
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "cgtool"))
"""


HIT = {"hit": True, "compiled": 0, "reused": 3, "trace_secs": 0.0, "compile_secs": 0.0}


def check_hit(report):
    assert {key: report[key] for key in HIT} == HIT


def files(root):
    """Return every file with its time of modification, except for stamps of use."""
    return sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file() and "state" not in p.parts)


def run_poisoned(names, program, *arguments):
    """Run a program in a fork of a process that has imported torch alone, and that cannot import these modules."""
    ran = forked(POISON.format(names=names) + program, *arguments)
    return Ran(code=ran.code, out=ran.out, err=ran.err)


def warm_poisoned(names, root, *options):
    return run_poisoned(names, COMMAND, "warm", MODEL, "--cache-dir", root, "--json", "--quiet", *options)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory, native_llama):
    assert native_llama.report["compiled"] == 3
    return native_llama.copy(tmp_path_factory.mktemp("warmed") / "cache")


def test_a_second_warm_traces_compiles_and_writes_nothing(warmed):
    before = files(warmed)
    check_hit(warm(MODEL, warmed))
    assert files(warmed) == before


def test_a_miss_fails_without_the_compiler(tmp_path):
    ran = warm_poisoned(COMPILER, tmp_path, "--weights", "real")
    assert ran.code == 1
    assert "is forbidden here" in ran.err


def test_a_hit_needs_no_module_that_traces(warmed):
    check_hit(warm_poisoned(TRACING, warmed).report)


def test_a_hit_with_real_weights_imports_no_compiler(warmed):
    """Fake weights need torch's FakeTensorMode, which imports Dynamo itself."""
    check_hit(warm_poisoned(COMPILER, warmed, "--weights", "real").report)


def test_eager_artifacts_are_served_without_a_compiler(eager_llama):
    request = {"model": LLAMA, "root": str(eager_llama.root), "calls": [{"num_tokens": n} for n in (1, 2, 8, 9)]}
    program = f"sys.path.insert(0, {str(COMPARE.parent)!r})\nfrom e2e_compare import main\nmain()"
    report = run_poisoned(COMPILER, program, json.dumps(request)).report
    assert (report["calls"], report["failures"], report["imported"]) == (4, [], [])


def test_a_load_imports_few_modules_and_none_that_only_a_warm_or_a_miss_needs(warmed):
    ran = python("-c", COUNT, str(warmed), env={"PYTHONPATH": f"{FIXTURES}:{environment()['PYTHONPATH']}"})
    imported = ran.out.split()
    assert len(imported) <= MOST_MODULES
    assert [name for name in imported if name.startswith(NEVER)] == []


#: Runs the command, and names the copy of cgtool that runs.
NAMING_COMMAND = "import sys, cgtool; print(cgtool.__file__, file=sys.stderr)" + COMMAND


def test_a_warm_hits_in_a_copy_with_everything_elsewhere(warmed, tmp_path):
    """The cache at another root, another HOME, another working directory, cgtool and the model in other folders."""
    root, site, models, home, work = (tmp_path / name for name in ("moved", "site", "models", "home", "work"))
    shutil.copytree(warmed, root)
    shutil.copytree(REPO / "cgtool", site / "cgtool", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(FIXTURES, models / "fixtures", ignore=shutil.ignore_patterns("__pycache__"))
    model = models / "tests/e2e/served.py"
    model.parent.mkdir(parents=True)
    shutil.copy(SERVED, model)
    home.mkdir()
    work.mkdir()
    env = {"HOME": str(home), "PYTHONPATH": str(site), "TMPDIR": str(work), "TORCHINDUCTOR_CACHE_DIR": str(work / "i")}
    before = files(root)
    command = ("warm", "../models/tests/e2e/served.py:llama", "--cache-dir", "../moved", "--json", "--quiet")
    ran = python("-c", NAMING_COMMAND, *command, env=env, cwd=work)
    assert ran.err.splitlines()[0] == str(site / "cgtool" / "__init__.py")
    check_hit(ran.report)
    assert files(root) == before
    shutil.move(root, tmp_path / "again")  # opening an artifact does not depend on the folder that it was made in
    report = compare(f"{model}:llama", tmp_path / "again", [{"num_tokens": n} for n in (2, 5, 8)], env=env, cwd=work)
    assert (report["calls"], report["failures"]) == (3, [])


#: A script that defines its model; if it is run, its classes and functions belong to `__main__`.
SCRIPT = """
import cgtool  # before torch, as a script may
import dataclasses, enum, functools, sys
import torch

FACTOR, TABLE = 1.5, {"shift": 0.25}

class Mode(enum.Enum):
    ONE = 1

@dataclasses.dataclass
class Settings:
    eps: float = 1e-3

def helper(x, factor=0.5):
    return x * factor

def closing_over(weight):
    return lambda x: x * weight

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * FACTOR
    return wrapper

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.SiLU()])
        self.settings, self.mode, self.table = Settings(), Mode.ONE, [torch.ones(8)]
        self.closure, self.partial = closing_over(0.75), functools.partial(helper, factor=0.9)

    @decorated
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = self.closure(self.partial(x)) * self.table[0] + self.settings.eps + TABLE["shift"]
        return helper(x) if self.mode is Mode.ONE else x

def build():
    torch.manual_seed(0)
    return cgtool.ModelSpec(module=Model().eval(), calls=[cgtool.ExampleCall(args=(torch.ones(4, 8),))])

if __name__ == "__main__":
    model, x = build().module, torch.rand(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(cgtool.load(model, cache_dir=sys.argv[1])(x), model(x))
    print("hit")
"""


def test_a_script_that_defines_its_model_hits_an_entry_warmed_by_the_command(tmp_path):
    (tmp_path / "serve.py").write_text(SCRIPT)
    root = tmp_path / "cache"
    assert warm(f"{tmp_path / 'serve.py'}:build", root, "--adaptor", "eager")["compiled"] == 1
    assert python("-m", "serve", str(root), cwd=tmp_path).out == "hit\n"
    (tmp_path / "other").mkdir()
    env = {"PYTHONHASHSEED": "12345", "TORCH_LOGS": "+dynamo"}
    assert python(str(tmp_path / "serve.py"), str(root), cwd=tmp_path / "other", env=env).out == "hit\n"


def test_the_cache_contains_no_paths_of_this_machine(warmed, native_llama, tmp_path):
    """No path of the model, of cgtool, of the cache or of a home is in any file."""
    inspect(warmed)
    names = [str(path).encode() for path in (REPO, warmed, native_llama.root, tmp_path.parent)]
    found = [
        (path.name, name) for path in warmed.rglob("*") if path.is_file() for name in names if name in path.read_bytes()
    ]
    assert found == []
