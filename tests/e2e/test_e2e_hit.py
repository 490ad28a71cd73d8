"""A second warm does nothing, wherever the cache, the model and cgtool lie by then."""

from __future__ import annotations

import shutil

import pytest
from e2e_harness import FIXTURES, LLAMA, REPO, cgtool, compare, environment, inspect, python, warm

pytestmark = pytest.mark.torch

SIZES = ("--compile-sizes", "1")
#: Makes an import raise, and not a look at whether a module is there; found by Python at its start through PYTHONPATH.
POISON = """
import importlib.machinery
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {names!r}):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise RuntimeError("the import of " + spec.name + " is forbidden here")

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Forbid())
"""
#: What tracing, splitting and compiling cannot do without.
TRACING = ("cgtool.compiler.stitch", "cgtool.trace", "cgtool.split", "torch._inductor.compile_fx")
COMPILER = (*TRACING, "torch._dynamo", "torch._inductor", "sympy", "triton")


#: How many modules of cgtool a start may import; each costs a quarter of a millisecond.
MOST_MODULES = 48
#: What a hit has no use for.
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


def what_happened(report):
    return {key: report[key] for key in ("hit", "compiled", "reused", "trace_secs", "compile_secs")}


HIT = {"hit": True, "compiled": 0, "reused": 6, "trace_secs": 0.0, "compile_secs": 0.0}


def files(root):
    """Every file with what would change if it were written to; stamps of use apart."""
    return sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file() and "state" not in p.parts)


def poisoned(folder, names):
    """An environment in which these modules cannot be imported."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(POISON.format(names=names))
    return {"PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}"}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory, sized_cache):
    warmed = sized_cache("tiny_llama")
    assert warmed.report["compiled"] == 6
    return warmed.copy(tmp_path_factory.mktemp("warmed") / "cache")


def test_a_second_warm_traces_nothing_compiles_nothing_and_writes_nothing(warmed):
    before = files(warmed)
    assert what_happened(warm(LLAMA, warmed, *SIZES)) == HIT
    assert files(warmed) == before


def test_the_poison_is_one(tmp_path):
    env = poisoned(tmp_path / "poison", COMPILER)
    ran = cgtool("warm", LLAMA, "--weights", "real", "--cache-dir", tmp_path / "cache", env=env)
    assert ran.code == 1
    assert "is forbidden here" in ran.err


def test_a_hit_cannot_have_traced_for_what_traces_is_not_there(warmed, tmp_path):
    env = poisoned(tmp_path / "poison", TRACING)
    assert what_happened(warm(LLAMA, warmed, *SIZES, env=env)) == HIT


def test_a_hit_with_real_weights_imports_no_compiler_at_all(warmed, tmp_path):
    """Weights that are fake need torch's FakeTensorMode, which imports Dynamo itself."""
    env = poisoned(tmp_path / "poison", COMPILER)
    assert what_happened(warm(LLAMA, warmed, *SIZES, "--weights", "real", env=env)) == HIT


def test_eager_artifacts_are_served_where_there_is_no_compiler(tmp_path):
    root = tmp_path / "cache"
    assert warm(LLAMA, root, *SIZES, "--adaptor", "eager")["compiled"] == 6
    env = poisoned(tmp_path / "poison", COMPILER)
    report = compare(LLAMA, root, [{"num_tokens": n} for n in (1, 2, 8, 9)], env=env)
    assert (report["calls"], report["failures"], report["imported"]) == (4, [], [])


def test_a_load_imports_few_modules_and_none_that_only_a_warm_or_a_miss_needs(warmed):
    ran = python("-c", COUNT, str(warmed), env={"PYTHONPATH": f"{FIXTURES}:{environment()['PYTHONPATH']}"})
    imported = ran.out.split()
    assert len(imported) <= MOST_MODULES
    assert [name for name in imported if name.startswith(NEVER)] == []


def test_so_does_a_warm_from_a_copy_with_everything_elsewhere(warmed, tmp_path):
    """The cache at another root, another HOME, another working directory, cgtool and the model in other folders."""
    root, site, models, home, work = (tmp_path / name for name in ("moved", "site", "models", "home", "work"))
    shutil.copytree(warmed, root)
    shutil.copytree(REPO / "cgtool", site / "cgtool", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(FIXTURES, models, ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir()
    work.mkdir()
    env = {"HOME": str(home), "PYTHONPATH": str(site), "TMPDIR": str(work), "TORCHINDUCTOR_CACHE_DIR": str(work / "i")}
    where = python("-c", "import cgtool; print(cgtool.__file__)", env=env, cwd=work)
    assert where.out.strip() == str(site / "cgtool" / "__init__.py")
    model = f"{models / 'tiny_llama.py'}:build"
    before = files(root)
    relative = warm("../models/tiny_llama.py:build", "../moved", *SIZES, env=env, cwd=work)
    assert what_happened(relative) == HIT
    assert files(root) == before
    shutil.move(root, tmp_path / "again")  # nothing that is opened is found through where it was made
    report = compare(model, tmp_path / "again", [{"num_tokens": n} for n in (1, 5, 8)], env=env, cwd=work)
    assert (report["calls"], report["failures"]) == (3, [])


#: A script that defines its model; its classes and functions are those of `__main__` where it is run.
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


def test_a_script_that_defines_its_model_hits_what_was_warmed_from_outside(tmp_path):
    (tmp_path / "serve.py").write_text(SCRIPT)
    root = tmp_path / "cache"
    assert warm(f"{tmp_path / 'serve.py'}:build", root, "--adaptor", "eager")["compiled"] == 1
    assert python("-m", "serve", str(root), cwd=tmp_path).out == "hit\n"
    (tmp_path / "other").mkdir()
    env = {"PYTHONHASHSEED": "12345", "TORCH_LOGS": "+dynamo"}
    assert python(str(tmp_path / "serve.py"), str(root), cwd=tmp_path / "other", env=env).out == "hit\n"


def test_nothing_of_this_machine_is_in_the_cache(warmed, sized_cache, tmp_path):
    """No path of the model, of cgtool, of the cache or of a home is in any file."""
    inspect(warmed)
    made_in = sized_cache("tiny_llama").root
    names = [str(path).encode() for path in (REPO, warmed, made_in, tmp_path.parent)]
    said = [
        (path.name, name) for path in warmed.rglob("*") if path.is_file() for name in names if name in path.read_bytes()
    ]
    assert said == []
