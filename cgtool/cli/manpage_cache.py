"""`cgtool-cache(5)`: the page of the format, put together from the heads of the modules that write each file.

So it cannot say anything else than they do. Must not import torch.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType

from cgtool.cli.roff import escaped, literal

NAME = "cgtool-cache.5"

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
    ("KEY", "cgtool.store.key"),
    ("MANIFESTS AND ARTIFACTS", "cgtool.store.records"),
    ("SHAPES", "cgtool.plan.shapes"),
    ("PLAN", "cgtool.plan.records"),
    ("TABLES OF A PLAN", "cgtool.plan.records"),
    ("PUBLISHING AN ENTRY", "cgtool.store.entry"),
    ("BYTES OF ARTIFACTS", "cgtool.store.artifacts"),
    ("UNITS", "cgtool.store.units"),
    ("LOOKUP AND HITS", "cgtool.store.lookup"),
    ("LEASES", "cgtool.store.leases"),
    ("PRUNING", "cgtool.toolkit.prune"),
    ("BUNDLES", "cgtool.toolkit.bundle"),
    ("INDEX OF A BUNDLE", "cgtool.store.bundle_index"),
    ("SIGNATURES", "cgtool.store.signatures"),
)


def page() -> str:
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


def _paragraphs(text: str) -> list[str]:
    return [line for block in text.strip().split("\n\n") for line in (".PP", escaped(" ".join(block.split())))]


def _blocks(text: str) -> list[str]:
    """Split at empty lines, and keep together what is indented: a grammar may hold empty lines."""
    blocks: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("    ") and blocks and blocks[-1].startswith("    "):
            blocks[-1] += "\n\n" + block
        else:
            blocks.append(block)
    return blocks
