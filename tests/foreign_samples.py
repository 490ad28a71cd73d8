"""Sample caches of other systems, from fixtures/caches."""

from __future__ import annotations

import struct
import tarfile
import zlib
from pathlib import Path

from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry

CACHES = Path(__file__).resolve().parents[1] / "fixtures" / "caches"
SAMPLES = {
    "vllm": "vllm",
    "vllm-old": "vllm",
    "atom": "atom",
    "torch_inductor": "torch_inductor",
    "triton": "triton",
    "mega_cache": "mega_cache",
    "compiled_artifact": "compiled_artifact",
}
#: The modification time of all files of the samples.
WRITTEN = "2026-11-21T12:00:00.000Z"

HASH = "torch_compile_cache/1572951577"
RANK = f"{HASH}/rank_0_0"
PIECES = f"{RANK}/backbone"
AOT = "723f935e3a4a27b111a781b0610ddf09ca90628089f12eddeb4e2f5277e3b851"
FX_KEY = "f3qmo5gms55npcitxii4z77iwei4ydi2ew54emwjagtjsi5konrv"
AOT_KEY = "acgp266bmq66t3r6zhfixuz4n54fxrjqoc5vwkjlv2uwqyxgyd5n"
TORCH_KEY = "d34d1007edd62bb52cb10ffdeb5f6e36975ee877f120be2df6df7e8d3dd2e62c"
SCALE = "GH3I6RWKZUZXIUPED6PSHIIXCCFXMBSHBB577KUBWIVR7HYUXOYQ"


def unpack(name: str, folder: Path) -> Path:
    """Unpack a sample into a folder and return its path."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(CACHES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def entry_of(cache: ForeignCache, name: str) -> ForeignEntry:
    (entry,) = [entry for entry in cache.entries if entry.name == name]
    return entry


def artifact_of(entry: ForeignEntry, path: str) -> ForeignArtifact:
    (artifact,) = [artifact for artifact in entry.artifacts if artifact.path == path]
    return artifact


#: Unpickling this creates a file.
BOMB = b"\x80\x04cposix\nsystem\n(S'touch HARM'\ntR."


def sealed(*parts: bytes) -> bytes:
    rest = b"".join(parts)
    return zlib.crc32(rest).to_bytes(4, "big") + rest


def number(value: int) -> bytes:
    return struct.pack(">Q", value)


def field(data: bytes) -> bytes:
    return number(len(data)) + data


KIND = field(b"aW5kdWN0b3I=")
KEY = field(b"Zm9v")
