"""Start-up without torch, help texts and man pages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import click
import pytest
from cache_maker import lay_decoder as lay_entry
from cli_harness import REPO, environment, run

from cgtool import __version__
from cgtool.cli import manpage
from cgtool.cli.main import cgtool

HEAVY = ("torch", "sympy", "numpy", "transformers", "triton")


def _all_commands(command=cgtool, path=("cgtool",)):
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from _all_commands(command.get_command(context, name), (*path, name))


COMMANDS = dict(_all_commands())


def _modules_after(*arguments):
    """Run the command in a new process; return its exit code and the names in sys.modules."""
    code = (
        "import json, sys\n"
        "from cgtool.cli.main import main\n"
        f"code = main({list(map(str, arguments))!r})\n"
        "print()\n"
        "print(json.dumps([code, sorted(sys.modules)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment(), timeout=60
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    return code, set(modules)


@pytest.mark.parametrize("path", [*COMMANDS], ids=" ".join)
def test_help_imports_neither_torch_nor_the_toolkit(path):
    code, modules = _modules_after(*path[1:], "--help")
    assert code == 0
    assert not modules.intersection(HEAVY)
    assert not [name for name in modules if name.startswith("cgtool.toolkit.")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "cache"),
        ("inspect", "graph"),
        ("diff", "{hash}", "{hash}"),
        ("diff", "{hash}", "--here"),
        ("prune", "--stale", "--orphans", "--yes"),
    ],
    ids=" ".join,
)
def test_commands_that_only_read_a_cache_do_not_import_torch(tmp_path, arguments):
    hash_ = lay_entry(tmp_path)
    code, modules = _modules_after(*(word.format(hash=hash_) for word in arguments), "--cache-dir", tmp_path)
    assert code == 0
    assert not modules.intersection((*HEAVY, "zstandard"))


def test_the_groups_help_imports_no_command():
    _, modules = _modules_after("--help")
    assert "cgtool.cli.warm" not in modules
    assert "cgtool.cli.inspect" not in modules
    assert "rich" not in modules


def test_a_command_does_not_import_another():
    _, modules = _modules_after("warm", "--help")
    assert "cgtool.cli.warm" in modules
    assert "cgtool.cli.inspect" not in modules


def test_a_usage_error_of_warm_does_not_import_torch():
    code, modules = _modules_after("warm", "model.py:build", "--compile-sizes", "none at all")
    assert code == 2
    assert not modules.intersection(HEAVY)


def test_version():
    ran = run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"cgtool {__version__}\n", "")


@pytest.mark.parametrize("path", [*COMMANDS], ids=" ".join)
def test_help_has_examples_of_the_command(path):
    ran = run(*path[1:], "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"Usage: {' '.join(path)} ")
    examples = ran.out.split("Examples:\n")[1].splitlines()
    assert all(line.strip().startswith(" ".join(path)) for line in examples)


def test_the_help_of_warm_warns_that_it_runs_the_models_code():
    assert "This runs MODEL's code" in " ".join(run("warm", "--help").out.split())


@pytest.mark.parametrize(
    "path", [path for path, command in COMMANDS.items() if not isinstance(command, click.Group)], ids=" ".join
)
def test_every_command_has_the_output_options(path):
    options = {option for parameter in COMMANDS[path].params for option in parameter.opts}
    assert {"--json", "--quiet", "--verbose", "--traceback"} <= options


def test_a_missing_command_is_a_usage_error_that_shows_the_help():
    ran = run()
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err == run("--help").out


def test_man_pages_are_up_to_date():
    folder = REPO / "man"
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert written == manpage.pages(), "run: python -m cgtool.cli.manpage man/"


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_man_pages_have_no_groff_warnings():
    """Calls groff directly, as `man --warnings` does, to be independent of the locale."""
    for path in sorted((REPO / "man").iterdir()):
        done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", path], capture_output=True, text=True, check=True)
        assert done.stderr == "", path.name


def test_the_page_on_the_format_starts_with_trust_and_has_every_grammar():
    text = manpage.pages()["cgtool-cache.5"]
    assert text.index("AN ARTIFACT IS CODE") < text.index(".SH THE TREE")
    for grammar in ("manifest.json plan.json", "VariantCounts: ", "Index: ", "signatures: ", "unit.json"):
        assert grammar.replace("-", r"\-") in text


def test_every_option_is_in_its_man_page():
    pages = manpage.pages()
    for path, command in COMMANDS.items():
        page = pages["-".join(path[:2]) + ".1"]
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.opts[-1].replace("-", r"\-") in page
