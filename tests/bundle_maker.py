"""Valid and forged bundles, and keys to sign them. Must not import torch."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import zstandard
from cache_samples import sealed

from cgtool.plan.grammar import sha256_hex


@dataclass(frozen=True, kw_only=True)
class File:
    """A member to be written to an archive.

    Args:
        name: Its name.
        data: Its body.
        header: Changes to the header.
        raw: The complete header, instead of all of these.
    """

    name: str
    data: bytes = b""
    header: Mapping[str, object] = field(default_factory=dict)
    raw: bytes | None = None


def index_of(files: Mapping[str, bytes], **changes: object) -> bytes:
    """The text of a bundle.json with arbitrary names and contents, written independently of cgtool."""
    members = [
        {
            "path": name,
            "sha256": sha256_hex(data),
            "size_bytes": len(data),
        }
        for name, data in sorted(files.items())
    ]
    return sealed({"record": "bundle-2", "cgtool": "1.0", "members": members, **changes})


def archive(files: list[File], *, end: bytes = bytes(1024)) -> bytes:
    """A tar archive, written by the standard library."""
    out = b""
    for file in files:
        info = tarfile.TarInfo(file.name)
        info.size, info.mode = len(file.data), 0o444 if "/artifacts/" in file.name else 0o644
        for name, value in file.header.items():
            setattr(info, name, value)
        head = info.tobuf(tarfile.USTAR_FORMAT, "utf-8") if file.raw is None else file.raw
        out += head + file.data + bytes(-len(file.data) % 512)
    return out + end


def packed(data: bytes) -> bytes:
    """A zstd frame."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def opened(data: bytes) -> bytes:
    """The content of a zstd frame."""
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()


@dataclass(frozen=True, kw_only=True)
class Forge:
    """A valid bundle, to be modified.

    Args:
        files: Its members by name, without the index.
        signature: The text of bundle.sig, or None.
    """

    files: Mapping[str, bytes]
    signature: bytes | None = None

    @classmethod
    def of(cls, root: Path, hash_: str) -> Forge:
        """Return the bundle of one entry of a cache."""
        base = root / "torch_compile_cache" / hash_
        return cls(files={str(path.relative_to(root)): path.read_bytes() for path in base.rglob("*") if path.is_file()})

    def name(self, end: str, *, number: int = 0) -> str:
        """The name of the member with this suffix."""
        return sorted(name for name in self.files if name.endswith(end))[number]

    def with_file(self, name: str, data: bytes) -> Forge:
        return replace(self, files={**self.files, name: data})

    def without(self, name: str) -> Forge:
        return replace(self, files={n: data for n, data in self.files.items() if n != name})

    def members(self) -> list[File]:
        """The members in the order of a valid bundle."""
        return [File(name=name, data=data) for name, data in sorted(self.files.items())]

    def heads(self, index: bytes | None = None) -> list[File]:
        heads = [File(name="bundle.json", data=index_of(self.files) if index is None else index)]
        return heads if self.signature is None else [*heads, File(name="bundle.sig", data=self.signature)]

    def bytes(
        self,
        *,
        index: bytes | None = None,
        change: Callable[[list[File]], list[File]] = lambda members: members,
        end: bytes = bytes(1024),
    ) -> bytes:
        """Return the compressed bundle.

        Args:
            index: Replaces the valid index.
            change: Changes the order, headers and bodies of members after the index was created.
            end: The end of the archive.
        """
        return packed(archive([*self.heads(index), *change(self.members())], end=end))

    def edited(self, end: str, edit: Callable[[dict[str, object]], None]) -> Forge:
        """A bundle with a sealed record that was changed and sealed again."""
        name = self.name(end)
        record = json.loads(self.files[name])
        edit(record)
        return self.with_file(name, sealed(record))

    def with_plan(self, plan: bytes) -> Forge:
        """A bundle with another plan and a matching manifest."""
        name = self.name("/plan.json")
        changed = self.with_file(name, plan)

        def edit(manifest: dict[str, object]) -> None:
            manifest["files"]["plan.json"] = {"sha256": sha256_hex(plan), "size_bytes": len(plan)}

        return changed.edited("/manifest.json", edit)

    def with_artifact(self, data: bytes) -> Forge:
        """A bundle with the first artifact replaced, under the digest of the new one."""
        name = self.name(".pt2")
        old, new = name.rpartition("/")[2].removesuffix(".pt2"), sha256_hex(data)
        changed = self.without(name).with_file(name.replace(old, new), data)

        def edit(manifest: dict[str, object]) -> None:
            for row in manifest["rows"]:
                if row["artifact"]["digest"] == old:
                    row["artifact"].update(digest=new, size_bytes=len(data))

        return changed.edited("/manifest.json", edit)


def make_keys(folder: Path, *names: str) -> None:
    """Create Ed25519 keys: `<name>.pem` and `<name>.pub` (PEM) for each name."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}.pub").write_bytes(public)
        (folder / f"{name}.pem").chmod(0o600)
