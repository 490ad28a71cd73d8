"""Man pages written from the click parser and from the heads of the modules that write each file of a cache.

So they cannot say anything else than `--help` and those modules do.

`python -m cgtool.cli.manpage man/` writes them; a test holds the files equal to that.
Must not import torch.
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


_DESCRIPTION = """\
A cache of cgtool is a folder. Everything in it is named by a digest, is written whole or not at all, and lies at no
fixed place: an entry may be copied to any other cache, user or machine. What follows is the grammar of every file, as
it stands at the head of the module that writes it.

Records are JSON; the tag of a record names its kind and the version of its grammar, and its types stand in its class. A
record of another version is refused, with the version that wrote it.
"""

_TRUST = """\
AN ARTIFACT IS CODE. Whoever can write to a cache decides what runs in every process that loads from it, with all the
rights of that process. A digest says that bytes are those that the manifest names. It does not say who wrote either.

An artifact of the kind pt2 is a package that holds native code, which the loader maps into the process. Artifacts of
the kinds that the adaptors inductor_standalone and inductor write hold torch's own pickle as well, and pickle runs what
it likes as it is read. A plan names functions, which are called.

So take bundles only from those whose programs you would run. Sign what you ship (cgtool export --sign), demand a
signature where it is taken (cgtool import --require-signature), and let no other user write to the cache's folders.
Nothing is executed before its digest matched; under a signature policy, before its signature did.
"""

#: What each section is about, and the module whose head says it.
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


def cache_page() -> str:
    """Return the text of the page."""
    lines = [
        r".\" Written by `python -m cgtool.cli.manpage man/` from the heads of the modules: change them.",
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
    """Return a module's head as roff: paragraphs, and indented blocks as they stand."""
    lines: list[str] = []
    for block in _blocks(inspect.cleandoc(text)):
        if block.startswith("    "):
            lines += [".PP", ".RS 4", ".nf", *literal(textwrap.dedent(block)), ".fi", ".RE"]
        else:
            words = " ".join(block.split()).replace("Must not import torch.", "").replace("::", ":").strip()
            lines += [".PP", escaped(words)] if words else []
    return lines


def _records(module: ModuleType) -> Iterator[str]:
    """Yield what a module's records are, and their fields as the docstrings of their classes say them."""
    from cgtool.plan.grammar import Record  # what other pages do without

    for name, record in vars(module).items():
        if isinstance(record, type) and issubclass(record, Record) and record.__module__ == module.__name__:
            said, _, rest = inspect.cleandoc(record.__doc__ or "").partition("\n\nArgs:\n")
            fields, _, _ = rest.partition("\n\n")
            yield from (".PP", escaped(f"{name}: {' '.join(said.split())}"))
            if fields:
                yield from (".RS 4", ".nf", *literal(textwrap.dedent(fields)), ".fi", ".RE")


def _blocks(text: str) -> list[str]:
    """Split at empty lines, and keep together what is indented: a grammar may hold empty lines."""
    blocks: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("    ") and blocks and blocks[-1].startswith("    "):
            blocks[-1] += "\n\n" + block
        else:
            blocks.append(block)
    return blocks


def escaped(text: str) -> str:
    """Return one line that man shows as it stands: no request, no special character."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("`", r"\(ga")
    # groff reads Latin-1 unless it is told otherwise
    text = "".join(char if char.isascii() else rf"\[u{ord(char):04X}]" for char in text)
    return r"\&" + text if text.startswith(".") else text


def literal(text: str) -> list[str]:
    """Return the lines of a block that man shows as they stand, in a `.nf`."""
    return [escaped(line) or ".sp" for line in text.splitlines()]


def main(folder: str) -> None:
    """Write every page into `folder`."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
