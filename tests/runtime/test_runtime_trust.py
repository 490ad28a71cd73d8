"""Load under a trust policy: signed entries are used, others are refused before anything of them is used."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from bundle_maker import make_keys

pytest.importorskip("torch")

import torch
from small_model import EAGER, Model, spec

import cgtool
from cgtool import CompilationConfig
from cgtool.compiler.pipeline import warm
from cgtool.errors import CacheMissError, RefusedError
from cgtool.store.layout import CacheLayout
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle
from cgtool.toolkit.verify.load import _open_all
from cgtool.toolkit.why import why_spec

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_grad")]


@pytest.fixture
def model():
    return Model().eval()


def fill(root, level):
    return warm(spec(Model().eval()), config=EAGER.replace(level=level), cache_dir=root).hash


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A cache with two matching entries, the older of which was imported with a signature; and the keys."""
    folder = tmp_path_factory.mktemp("made")
    make_keys(folder / "keys", "ours", "theirs")
    with torch.no_grad():
        signed = fill(folder / "source", 3)
        bundle = folder / "signed.tar.zst"
        export(dest=bundle, cache_dir=folder / "source", sign=(folder / "keys/ours.pem",))
        import_bundle(source=bundle, cache_dir=folder / "cache", trust=True, any_machine=True)
        unsigned = fill(folder / "cache", 2)
    return folder, signed, unsigned


@pytest.fixture
def root(caches, tmp_path):
    shutil.copytree(caches[0] / "cache", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def ours(caches):
    return caches[0] / "keys/ours.pub"


def agrees(model, **options):
    loaded = cgtool.load(model, **options)
    x = torch.rand(5, 4)
    torch.testing.assert_close(loaded(x), model(x))


def refusal(model, **options):
    with pytest.raises(RefusedError) as refused:
        cgtool.load(model, **options)
    return refused.value.reason


def test_of_two_matching_entries_the_signed_one_is_used(model, root, ours, caches):
    plan = root / "torch_compile_cache" / caches[2] / "rank_0/backbone/plan.json"
    agrees(model, cache_dir=root, trusted_keys=[ours])
    plan.write_bytes(b"torn")  # the other entry is not used, and its damage is not reported
    agrees(model, cache_dir=root, trusted_keys=[ours])


def test_unsigned_entries_are_refused_and_not_parsed(model, root, ours, caches):
    shutil.rmtree(root / "torch_compile_cache" / caches[1] / "signatures")
    assert refusal(model, cache_dir=root, trusted_keys=[ours]) == "unsigned"
    agrees(model, cache_dir=root)


def test_the_configuration_and_the_environment_can_require_signatures(model, root, caches, monkeypatch):
    theirs = str(caches[0] / "keys/theirs.pub")
    config = CompilationConfig(adaptor="eager", level=3, trusted_keys=[theirs])
    assert refusal(model, cache_dir=root, config=config) == "untrusted_key"
    monkeypatch.setenv("CGTOOL_TRUSTED_KEYS", theirs)
    assert refusal(model, cache_dir=root) == "untrusted_key"
    assert refusal(model, cache_dir=root, config=CompilationConfig(adaptor="eager", level=3)) == "untrusted_key"
    agrees(model, cache_dir=root, trusted_keys=[caches[0] / "keys/ours.pub"])


def test_a_cache_writable_by_others_is_refused_unless_the_policy_allows_it(model, root, monkeypatch):
    root.chmod(root.stat().st_mode | stat.S_IWOTH)
    assert refusal(model, cache_dir=root) == "writable_by_others"
    agrees(model, cache_dir=root, config=CompilationConfig(adaptor="eager", level=3, allow_shared_cache=True))
    monkeypatch.setenv("CGTOOL_ALLOW_SHARED_CACHE", "1")
    agrees(model, cache_dir=root)


def test_under_a_policy_a_model_without_an_entry_is_still_a_miss(root, ours):
    with pytest.raises(CacheMissError):
        cgtool.load(Model(width=5).eval(), cache_dir=root, trusted_keys=[ours])


def test_a_compiled_entry_is_refused_once_others_can_write_to_it(model, tmp_path):
    compiled = cgtool.compile(
        model, example_args=(torch.rand(3, 4),), config=CompilationConfig(adaptor="eager"), cache_dir=tmp_path / "own"
    )
    torch.testing.assert_close(compiled(torch.ones(3, 4)), model(torch.ones(3, 4)))
    (tmp_path / "own/torch_compile_cache").chmod(0o777)
    assert refusal(model, cache_dir=tmp_path / "own") == "writable_by_others"


def test_a_symlinked_cache_is_read_through_its_resolved_path(model, root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    agrees(model, cache_dir=tmp_path / "link")
    root.chmod(0o777)
    with pytest.raises(RefusedError, match=f"^{root} is writable"):
        cgtool.load(model, cache_dir=tmp_path / "link")


def _loads(root):
    """As `verify --load` does in its child process."""
    layout = CacheLayout(root=root)
    found = [_open_all(layout, name, print) for name in layout.rank_names(layout.hashes()[0])]
    ((problem,),) = (opened.problems for opened in found)
    reason = "writable_by_others" if "is writable" in problem.sentence else "unsigned"
    raise RefusedError(problem.sentence, reason=reason)


VERBS = {
    "load": lambda model, root: cgtool.load(model, cache_dir=root),
    "compile": lambda model, root: cgtool.compile(
        model, example_args=(torch.rand(3, 4),), dynamic={"x": {0: "n"}}, config=EAGER, cache_dir=root
    ),
    "warm": lambda model, root: warm(spec(model), config=EAGER, cache_dir=root),
    "warm --check": lambda model, root: warm(spec(model), config=EAGER, cache_dir=root, check=True),
    "why": lambda model, root: why_spec(spec(model), config=EAGER, cache_dir=root),
    "verify --load": lambda _, root: _loads(root),
}


@pytest.fixture(scope="module")
def unsigned_cache(tmp_path_factory):
    root = tmp_path_factory.mktemp("unsigned") / "cache"
    with torch.no_grad():
        fill(root, 3)
    return root


@pytest.fixture
def unsigned(unsigned_cache, tmp_path):
    return Path(shutil.copytree(unsigned_cache, tmp_path / "own"))


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_checks_the_owner_before_it_interprets_anything(model, unsigned, verb):
    (folder,) = unsigned.glob("torch_compile_cache/*/rank_0")
    for path in (folder.parent / "key.json", folder / "backbone/manifest.json", folder / "backbone/plan.json"):
        path.write_bytes(b"not even JSON")
    folder.chmod(0o777)
    with pytest.raises(RefusedError, match=r"rank_0 is writable by everyone.*--cache-dir") as refused:
        VERBS[verb](model, unsigned)
    assert refused.value.reason == "writable_by_others"


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_checks_the_signature_before_it_interprets_anything(model, unsigned, ours, verb, monkeypatch):
    for path in unsigned.glob("torch_compile_cache/*/key.json"):
        path.write_bytes(b"not even JSON")
    monkeypatch.setenv("CGTOOL_TRUSTED_KEYS", str(ours))
    with pytest.raises(RefusedError, match=r"imported without a signature.*--cache-dir") as refused:
        VERBS[verb](model, unsigned)
    assert refused.value.reason == "unsigned"


def test_warm_does_not_add_to_a_refused_entry(model, unsigned):
    """With another rank, nothing is found, but the key leads to the same folder."""
    (entry,) = unsigned.glob("torch_compile_cache/" + "[0-9a-f]" * 64)
    entry.chmod(0o777)
    before = sorted(unsigned.rglob("*"))
    with pytest.raises(RefusedError, match="--cache-dir"):
        warm(spec(model), config=EAGER, cache_dir=unsigned, rank=1)
    assert [path for path in sorted(unsigned.rglob("*")) if path not in before and "state" not in path.parts] == []
