"""Write a cache as a container image, for `COPY --from` and for pods that mount images. Must not import torch.

Each artifact is one layer, a tar of that file without times and owners, so that images of models that share an artifact
share its layer. The last layer holds everything that differs between entries::

    torch_compile_cache/artifacts/<sha256>.<kind>          one layer each
    torch_compile_cache/<hash>/artifacts/<sha256>.<kind>   in the last layer: a symlink to the artifact
    torch_compile_cache/<hash>/...                         in the last layer: other files, as in `export --folder`

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
#: Container engines allow 127 layers, and a build on top needs some. Further artifacts, the smallest, share a layer.
_MAX_SINGLE_LAYERS = 100
#: Processor names in image configurations.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "": platform.machine()}


class _Member(NamedTuple):
    info: tarfile.TarInfo
    chunks: Iterable[bytes] = ()


class ImageTag:
    """A registry tag, oci://HOST/REPOSITORY[:TAG], as the destination of an image."""

    def __init__(self, url: str) -> None:
        self._store = OciStore(url)
        self.url = self._store.url
        existing = self._store.manifest()
        if existing is None:
            return
        if existing.config.mediaType not in IMAGE_CONFIG_TYPES or f"{LABEL}/entry-count" not in existing.annotations:
            message = f"{self.url} exists and is not an image of a cache. Name another tag."
            raise UsageError(message, path=self.url, actual=existing.config.mediaType)

    def write(self, contents: Contents, heads: Mapping[str, bytes]) -> int:
        """Write an image of a cache's contents and additional files; return the total size of its layers."""
        keys = list(_keys(contents))
        machines = sorted({machine_of(key) for key in keys})
        if len(machines) > 1:
            message = f"An image is for one processor architecture, and these entries are for {' and '.join(machines)}."
            raise UsageError(f"{message} Choose entries for one of them.", path=self.url, actual=machines)
        groups = [*_artifacts(contents), _records(contents, heads)]
        size_bytes = sum(member.info.size for group in groups for member in group)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cgtool-image") as pool:
            layers = tuple(pool.map(self._upload, groups))
        annotations = labels(contents.index.hashes, [target for key in keys for target in targets_of(key)], size_bytes)
        config = {
            "architecture": _ARCHITECTURES.get(machines[0], machines[0]),
            "os": "linux",
            "config": {"Labels": annotations},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
        image = self._store.upload(msgspec.json.encode(config), IMAGE_CONFIG_TYPES[0])
        self._store.write_manifest(Manifest(config=image, layers=layers, annotations=annotations))
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
    """Return the artifact members of each layer, largest first."""
    by_file = {content.member.place.file: content for content in contents.contents if content.file is not None}
    ordered = sorted(by_file.items(), key=lambda named: (-named[1].member.size_bytes, named[0]))
    members = [
        _member(f"{_POOL}/{file}", tarfile.REGTYPE, ARTIFACT_MODE, content.member.size_bytes, content.chunks())
        for file, content in ordered
    ]
    single, shared = members[:_MAX_SINGLE_LAYERS], members[_MAX_SINGLE_LAYERS:]
    return [*([member] for member in single), *([shared] if shared else [])]


def _records(contents: Contents, heads: Mapping[str, bytes]) -> list[_Member]:
    """Return the members of the last layer: folders, records, and the symlinks to artifacts."""
    files = {
        **heads,
        **{content.member.path: content.data for content in contents.contents if content.data is not None},
    }
    links = [content.member for content in contents.contents if content.file is not None]
    folders = names_of_folders([*files, *(member.path for member in links), f"{_POOL}/"])
    members = [_member(name, tarfile.DIRTYPE, _FOLDER_MODE) for name in sorted(folders)]
    members += [_member(name, tarfile.REGTYPE, RECORD_MODE, len(data), [data]) for name, data in sorted(files.items())]
    for member in links:
        link = _member(member.path, tarfile.SYMTYPE, 0o777)
        link.info.linkname = f"../../{ARTIFACTS}/{member.place.file}"
        members.append(link)
    return members


def _member(name: str, kind: bytes, mode: int, size_bytes: int = 0, chunks: Iterable[bytes] = ()) -> _Member:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, mode, size_bytes
    return _Member(info, chunks)
