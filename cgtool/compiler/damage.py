"""What of an entry is missing or damaged, as a warm finds it."""

from __future__ import annotations

from collections.abc import Iterable

from cgtool.compiler.compile_work import row_name, unique
from cgtool.compiler.wanted import Work
from cgtool.errors import CacheCorruptError, CacheMissError
from cgtool.plan.shapes import shape_text
from cgtool.runtime.find import Found
from cgtool.store.entry import read_entry
from cgtool.store.layout import CacheLayout


def damaged_texts(layout: CacheLayout, found: Found) -> tuple[str, ...]:
    """Say which of an entry's files for people differ from their digests: nothing but a trace writes them."""
    try:
        read_entry(layout, found.entry.name, files=found.entry.manifest.files)
    except CacheCorruptError as error:
        return (str(error),)
    return ()


def broken_rows(found: Found, work: Iterable[Work]) -> list[Work]:
    """Return the work of `found` whose artifacts are gone or differ from their digests."""
    broken, seen = [], {}
    for item in work:
        row = found.entry.manifest.row(**row_name(item))
        if row is None:
            continue
        digest = row.artifact.digest
        if digest not in seen:
            try:
                found.entry.artifact(row.artifact)
                seen[digest] = True
            except CacheCorruptError:
                seen[digest] = False
        if not seen[digest]:
            broken.append(item)
    return broken


def incomplete(
    missing: list[Work], broken: list[Work], layout: CacheLayout, *, unproved: int = 0, nearest: str | None = None
) -> CacheMissError:
    """Return the miss of an entry that lacks something, with a sentence for each kind of lack."""
    shapes = list(dict.fromkeys(shape_text(work.shape) for work in missing))
    count = len(list(unique(missing)))
    named = f"{'shape' if len(shapes) == 1 else 'shapes'} {', '.join(shapes)}"
    said = "1 artifact is missing" if count == 1 else f"{count} artifacts are missing"
    reasons = [f"{said}, for the {named}"] if missing else []
    reasons += [f"the artifact of piece {work.piece_index} is damaged" for work in broken]
    if unproved:
        reasons.append(
            "1 artifact was not proved yet" if unproved == 1 else f"{unproved} artifacts were not proved yet"
        )
    msg = f"The entry is incomplete: {'; '.join(reasons)}. Warm the model again to add what is missing."
    return CacheMissError(msg, reasons=tuple(reasons), path=layout.root, nearest=nearest)
