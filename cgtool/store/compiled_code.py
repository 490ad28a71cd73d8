"""What compilers wrote, for people: the kernels in native code, and the sources that Inductor generated. No torch.

Everything here is read as data and nothing is executed; what is torn or of another make says nothing, for this is only
ever shown to people. Of a 64-bit little-endian ELF file this reads::

    header     e_machine (190 is CUDA), e_flags (a CUDA target), the section headers
    .symtab    names of functions; `cpp_fused_*` are the kernels that Inductor wrote in C++
    .comment   which compiler made it
    .text.K    a CUDA kernel K: the upper byte of sh_info is its number of registers
    .nv.info   records (format u8, attribute u8, then a u16, and where the format is 4 so many bytes): attribute 0x2f is
               (symbol u32, registers u32)
    .nv.shared.K   its size is the static shared memory of K; `.nv.constant0.K` that of its parameters and constants

Source: the System V ABI for ELF; NVIDIA's attributes as `cuobjdump -elf` and `-res-usage` show them.

Artifacts of `inductor_standalone` and `inductor` hold pickles of torch's. A pickle writes a text as its opcode, its
length and its UTF-8 bytes: that is looked for and nothing is unpickled::

    "X" length u32 little-endian, text      BINUNICODE, also within the bytes of a pickle that another one holds
"""

from __future__ import annotations

import glob
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cgtool.store.files import is_temporary
from cgtool.store.layout import GENERATED, CacheLayout, RankName

_MAGIC = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_CUDA, _FUNCTION, _SYMTAB, _NOBITS = 190, 2, 2, 8
_REGCOUNT, _SIZED = 0x2F, 4
_MOST_SECTIONS, _MOST_SYMBOLS = 10_000, 200_000
_CPP_KERNEL = re.compile(rb"(cpp_[A-Za-z0-9_]{1,300}|triton_[A-Za-z0-9_]{1,300})\Z")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel, as its code says it; what it does not say is None."""

    name: str
    #: For each thread.
    registers: int | None = None
    #: What is asked for at each launch is not in it.
    shared_bytes: int | None = None
    #: Its parameters and constants.
    constant_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class NativeCode:
    """What a file of native code says of itself; the target, "sm_90", is a cubin's."""

    target: str | None = None
    compiler: str | None = None
    kernels: tuple[Kernel, ...] = ()


def read_native(data: bytes) -> NativeCode:
    """Return what a file of native code says of itself; nothing where it is no ELF file or a torn one."""
    try:
        return _read(data)
    except (struct.error, IndexError, OverflowError, ValueError):
        return NativeCode()


@dataclass(frozen=True, kw_only=True)
class _Section:
    name: bytes
    type: int
    offset: int
    size: int
    link: int
    info: int

    def body(self, data: bytes) -> bytes:
        return b"" if self.type == _NOBITS else data[self.offset : self.offset + self.size]


def _read(data: bytes) -> NativeCode:
    if not data.startswith(_MAGIC):
        return NativeCode()
    fields = _HEADER.unpack_from(data)
    machine, flags = fields[2], fields[7]
    sections = _sections(data, fields)
    if machine == _CUDA:
        return NativeCode(target=_cuda_target(flags), kernels=tuple(_cuda_kernels(data, sections)))
    names = {
        name.decode("ascii") for name, kind in _symbols(data, sections) if kind == _FUNCTION and _CPP_KERNEL.match(name)
    }
    comment = next((section.body(data) for section in sections if section.name == b".comment"), b"")
    compiler = comment.split(b"\0")[0].decode("utf-8", "replace")
    return NativeCode(compiler=compiler or None, kernels=tuple(Kernel(name=name) for name in sorted(names)))


def _sections(data: bytes, fields: tuple[int, ...]) -> list[_Section]:
    start, size, count, names_at = fields[6], fields[11], fields[12], fields[13]
    if size != _SECTION.size or count > _MOST_SECTIONS:
        return []
    raw = [_SECTION.unpack_from(data, start + number * size) for number in range(count)]
    names = data[raw[names_at][4] : raw[names_at][4] + raw[names_at][5]] if raw else b""
    return [
        _Section(name=_text_at(names, one[0]), type=one[1], offset=one[4], size=one[5], link=one[6], info=one[7])
        for one in raw
    ]


def _symbols(data: bytes, sections: list[_Section]) -> Iterator[tuple[bytes, int]]:
    """Yield every symbol's name and kind, in order."""
    table = next((section for section in sections if section.type == _SYMTAB), None)
    if table is None:
        return
    names = sections[table.link].body(data)
    body = table.body(data)
    for number in range(min(len(body) // _SYMBOL.size, _MOST_SYMBOLS)):
        name, info, *_ = _SYMBOL.unpack_from(body, number * _SYMBOL.size)
        yield _text_at(names, name), info & 15


def _cuda_kernels(data: bytes, sections: list[_Section]) -> Iterator[Kernel]:
    by_name = {section.name: section for section in sections}
    symbols = [name for name, _ in _symbols(data, sections)]
    info = by_name.get(b".nv.info")
    counted = {} if info is None else {symbols[number]: count for number, count in _register_counts(info.body(data))}
    for section in sections:
        name = section.name.removeprefix(b".text.")
        if name == section.name or not name:
            continue
        shared, constant = by_name.get(b".nv.shared." + name), by_name.get(b".nv.constant0." + name)
        yield Kernel(
            name=name.decode("utf-8", "replace"),
            registers=counted.get(name, section.info >> 24) or None,
            shared_bytes=0 if shared is None else shared.size,
            constant_bytes=None if constant is None else constant.size,
        )


def _register_counts(info: bytes) -> Iterator[tuple[int, int]]:
    """Yield (number of a symbol, its registers)."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if attribute == _REGCOUNT:
                yield struct.unpack_from("<II", info, at)
            at += value


def _cuda_target(flags: int) -> str | None:
    # The architecture stood in the lowest byte up to CUDA 12, and stands in the second one since.
    number = flags & 0xFF if flags & 0xFF >= 10 else flags >> 8 & 0xFF  # noqa: PLR2004 - sm_10 was the first
    return f"sm_{number}" if number else None


def _text_at(names: bytes, at: int) -> bytes:
    return names[at : names.index(b"\0", at)]


#: What every module that Inductor writes holds.
_MARK = re.compile(rb"# AOT ID: |async_compile\.wait\(globals\(\)\)")
_OPCODE, _LENGTH_BYTES = b"X", 4
#: How much of an artifact's digest names its folder.
_NAME_DIGITS = 16
#: How far before a mark a text may begin, and how long it may be.
_MOST_BYTES = 4 << 20
#: How many bytes are taken for an opcode in all: who writes more of them means to keep us busy.
_MOST_TRIES = 100_000


def generated_dir(layout: CacheLayout, name: RankName, digest: str) -> Path:
    """Return where a rank keeps what a compiler wrote for an artifact, for people; it may be missing."""
    return layout.rank_dir(name) / GENERATED / digest[:_NAME_DIGITS]


def generated_texts(layout: CacheLayout, digest: str) -> dict[str, str]:
    """Return what a compiler wrote for an artifact, by name, from whichever rank of the cache kept it."""
    # Not Path.glob: it raises where an entry is removed meanwhile.
    for found in sorted(glob.glob(f"*/rank_*/*/{GENERATED}/{digest[:_NAME_DIGITS]}", root_dir=layout.base)):  # noqa: PTH207
        folder = layout.base / found
        try:
            files = sorted(path for path in folder.iterdir() if path.is_file() and not is_temporary(path.name))
            texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in files}
        except OSError:  # it is being removed
            continue
        if texts:
            return texts
    return {}


def generated_sources(data: bytes) -> tuple[str, ...]:
    """Return the modules that Inductor wrote and an artifact holds, each once, in order."""
    found: dict[str, None] = {}
    end = tries = 0
    for mark in _MARK.finditer(data):
        if mark.start() < end:
            continue
        for start, stop in _around(data, mark.start()):
            tries += 1
            if tries > _MOST_TRIES:
                return tuple(found)
            if stop <= mark.end():
                continue
            try:
                text = data[start:stop].decode("utf-8")
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                found[text] = None
                end = stop
                break
    return tuple(found)


def _around(data: bytes, mark: int) -> Iterator[tuple[int, int]]:
    """Yield where a text may begin and end, the nearest beginning before a mark first."""
    at = mark
    first = max(0, mark - _MOST_BYTES)
    while (at := data.rfind(_OPCODE, first, at)) >= 0:
        start = at + 1 + _LENGTH_BYTES
        length = int.from_bytes(data[at + 1 : start], "little")
        # One that ends before the mark is yielded as empty, so that whoever asks can count.
        holds = start <= mark < start + length <= len(data) and length <= _MOST_BYTES
        yield (start, start + length) if holds else (start, 0)
