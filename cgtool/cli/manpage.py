"""Man pages, generated from the click commands and from the docstrings of the modules that define a cache's files.

`python -m cgtool.cli.manpage man/` writes them; a test checks that the files are up to date. Must not import torch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click

from cgtool.cli.main import cgtool

EXIT_STATUS = (
    ("0", "Success."),
    ("1", "Failure; the reason is printed on standard error."),
    ("2", "Usage error."),
    ("3", "A check failed, or the cache has no entry that matches the model."),
    ("130", "Interrupted by Ctrl-C. Each entry of the cache is in its old or its new state, never in between."),
    ("141", "The reader of the output closed the pipe."),
    ("143", "Terminated by SIGTERM. Each entry of the cache is in its old or its new state, never in between."),
)

ENVIRONMENT = (
    ("CGTOOL_CACHE_DIR", "Root of the cache, unless --cache-dir is given."),
    ("CGTOOL_DISABLE_CACHE", "Disables the cache if set to 1."),
    ("CGTOOL_*", "Fields of CompilationConfig in upper case, such as CGTOOL_LEVEL."),
    ("NO_COLOR", "Disables colours if set."),
)

FILES = (
    ("cgtool.toml, pyproject.toml", "Settings. In pyproject.toml, the table [tool.cgtool]."),
    ("~/.cache/cgtool", "The default root of the cache."),
)


_DESCRIPTION = """\
A cache of cgtool is a directory. Everything in it is named by a digest and written atomically, and nothing depends on
its location: an entry can be copied to any other cache, user or machine. The following sections define the format of
every file, taken from the documentation of the module that writes it.

Records are JSON. The tag of a record names its kind and the version of its format; the types of its fields are given by
its class. A record of another version is rejected with an error that names the version that wrote it.
"""

_TRUST = """\
AN ARTIFACT IS CODE. Whoever can write to a cache decides what runs in every process that loads from it, with all the
rights of that process. A digest proves that the bytes are those that the manifest names. It does not prove who wrote
either of them.

An artifact of the kind pt2 is a package with native code, which the loader maps into the process. Artifacts of the
adaptors inductor_standalone and inductor also contain torch's own pickle, and unpickling can run arbitrary code. A plan
names functions, which are called.

So accept bundles only from people whose programs you would run. Sign what you ship (cgtool export --sign), require a
signature when you import it (cgtool import --require-signature), and let no other user write to the cache. Nothing is
executed before its digest has been verified and, under a signature policy, its signature.
"""

#: The sections, and the module whose docstring each one shows.
_SECTIONS = (
    ("THE TREE", "cgtool.store.layout"),
    ("HOW FILES ARE WRITTEN", "cgtool.store.files"),
    ("KEYS, MANIFESTS AND ARTIFACTS", "cgtool.store.records"),
    ("SHAPES", "cgtool.plan.shapes"),
    ("PLAN", "cgtool.plan.records"),
    ("PUBLISHING AN ENTRY", "cgtool.store.entry"),
    ("BYTES OF ARTIFACTS", "cgtool.store.artifacts"),
    ("UNITS", "cgtool.store.units"),
    ("LOOKUP AND HITS", "cgtool.store.lookup"),
    ("LEASES", "cgtool.store.leases"),
    ("PRUNING", "cgtool.toolkit.prune"),
    ("BUNDLES", "cgtool.store.bundle"),
    ("INDEX OF A BUNDLE", "cgtool.store.bundle_index"),
    ("SIGNATURES", "cgtool.store.signatures"),
)


def pages() -> dict[str, str]:
    """Return the text of every man page by file name."""
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
    return result | {"cgtool-cache.5": cache_page()}


def _command(group: click.Group, context: click.Context, name: str) -> click.Command:
    command = group.get_command(context, name)
    if command is None:
        raise LookupError(f"{context.command_path} has no command {name}.")
    return command


Section = tuple[click.Command, click.Context]


def _page(command: click.Command, context: click.Context, *, sections: list[Section]) -> str:
    dashed = context.command_path.replace(" ", "-")
    lines = [
        r".\" Generated from the click commands by `python -m cgtool.cli.manpage man/`. Do not edit.",
        f'.TH "{dashed.upper()}" 1 "" "cgtool" "cgtool manual"',
        ".nh",
        ".SH NAME",
        f"{escaped(dashed)} \\- {escaped(_short(command)[:1].lower() + _short(command)[1:])}",
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
    others = [] if len(context.command_path.split()) == 1 else [".BR cgtool (1),"]
    lines += [".SH SEE ALSO", *others, r".BR cgtool\-cache (5)"]
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


def cache_page() -> str:
    """Return the page on the format of a cache."""
    lines = [
        r".\" Generated from docstrings by `python -m cgtool.cli.manpage man/`. Do not edit.",
        '.TH "CGTOOL-CACHE" 5 "" "cgtool" "cgtool manual"',
        ".nh",
        ".SH NAME",
        r"cgtool\-cache \- the files of a compile cache, and what trusting one means",
        ".SH DESCRIPTION",
        *_paragraphs(_DESCRIPTION),
        ".SH TRUST",
        *_paragraphs(_TRUST),
    ]
    for title, name in _SECTIONS:
        lines.append(f".SH {title}")
        module = importlib.import_module(name)
        lines += [*head(module.__doc__ or ""), *_records(module)]
    lines += [".SH SEE ALSO", ".BR cgtool (1)"]
    return "\n".join(lines) + "\n"


def head(text: str) -> list[str]:
    """Convert a module's docstring to roff: paragraphs, and indented blocks verbatim."""
    lines: list[str] = []
    for block in _blocks(inspect.cleandoc(text)):
        if block.startswith("    "):
            lines += [".PP", ".RS 4", ".nf", *literal(textwrap.dedent(block)), ".fi", ".RE"]
        else:
            paragraph = " ".join(block.split()).replace("Must not import torch.", "").replace("::", ":").strip()
            lines += [".PP", escaped(paragraph)] if paragraph else []
    return lines


def _records(module: ModuleType) -> Iterator[str]:
    """Yield the records of a module and their fields, from the docstrings of their classes."""
    from cgtool.plan.grammar import Record  # lazy: other pages do not need it

    for name, record in vars(module).items():
        if isinstance(record, type) and issubclass(record, Record) and record.__module__ == module.__name__:
            summary, _, rest = inspect.cleandoc(record.__doc__ or "").partition("\n\nArgs:\n")
            fields, _, _ = rest.partition("\n\n")
            yield from (".PP", escaped(f"{name}: {' '.join(summary.split())}"))
            if fields:
                yield from (".RS 4", ".nf", *literal(textwrap.dedent(fields)), ".fi", ".RE")


def _blocks(text: str) -> list[str]:
    """Split at empty lines, except inside an indented block: a grammar may have empty lines."""
    blocks: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("    ") and blocks and blocks[-1].startswith("    "):
            blocks[-1] += "\n\n" + block
        else:
            blocks.append(block)
    return blocks


def escaped(text: str) -> str:
    """Escape a line so that man shows it verbatim: no requests, no special characters."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("`", r"\(ga")
    # groff reads Latin-1 by default
    text = "".join(char if char.isascii() else rf"\[u{ord(char):04X}]" for char in text)
    return r"\&" + text if text.startswith(".") else text


def literal(text: str) -> list[str]:
    """Escape the lines of a verbatim block, inside a `.nf`."""
    return [escaped(line) or ".sp" for line in text.splitlines()]


def main(folder: str) -> None:
    """Write every page into `folder`."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
