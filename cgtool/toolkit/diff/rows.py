"""Two manifests of one rank and prefix: variants, sizes that were compiled, artifacts, fallbacks. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import asdict, replace

from cgtool.plan.pieces import Json
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import short
from cgtool.store.records import Artifact, Fallback, Manifest, Row, VariantCounts
from cgtool.toolkit.diff.graphs import pieces_text
from cgtool.toolkit.diff.records import Difference, What

#: What there is one row of, by the variant's name: numbers of variants may differ from side to side.
_Place = tuple[str, str, int, str, bool]


def variant_name(name: str, fixed: Mapping[str, int]) -> str:
    """Return what a variant is called: "default", "default num_tokens=1"."""
    return " ".join([name, *(f"{dim}={size}" for dim, size in fixed.items())])


def coverage_differences(old: Manifest, new: Manifest) -> list[Difference]:
    """Return which variants, sizes and pieces were compiled on one side alone, and what else a manifest says."""
    found = list(_fields(old, new))
    names = _variants(old), _variants(new)
    found += [
        _one_sided("coverage", name, _counts(side[name]), f"variant {name}", gone=gone)
        for gone, side, other in ((True, *names), (False, names[1], names[0]))
        for name in side
        if name not in other
    ]
    rows = _rows(old), _rows(new)
    both = names[0].keys() & names[1].keys()
    for gone, side, other in ((True, *rows), (False, rows[1], rows[0])):
        alone = {place: row for place, row in side.items() if place not in other and place[0] in both}
        found += [_uncovered(group, gone=gone) for group in _together(alone)]
    return found


def artifact_differences(old: Manifest, new: Manifest) -> list[Difference]:
    """Return which artifacts of one piece and shape differ: in their bytes, in whether they were proved."""
    before, after = _rows(old), _rows(new)
    groups: dict[tuple[str, str, str, bool, str, str], list[_Place]] = {}
    for place, row in before.items():
        other = after.get(place)
        if other is not None and _said(row) != _said(other):
            groups.setdefault((place[0], place[1], place[3], place[4], _said(row), _said(other)), []).append(place)
    return [_artifact(places, before[places[0]].artifact, after[places[0]].artifact) for places in groups.values()]


def fallback_differences(old: Manifest, new: Manifest) -> list[Difference]:
    """Return which pieces fall back to another adaptor on one side alone, or for another reason."""
    before, after = _fallbacks(old), _fallbacks(new)
    found = []
    for place in [*before, *(place for place in after if place not in before)]:
        was, now = before.get(place), after.get(place)
        sides = [None if side is None else {"adaptor": side.adaptor, "reason": side.reason} for side in (was, now)]
        if sides[0] == sides[1]:
            continue
        fallback = was or now
        shape = "" if fallback is None else shape_text(fallback.shape)
        said = f"piece {place[2]} of {place[0]} ({shape})"
        path = f"{place[0]}/{shape}/piece {place[2]}"
        sentence = f"{said} {_fallback_words(was, now)}"
        found.append(Difference(what="fallback", path=path, old=sides[0], new=sides[1], sentence=sentence))
    return found


def _fallback_words(was: Fallback | None, now: Fallback | None) -> str:
    if was is None and now is not None:
        return f"falls back to {now.adaptor} now and did not before: {now.reason}"
    if now is None and was is not None:
        return f"fell back to {was.adaptor} ({was.reason}) and does not now"
    if was is not None and now is not None and was.adaptor != now.adaptor:
        return f"fell back to {was.adaptor} and does to {now.adaptor} now: {now.reason}"
    return f"falls back for another reason now: {now.reason if now is not None else ''}"


def _fields(old: Manifest, new: Manifest) -> Iterator[Difference]:
    pairs: tuple[tuple[What, str, Json, Json], ...] = (
        ("entry", "model", old.model, new.model),
        ("factor", "splitting_ops", list(old.splitting_ops), list(new.splitting_ops)),
    )
    for what, path, before, after in pairs:
        if before != after:
            words = [", ".join(side) if isinstance(side, list) else str(side) for side in (before, after)]
            said = f"{path} was {words[0] or 'empty'} and is {words[1] or 'empty'} now"
            yield Difference(what=what, path=path, old=before, new=after, sentence=said)


def _variants(manifest: Manifest) -> dict[str, VariantCounts]:
    return {variant_name(counts.name, counts.fixed): counts for counts in manifest.variants}


def _counts(counts: VariantCounts) -> Json:
    return asdict(counts)


def _rows(manifest: Manifest) -> dict[_Place, Row]:
    names = list(_variants(manifest)) if len(_variants(manifest)) == len(manifest.variants) else None
    return {
        (
            names[row.variant] if names is not None else f"variant {row.variant}",
            shape_text(row.shape),
            row.piece_index,
            row.adaptor,
            row.tuned,
        ): row
        for row in manifest.rows
    }


def _fallbacks(manifest: Manifest) -> dict[tuple[str, str, int], Fallback]:
    names = [variant_name(counts.name, counts.fixed) for counts in manifest.variants]
    return {
        (
            names[item.variant] if item.variant < len(names) else f"variant {item.variant}",
            shape_text(item.shape),
            item.piece_index,
        ): item
        for item in manifest.fallbacks
    }


def _together(rows: Mapping[_Place, Row]) -> list[list[tuple[_Place, Row]]]:
    groups: dict[tuple[str, str, str, bool], list[tuple[_Place, Row]]] = {}
    for place, row in rows.items():
        groups.setdefault((place[0], place[1], place[3], place[4]), []).append((place, row))
    return list(groups.values())


def _uncovered(group: Sequence[tuple[_Place, Row]], *, gone: bool) -> Difference:
    (name, shape, _, adaptor, tuned), row = group[0]
    pieces = pieces_text(sorted(place[2] for place, _ in group))
    numbers = sorted(place[2] for place, _ in group)
    value = {"shape": row.shape, "adaptor": adaptor, "tuned": tuned, "pieces": numbers}
    said = f"{pieces} of {name} for {shape} by {adaptor}{', autotuned' if tuned else ''}"
    return _one_sided("coverage", f"{name}/{shape}/{pieces}", value, said, gone=gone)


def _one_sided(what: What, path: str, value: Json, said: str, *, gone: bool) -> Difference:
    verb = "was there before and is not now" if gone else "is there now and was not before"
    return Difference(
        what=what,
        path=path,
        old=value if gone else None,
        new=None if gone else value,
        sentence=f"{said}: {verb}",
    )


def _said(row: Row) -> str:
    """Return all of a row that can differ where it is the same piece, shape and adaptor."""
    return repr(replace(row.artifact, compile_secs=0.0, kernels=0))


def _artifact(places: Sequence[_Place], old: Artifact, new: Artifact) -> Difference:
    name, shape, _, adaptor, _ = places[0]
    pieces = pieces_text(sorted(place[2] for place in places))
    said = f"the artifact of {pieces} of {name} for {shape} by {adaptor}"
    if old.digest != new.digest or old.size_bytes != new.size_bytes:
        what = (
            f"was {short(old.digest)} ({old.size_bytes} bytes) and is {short(new.digest)} ({new.size_bytes} bytes) now"
        )
    elif old.proved != new.proved:
        what = f"was {'' if old.proved else 'not '}proved and is {'' if new.proved else 'not '}now"
    else:
        what = "serves under other conditions now" if old.guards != new.guards else "has another proof now"
    return Difference(
        what="artifact",
        path=f"{name}/{shape}/{pieces}",
        old=_facts(old),
        new=_facts(new),
        sentence=f"{said} {what}",
        detail=tuple(_guard_lines(old.guards, new.guards)),
    )


def _facts(one: Artifact) -> Json:
    return {"digest": one.digest, "kind": one.kind, "size_bytes": one.size_bytes, "proved": one.proved}


def _guard_lines(old: Iterable[str], new: Iterable[str]) -> Iterator[str]:
    before, after = list(old), list(new)
    yield from (f"- {guard}" for guard in before if guard not in after)
    yield from (f"+ {guard}" for guard in after if guard not in before)
