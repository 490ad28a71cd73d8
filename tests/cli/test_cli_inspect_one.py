"""`cgtool inspect entry`, `artifact`, `key` and the pictures of `graph`; nothing is compiled."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from cache_maker import lay_decoder as lay_entry
from cli_harness import COMMAND, Ran, environment, run
from msgspec.structs import asdict, replace

from cgtool.cli.text import size_text
from cgtool.plan.shapes import of_sizes
from cgtool.store.entry import ObjectStore, read_entry
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.records import Factor, Fallback, Key, Manifest, Row

EVIL = "[bold red]Evil\x1b[2J\u202e\n</text><script>alert(1)</script>[/]" + "x" * 10_000
SVG = "{http://www.w3.org/2000/svg}"


def inspect(root: Path, *runs: tuple[object, ...]) -> list[Ran]:
    return [run("inspect", *arguments, "--cache-dir", root) for arguments in runs]


def change(root: Path, hash_: str, changes: dict[str, object], *, rank: int = 0) -> None:
    """Change fields of a manifest and seal it again."""
    layout = CacheLayout(root=root)
    name = RankName(hash=hash_, rank=rank, prefix="backbone")
    entry = read_entry(layout, name)
    assert entry is not None
    layout.manifest_file(name).write_bytes(replace(entry.manifest, **changes).to_bytes())


def manifest_of(root: Path, hash_: str) -> Manifest:
    entry = read_entry(CacheLayout(root=root), RankName(hash=hash_, rank=0, prefix="backbone"))
    assert entry is not None
    return entry.manifest


def with_artifact(row: Row, **changes: object) -> Row:
    return replace(row, artifact=replace(row.artifact, **changes))


def test_an_entry_is_shown_by_shape_and_piece_with_its_holes(tmp_path):
    hash_ = lay_entry(tmp_path)
    rows = manifest_of(tmp_path, hash_).rows
    proved = [with_artifact(row, proved=True, guards=("s0 < 9", "s0 > 2")) for row in rows[:2]]
    more = [
        replace(rows[0], shape=of_sizes({"num_tokens": 8})),
        with_artifact(rows[2], proof_gap="no inputs could be made"),
    ]
    fallback = Fallback(variant=0, piece_index=2, shape={}, adaptor="inductor", reason="a\x1bb")
    change(tmp_path, hash_, {"rows": (*proved, *more), "fallbacks": (fallback,)})
    text, as_json = inspect(tmp_path, ("entry",), ("entry", hash_[:6], "--json"))
    assert (text.code, text.err) == (0, "")
    assert text.out == (
        f"TinyModel {hash_[:10]}\n"
        "\n"
        "backbone, variant 0 (prefill): 5 pieces, 2 splitting, 3 unique, inductor_standalone\n"
        "shape         piece 0           piece 2           piece 4\n"
        "general       proved, 2 guards  proved, 2 guards  not proved\n"
        "num_tokens=8  not proved        HOLE              HOLE\n"
        "\n"
        "backbone, variant 1 (decode, num_tokens=1): 5 pieces, 2 splitting, 3 unique, inductor_standalone\n"
        "shape         pieces 0-4 by 2\n"
        "num_tokens=1  HOLE\n"
        "\n"
        f"3 artifacts for 4 rows, {size_text(sum(row.artifact.size_bytes for row in rows))}\n"
        "Holes (warm the model again to fill them):\n"
        "  piece 2 for num_tokens=8 (variant 0, rank 0, backbone)\n"
        "  piece 4 for num_tokens=8 (variant 0, rank 0, backbone)\n"
        "  piece 0 for num_tokens=1 (variant 1, rank 0, backbone)\n"
        "  piece 2 for num_tokens=1 (variant 1, rank 0, backbone)\n"
        "  piece 4 for num_tokens=1 (variant 1, rank 0, backbone)\n"
        "Compiled by another adaptor:\n"
        "  piece 2 for general (variant 0, rank 0, backbone) by inductor: a\\x1bb\n"
        "Not proved:\n"
        "  1 row: no inputs could be made\n"
    )
    report = as_json.report
    assert " ".join(report) == "schema root hash complete shapes ranks places holes unknown fallbacks warnings"
    assert (report["schema"], report["complete"], report["shapes"]) == (
        2,
        False,
        [{}, {"num_tokens": [1, 1]}, {"num_tokens": [8, 8]}],
    )
    (rank,) = report["ranks"]
    assert list(rank) == ["rank", "prefix", "model", "level", "adaptor", "cgtool", "created", "variants"]
    variant = rank["variants"][1]
    assert " ".join(variant) == "name pieces splitting_pieces unique_pieces fixed proved_at proof_gap"
    assert [*variant.values()] == ["decode", 5, 2, 3, {"num_tokens": 1}, [], ""]
    place = report["places"][0]
    cells = place.pop("cells")
    there = {"rank": 0, "prefix": "backbone", "variant": 0}
    assert place == {**there, "piece_index": 0, "adaptor": "inductor_standalone", "serves_all": False}
    artifact = {**asdict(rows[0].artifact), "guards": ["s0 < 9", "s0 > 2"], "proved": True}
    assert cells[0] == {"shape": {}, "adaptor": "inductor_standalone", "tuned": False, **artifact}
    assert " ".join(artifact) == "digest kind size_bytes compile_secs kernels guards proved proof_gap"
    assert report["holes"][0] == {**there, "piece_index": 2, "shape": {"num_tokens": [8, 8]}}
    fallback = {"piece_index": 2, "shape": {}, "adaptor": "inductor", "reason": "a\x1bb"}
    assert report["fallbacks"] == [{**there, **fallback}]


def test_equal_ranks_share_a_column_and_a_torn_rank_is_a_warning(tmp_path):
    hash_ = lay_entry(tmp_path)
    for rank in (1, 2):
        assert lay_entry(tmp_path, rank=rank) == hash_
    change(tmp_path, hash_, {"rows": manifest_of(tmp_path, hash_).rows[:2]}, rank=1)
    torn = CacheLayout(root=tmp_path).manifest_file(RankName(hash=hash_, rank=2, prefix="backbone"))
    text = inspect(tmp_path, ("entry", hash_))[0].out.splitlines()
    assert text[3:5] == [
        "shape    rank 0, 2 pieces 0-4 by 2; rank 1 pieces 0, 2  rank 1 piece 4",
        "general  not proved                                     HOLE",
    ]
    torn.write_bytes(torn.read_bytes()[:-10])
    ran, as_json = inspect(tmp_path, ("entry", hash_), ("entry", hash_, "--json"))
    assert ran.code == 0
    assert ran.err.startswith(f"Warning: {torn} is corrupt")
    assert len(as_json.report["ranks"]) == 2
    assert as_json.report["complete"] is False


def test_an_entry_without_a_readable_rank_fails(tmp_path):
    hash_ = lay_entry(tmp_path)
    manifest = CacheLayout(root=tmp_path).manifest_file(RankName(hash=hash_, rank=0, prefix="backbone"))
    manifest.write_text("{}")
    ran = inspect(tmp_path, ("entry", hash_, "--json"))[0]
    assert (ran.code, ran.report["error"]["type"]) == (1, "CacheCorruptError")


def test_an_ambiguous_or_unknown_hash_lists_the_entries(tmp_path):
    hashes = sorted(lay_entry(tmp_path, seed=seed) for seed in range(2))
    listed = "".join(f"  {hash_[:10]}\n" for hash_ in hashes)
    several, none, key, artifact = inspect(tmp_path, ("entry",), ("entry", "nothing"), ("key",), ("artifact", "zz/1"))
    assert several.code == none.code == key.code == artifact.code == 2
    assert several.err == f"Error: {tmp_path} holds 2 entries. Name one of these:\n{listed}"
    assert none.err == f"Error: No entry begins with 'nothing' in {tmp_path}. Name one of these:\n{listed}"
    assert key.err == several.err
    assert artifact.err.startswith("Error: 'zz/1' does not name an artifact. Give the start of its digest")


def test_every_factor_of_a_key_is_shown_with_its_value(tmp_path):
    hash_ = lay_entry(tmp_path)
    layout = CacheLayout(root=tmp_path)
    text, as_json = inspect(tmp_path, ("key",), ("key", hash_[:8], "--json"))
    factor = Factor(name="model", value=0)
    assert (text.code, text.out) == (0, f"{hash_}\nmodel  ({factor.hash[:10]})\n  0\n")
    assert as_json.report == {
        "schema": 1,
        "root": str(tmp_path),
        "hash": hash_,
        "factors": [{"name": "model", "hash": factor.hash, "value": 0}],
    }
    layout.key_file(hash_).write_text("{")
    assert inspect(tmp_path, ("key",))[0].code == 1
    layout.key_file(hash_).unlink()
    gone = inspect(tmp_path, ("key",))[0]
    assert (gone.code, gone.err) == (1, f"Error: Entry {hash_[:10]} has no key.json. Warm the model again.\n")


def test_an_artifact_is_shown_by_digest_and_by_piece(tmp_path):
    hash_ = lay_entry(tmp_path)
    row = manifest_of(tmp_path, hash_).rows[1]
    change(tmp_path, hash_, {"rows": (with_artifact(row, guards=("s0 < 9",), proved=True),)})
    by_piece, by_digest, missing, unknown, ambiguous = inspect(
        tmp_path,
        ("artifact", f"{hash_[:8]}/2"),
        ("artifact", row.artifact.digest[:12], "--json"),
        ("artifact", f"{hash_[:8]}/3"),
        ("artifact", "0" * 64),
        ("artifact", ""),
    )
    assert by_piece.out == (
        f"{row.artifact.digest}.aot\n"
        f"{size_text(row.artifact.size_bytes)}, 1 kernels, proved\n"
        "Target: unknown\n"
        "Compiler: unknown\n"
        "\n"
        "Used by:\n"
        f"  {hash_[:10]} rank 0 backbone, variant 0, piece 2 for general\n"
        "Guards:\n"
        "  s0 < 9\n"
    )
    assert by_digest.report == {
        "schema": 2,
        "root": str(tmp_path),
        "digest": row.artifact.digest,
        "kind": "aot",
        "size_bytes": row.artifact.size_bytes,
        "uses": [
            {
                "hash": hash_,
                "rank": 0,
                "prefix": "backbone",
                "variant": 0,
                "piece_index": 2,
                "shape": {},
                "adaptor": "inductor_standalone",
                "tuned": False,
                "compile_secs": 1.25,
                "kernels": 1,
                "guards": ["s0 < 9"],
                "proved": True,
                "proof_gap": "",
            }
        ],
        "num_kernels": 1,
        "kernels": [],
        "target": {},
        "compiler": {},
        "members": [],
        "sources": [],
        "warnings": [],
    }
    assert missing.err == (
        "Error: No artifact of this entry matches. Name one of these by its digest, or by --shape, --variant, --rank "
        f"and --prefix:\n  {row.artifact.digest[:10]}  piece 2, shape general, variant 0, rank 0, backbone\n"
    )
    assert unknown.err == "Error: No artifact matches. cgtool inspect entry shows the digests of an entry.\n"
    assert {ran.code for ran in (missing, unknown, ambiguous)} == {2}


def test_an_artifact_with_a_wrong_digest_is_refused(tmp_path):
    hash_ = lay_entry(tmp_path)
    row = manifest_of(tmp_path, hash_).rows[0]
    path = ObjectStore(CacheLayout(root=tmp_path).entry_dir(hash_)).path(row.artifact.digest, row.artifact.kind)
    path.chmod(0o644)
    path.write_bytes(b"other")
    ran = inspect(tmp_path, ("artifact", row.artifact.digest, "--json"))[0]
    assert (ran.code, ran.report["error"]["type"]) == (1, "CacheCorruptError")


def test_the_target_and_the_compiler_come_from_the_key(tmp_path):
    hash_ = lay_entry(tmp_path)
    layout = CacheLayout(root=tmp_path)
    factors = [
        Factor(name="target", value={"cpu": {"machine": "x86_64\x1b[2J"}}),
        Factor(name="torch", value={"version": "2.13.0"}),
        Factor(name="compiler", value="GCC 12"),
        Factor(name="triton", value=None),
    ]
    key = Key.of(factors)
    layout.entry_dir(hash_).rename(layout.entry_dir(key.hash))
    layout.key_file(key.hash).write_bytes(key.to_bytes())
    manifest = layout.manifest_file(RankName(hash=key.hash, rank=0, prefix="backbone"))
    data = json.loads(manifest.read_text())
    digest = data["rows"][0]["artifact"]["digest"]
    ran = inspect(tmp_path, ("artifact", digest))[0]
    assert ran.code == 0
    assert "Target:\n  cpu.machine: x86_64\\x1b[2J\nCompiler:\n  torch.version: 2.13.0\n  compiler: GCC 12\n" in ran.out
    assert ran.err.startswith("Warning: ")  # the manifest is for another hash
    assert "No manifest names it.\n" in ran.out


class Page(HTMLParser):
    """Collects the tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def test_a_graph_can_be_written_as_svg_and_html(tmp_path):
    lay_entry(tmp_path, model=EVIL)
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    ran = inspect(tmp_path, ("graph", "--svg", svg, "--html", html))[0]
    assert (ran.code, ran.err) == (0, f"Wrote {svg}\nWrote {html}\n")
    picture = ET.fromstring(svg.read_text())
    assert picture.tag == f"{SVG}svg"
    boxes = picture.findall(f"{SVG}g")
    names = [box.findall(f"{SVG}text")[0].text for box in boxes]
    assert names == [
        "piece 0 · compiled for general",
        "piece 1 · splitting, not compiled",
        "piece 2 · compiled for general",
        "piece 3 · splitting, not compiled",
        "piece 4 · compiled for general",
    ]
    rects = [box.find(f"{SVG}rect") for box in boxes]
    fills = [rect.get("fill") for rect in rects]
    assert fills[1] is fills[3] is None
    assert len({fills[0], fills[2], fills[4]}) == 3
    assert [rect.get("class") for rect in rects] == ["piece", "split", "piece", "split", "piece"]
    assert all(float(rect.get("y")) < float(picture.get("height")) for rect in rects)
    title = picture.find(f"{SVG}title").text
    assert title.startswith("[bold red]Evil\\x1b[2J\\u202e\\n</text… ")
    assert len(title) < 150
    page = Page()
    page.feed(html.read_text())
    assert "script" not in page.tags
    assert page.tags.count("rect") == 6
    loads = {value for name, value in page.attributes if name in {"src", "href", "onload", "onclick"}}
    assert loads == {"data:,"}
    assert re.findall(r"https?://[^\"' ]*", html.read_text()) == ["http://www.w3.org/2000/svg"]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes
    assert "prefers-color-scheme: dark" in svg.read_text()
    assert "\x1b" not in svg.read_text() + html.read_text()


def test_the_picture_is_deterministic(tmp_path):
    lay_entry(tmp_path)
    inspect(tmp_path, ("graph", "--svg", tmp_path / "a.svg"), ("graph", "--svg", tmp_path / "b.svg"))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path):
    lay_entry(tmp_path)
    ran = inspect(tmp_path, ("graph", "--svg", tmp_path / "no" / "a.svg"))[0]
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err == f"Error: {tmp_path}/no/a.svg could not be written: No such file or directory. Name another file.\n"
    )


@pytest.mark.parametrize("what", ["entry", "cache", "key", "artifact"])
def test_untrusted_names_are_escaped_and_truncated(tmp_path, what):
    hash_ = lay_entry(tmp_path, model=EVIL)
    row = manifest_of(tmp_path, hash_).rows[0]
    change(tmp_path, hash_, {"rows": (with_artifact(row, guards=(EVIL,), proof_gap=EVIL),)})
    arguments = {"artifact": (what, row.artifact.digest)}.get(what, (what,))
    text, as_json = inspect(tmp_path, arguments, (*arguments, "--json"))
    assert text.code == as_json.code == 0
    assert text.out.replace("\n", "").isprintable()
    assert "\u202e" not in text.out
    assert max(map(len, text.out.splitlines())) < 400
    assert as_json.out.isascii()
    assert "\x1b" not in as_json.out


def test_untrusted_text_cannot_control_a_terminal(tmp_path):
    hash_ = lay_entry(tmp_path, model=EVIL)
    row = manifest_of(tmp_path, hash_).rows[0]
    shown = {}
    for what in ("cache", "entry", "graph", "artifact"):
        ours, theirs = pty.openpty()
        arguments = [what, row.artifact.digest] if what == "artifact" else [what]
        process = subprocess.Popen(
            [*COMMAND, "inspect", *arguments, "--cache-dir", str(tmp_path)],
            stdout=theirs,
            env=environment(TERM="xterm-256color"),
        )
        os.close(theirs)
        data = b""
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            data += read
            if not read:
                break
        os.close(ours)
        assert process.wait() == 0
        shown[what] = data.decode()
    for text in shown.values():
        assert "\x1b[2J" not in text
        assert "\u202e" not in text
        assert set(re.findall(r"\x1b[^m]*m", text)) <= set(re.findall(r"\x1b\[[0-9;]*m", text))
        assert re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "").isprintable()
