"""Load and prune: loaded entries stay, an entry removed during a load is a miss, and such misses are counted."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")

import torch
from small_model import EAGER, Model, spec

import cgtool
from cgtool.compiler.pipeline import warm
from cgtool.errors import CacheMissError
from cgtool.runtime import find as find_module
from cgtool.store import leases
from cgtool.store.layout import CacheLayout
from cgtool.store.pruned import all_pruned
from cgtool.toolkit.prune.plan import Rules
from cgtool.toolkit.prune.planner import make_plan

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_grad")]


@pytest.fixture
def model():
    return Model().eval()


@pytest.fixture
def let_go():
    """Return a function that releases this process's leases, as its exit would."""

    def end():
        for lease in leases._held.values():
            lease.release()
        leases._held.clear()

    yield end
    end()


def fill(model, root):
    return warm(spec(model), config=EAGER, cache_dir=root).hash


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root = tmp_path_factory.mktemp("warmed") / "cache"
    with torch.no_grad():
        return root, fill(Model().eval(), root)


@pytest.fixture
def hash_(warmed, cache_root, let_go):
    """The hash of the only entry in `cache_root`, which no process holds."""
    shutil.copytree(warmed[0], cache_root, dirs_exist_ok=True)
    let_go()
    return warmed[1]


def prune(root):
    return make_plan(CacheLayout(root=root), Rules(keep_last=0)).execute()


def test_an_entry_that_prune_is_removing_is_a_miss(model, cache_root, hash_):
    with leases.claimed(CacheLayout(root=cache_root), hash_) as mine:
        assert mine
        with pytest.raises(CacheMissError):
            cgtool.load(model, cache_dir=cache_root)
    cgtool.load(model, cache_dir=cache_root)


def test_a_loaded_entry_stays_until_the_process_ends(model, cache_root, hash_, let_go):
    loaded = cgtool.load(model, cache_dir=cache_root)
    plan = make_plan(CacheLayout(root=cache_root), Rules(keep_last=0))
    assert (plan.entries, [kept.why for kept in plan.kept]) == ((), ["in_use"])
    let_go()
    assert prune(cache_root).removed == (hash_,)
    x = torch.rand(2, 4)
    torch.testing.assert_close(loaded(x), model(x))  # the loaded model still works


def test_an_entry_removed_before_its_lease_is_taken_is_a_miss(model, cache_root, hash_, monkeypatch):
    keep = find_module.keep

    def late(layout, name):
        prune(cache_root)
        return keep(layout, name)

    monkeypatch.setattr(find_module, "keep", late)
    with pytest.raises(CacheMissError) as caught:
        cgtool.load(model, cache_dir=cache_root)
    assert "was pruned on" in caught.value.reasons[0]


def test_a_miss_caused_by_prune_is_counted_and_reported(model, cache_root, hash_):
    prune(cache_root)
    for _ in range(2):
        with pytest.raises(CacheMissError) as caught:
            cgtool.load(model, cache_dir=cache_root)
        (reason,) = caught.value.reasons
        assert reason.startswith(f"entry {hash_[:10]} was pruned on ")
        assert reason.endswith(": it is not among the last 0 of its model")
    (record,) = all_pruned(CacheLayout(root=cache_root))
    assert record.misses == 2
    fill(model, cache_root)
    cgtool.load(model, cache_dir=cache_root)
    assert all_pruned(CacheLayout(root=cache_root)) == ()
