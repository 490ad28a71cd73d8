"""The sources of settings: their precedence, the search for files, and errors that name the source."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cgtool.cli.settings import find_file, load_settings
from cgtool.config import CompilationConfig
from cgtool.errors import ConfigError
from cgtool.host import environment


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with a folder in it; the search for files ends there."""
    root = tmp_path / "repo"
    (root / ".git").mkdir(parents=True)
    (root / "inner").mkdir()
    return root


def settings(start: Path, *, variables=None, **given):
    return load_settings(start=start, env=environment(variables or {}), **given)


def refusal(start: Path, *, variables=None, **given) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(start, variables=variables, **given)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_without_any_source_the_defaults_apply(repo):
    assert settings(repo) == CompilationConfig()


SOURCES = ["file", "variable", "json", "flag"]


@pytest.mark.parametrize("highest", range(len(SOURCES)), ids=SOURCES)
def test_a_higher_source_wins_and_the_log_names_it(repo, highest, caplog):
    caplog.set_level(logging.DEBUG, logger="cgtool")
    given = {}
    if highest >= 0:
        (repo / "cgtool.toml").write_text("compile_sizes = [1]\nsize_dim = 'a'\n")
    if highest >= 1:
        given["variables"] = {"CGTOOL_COMPILE_SIZES": "2"}
    if highest >= 2:
        given["compilation_config"] = '{"compile_sizes": [3]}'
    if highest >= 3:
        given["flags"] = {"compile_sizes": [4]}
    found = settings(repo, **given)
    assert found == CompilationConfig(compile_sizes=[highest + 1], size_dim="a")
    origins = [
        f"{repo}/cgtool.toml, key compile_sizes",
        "the variable CGTOOL_COMPILE_SIZES",
        "--compilation-config, key compile_sizes",
        "--compile-sizes",
    ]
    assert f"compile_sizes is [{highest + 1}], set by {origins[highest]}" in caplog.messages
    assert f'size_dim is "a", set by {repo}/cgtool.toml, key size_dim' in caplog.messages


def test_absent_flags_are_ignored_and_text_is_parsed(repo):
    flags = {"level": None, "compile_sizes": "1,batch=2", "adaptor": "eager", "disable_cache": True}
    found = settings(repo, flags=flags)
    assert found == CompilationConfig(compile_sizes=[1, {"batch": 2}], adaptor="eager", disable_cache=True)


def test_an_empty_variable_counts_as_unset(repo):
    assert settings(repo, variables={"CGTOOL_COMPILE_SIZES": "", "CGTOOL_NO_SUCH": ""}) == CompilationConfig()


def test_the_table_of_pyproject_is_found_from_a_folder_below(repo):
    (repo / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.cgtool]\ncompile_sizes = [1, {batch = 2}]\n')
    found = settings(repo / "inner")
    assert found == CompilationConfig(compile_sizes=[1, {"batch": 2}])


def test_only_the_nearest_file_is_read(repo):
    (repo / "cgtool.toml").write_text("level = 2\nsize_dim = 'a'\n")
    (repo / "inner" / "cgtool.toml").write_text("level = 1\n")
    assert settings(repo / "inner") == CompilationConfig(level=1)


def test_a_pyproject_without_the_table_is_skipped(repo):
    (repo / "cgtool.toml").write_text("level = 2\n")
    (repo / "inner" / "pyproject.toml").write_text("[tool.other]\nlevel = 1\n")
    assert find_file(repo / "inner") == repo / "cgtool.toml"


def test_the_search_ends_at_the_repository(repo):
    (repo.parent / "cgtool.toml").write_text("level = 2\n")
    assert find_file(repo / "inner") is None
    assert find_file(repo.parent) == repo.parent / "cgtool.toml"


def test_a_worktrees_git_file_ends_the_search_too(repo):
    (repo.parent / "cgtool.toml").write_text("level = 2\n")
    (repo / ".git").rmdir()
    assert find_file(repo / "inner") == repo.parent / "cgtool.toml"
    (repo / ".git").write_text("gitdir: elsewhere\n")
    assert find_file(repo / "inner") is None


def test_the_search_starts_at_the_working_directory(repo, monkeypatch):
    (repo / "cgtool.toml").write_text("level = 2\n")
    monkeypatch.chdir(repo / "inner")
    assert load_settings(env=environment({})).level == 2


def test_a_path_in_a_file_is_relative_to_the_file(repo):
    (repo / "cgtool.toml").write_text("cache_dir = 'caches/a'\ndebug_dump_path = '/abs'\n")
    config = settings(repo / "inner")
    assert (config.cache_dir, config.debug_dump_path) == (str(repo / "caches/a"), "/abs")


def test_a_tilde_in_a_file_is_the_users_home(repo, isolated_home):
    (repo / "cgtool.toml").write_text("cache_dir = '~/c'\n")
    assert settings(repo).cache_dir == str(isolated_home / "c")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            {"variables": {"CGTOOL_COMPILE_SIZE": "1"}},
            "The variable CGTOOL_COMPILE_SIZE: cgtool has no setting 'CGTOOL_COMPILE_SIZE'; "
            "the nearest is 'CGTOOL_COMPILE_SIZES'.",
            id="variable",
        ),
        pytest.param(
            {"compilation_config": '{"compile-sizes": [1]}'},
            "--compilation-config, key compile-sizes: cgtool has no setting 'compile-sizes'; "
            "the nearest is 'compile_sizes'.",
            id="json",
        ),
        pytest.param(
            {"flags": {"compile_rages": [[1, 2]]}},
            "--compile-rages: cgtool has no setting '--compile-rages'; the nearest is '--compile-ranges'.",
            id="flag",
        ),
    ],
)
def test_an_unknown_key_names_its_source_and_the_nearest(repo, given, message):
    assert refusal(repo, **given) == message


def test_an_unknown_key_of_a_file_names_the_file(repo):
    (repo / "pyproject.toml").write_text("[tool.cgtool]\nsplit_ops = []\n")
    path = repo / "pyproject.toml"
    message = f"{path}, key tool.cgtool.split_ops: cgtool has no setting 'split_ops'; the nearest is 'splitting_ops'."
    assert refusal(repo) == message


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        ({"variables": {"CGTOOL_LEVEL": "9"}}, "The variable CGTOOL_LEVEL: level is 9: levels are 0"),
        ({"compilation_config": {"level": "x"}}, "--compilation-config, key level: level is 'x': levels are 0"),
        ({"flags": {"compile_sizes": [0]}}, "--compile-sizes: compile_sizes is [0]: sizes are positive integers"),
        ({"flags": {"inductor_compile_config": []}}, "--inductor-config: inductor_compile_config is []: it must map"),
        ({"compilation_config": "{"}, "--compilation-config is '{': it is not valid JSON"),
        ({"compilation_config": "[1]"}, "--compilation-config is '[1]'. Give an object such as"),
        ({"compilation_config": '{"level": 1, "level": 2}'}, "--compilation-config is "),
    ],
)
def test_a_wrong_value_names_its_source(repo, given, starts):
    assert refusal(repo, **given).startswith(starts)


def test_a_wrong_value_is_an_error_even_if_a_higher_source_overrides_it(repo):
    (repo / "cgtool.toml").write_text("level = 9\n")
    assert refusal(repo, flags={"level": 3}).startswith(f"{repo}/cgtool.toml, key level: level is 9")


def test_a_contradiction_names_both_sources(repo):
    (repo / "cgtool.toml").write_text('splitting_ops = ["a::b"]\n')
    message = refusal(repo, flags={"level": 2})
    assert message.startswith("Level 2 does not split the graph")
    assert message.endswith(f"(level: --level; splitting_ops: {repo}/cgtool.toml, key splitting_ops)")


@pytest.mark.parametrize("content", [b"level = ", b"\xff = 1"])
def test_a_file_that_cannot_be_read_is_named(repo, content):
    (repo / "cgtool.toml").write_bytes(content)
    message = refusal(repo)
    assert message.startswith(f"The configuration file {repo}/cgtool.toml cannot be read: ")
    assert message.endswith("Correct it or move it away.")


def test_a_value_that_is_not_a_table_is_refused(repo):
    (repo / "pyproject.toml").write_text("tool.cgtool = 3\n")
    assert refusal(repo) == (
        f"In {repo}/pyproject.toml, tool.cgtool is 3, not a table. Write [tool.cgtool] and the fields below it."
    )


def test_two_files_in_one_folder_are_refused(repo):
    (repo / "pyproject.toml").write_text("[tool.cgtool]\nlevel = 1\n")
    (repo / "cgtool.toml").write_text("level = 2\n")
    assert refusal(repo).endswith("configure cgtool. Keep one of them.")


def test_the_library_reads_no_configuration_file(repo, monkeypatch):
    (repo / "cgtool.toml").write_text("level = 1\n")
    monkeypatch.chdir(repo)
    assert CompilationConfig().level == 3
