"""Man pages written from the click parser, so that they cannot say anything else than `--help` does.

`python -m cgtool.cli.manpage man/` writes them; a test holds the files equal to that.
Must not import torch.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import click

from cgtool.cli import manpage_cache
from cgtool.cli.main import cgtool
from cgtool.cli.roff import escaped

EXIT_STATUS = (
    ("0", "Done."),
    ("1", "Failed; the reason is on standard error."),
    ("2", "Wrong usage."),
    ("3", "A check said no, or the cache does not serve the model."),
    ("130", "Ended by Ctrl-C. The cache is as before or as after."),
    ("141", "The reader of the output went away."),
    ("143", "Ended by SIGTERM. The cache is as before or as after."),
)

ENVIRONMENT = (
    ("CGTOOL_CACHE_DIR", "The cache's root where --cache-dir names none."),
    ("CGTOOL_DISABLE_CACHE", "Switches the cache off where it is 1."),
    ("CGTOOL_*", "Fields of CompilationConfig in capitals, such as CGTOOL_LEVEL."),
    ("NO_COLOR", "Switches colours off where it is set."),
)

FILES = (
    ("cgtool.toml, pyproject.toml", "Settings: in pyproject.toml the table [tool.cgtool]."),
    ("~/.cache/cgtool", "The cache where nothing else is said."),
)


def pages() -> dict[str, str]:
    """Return every man page by file name."""
    context = click.Context(cgtool, info_name="cgtool", **cgtool.context_settings)
    result = {"cgtool.1": _page(cgtool, context, sections=[])}
    for name in cgtool.list_commands(context):
        command = _command(cgtool, context, name)
        inner = click.Context(command, info_name=name, parent=context)
        sections = []
        if isinstance(command, click.Group):
            for sub in command.list_commands(inner):
                child = _command(command, inner, sub)
                sections.append((child, click.Context(child, info_name=sub, parent=inner)))
        result[f"cgtool-{name}.1"] = _page(command, inner, sections=sections)
    return result | {manpage_cache.NAME: manpage_cache.page()}


def _command(group: click.Group, context: click.Context, name: str) -> click.Command:
    command = group.get_command(context, name)
    if command is None:
        message = f"{context.command_path} has no command {name}."
        raise LookupError(message)
    return command


Section = tuple[click.Command, click.Context]


def _page(command: click.Command, context: click.Context, *, sections: list[Section]) -> str:
    dashed = context.command_path.replace(" ", "-")
    lines = [
        r".\" Written by `python -m cgtool.cli.manpage man/` from the parser: change the parser.",
        f'.TH "{dashed.upper()}" 1 "" "cgtool" "cgtool manual"',
        ".nh",
        ".SH NAME",
        f"{escaped(dashed)} \\- {escaped(_short(command))}",
        ".SH SYNOPSIS",
    ]
    synopses = [context, *(inner for _, inner in sections)] if not sections else [inner for _, inner in sections]
    for inner in synopses:
        pieces = " ".join(inner.command.collect_usage_pieces(inner))
        lines += [f".B {escaped(inner.command_path)}", escaped(pieces), ".br"]
    lines += [".SH DESCRIPTION", *_paragraphs(command.help or "")]
    if isinstance(command, click.Group) and not sections:
        lines.append(".SH COMMANDS")
        for name in command.list_commands(context):
            short = _short(_command(command, context, name))
            lines += [".TP", f".BR {escaped(dashed)}\\-{escaped(name)} (1)", escaped(short)]
    for child, inner in sections:
        lines.append(f'.SH "{escaped(inner.command_path).upper()}"')
        lines += [*_paragraphs(child.help or ""), *_options(child, inner)]
        lines += _examples(child, heading=".SS")
    if not sections:
        lines += [".SH OPTIONS", *_options(command, context)]
    lines += _examples(command, heading=".SH")
    for heading, rows in (("EXIT STATUS", EXIT_STATUS), ("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES)):
        lines.append(f".SH {heading}")
        for term, text in rows:
            lines += [".TP", f".B {escaped(term)}", escaped(text)]
    return "\n".join(lines) + "\n"


def _short(command: click.Command) -> str:
    return (command.short_help or command.get_short_help_str(limit=200)).rstrip(".")


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines += [".PP", escaped(" ".join(paragraph.split()))]
    return lines


def _options(command: click.Command, context: click.Context) -> list[str]:
    lines: list[str] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            lines += [".TP", f".B {escaped(record[0])}", escaped(" ".join(record[1].split()))]
    return lines


def _examples(command: click.Command, *, heading: str) -> list[str]:
    examples = [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]
    if not examples:
        return []
    return [f"{heading} EXAMPLES", ".nf", *(escaped(example) for example in examples), ".fi"]


def main(folder: str) -> None:
    """Write every page into `folder`."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
