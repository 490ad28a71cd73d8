"""A container image of a cache in a registry, for `COPY --from` and for pods that mount images. Needs no torch.

An artifact is a layer of its own, a tar of that one file without times and users, so that the images of all models that
share an artifact share its layer. What differs from entry to entry is in the last layer::

    torch_compile_cache/artifacts/<sha256>.<kind>          a layer each
    torch_compile_cache/<hash>/artifacts/<sha256>.<kind>   in the last layer: a link to it
    torch_compile_cache/<hash>/...                         in the last layer: the rest, as `export --folder` writes it

*Source*: the image specification of the Open Container Initiative, version 1.1.
"""

from __future__ import annotations

import platform
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from cgtool.errors import UsageError
from cgtool.remote.entries import AT_ONCE
from cgtool.remote.oci import IMAGE_CONFIG_TYPES, LABEL, Layer, Manifest, OciStore, labels, machine_of, targets_of
from cgtool.store.bundle.gather import Contents
from cgtool.store.bundle.reading import END, padding
from cgtool.store.bundle_index import names_of_folders
from cgtool.store.files import ARTIFACT_MODE, RECORD_MODE
from cgtool.store.layout import ARTIFACTS, CACHE_FOLDER, KEY_FILE
from cgtool.store.records import Key, parse_key

_POOL = f"{CACHE_FOLDER}/{ARTIFACTS}"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_FOLDER_MODE = 0o755
#: Container engines stack 127 layers, of which a build on top needs some: the smallest of more artifacts share one.
_MOST_ALONE = 100
#: What the makers of images call processors.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "": platform.machine()}


class _Member(NamedTuple):
    info: tarfile.TarInfo
    chunks: Iterable[bytes] = ()


class ImageTag:
    """A tag of a registry, oci://HOST/REPOSITORY[:TAG], that an image is written to."""

    def __init__(self, url: str) -> None:
        self._store = OciStore(url)
        self.url = self._store.url
        there = self._store.manifest()
        if there is None:
            return
        if there.config.mediaType not in IMAGE_CONFIG_TYPES or f"{LABEL}/entry-count" not in there.annotations:
            message = f"{self.url} holds something else than an image of a cache. Name another tag."
            raise UsageError(message, path=self.url, actual=there.config.mediaType)

    def write(self, contents: Contents, heads: Mapping[str, bytes]) -> int:
        """Write an image of what a cache holds, and of further files by name; return the bytes that its layers hold."""
        keys = list(_keys(contents))
        machines = sorted({machine_of(key) for key in keys})
        if len(machines) > 1:
            message = f"An image is for processors of one kind, and these entries are for {' and '.join(machines)}."
            raise UsageError(f"{message} Name some of them.", path=self.url, actual=machines)
        groups = [*_artifacts(contents), _records(contents, heads)]
        size_bytes = sum(member.info.size for group in groups for member in group)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cgtool-image") as pool:
            layers = tuple(pool.map(self._upload, groups))
        said = labels(contents.index.hashes, [target for key in keys for target in targets_of(key)], size_bytes)
        config = {
            "architecture": _ARCHITECTURES.get(machines[0], machines[0]),
            "os": "linux",
            "config": {"Labels": said},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
        image = self._store.upload(msgspec.json.encode(config), IMAGE_CONFIG_TYPES[0])
        self._store.write_manifest(Manifest(config=image, layers=layers, annotations=said))
        return sum(layer.size for layer in layers)

    def _upload(self, members: Iterable[_Member]) -> Layer:
        with tempfile.NamedTemporaryFile(prefix="cgtool-layer-") as file:
            for member in members:
                file.write(member.info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))
                file.writelines(member.chunks)
                file.write(padding(member.info.size))
            file.write(END)
            file.flush()
            return self._store.upload(Path(file.name), _LAYER_TYPE)


def _keys(contents: Contents) -> Iterator[Key]:
    for content in contents.contents:
        place = content.member.place
        if place.file == KEY_FILE and content.data is not None:
            yield parse_key(content.data, path=Path(content.member.path), hash_=place.hash)


def _artifacts(contents: Contents) -> list[list[_Member]]:
    """The artifacts of each layer, the largest first."""
    found = {content.member.place.file: content for content in contents.contents if content.file is not None}
    ordered = sorted(found.items(), key=lambda named: (-named[1].member.size_bytes, named[0]))
    members = [
        _member(f"{_POOL}/{file}", tarfile.REGTYPE, ARTIFACT_MODE, content.member.size_bytes, content.chunks())
        for file, content in ordered
    ]
    alone, together = members[:_MOST_ALONE], members[_MOST_ALONE:]
    return [*([member] for member in alone), *([together] if together else [])]


def _records(contents: Contents, heads: Mapping[str, bytes]) -> list[_Member]:
    """All that is no artifact, folders first, and the links to artifacts."""
    files = {**heads, **{one.member.path: one.data for one in contents.contents if one.data is not None}}
    links = [content.member for content in contents.contents if content.file is not None]
    folders = names_of_folders([*files, *(member.path for member in links), f"{_POOL}/"])
    found = [_member(name, tarfile.DIRTYPE, _FOLDER_MODE) for name in sorted(folders)]
    found += [_member(name, tarfile.REGTYPE, RECORD_MODE, len(data), [data]) for name, data in sorted(files.items())]
    for member in links:
        link = _member(member.path, tarfile.SYMTYPE, 0o777)
        link.info.linkname = f"../../{ARTIFACTS}/{member.place.file}"
        found.append(link)
    return found


def _member(name: str, kind: bytes, mode: int, size_bytes: int = 0, chunks: Iterable[bytes] = ()) -> _Member:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, mode, size_bytes
    return _Member(info, chunks)
