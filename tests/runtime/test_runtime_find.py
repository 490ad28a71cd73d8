"""Finding an entry: what leads to it, what turns it away and in which words, and how a damaged one is mended."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import cgtool  # noqa: E402
from cgtool import CompilationConfig, ExampleCall, ModelSpec  # noqa: E402
from cgtool.build.pipeline import warm  # noqa: E402
from cgtool.cache.entry import EntryWriter, read_entry  # noqa: E402
from cgtool.cache.files import sealed_json  # noqa: E402
from cgtool.cache.key import read_key  # noqa: E402
from cgtool.cache.layout import CacheLayout, RankName  # noqa: E402
from cgtool.digests import canonical_json  # noqa: E402
from cgtool.errors import CacheCorruptError, CacheMissError, CacheSchemaError  # noqa: E402

pytestmark = pytest.mark.torch


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Other(Model):
    pass


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return Model().eval()


def run(model, root, rank=None, prefix="backbone", check=False, **fields):
    call = ExampleCall(args=(torch.rand(3, 4),))
    spec = ModelSpec(module=model, calls=[call], dynamic={"x": {0: "n"}}, prefix=prefix)
    return warm(spec, config=CompilationConfig(adaptor="eager", **fields), cache_dir=root, rank=rank, check=check)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A cache with one entry."""
    root = tmp_path_factory.mktemp("warmed")
    with torch.no_grad():
        result = run(Model().eval(), root)
    return root, result.hash


@pytest.fixture
def cache(warmed, tmp_path):
    """A copy of it, to be damaged."""
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


def mended(model, root):
    """Warm a damaged cache, and hold it to be whole afterwards."""
    result = run(model, root)
    assert not result.hit
    agree(model, cache_dir=root)
    assert run(model, root).hit
    return result


def test_a_lookup_that_was_removed_is_made_again(model, cache):
    lookup = cache / "torch_compile_cache" / "lookup"
    before = sorted(p.relative_to(lookup) for p in lookup.rglob("*"))
    shutil.rmtree(lookup)
    agree(model, cache_dir=cache)
    assert sorted(p.relative_to(lookup) for p in lookup.rglob("*")) == before
    shutil.rmtree(lookup)
    assert run(model, cache).hit


def test_junk_in_the_lookup_leads_nowhere(model, cache):
    for path in (cache / "torch_compile_cache" / "lookup").iterdir():
        (path / ("0" * 64)).touch()
        (path / "junk").touch()
        (path / "folder").mkdir()
    agree(model, cache_dir=cache)


def test_an_empty_or_missing_cache_says_what_to_do(model, tmp_path):
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CacheMissError, match=r"nothing for this model in .* Warm it first") as caught:
            cgtool.load(model, cache_dir=root)
        assert caught.value.reasons == ("nothing has been warmed for this model",)
    assert list(tmp_path.iterdir()) == []


def test_another_model_misses(cache):
    with pytest.raises(CacheMissError, match="nothing for this model"):
        cgtool.load(Other().eval(), cache_dir=cache)


def test_a_model_of_another_size_is_told_what_differs(cache):
    with pytest.raises(CacheMissError, match=r"layer\.weight") as caught:
        cgtool.load(Model(8).eval(), cache_dir=cache)
    assert any("[4, 4]" in reason and "[8, 8]" in reason for reason in caught.value.reasons)


def newer(path):
    record = json.loads(path.read_bytes())
    record = {name: value for name, value in record.items() if name not in {"schema", "cgtool", "digest"}}
    path.write_bytes(sealed_json(record, schema=99))


@pytest.mark.parametrize("name", ["manifest.json", "../../key.json"])
def test_an_entry_of_a_newer_schema_is_passed_by_for_one_that_is_known(model, cache, name):
    newer((folder(cache) / name).resolve())
    with pytest.raises(CacheSchemaError, match=r"schema 99 .* this cgtool reads schema \d+\. Update cgtool"):
        cgtool.load(model, cache_dir=cache)
    second = run_level_2_elsewhere(model, cache)
    agree(model, cache_dir=cache)
    assert run(model, cache, level=2).hash == second.hash


def run_level_2_elsewhere(model, cache):
    """Warm another entry and put it beside."""
    elsewhere = cache.parent / "elsewhere"
    result = run(model, elsewhere, level=2)
    shutil.copytree(elsewhere / "torch_compile_cache" / result.hash, cache / "torch_compile_cache" / result.hash)
    return result


def changed_plan(root, hash_, change):
    """Publish an entry again with another plan, as another version of cgtool might have written it."""
    layout = CacheLayout(root=root)
    entry = read_entry(layout, RankName(hash=hash_, rank=0, prefix="backbone"))
    data = json.loads(entry.files["plan.json"])
    change(data)
    writer = EntryWriter(layout, read_key(layout, hash_), rank=0, prefix="backbone")
    writer.publish(entry.manifest, {"plan.json": canonical_json(data)})


def test_a_plan_of_a_newer_schema_is_told(model, cache, warmed):
    changed_plan(cache, warmed[1], lambda data: data.update(schema=99))
    with pytest.raises(CacheSchemaError, match=r"plan.* schema 99"):
        cgtool.load(model, cache_dir=cache)


@pytest.mark.parametrize("change", [lambda d: d.pop("variants"), lambda d: d.update(variants=5), lambda d: d.clear()])
def test_a_plan_that_is_none_is_a_reason_and_no_crash(model, cache, warmed, change):
    changed_plan(cache, warmed[1], change)
    with pytest.raises((CacheMissError, CacheSchemaError), match="plan"):
        cgtool.load(model, cache_dir=cache)


def test_a_guard_of_an_unknown_kind_is_a_reason(model, cache, warmed):
    def change(data):
        data["guards"].append(["nonsense", 1, [data["texts"]["ends"].index("self")]])
        data["variants"][0]["model_guards"].append(len(data["guards"]) - 1)

    changed_plan(cache, warmed[1], change)
    with pytest.raises(CacheMissError, match="unknown kind 'nonsense'"):
        cgtool.load(model, cache_dir=cache)


TORN = ["plan.json", "manifest.json", "../../key.json"]


@pytest.mark.parametrize("name", TORN)
@pytest.mark.parametrize("length", [0, 10, -3])
def test_a_torn_record_is_a_miss_in_a_sentence_and_the_next_warm_mends_it(model, cache, name, length):
    path = (folder(cache) / name).resolve()
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CacheMissError, match=rf"{path.name} is corrupt: .*Warm the model again"):
        cgtool.load(model, cache_dir=cache)
    with pytest.raises(CacheMissError, match=f"{path.name} is corrupt"):
        run(model, cache, check=True)
    mended(model, cache)


@pytest.mark.parametrize("name", TORN)
def test_a_missing_record_is_a_miss_and_the_next_warm_mends_it(model, cache, name):
    (folder(cache) / name).unlink()
    with pytest.raises(CacheMissError):
        cgtool.load(model, cache_dir=cache)
    mended(model, cache)


def artifacts(root):
    return sorted(root.glob("torch_compile_cache/*/artifacts/*"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_flipped_bit_is_noticed_before_anything_is_opened(model, cache, monkeypatch):
    first = artifacts(cache)[0]
    for path in artifacts(cache):
        flip(path)
    opened = []
    monkeypatch.setattr("cgtool.runtime.opening.piece_function", lambda *args, **_: opened.append(args))
    with pytest.raises(CacheCorruptError, match=r"artifacts/[0-9a-f]{64}\.\w+ is corrupt") as caught:
        cgtool.load(model, cache_dir=cache)
    assert Path(caught.value.path).parent == first.parent
    assert opened == []


@pytest.mark.parametrize("harm", [flip, Path.unlink])
@pytest.mark.parametrize("units_too", [False, True], ids=["the artifact", "its unit too"])
def test_a_damaged_artifact_is_mended_by_warm(model, cache, harm, units_too):
    path = artifacts(cache)[0]  # in a copied cache it is no hard link to its unit
    if units_too:
        for unit in cache.glob(f"torch_compile_cache/units/*/*/{path.name}"):
            harm(unit)
    harm(path)
    with pytest.raises(CacheCorruptError):
        cgtool.load(model, cache_dir=cache)
    with pytest.raises(CacheMissError, match="damaged"):
        run(model, cache, check=True)
    result = mended(model, cache)
    assert result.trace_secs == 0
    assert result.compiled == int(units_too)


def test_compile_mends_a_damaged_artifact(model, cache):
    flip(artifacts(cache)[0])
    config = CompilationConfig(adaptor="eager")
    dynamic = {"x": {0: "n"}}
    x = torch.rand(3, 4)
    loaded = cgtool.compile(model, example_args=(x,), dynamic=dynamic, config=config, cache_dir=cache)
    torch.testing.assert_close(loaded(x), model(x))


def test_of_several_entries_the_newest_is_taken_and_the_others_are_named(model, tmp_path, caplog):
    first = run(model, tmp_path)
    second = run(model, tmp_path, level=2)
    with caplog.at_level(logging.INFO, logger="cgtool"):
        agree(model, cache_dir=tmp_path)
    (line,) = [r.getMessage() for r in caplog.records if "entries serve this model" in r.getMessage()]
    assert line.startswith(f"2 entries serve this model; the newest, {second.hash[:10]}")
    assert first.hash[:10] in line
    assert first.hash != second.hash


def test_a_config_asks_for_its_own_entry_and_none_takes_any(model, tmp_path):
    run(model, tmp_path)
    agree(model, cache_dir=tmp_path)
    agree(model, cache_dir=tmp_path, config=CompilationConfig(adaptor="eager"))
    agree(model, cache_dir=tmp_path, config=CompilationConfig(adaptor="eager", compile_sizes=[8]))  # no key field
    with pytest.raises(CacheMissError, match="level"):
        cgtool.load(model, cache_dir=tmp_path, config=CompilationConfig(adaptor="eager", level=2))
    with pytest.raises(CacheMissError, match="adaptor"):
        cgtool.load(model, cache_dir=tmp_path, config=CompilationConfig())
    run(model, tmp_path, level=2)
    agree(model, cache_dir=tmp_path, config=CompilationConfig(adaptor="eager", level=2))
    agree(model, cache_dir=tmp_path, config=CompilationConfig(adaptor="eager"))


def test_ranks_and_prefixes_are_apart_and_share_what_was_compiled(model, tmp_path):
    first = run(model, tmp_path)
    with pytest.raises(CacheMissError, match=r"rank 1, prefix 'backbone'"):
        cgtool.load(model, cache_dir=tmp_path, rank=1)
    with pytest.raises(CacheMissError, match=r"rank 0, prefix 'head'"):
        cgtool.load(model, cache_dir=tmp_path, prefix="head")
    second, third = run(model, tmp_path, rank=1), run(model, tmp_path, prefix="head")
    assert first.compiled > 0
    assert (second.compiled, third.compiled) == (0, 0)
    assert first.hash == second.hash == third.hash
    assert (second.hit, third.hit) == (False, False)
    assert len(artifacts(tmp_path)) == first.compiled
    agree(model, cache_dir=tmp_path, rank=1)
    agree(model, cache_dir=tmp_path, prefix="head")
    assert run(model, tmp_path, rank=1).hit


def test_the_rank_of_the_environment_is_the_default(model, tmp_path, monkeypatch):
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
