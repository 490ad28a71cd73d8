"""The reasons of refusals are stable and documented in one place."""

from __future__ import annotations

import re
from pathlib import Path

import cgtool.store
from cgtool.store import bundle_index as refusals

PACKAGE = Path(cgtool.store.__file__).parents[1]
SOURCES = (
    *(PACKAGE / "toolkit/bundle").glob("*.py"),
    *(PACKAGE / "store/bundle").glob("*.py"),
    *(PACKAGE / "store" / name for name in ("bundle_index.py", "signatures.py", "trust.py")),
    PACKAGE / "toolkit/bundle/import_.py",
)


#: How the code passes a reason.
SPELLINGS = (
    r'refused\(\s*"([a-z_]+)"',
    r'reason="([a-z_]+)"',
    r'reason = "([a-z_]+)" if',
    r'if signed else "([a-z_]+_[a-z]+)"',
    r'_parse_errors_as_refusals\(\w+, "([a-z_]+)"',
    r'(?:TYPE|SPARSE): \("([a-z_]+)"',
    r'_EXTENDED = \("([a-z_]+)"',
    r'\("([a-z_]+)", "has an unknown',
)


def test_the_documented_reasons_are_those_in_the_code():
    sources = [path.read_text() for path in SOURCES]
    used = {reason for text in sources for spelling in SPELLINGS for reason in re.findall(spelling, text)}
    table, _, load = refusals.__doc__.split("prints::")[1].partition("Load adds (`cgtool.store.trust`):")
    rows = [re.split(r" {2,}", line.strip())[0] for line in table.splitlines()]
    assert used == {word for row in [*rows, load.strip(" .\n")] for word in row.split()}
