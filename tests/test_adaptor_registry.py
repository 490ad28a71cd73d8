"""Third-party adaptors: their names, and errors for unusable ones."""

from __future__ import annotations

import sys

import pytest

from cgtool import CompilationConfig, adaptor_registry, register_adaptor
from cgtool.adaptor_registry import ADAPTORS, adaptor_names, is_adaptor, is_kind
from cgtool.errors import ConfigError
from cgtool.plan.pieces import KINDS, kind_of


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path):
    """Create the metadata of a distribution, and reset the registry."""
    monkeypatch.setattr(adaptor_registry, "_registered", {})
    adaptor_registry._installed.cache_clear()

    def install(name, *points):
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("\n".join([f"[{adaptor_registry.GROUP}]", *points]))

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield install
    adaptor_registry._installed.cache_clear()


def test_a_registered_adaptor_works_in_configurations_and_bundles():
    @register_adaptor("toy")
    class Toy:
        pass

    assert adaptor_names() == (*ADAPTORS, "toy")
    assert CompilationConfig(adaptor="toy").adaptor == "toy"
    assert kind_of("toy") == "toy"
    assert is_kind("toy")
    assert adaptor_registry.adaptor_class("toy") is Toy
    with pytest.raises(ConfigError, match=r"adaptors are .*eager, toy; the nearest is toy"):
        CompilationConfig(adaptor="toyy")


def test_an_installed_adaptor_is_known_before_it_is_imported(installed):
    installed("toys", "toy = no_such_module:Toy")
    assert CompilationConfig(adaptor="toy").adaptor == "toy"
    with pytest.raises(ConfigError, match="'toy' cannot be imported from no_such_module:Toy: ModuleNotFoundError"):
        adaptor_registry.adaptor_class("toy")


def test_two_distributions_with_the_same_name_are_an_error(installed):
    installed("toys", "toy = one:Toy")
    installed("more", "toy = two:Toy")
    with pytest.raises(ConfigError, match="Two distributions provide an adaptor 'toy'"):
        is_adaptor("toy")


@pytest.mark.parametrize("name", ["", "Toy", "a/b", "../x", "1st", "a" * 41, "a.b", "eager", "pt2", "json", None])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(ConfigError, match="is not a valid name"):
        register_adaptor(name)


def test_a_taken_name_is_refused():
    register_adaptor("toy")(type("Toy", (), {}))
    register_adaptor("toy")(type("Toy", (), {}))  # the module was imported again
    with pytest.raises(ConfigError, match=r"Other cannot be registered as the adaptor 'toy', which is already .*Toy"):
        register_adaptor("toy")(type("Other", (), {}))


def test_built_in_adaptors_have_unique_kinds():
    assert set(KINDS) == set(ADAPTORS)
    assert len(set(KINDS.values())) == len(KINDS)
    assert not is_kind("eager")
    assert not is_kind("so")
    assert is_kind("pt2")
