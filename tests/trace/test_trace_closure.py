"""The import closure of the user's code: which modules it contains, and that a change in any of them is a miss."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap

import pytest
import torch
from trace_harness import EAGER, agree, spec_of

import cgtool
from cgtool.compiler.pipeline import warm
from cgtool.errors import CacheMissError, GuardError, TraceError
from cgtool.guards.files import find_spec, installed_versions, source_digests
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout
from cgtool.trace.closure import closure_of, modules_by_file

pytestmark = pytest.mark.torch


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write modules into a folder on the import path; their imports are undone afterwards."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)

    def write(**files):
        for name, text in files.items():
            path = folder / (name.replace("__", "/") + ".py" if not name.startswith("__") else name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return folder

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def test_imports_are_followed_wherever_they_are(project):
    folder = project(
        root="""
            import top
            import pkg.sub.leaf as leaf
            from pkg import beside, NAME
            if False:
                import conditional
            try:
                import not_there
            except ImportError:
                pass
            def late():
                import importlib
                from lazily import thing
                importlib.import_module("by_name")
        """,
        top="import second",
        second="import os, sys, torch, json",
        pkg__beside="from . import other; from .sub import leaf; from ..too_far import x",
        pkg__other="",
        conditional="",
        lazily="thing = 1",
        by_name="",
        unrelated="",
    )
    (folder / "pkg/__init__.py").write_text("NAME = 1")
    (folder / "pkg/sub").mkdir()
    (folder / "pkg/sub/leaf.py").write_text("raise SystemExit")
    importlib.invalidate_caches()
    found = closure_of(["root"])
    there = {name for name, digest in found.digests.items() if digest is not None}
    assert there == {
        *("root", "top", "second", "pkg", "pkg.sub.leaf", "pkg.beside", "pkg.other"),
        *("conditional", "lazily", "by_name"),
    }
    assert {name for name, digest in found.digests.items() if digest is None} == {"not_there"}
    assert found.distributions == {}
    assert source_digests(found.digests) == found.digests
    assert not {"root", "pkg", "pkg.sub"} & set(sys.modules)  # nothing was imported


def test_installed_distributions_are_recorded_by_version_and_not_followed(project):
    project(root="import yaml\nfrom click import testing\nimport torch, cgtool, os")
    found = closure_of(["root"])
    assert set(found.digests) == {"root"}
    assert set(found.distributions) == {"pyyaml", "click"}
    assert installed_versions(found.distributions) == found.distributions


def test_a_package_installed_into_a_user_folder_is_a_distribution(project):
    folder = project(root="import shipped, own", shipped="import never_looked_at", own="")
    (folder / "Shipped-1.5.dist-info").mkdir()
    (folder / "Shipped-1.5.dist-info/RECORD").write_text("shipped.py,,\nshipped-1.5.dist-info/RECORD,,\n")
    (folder / "own-1.0.dist-info").mkdir()  # installed in place from the very folder
    (folder / "own-1.0.dist-info/RECORD").write_text("own-1.0.dist-info/RECORD,,\n")
    (folder / "own.egg-info").mkdir()  # what a checkout has
    found = closure_of(["root"])
    assert found.distributions == {"shipped": "1.5"}
    assert set(found.digests) == {"root", "own"}
    (folder / "Shipped-1.5.dist-info").rename(folder / "Shipped-1.6.dist-info")
    assert installed_versions(["shipped", "none"]) == {"shipped": "1.6", "none": None}


def test_an_editable_install_is_user_code(project, monkeypatch, tmp_path):
    """An editable install as in PEP 660: a finder maps the name to a folder outside the import path."""
    project(root="import inplace")
    package = tmp_path / "checkout" / "inplace"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import part")
    (package / "part.py").write_text("")

    class Finder:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name == "inplace":
                return importlib.util.spec_from_file_location(
                    name, package / "__init__.py", submodule_search_locations=[str(package)]
                )
            return None

    Finder.__module__ = "__editable___inplace_1_0_finder"
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert set(closure_of(["root"]).digests) == {"root", "inplace", "inplace.part"}


def test_a_module_is_found_without_importing_its_parents(project):
    folder = project(above__leaf="")
    (folder / "above/__init__.py").write_text("raise SystemExit")
    assert find_spec("above.leaf").origin == str(folder / "above/leaf.py")
    assert find_spec("above.nothing") is None
    assert source_digests(["above.leaf", "above.nothing", "sys"])["above.nothing"] is None


def test_a_module_that_is_imported_or_replaced_is_found_by_its_file(tmp_path, monkeypatch):
    modules = {}
    for name in ("one", "two"):
        file = tmp_path / f"{name}.py"
        file.write_text("")
        spec = importlib.util.spec_from_file_location("changing", file)
        modules[str(file)] = importlib.util.module_from_spec(spec)
    (one, first), (two, second) = modules.items()
    assert not {one, two} & modules_by_file().keys()
    monkeypatch.setitem(sys.modules, "changing", first)
    assert modules_by_file()[one] == "changing"
    monkeypatch.setitem(sys.modules, "changing", second)
    assert modules_by_file()[two] == "changing"
    assert one not in modules_by_file()


def test_many_files_give_the_same_digests_as_few(project):
    project(**{f"many{number}": f"NUMBER = {number}" for number in range(150)})
    names = [f"many{number}" for number in range(150)]
    together = source_digests(names)
    assert together == {name: source_digests([name])[name] for name in names}
    assert len(set(together.values())) == 150


# A model of several files, one of which changes.

FILES = {
    "helper": "import deeper\ndef scaled(x):\n    return x * 2\n",
    "deeper": "VALUE = 1\n",
    "bases": "class Base:\n    gain = 3\n",
    "model": """
        import torch
        import helper, bases
        def unused():
            import lazily
        class Model(torch.nn.Module, bases.Base):
            def forward(self, x):
                return helper.scaled(x)
    """,
    "lazily": "",
    "unrelated": "",
}


@pytest.fixture
def warmed(project, tmp_path):
    project(**FILES)
    module = importlib.import_module("model").Model().eval()
    with torch.no_grad():
        result = warm(spec_of(module, torch.rand(3)), config=EAGER, cache_dir=tmp_path / "cache")
    return module, tmp_path / "cache", result.hash


@pytest.mark.parametrize("name", ["helper", "deeper", "bases", "model", "lazily"])
def test_an_edit_of_any_file_in_the_closure_is_a_miss_and_no_compile(project, warmed, name):
    module, root, _ = warmed
    project(**{name: textwrap.dedent(FILES[name]) + "\n# an edit\n"})
    with torch.no_grad(), pytest.raises(CacheMissError, match=rf"sources\.{name} has changed"):
        cgtool.load(module, cache_dir=root)
    with torch.no_grad():
        again = warm(spec_of(module, torch.rand(3)), config=EAGER, cache_dir=root)
        assert (again.hit, again.compiled) == (False, 0)
        agree(cgtool.load(module, cache_dir=root), module, torch.rand(3))


def test_an_edit_of_another_file_is_a_hit(project, warmed):
    module, root, hash_ = warmed
    project(unrelated="VALUE = 2")
    with torch.no_grad():
        agree(cgtool.load(module, cache_dir=root), module, torch.rand(3))
    key = read_key(CacheLayout(root=root), hash_)
    assert {"helper", "deeper", "bases", "model", "lazily"} <= set(key.value("sources"))


# What a model reads of the environment.


def warm_reading(project, tmp_path, body, top=""):
    """Warm a model whose forward is `body`; return it and its cache."""
    text = f"import os, torch\nfrom os import getenv as given, environ\n{top}\n"
    text += "class Model(torch.nn.Module):\n    def forward(self, x):\n        " + body + "\n"
    project(reads=text)
    module = importlib.import_module("reads").Model().eval()
    with torch.no_grad():
        result = warm(spec_of(module, torch.rand(3)), config=EAGER, cache_dir=tmp_path / "cache")
    return module, tmp_path / "cache", result.hash


READS = [
    pytest.param('return x * float(os.environ.get("GAIN", "1"))', "", id="get"),
    pytest.param('return x * float(os.getenv("GAIN", "1"))', "", id="getenv"),
    pytest.param('return x * (2 if "GAIN" in environ else 1)', "", id="in"),
    pytest.param('return x * (float(environ["GAIN"]) if "GAIN" in os.environ else 1)', "", id="item"),
    pytest.param('return x * float(os.environ.get(NAME, "1"))', 'NAME = "GAIN"', id="a constant of the module"),
    pytest.param("return x * helper()", 'def helper():\n    return float(os.getenv("GAIN", "1"))', id="a function"),
    pytest.param("return x * VALUE", 'VALUE = float(os.environ.get("GAIN", "1"))', id="at import"),
]


@pytest.mark.parametrize(("body", "top"), READS)
def test_an_environment_variable_that_code_reads_is_a_factor(project, tmp_path, monkeypatch, body, top):
    monkeypatch.delenv("GAIN", raising=False)
    module, root, hash_ = warm_reading(project, tmp_path, body, top)
    assert read_key(CacheLayout(root=root), hash_).value("variables") == {"GAIN": None}
    with torch.no_grad():
        agree(cgtool.load(module, cache_dir=root), module, torch.rand(3))
        monkeypatch.setenv("UNRELATED", "1")
        agree(cgtool.load(module, cache_dir=root), module, torch.rand(3))
        monkeypatch.setenv("GAIN", "3")
        with pytest.raises(CacheMissError, match="the environment variable GAIN was unset and is"):
            cgtool.load(module, cache_dir=root)


def test_an_alias_of_getenv_is_refused_by_its_name(project, tmp_path):
    with pytest.raises(TraceError, match=r"kept is an alias of os\.environ or of a function that reads it"):
        warm_reading(project, tmp_path, 'return x * float(kept("GAIN") or 1)', "kept = given")


COMPUTED = [
    pytest.param('return x * float(os.environ.get("GA" + str(x.dim()), "1"))', id="computed"),
    pytest.param("return x * len(os.environ)", id="the whole"),
    pytest.param('return x * (2 if f"G{x.dim()}" in environ else 1)', id="in"),
    pytest.param('return x * float((lambda read: read("GAIN", "1"))(os.getenv))', id="handed on"),
    pytest.param('return x * float(getattr(os, "getenv")("GAIN", "1"))', id="by name"),
]


@pytest.mark.parametrize("body", COMPUTED)
def test_a_computed_variable_name_is_refused_with_its_line(project, tmp_path, body):
    with pytest.raises(TraceError, match=r"reads\.py:6 reads an environment variable whose name is not a constant"):
        warm_reading(project, tmp_path, body)


def test_untraced_code_may_read_the_whole_environment(project, tmp_path):
    top = 'def port(name):\n    return os.environ[name], os.environ["PORT"]\nALL = dict(os.environ)'
    _, root, hash_ = warm_reading(project, tmp_path, "return x + 1", top)
    assert read_key(CacheLayout(root=root), hash_).value("variables") == {}


def test_a_set_environment_variable_is_a_factor_and_not_a_guard(project, tmp_path, monkeypatch):
    monkeypatch.setenv("GAIN", "3")
    module, root, hash_ = warm_reading(project, tmp_path, 'return x * float(os.environ.get("GAIN", "1"))')
    assert read_key(CacheLayout(root=root), hash_).value("variables") == {"GAIN": "3"}
    with torch.no_grad():
        loaded = cgtool.load(module, cache_dir=root)
        agree(loaded, module, torch.rand(3))
        monkeypatch.delenv("GAIN")
        with pytest.raises(GuardError, match='the environment variable GAIN was "3" and is unset now'):
            loaded.recheck()
        with pytest.raises(CacheMissError, match='the environment variable GAIN was "3" and is unset now'):
            cgtool.load(module, cache_dir=root)


class Gained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = 2.0

    def forward(self, x):
        return x * self.gain


def test_each_call_checks_all_live_objects_if_configured(tmp_path):
    module = Gained().eval()
    x = torch.rand(3)
    with torch.no_grad():
        warm(spec_of(module, x), config=EAGER, cache_dir=tmp_path)
        loaded = cgtool.load(module, cache_dir=tmp_path, config=EAGER.replace(recheck="call"))
        agree(loaded, module, x)
        module.gain = 3.0
        with pytest.raises(GuardError, match=r"gain was 2\.0 when this was compiled and is 3\.0 now"):
            loaded(x)
        module.gain = 2.0
        agree(loaded, module, x)


def test_an_environment_variable_with_undecodable_bytes_is_a_factor(project, tmp_path, monkeypatch):
    monkeypatch.setenv("GAIN", os.fsdecode(b"\xff"))
    module, root, _ = warm_reading(project, tmp_path, 'return x * (2 if "GAIN" in os.environ else 1)')
    with torch.no_grad():
        agree(cgtool.load(module, cache_dir=root), module, torch.rand(3))
