"""Hostile bundles: what is wrong with each, the reason for which it is refused, and how it is forged."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace

from bundle_maker import File, Forge, archive, index_of, opened, packed
from cache_maker import package
from cache_samples import sealed

from cgtool.plan.grammar import sha256_hex
from cgtool.store.artifacts import Package, pack, unpack

EVIL = b"evil"
HASH = "ab" * 32
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00evil"


def replacing(end: str, **header: object) -> Callable[[Forge], bytes]:
    """Change the header of the member whose name ends with `end`; drop its body if the type has none."""

    def make(forge: Forge) -> bytes:
        name = forge.name(end)
        body = header.get("type", tarfile.REGTYPE) == tarfile.REGTYPE

        def change(members: list[File]) -> list[File]:
            return [replace(m, header=header, data=m.data if body else b"") if m.name == name else m for m in members]

        return forge.bytes(change=change)

    return make


def _beside(*files: File, last: bool = False) -> Callable[[Forge], bytes]:
    """Add files that the index does not name, before or after all others."""
    return lambda forge: forge.bytes(change=lambda members: [*members, *files] if last else [*files, *members])


def _indexed(name: str) -> Callable[[Forge], bytes]:
    """Add a member that the index names."""
    return lambda forge: forge.with_file(name, EVIL).bytes()


def _index(edit: Callable[[dict], object]) -> Callable[[Forge], bytes]:
    """Change the index, and seal it again."""

    def make(forge: Forge) -> bytes:
        record = json.loads(index_of(forge.files))
        edit(record)
        return forge.bytes(index=sealed(record))

    return make


def _edited(end: str, edit: Callable[[dict], object]) -> Callable[[Forge], bytes]:
    return lambda forge: forge.edited(end, edit).bytes()


def _in(folder: str, name: str) -> Callable[[Forge], bytes]:
    """Add an indexed member to the genuine entry."""
    return lambda forge: forge.with_file(
        f"{forge.name('/key.json').removesuffix('/key.json')}{folder}/{name}", EVIL
    ).bytes()


def _plan(edit: Callable[[dict], object]) -> Callable[[Forge], bytes]:
    def make(forge: Forge) -> bytes:
        record = json.loads(forge.files[forge.name("/plan.json")])
        edit(record)
        return forge.with_plan(json.dumps(record).encode()).bytes()

    return make


def _zip(**members: bytes) -> bytes:
    """Return a package with additional members."""
    out = io.BytesIO(package("more"))
    with zipfile.ZipFile(out, "a") as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(f"piece/data/aotinductor/model/{name}"), data)
    return out.getvalue()


def _deflated() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(package("small"))) as source, zipfile.ZipFile(out, "w") as file:
        for info in source.infolist():
            file.writestr(info.filename, source.read(info), compress_type=zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _artifact(data: bytes) -> Callable[[Forge], bytes]:
    return lambda forge: forge.with_artifact(data).bytes()


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _bad_checksum(forge: Forge) -> bytes:
    return packed(_flipped(opened(forge.bytes()), 100))


def _padded(forge: Forge) -> bytes:
    data = opened(forge.bytes())
    return packed(data[: -1024 - 1] + b"x" + data[-1024:])


def _twice(forge: Forge) -> bytes:
    """Repeat a member in the index and in the archive."""
    name = forge.name("/key.json")
    record = json.loads(index_of(forge.files))
    row = next(member for member in record["members"] if member["path"] == name)
    record["members"].insert(record["members"].index(row), row)
    return forge.bytes(index=sealed(record), change=lambda ms: [m for m in ms for _ in range(1 + (m.name == name))])


def _other_bytes(forge: Forge) -> bytes:
    name = forge.name(".pt2")
    return forge.bytes(change=lambda ms: [replace(m, data=_flipped(m.data, 900)) if m.name == name else m for m in ms])


def _missing(forge: Forge) -> bytes:
    return forge.bytes(change=lambda members: members[:-1])


def _swapped(forge: Forge) -> bytes:
    return forge.bytes(change=lambda members: [members[1], members[0], *members[2:]])


def _misnamed(forge: Forge) -> bytes:
    name = forge.name(".pt2")
    return forge.without(name).with_file(name.replace(name.split("/")[-1], f"{HASH}.pt2"), forge.files[name]).bytes()


def _deep(forge: Forge) -> bytes:
    return forge.bytes(index=b"[" * 100_000 + b"]" * 100_000)


def _pax(name: str) -> File:
    return File(name="x", data=f"{len(name) + 10} path={name}\n".encode(), header={"type": tarfile.XHDTYPE})


def _zeros(forge: Forge) -> bytes:
    data = pack(Package(native=bytes(48 * 2**20), metadata={}))
    return forge.with_artifact(data).bytes()


def _texts(record: dict) -> None:
    record["texts"] = {"parents": list(range(-1, 29_999)), "ends": ["a" * 100] * 30_000}


CORPUS = {
    # Names
    "a parent in the index": ("parent_path", _indexed("torch_compile_cache/../../evil")),
    "a parent in the archive": ("parent_path", _beside(File(name="../evil", data=EVIL))),
    "a parent at the end": (
        "parent_path",
        _beside(File(name=f"torch_compile_cache/{HASH}/../../../evil", data=EVIL), last=True),
    ),
    "an absolute name in the index": ("absolute_name", _indexed("/tmp/evil")),
    "an absolute name in the archive": ("absolute_name", _beside(File(name="/etc/evil", data=EVIL))),
    "a backslash": ("strange_name", _indexed(f"torch_compile_cache/{HASH}\\key.json")),
    "a newline and an escape": ("strange_name", _indexed("torch_compile_cache/\n\x1b[2J")),
    "a dot": ("strange_name", _indexed(f"torch_compile_cache/./{HASH}/key.json")),
    "an empty part": ("strange_name", _indexed(f"torch_compile_cache//{HASH}/key.json")),
    "a letter that is not ASCII": ("strange_name", _in("/rank_0/bäckbone", "plan.json")),
    "another folder of a cache": ("outside_layout", _indexed(f"torch_compile_cache/units/ab/{HASH}/unit.json")),
    "a hidden file": ("outside_layout", _in("/rank_0/backbone", ".plan.json.next")),
    "a file with a name that load does not read": ("outside_layout", _in("/rank_0/backbone", "sitecustomize.py")),
    "a rank with leading zeros": ("outside_layout", _in("/rank_00/backbone", "plan.json")),
    "a file beside the cache": ("outside_layout", _indexed("CACHEDIR.TAG")),
    "a signature inside an entry": ("outside_layout", _in("/signatures", f"{HASH}.sig")),
    "an unknown kind of artifact": ("unknown_kind", _in("/artifacts", f"{sha256_hex(EVIL)}.so")),
    "two names that differ in case": ("case_collision", _in("/rank_0/Backbone", "plan.json")),
    "two files that differ in case": ("outside_layout", _in("", "KEY.json")),
    "two folders that differ in case": ("case_collision", _in("/rank_0/BACKBONE", "computation_graph.py")),
    "two spellings of one name": (
        "strange_name",
        lambda forge: forge.with_file("caf\u00e9", EVIL).with_file("cafe\u0301", EVIL).bytes(),
    ),
    "a member twice in the index": ("duplicate_member", _twice),
    "a member twice in the archive": (
        "duplicate_member",
        lambda forge: forge.bytes(change=lambda members: [*members, members[0]]),
    ),
    "a second index": ("duplicate_member", lambda forge: forge.bytes(change=lambda ms: [*forge.heads(), *ms])),
    # Types
    "a symbolic link": ("link", replacing("/key.json", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "a hard link": ("link", replacing("/key.json", type=tarfile.LNKTYPE, linkname="bundle.json")),
    "an additional link": (
        "link",
        _beside(File(name="torch_compile_cache", header={"type": tarfile.SYMTYPE, "linkname": "/"})),
    ),
    "a character device": ("device", replacing("/key.json", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "a block device": ("device", replacing("/key.json", type=tarfile.BLKTYPE, devmajor=8)),
    "a named pipe": ("fifo", replacing("/key.json", type=tarfile.FIFOTYPE)),
    "a folder": ("folder_member", _beside(File(name="torch_compile_cache", header={"type": tarfile.DIRTYPE}))),
    "a sparse file": ("sparse", replacing("/key.json", type=tarfile.GNUTYPE_SPARSE)),
    "an extended header": ("pax_header", _beside(_pax("../evil"))),
    "a global extended header": (
        "pax_header",
        _beside(File(name="g", data=b"11 path=ab\n", header={"type": tarfile.XGLTYPE})),
    ),
    "a GNU long name": (
        "pax_header",
        _beside(File(name="././@LongLink", data=b"../evil\0", header={"type": tarfile.GNUTYPE_LONGNAME})),
    ),
    "a contiguous file": ("strange_type", replacing("/key.json", type=tarfile.CONTTYPE)),
    "an old file type": ("strange_type", replacing("/key.json", type=tarfile.AREGTYPE)),
    # Headers
    "a wrong checksum": ("bad_header", _bad_checksum),
    "a modification time": ("bad_header", replacing("/key.json", mtime=1)),
    "an owner": ("bad_header", replacing("/key.json", uid=1000, uname="evil")),
    "a setuid mode": ("bad_header", replacing("/key.json", mode=0o4755)),
    "a world-writable mode": ("bad_header", replacing(".pt2", mode=0o666)),
    "a link name of a plain file": ("bad_header", replacing("/key.json", linkname="/etc/passwd")),
    # Sizes
    "a size of terabytes": ("too_large", _index(lambda r: r["members"][0].update(size_bytes=2**45))),
    "a manifest of gigabytes": ("too_large", _index(lambda r: r["members"][-1].update(size_bytes=2**30))),
    "a negative size": ("bad_index", _index(lambda r: r["members"][0].update(size_bytes=-1))),
    "another size in the archive": ("size_mismatch", _index(lambda r: r["members"][0].update(size_bytes=5))),
    "endless zeros": ("bomb", _zeros),
    "a plan of long texts": ("corrupt_plan", _plan(_texts)),
    # The frame and the archive
    "an empty file": ("not_a_bundle", lambda forge: b""),
    "a text": ("not_a_bundle", lambda forge: b"no bundle at all, only words"),
    "an uncompressed archive": ("not_a_bundle", lambda forge: opened(forge.bytes())),
    "an archive without an index": ("not_a_bundle", lambda forge: packed(archive(forge.members()))),
    "an empty archive": ("not_a_bundle", lambda forge: packed(bytes(1024))),
    "a truncated frame": ("truncated", lambda forge: forge.bytes()[:-7]),
    "only the start of a frame": ("truncated", lambda forge: forge.bytes()[:40]),
    "a truncated archive in a whole frame": ("truncated", lambda forge: packed(opened(forge.bytes())[:-3000])),
    "an archive without its end": ("truncated", lambda forge: forge.bytes(end=b"")),
    "half an end": ("truncated", lambda forge: forge.bytes(end=bytes(512))),
    "bytes after the frame": ("trailing_data", lambda forge: forge.bytes() + b"x"),
    "a second frame": ("trailing_data", lambda forge: forge.bytes() * 2),
    "a skippable frame": ("trailing_data", lambda forge: forge.bytes() + SKIPPABLE),
    "a leading skippable frame": ("not_a_bundle", lambda forge: SKIPPABLE + forge.bytes()),
    "blocks after the end": ("trailing_data", lambda forge: forge.bytes(end=bytes(2048))),
    "an archive after the end": ("trailing_data", lambda forge: packed(opened(forge.bytes()) + opened(forge.bytes()))),
    "bytes between members": ("trailing_data", _padded),
    "a byte of the frame flipped": ("bad_compression", lambda forge: _flipped(forge.bytes(), -2)),
    "a dictionary": (
        "not_a_bundle",
        lambda forge: b"\x28\xb5\x2f\xfd\x01\x58\x01" + forge.bytes()[6:],
    ),
    # The index
    "an index that is not JSON": ("bad_index", lambda forge: forge.bytes(index=b"{")),
    "a deeply nested index": ("bad_index", _deep),
    "an index with a wrong digest": (
        "bad_index",
        lambda forge: forge.bytes(index=index_of(forge.files).replace(b'"1.0"', b'"1.1"')),
    ),
    "an index with another field": ("bad_index", _index(lambda r: r.update(run="me"))),
    "an index with another spelling": (
        "bad_index",
        lambda forge: forge.bytes(index=index_of(forge.files).replace(b",", b" ,", 1)),
    ),
    "an index out of order": ("bad_index", _index(lambda r: r["members"].reverse())),
    "an empty index": ("bad_index", lambda forge: Forge(files={}).bytes()),
    "an index that sets a mode": ("bad_index", _index(lambda r: r["members"][0].update(mode="4755"))),
    "a newer schema": ("unknown_schema", _index(lambda r: r.update(record="bundle-3"))),
    "no schema": ("bad_index", lambda forge: forge.bytes(index=b"{}")),
    "an invalid digest": ("bad_index", _index(lambda r: r["members"][-1].update(sha256="../evil"))),
    # Members against the index
    "bytes that do not match the digest": ("digest_mismatch", _other_bytes),
    "an artifact under another digest": ("digest_mismatch", _misnamed),
    "a missing member": ("missing_member", _missing),
    "members out of order": ("missing_member", _swapped),
    "an unlisted member": ("unlisted_member", _beside(File(name=f"torch_compile_cache/{HASH}/key.json", data=EVIL))),
    "an entry without a key": ("missing_member", lambda forge: forge.without(forge.name("/key.json")).bytes()),
    "a rank without a plan": ("missing_member", lambda forge: forge.without(forge.name("/plan.json")).bytes()),
    "only a key": (
        "missing_member",
        lambda forge: Forge(files={n: d for n, d in forge.files.items() if n.endswith("/key.json")}).bytes(),
    ),
    "a missing artifact": ("missing_artifact", lambda forge: forge.without(forge.name(".pt2")).bytes()),
    "an artifact that nothing names": (
        "unnamed_artifact",
        lambda forge: forge.with_file(
            forge.name(".pt2").rpartition("/")[0] + f"/{sha256_hex(EVIL)}.json", EVIL
        ).bytes(),
    ),
    "a file that its manifest does not name": (
        "unlisted_member",
        _edited("/manifest.json", lambda r: r["files"].pop("computation_graph.py")),
    ),
    # Records
    "a key of another hash": (
        "corrupt_key",
        _edited("/key.json", lambda r: r["factors"].update(model=7)),
    ),
    "a torn key": ("corrupt_key", lambda forge: forge.with_file(forge.name("/key.json"), b"{").bytes()),
    "a manifest of another folder": ("corrupt_manifest", _edited("/manifest.json", lambda r: r.update(rank=1))),
    "a manifest with a path as prefix": (
        "corrupt_manifest",
        _edited("/manifest.json", lambda r: r.update(prefix="../x")),
    ),
    "a manifest of a newer schema": (
        "unknown_schema",
        _edited("/manifest.json", lambda r: r.update(record="manifest-99")),
    ),
    "a manifest with another plan's digest": (
        "digest_mismatch",
        _edited("/manifest.json", lambda r: r["files"]["plan.json"].update(sha256=HASH)),
    ),
    "a manifest with another size": (
        "size_mismatch",
        _edited("/manifest.json", lambda r: [row["artifact"].update(size_bytes=1) for row in r["rows"]]),
    ),
    "a plan that is not JSON": ("corrupt_plan", lambda forge: forge.with_plan(b"import os").bytes()),
    "a deeply nested plan": (
        "corrupt_plan",
        lambda forge: forge.with_plan(b"[" * 100_000 + b"]" * 100_000).bytes(),
    ),
    "a plan of a newer schema": ("unknown_schema", _plan(lambda r: r.update(schema=99))),
    "a plan without a piece": ("corrupt_plan", _plan(lambda r: r["variants"][0]["steps"].pop())),
    "a plan with another variant": ("corrupt_plan", _plan(lambda r: r["variants"].append(r["variants"][0]))),
    # Packages
    "a package with a source": ("strange_package", _artifact(_zip(**{"model.wrapper.cpp": b"int main;"}))),
    "a package with another library": ("strange_package", _artifact(_zip(**{"evil.so": b"\x7fELF"}))),
    "a package with a path": ("strange_package", _artifact(_zip(**{"../../evil.cubin": b"x"}))),
    "a compressed package": ("strange_package", _artifact(_deflated())),
    "a package with bytes before it": ("strange_package", _artifact(b"evil" + package("before"))),
    "a package that is not an archive": ("strange_package", _artifact(b"\x7fELF and so on")),
}


def _with_plan(edit: Callable[[dict], object]) -> Callable[[Forge], Forge]:
    """Change the plan, and update all digests of it."""

    def make(forge: Forge) -> Forge:
        record = json.loads(forge.files[forge.name("/plan.json")])
        edit(record)
        return forge.with_plan(json.dumps(record).encode())

    return make


def _frame(edit: Callable[[dict], object]) -> Callable[[Forge], Forge]:
    return _with_plan(lambda r: edit(r["graphs"]["frames"][0]))


def _with_rows(edit: Callable[[list[dict]], object]) -> Callable[[Forge], Forge]:
    return lambda forge: forge.edited("/manifest.json", lambda r: edit(r["rows"]))


def _exchanged(rows: list[dict]) -> None:
    first, *_, last = [row for row in rows if row["artifact"]["kind"] == "pt2"]
    first["artifact"], last["artifact"] = last["artifact"], first["artifact"]


def _renamed(rows: list[dict]) -> None:
    for row in rows:
        row["shape"] = {f"{dim}_too": sizes for dim, sizes in row["shape"].items()}


def _resized(rows: list[dict]) -> None:
    row = next(row for row in rows if row["shape"])
    row["shape"] = {dim: [low, high + 7] for dim, (low, high) in row["shape"].items()}


def _without_origin(forge: Forge) -> Forge:
    package = unpack(forge.files[forge.name(".pt2")])
    return forge.with_artifact(pack(Package(native=package.native, metadata=package.metadata)))


#: Bundles with consistent digests but contents that cgtool never writes; tested as an archive and as a folder.
CONSISTENT = {
    "a method that is not a string": ("corrupt_plan", _with_plan(lambda r: r.update(method=5))),
    "a method that is code": ("corrupt_plan", _with_plan(lambda r: r.update(method="forward();evil"))),
    "a class that is code": ("corrupt_plan", _with_plan(lambda r: r.update(qualname="os:system('evil')"))),
    "an op that is code": ("corrupt_plan", _frame(lambda g: g["nodes"][0].__setitem__(1, "torch.sin;evil"))),
    "an argument that is code": ("corrupt_plan", _frame(lambda g: g["nodes"][0].__setitem__(3, {"a=evil(), b": 1}))),
    "an output that is code": ("corrupt_plan", _frame(lambda g: g.update(outputs=["%0 or evil"]))),
    "a dtype that is code": ("corrupt_plan", _frame(lambda g: g["inputs"][0].__setitem__(0, "float32 or evil"))),
    "a device that is a path": ("corrupt_plan", _frame(lambda g: g["inputs"][0].__setitem__(3, "/dev/evil"))),
    "a symbol that is code": ("corrupt_plan", _frame(lambda g: g["symbols"][0].__setitem__(0, "s0=evil"))),
    "a size that is code": ("corrupt_plan", _frame(lambda g: g["inputs"][0].__setitem__(1, ["__import__('os')", 1]))),
    "a size beyond any memory": ("corrupt_plan", _frame(lambda g: g["inputs"][0].__setitem__(1, [2**70, 1]))),
    "a graph that was changed": ("corrupt_plan", _frame(lambda g: g.update(aliases=[[0, 0]]))),
    "a duplicate graph": (
        "corrupt_plan",
        _with_plan(lambda r: r["graphs"]["members"].append(r["graphs"]["members"][0])),
    ),
    "a step with an unknown graph": (
        "corrupt_plan",
        _with_plan(lambda r: r["variants"][0]["steps"][0].__setitem__(2, 99)),
    ),
    "a guard with an unknown text": ("corrupt_plan", _with_plan(lambda r: r["guards"].append(["value", 1, [10**6]]))),
    "artifacts exchanged": ("strange_artifact", _with_rows(_exchanged)),
    "a dimension renamed": ("strange_artifact", _with_rows(_renamed)),
    "a size relabelled": ("strange_artifact", _with_rows(_resized)),
    "an artifact of another adaptor": (
        "strange_artifact",
        _with_rows(lambda rows: [row.update(adaptor="inductor") for row in rows]),
    ),
    "a package without its origin": ("strange_artifact", _without_origin),
    "a range from 0": ("corrupt_manifest", _with_rows(lambda rows: rows[0].update(shape={"n": [0, 5]}))),
    "a shape without dimensions": ("corrupt_manifest", _with_rows(lambda rows: rows[0].update(shape=[8, 8]))),
}
