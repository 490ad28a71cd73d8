"""Finding an entry: lookup, the reasons for a miss, and repairs of damaged entries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from cache_samples import resealed

pytest.importorskip("torch")

import torch
from small_model import Model, spec
from torch import nn

import cgtool
from cgtool import CompilationConfig, adaptor_registry, host
from cgtool.compiler import traced as traced_module
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.compiler.pipeline import warm
from cgtool.errors import ArtifactError, CacheCorruptError, CacheMissError, CacheSchemaError
from cgtool.plan.grammar import canonical_json
from cgtool.runtime import find
from cgtool.runtime.factors import FACTORS, state_of
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import FACTOR_ORDER, read_key
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.records import Factor, Key
from cgtool.trace.states import capture

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_grad")]


class Other(Model):
    pass


@pytest.fixture
def model():
    return Model().eval()


def run(model, root, rank=None, prefix="backbone", check=False, **fields):
    config = CompilationConfig(adaptor="eager", **fields)
    return warm(spec(model, prefix=prefix), config=config, cache_dir=root, rank=rank, check=check)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A cache with one entry."""
    root = tmp_path_factory.mktemp("warmed")
    with torch.no_grad():
        result = run(Model().eval(), root)
    return root, result.hash


@pytest.fixture(scope="module")
def level_2(tmp_path_factory):
    """A cache with an entry for level 2."""
    root = tmp_path_factory.mktemp("level_2")
    with torch.no_grad():
        result = run(Model().eval(), root, level=2)
    return root, result.hash


def add_entry(cache, root, hash_):
    """Copy an entry to another cache."""
    shutil.copytree(root / "torch_compile_cache" / hash_, cache / "torch_compile_cache" / hash_)


@pytest.fixture
def cache(warmed, tmp_path):
    """A copy of the warmed cache, to be changed."""
    root = tmp_path / "cache"
    shutil.copytree(warmed[0], root)
    return root


def folder(root, hash_=None):
    (path,) = root.glob(f"torch_compile_cache/{hash_ or '*'}/rank_0/backbone")
    return path


def agree(model, **options):
    loaded = cgtool.load(model, **options)
    for n in (1, 2, 5):
        x = torch.rand(n, 4)
        torch.testing.assert_close(loaded(x), model(x))


def repaired(model, root):
    """Warm a damaged cache, and check that it is whole afterwards."""
    result = run(model, root)
    assert not result.hit
    agree(model, cache_dir=root)
    assert run(model, root).hit
    return result


def test_a_removed_lookup_folder_is_rebuilt(model, cache):
    lookup = cache / "torch_compile_cache" / "lookup"
    before = sorted(p.relative_to(lookup) for p in lookup.rglob("*"))
    shutil.rmtree(lookup)
    agree(model, cache_dir=cache)
    assert sorted(p.relative_to(lookup) for p in lookup.rglob("*")) == before
    shutil.rmtree(lookup)
    assert run(model, cache).hit


def test_junk_in_the_lookup_folder_is_ignored(model, cache):
    for path in (cache / "torch_compile_cache" / "lookup").iterdir():
        (path / ("0" * 64)).touch()
        (path / "junk").touch()
        (path / "folder").mkdir()
    agree(model, cache_dir=cache)


def test_a_miss_in_an_empty_or_missing_cache_says_what_to_do(model, tmp_path):
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CacheMissError, match=r"has no entry for this model: nothing .* Warm it first") as caught:
            cgtool.load(model, cache_dir=root)
        assert caught.value.reasons == ("nothing has been warmed for this model",)
    assert list(tmp_path.iterdir()) == []


def test_a_miss_for_one_rank_lists_the_ranks_that_were_warmed(model, cache):
    with pytest.raises(
        CacheMissError, match=r"this model: it was warmed for rank 0, not for rank 2\. .* load with rank=0\.$"
    ):
        cgtool.load(model, cache_dir=cache, rank=2)


def test_another_model_misses(cache):
    with pytest.raises(CacheMissError, match="has no entry for this model"):
        cgtool.load(Other().eval(), cache_dir=cache)


def test_a_class_imported_under_another_name_is_reported(model, cache, monkeypatch):
    monkeypatch.setattr(type(model), "__module__", "elsewhere")
    with pytest.raises(CacheMissError, match=r"class was \"\S+\" and is \"elsewhere:\w+\" now(.|\n)*MODULE:FACTORY"):
        cgtool.load(model, cache_dir=cache)


def test_a_miss_for_a_model_of_another_size_names_the_difference(cache):
    with pytest.raises(CacheMissError, match=r"layer\.weight") as caught:
        cgtool.load(Model(8).eval(), cache_dir=cache)
    assert any("[4, 4]" in reason and "[8, 8]" in reason for reason in caught.value.reasons)


def newer(path):
    name = json.loads(path.read_bytes())["record"].partition("-")[0]
    path.write_bytes(resealed(path.read_bytes(), {"record": f"{name}-99"}))


@pytest.mark.parametrize("name", ["manifest.json", "../../key.json"])
def test_an_entry_of_a_newer_schema_is_skipped_if_another_matches(model, cache, level_2, name):
    newer((folder(cache) / name).resolve())
    with pytest.raises(CacheSchemaError, match=r"schema 99 .* this cgtool reads schema \d+\. Update cgtool"):
        cgtool.load(model, cache_dir=cache)
    add_entry(cache, *level_2)
    agree(model, cache_dir=cache)
    assert run(model, cache, level=2).hash == level_2[1]


def changed_plan(root, hash_, change):
    """Publish an entry again with a modified plan, as another version of cgtool might write it."""
    layout = CacheLayout(root=root)
    entry = read_entry(layout, RankName(hash=hash_, rank=0, prefix="backbone"))
    data = json.loads(entry.files["plan.json"])
    change(data)
    writer = EntryWriter(layout, read_key(layout, hash_), rank=0, prefix="backbone")
    writer.publish(entry.manifest, {"plan.json": canonical_json(data)})


def test_a_plan_of_a_newer_schema_is_reported(model, cache, warmed):
    changed_plan(cache, warmed[1], lambda data: data.update(schema=99))
    with pytest.raises(CacheSchemaError, match=r"plan.* schema 99"):
        cgtool.load(model, cache_dir=cache)


@pytest.mark.parametrize("change", [lambda d: d.pop("variants"), lambda d: d.update(variants=5), lambda d: d.clear()])
def test_an_invalid_plan_is_a_reason_for_a_miss(model, cache, warmed, change):
    changed_plan(cache, warmed[1], change)
    with pytest.raises((CacheMissError, CacheSchemaError), match="plan"):
        cgtool.load(model, cache_dir=cache)


def test_a_guard_of_an_unknown_kind_is_a_reason_for_a_miss(model, cache, warmed):
    def change(data):
        data["kinds"].append("nonsense")
        data["guards"].append([len(data["kinds"]) - 1, 1, [data["texts"]["ends"].index("self")]])
        data["variants"][0]["model_guards"].append(len(data["guards"]) - 1)

    changed_plan(cache, warmed[1], change)
    with pytest.raises(CacheMissError, match="unknown kind 'nonsense'"):
        cgtool.load(model, cache_dir=cache)


TORN = ["plan.json", "manifest.json", "../../key.json"]


@pytest.mark.parametrize("name", TORN)
def test_a_torn_record_is_a_miss_and_the_next_warm_replaces_it(model, cache, name):
    path = (folder(cache) / name).resolve()
    path.chmod(0o644)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) - 3):
        path.write_bytes(whole[:length])
        with pytest.raises(CacheMissError, match=rf"{path.name} is corrupt: .*Warm the model again"):
            cgtool.load(model, cache_dir=cache)
        with pytest.raises(CacheMissError, match=f"{path.name} is corrupt"):
            run(model, cache, check=True)
    repaired(model, cache)


@pytest.mark.parametrize("name", TORN)
def test_a_missing_record_is_a_miss_and_the_next_warm_writes_it(model, cache, name):
    (folder(cache) / name).unlink()
    with pytest.raises(CacheMissError):
        cgtool.load(model, cache_dir=cache)
    repaired(model, cache)


def artifacts(root):
    return sorted(root.glob("torch_compile_cache/*/artifacts/*"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_flipped_bit_is_detected_before_anything_is_opened(model, cache, monkeypatch):
    first = artifacts(cache)[0]
    for path in artifacts(cache):
        flip(path)
    opened = []
    monkeypatch.setattr("cgtool.runtime.find.checked_function", lambda *args, **_: opened.append(args))
    with pytest.raises(CacheCorruptError, match=r"artifacts/[0-9a-f]{64}\.\w+ is corrupt") as caught:
        cgtool.load(model, cache_dir=cache)
    assert Path(caught.value.path).parent == first.parent
    assert opened == []


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("units_too", [False, True], ids=["the artifact", "its unit too"])
def test_warm_repairs_a_damaged_artifact(model, cache, damage, units_too):
    path = artifacts(cache)[0]  # in a copied cache, it is not a hard link to its unit
    if units_too:
        for unit in cache.glob(f"torch_compile_cache/units/*/*/{path.name}"):
            damage(unit)
    damage(path)
    with pytest.raises(CacheCorruptError):
        cgtool.load(model, cache_dir=cache)
    with pytest.raises(CacheMissError, match="damaged"):
        run(model, cache, check=True)
    result = repaired(model, cache)
    assert result.trace_secs == 0
    assert result.compiled == int(units_too)


def test_compile_repairs_a_damaged_artifact(model, cache):
    flip(artifacts(cache)[0])
    config = CompilationConfig(adaptor="eager")
    dynamic = {"x": {0: "n"}}
    x = torch.rand(3, 4)
    loaded = cgtool.compile(model, example_args=(x,), dynamic=dynamic, config=config, cache_dir=cache)
    torch.testing.assert_close(loaded(x), model(x))


def test_the_entry_that_was_published_last_is_preferred(model, cache, warmed):
    shutil.rmtree(cache / "torch_compile_cache/state/leases", ignore_errors=True)
    first, second = warmed[1], run(model, cache, level=2).hash
    assert first != second
    agree(model, cache_dir=cache)
    assert used(cache) == [second]
    run(model, cache, compile_sizes=[8])
    agree(model, cache_dir=cache)
    assert used(cache) == sorted([first, second])


def used(root):
    """The entries that were loaded."""
    return sorted({path.name[:64] for path in (root / "torch_compile_cache/state/leases").glob("*-rank_0-backbone")})


@contextlib.contextmanager
def watched(root):
    """Collect the paths below a folder that are opened or listed while the block runs."""
    seen, active = [], [True]

    def hook(event, arguments):
        if active and event in {"open", "os.listdir", "os.scandir"}:
            seen.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else "")

    sys.addaudithook(hook)  # a hook cannot be removed; it ignores events after the block
    try:
        yield seen
    finally:
        active.clear()
    seen[:] = [os.path.relpath(path, root) for path in seen if path.startswith(str(root))]


def test_a_hit_does_not_read_other_entries(model, cache, warmed):
    base = cache / "torch_compile_cache"
    agree(model, cache_dir=cache)  # creates a lease and a stamp
    with watched(base) as alone:
        agree(model, cache_dir=cache)
    for number in range(30):
        shutil.copytree(base / warmed[1], base / f"{number:064x}")
    with watched(base) as among_others:
        agree(model, cache_dir=cache)
    assert sorted(among_others) == sorted(alone)
    (digest,) = {path.name for path in (base / "lookup").iterdir()} - {"indexed"}
    parts = {path.parts[:2] for path in map(Path, alone) if path.parts[0] != "state"}
    assert parts == {("lookup", digest), *((warmed[1], name) for name in ("key.json", "artifacts", "rank_0"))}


@pytest.mark.parametrize(("changed", "value"), [("version", "9.9"), ("source", "cd" * 32)], ids=["version", "source"])
def test_another_cgtool_version_traces_again_but_reuses_what_was_compiled(model, cache, monkeypatch, changed, value):
    build = {**host.cgtool_build(), changed: value}
    monkeypatch.setattr(host, "cgtool_build", lambda: build)
    with pytest.raises(CacheMissError, match=rf"cgtool\.{changed} "):
        cgtool.load(model, cache_dir=cache)
    with pytest.raises(CacheMissError, match=r"cgtool\."):
        run(model, cache, check=True)
    again = run(model, cache)
    assert (again.hit, again.compiled) == (False, 0)
    assert again.trace_secs > 0
    agree(model, cache_dir=cache)


def test_the_build_of_a_checkout_changes_with_its_source():
    build = host.cgtool_build()
    assert build["version"] == cgtool.__version__
    assert (build["source"] is None) == (Path(cgtool.__file__).parents[1].name in {"site-packages", "dist-packages"})


def rekeyed(root, hash_, change):
    """Store an entry under the key that `change` makes from its key."""
    layout = CacheLayout(root=root)
    name = RankName(hash=hash_, rank=0, prefix="backbone")
    entry = read_entry(layout, name)
    key = Key.of(change([Factor(name=name, value=value) for name, value in read_key(layout, hash_).factors.items()]))
    to = layout.entry_dir(key.hash)
    shutil.copytree(layout.entry_dir(hash_), to)
    for path in (to / "key.json", layout.manifest_file(RankName(hash=key.hash, rank=0, prefix="backbone"))):
        path.unlink()
    writer = EntryWriter(layout, key, rank=0, prefix="backbone")
    writer.publish(msgspec.structs.replace(entry.manifest, hash=key.hash), entry.files)
    shutil.rmtree(layout.entry_dir(hash_))


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_missing_from_a_key_is_a_miss(model, cache, warmed, name):
    rekeyed(cache, warmed[1], lambda factors: [factor for factor in factors if factor.name != name])
    with pytest.raises(CacheMissError, match=f"the factor {name} is missing from the entry.s key"):
        cgtool.load(model, cache_dir=cache)


def test_an_unknown_factor_in_a_key_is_a_miss(model, cache, warmed):
    rekeyed(cache, warmed[1], lambda factors: [*factors, Factor(name="weather", value="rain")])
    with pytest.raises(CacheMissError, match="unknown factor weather"):
        cgtool.load(model, cache_dir=cache)


def test_reasons_are_ordered_by_factor():
    assert tuple(FACTORS) == FACTOR_ORDER


def test_a_config_selects_its_own_entry_and_no_config_accepts_any(model, cache, level_2):
    agree(model, cache_dir=cache)
    agree(model, cache_dir=cache, config=CompilationConfig(adaptor="eager"))
    agree(model, cache_dir=cache, config=CompilationConfig(adaptor="eager", compile_sizes=[8]))  # not a key field
    with pytest.raises(CacheMissError, match="level"):
        cgtool.load(model, cache_dir=cache, config=CompilationConfig(adaptor="eager", level=2))
    with pytest.raises(CacheMissError, match="adaptor"):
        cgtool.load(model, cache_dir=cache, config=CompilationConfig())
    add_entry(cache, *level_2)
    agree(model, cache_dir=cache, config=CompilationConfig(adaptor="eager", level=2))
    agree(model, cache_dir=cache, config=CompilationConfig(adaptor="eager"))


def test_ranks_and_prefixes_have_their_own_folders_and_share_artifacts(model, cache, warmed):
    before = artifacts(cache)
    with pytest.raises(CacheMissError, match=r"rank 1, prefix 'backbone'"):
        cgtool.load(model, cache_dir=cache, rank=1)
    with pytest.raises(CacheMissError, match=r"rank 0, prefix 'head'"):
        cgtool.load(model, cache_dir=cache, prefix="head")
    second, third = run(model, cache, rank=1), run(model, cache, prefix="head")
    assert (second.compiled, third.compiled) == (0, 0)
    assert warmed[1] == second.hash == third.hash
    assert (second.hit, third.hit) == (False, False)
    assert artifacts(cache) == before
    agree(model, cache_dir=cache, rank=1)
    agree(model, cache_dir=cache, prefix="head")
    assert run(model, cache, rank=1).hit


class Naming(EagerAdaptor):
    """A stand-in for Inductor, whose code hard-codes the device that it was compiled on."""

    name = "inductor_standalone"


def test_code_compiled_for_the_first_device_is_refused_on_another(model, tmp_path, monkeypatch):
    monkeypatch.setitem(adaptor_registry._registered, Naming.name, Naming)
    warm(spec(model), config=CompilationConfig(adaptor=Naming.name, jobs=0), cache_dir=tmp_path)
    agree(model, cache_dir=tmp_path)
    monkeypatch.setattr(find, "first_index", lambda *_: 1)
    with pytest.raises(
        ArtifactError, match=r"inductor_standalone runs on the first visible device.*CUDA_VISIBLE_DEVICES=1"
    ):
        cgtool.load(model, cache_dir=tmp_path)


def test_the_default_rank_comes_from_the_environment(model, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    run(model, tmp_path)
    agree(model, cache_dir=tmp_path)
    agree(model, cache_dir=tmp_path, rank=3)
    monkeypatch.delenv("RANK")
    with pytest.raises(CacheMissError, match="rank 0"):
        cgtool.load(model, cache_dir=tmp_path)


def test_a_copy_of_the_entry_alone_is_found(model, cache, warmed, tmp_path):
    there = tmp_path / "shipped" / "torch_compile_cache"
    there.mkdir(parents=True)
    shutil.copytree(cache / "torch_compile_cache" / warmed[1], there / warmed[1])
    agree(model, cache_dir=tmp_path / "shipped")
    result = run(model, tmp_path / "shipped")
    assert (result.hit, result.compiled) == (True, 0)


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


class Choosing(nn.Module):
    """Takes another branch for a few tokens, so that one trace does not cover all sizes."""

    def forward(self, x):
        return x + 1 if x.shape[0] > 8 else x * 3


@pytest.mark.parametrize(
    ("kind", "dynamic"), [(Doubling, None), (Choosing, {"x": {0: "n"}})], ids=["static", "dynamic"]
)
def test_compile_finds_the_entry_that_accepts_the_call(tmp_path, monkeypatch, kind, dynamic):
    traced = []
    monkeypatch.setattr(traced_module, "capture", lambda *args, **more: traced.append(args) or capture(*args, **more))
    module = kind().eval()
    counts = []
    for size in (4, 12, 4, 12, 4):
        x = torch.rand(size, 8)
        config = CompilationConfig(adaptor="eager")
        loaded = cgtool.compile(module, example_args=(x,), dynamic=dynamic, config=config, cache_dir=tmp_path)
        torch.testing.assert_close(loaded(x), module(x))
        counts.append(len(traced))
    assert 0 < counts[0] < counts[1]
    assert counts[1:] == [counts[1]] * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_the_state_includes_buffers_without_strides():
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.eye(3).to_sparse_csr())
    assert state_of(module)["tensors"]["table"] == "float32[3, 3] cpu torch.sparse_csr"
