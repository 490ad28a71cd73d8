"""Opening the packages of AOTInductor: native code becomes a function, with torch alone.

torch's loader opens paths. It is given a private folder whose native code is a link to a file that lies in memory and
holds the very bytes whose digest was checked. So nothing is unpacked to a disk: a full, tiny or noexec temporary folder
serves, and the folder is gone when the package is open. A torch that opens no folders (before 2.13) unpacks the package
itself, into /tmp; that is removed too as soon as the package is open. What a killed process left of its folder is
removed by the next that makes one there.

Outputs that are views of what the code was given or gave stand in the package's metadata as JSON::

    outputs = [output...]                          the piece's outputs, in order
    output  = [source, index]                      the very tensor: "native" 0 is the first that the native code gives,
                                                   "input" 1 the second that the piece takes (its constants are last)
            | [source, index, [dim...], [dim...], dim]   a view of it by sizes, strides and an offset, in elements
            | [source, index, [dim...], [dim...], dim, dtype]   the same, of elements of another dtype
    dim     = int | an expression over the piece's symbols (`cgtool.graph.expressions`)

Code for accelerators works on a copy of an input that does not begin at a multiple of 16 bytes, which is right for what
is read alone. The metadata says what is written to, and what was written to a copy is copied back::

    written = [index...]                           absent in packages of older builds: anything may be
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from cgtool.errors import ArtifactError, NoRoomError, first_line
from cgtool.graph.values import constants_of, dtype_of, placed
from cgtool.host import closing, opening
from cgtool.plan.pieces import Json, PieceGraph
from cgtool.runtime import _torch as private
from cgtool.runtime.dispatch import ALIGNMENT, ANYWHERE, Boxed
from cgtool.runtime.generate import Code, expression, malformed, tuple_source
from cgtool.store.artifacts import NATIVE_FILE, Package, archive_with_source, unpack
from cgtool.store.files import FILE_LIMIT
from cgtool.store.leases import hold_folder, is_abandoned
from cgtool.threads import ForkedLock

_log = logging.getLogger(__name__)

#: Where torch's loader looks within a folder.
_INNER = Path("data/aotinductor/model")
#: Linux 6.3 and newer: the file may hold code although the system's default says otherwise.
_MFD_EXEC = 0x10
#: A line of /proc/self/maps that shows native code which torch's loader unpacked, and the folder that it made for it.
_UNPACKED = rf" (/tmp/(?:aotinductor_)?[A-Za-z0-9]{{6}})/piece/{_INNER}/{re.escape(NATIVE_FILE)}\n"
_MORE_FILES = "Close files that this process holds open, or let it open more: `ulimit -n`."
#: Where a private folder is made, the first that takes it: some hundred bytes are needed. None is the system's own.
_PARENTS = ("/dev/shm", None, "/tmp", "/var/tmp")  # noqa: S108 - private folders are made within
#: Held while torch unpacks: what one thread's opening adds to those folders is then its own.
_unpacking = ForkedLock()
#: Numbers the packages of this process: the system's linker takes two libraries of one path for one.
_numbers = itertools.count()


def open_package(data: bytes, graph: PieceGraph, *, device_index: int | None = None) -> Boxed:
    """Return the function that one package holds; see `Packages.open`."""
    with Packages(device_index=device_index) as packages:
        return packages.open(data, graph)


class Packages:
    """Opens packages; in a `with` block they share one private folder, which is gone when it ends.

    Outside of the block each gets a folder of its own. One thread at a time may be in the block.

    Args:
        device_index: What a device without an index means ("cuda" → "cuda:1"); None: the current device.
    """

    def __init__(self, *, device_index: int | None = None) -> None:
        self.device_index = device_index
        self._is_entered = False

    def __enter__(self) -> Self:
        self._is_entered = True
        self._parents = iter(_PARENTS)
        self._folder: Path | None = None
        self._keeps_kernels = False
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_entered = False
        if self._folder is not None and not self._keeps_kernels:
            _remove(self._folder)

    def open(self, data: bytes, graph: PieceGraph) -> Boxed:
        """Return the function that a package holds.

        Args:
            data: The package's bytes, whose digest was checked.
            graph: The piece that was compiled.

        Returns:
            A boxed function: takes a list of tensors, which it empties, and returns a list of the piece's outputs. It
            holds Python's global lock while it runs, so that threads may call it at any time. It checks no inputs.

        Raises:
            ArtifactError: The bytes are no package, or cannot be opened here.
        """
        if not self._is_entered:
            return open_package(data, graph, device_index=self.device_index)
        package = unpack(data, verified=True)
        try:
            if private.opens_folders():
                loader = self._open_in_folder(package)
            else:
                loader = _open_archive(package, self.device_index)
        except RuntimeError as error:  # torch's loader has no other
            raise _cannot_open(error) from error
        run: Boxed = loader.boxed_run
        if any(meta.device not in ANYWHERE for meta in graph.inputs):
            run = keeping_writes(run, _written(package.metadata, graph))
        constants = [placed(tensor, self.device_index) for tensor in constants_of(graph)]
        if OUTPUTS in package.metadata:
            run = with_views(run, package.metadata[OUTPUTS], graph, num_constants=len(constants))
        return _with_constants(run, constants) if constants else run

    def _open_in_folder(self, package: Package) -> Any:
        stem = f"piece-{next(_numbers)}.wrapper"
        files = package.files(stem)
        with _in_memory(package.native) as path:
            inner = self._filled(files)
            native = f"{inner}/{stem}.so"
            try:
                if path is None:
                    _write(native, package.native)
                else:
                    os.symlink(path, native)  # noqa: PTH211 - as in `_write`
                loader = private.open_package(str(self._folder), self.device_index)
            except OSError as error:
                raise _no_room(error) from error
            finally:
                for name in (native, *(f"{inner}/{name}" for name in files.keys() - package.kernels.keys())):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)  # noqa: PTH108 - as in `_write`
        if package.kernels and self._folder is not None:  # torch reads them when they first run
            self._keeps_kernels = True
            _folders[self._folder].owner = None
        return loader

    def _filled(self, files: Mapping[str, bytes]) -> str:
        """Put a package's files into a folder that only this user can enter, and return where torch's loader looks."""
        error: OSError | None = None
        while True:
            try:
                if self._folder is None:
                    self._folder = _new_folder(next(self._parents) or tempfile.gettempdir(), self)
                    (self._folder / _INNER).mkdir(parents=True)
                inner = f"{self._folder}/{_INNER}"
                for name, body in files.items():
                    _write(f"{inner}/{name}", body)
            except StopIteration:
                raise _no_room(error) from error
            except OSError as failed:  # no such folder, full, read-only: another may serve
                error = error or failed
                if self._folder is not None and not self._keeps_kernels:
                    _remove(self._folder)
                self._folder = None
            else:
                return inner


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:  # noqa: PTH123 - a Path costs as much as the file, and a start has many
        file.write(data)


def _with_constants(run: Boxed, constants: list[torch.Tensor]) -> Boxed:
    def with_constants(inputs: list[Any]) -> Any:
        inputs.extend(constants)
        return run(inputs)

    return with_constants


#: The metadata's name for the inputs that are written to.
WRITTEN = "CGTOOL_WRITTEN"


def keeping_writes(run: Boxed, written: Sequence[int]) -> Boxed:
    """Return `run` as a function whose writes reach inputs that begin anywhere."""
    if not written:
        return run

    def with_writes(inputs: list[Any]) -> Any:
        copied = [n for n in written if inputs[n].data_ptr() % ALIGNMENT]
        if not copied:
            return run(inputs)
        theirs = [inputs[n] for n in copied]
        # ordinary tensors, which a custom op in Python may write to outside inference mode too
        with torch.inference_mode(mode=False), torch.no_grad():
            ours = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in theirs]
        for n, tensor in zip(copied, ours, strict=True):
            inputs[n] = tensor
        given = run(inputs)
        with torch.inference_mode():  # in which any tensor may be written to, as native code does
            for tensor, copy in zip(theirs, ours, strict=True):
                tensor.copy_(copy)
        return given

    return with_writes


def _written(metadata: Mapping[str, str], graph: PieceGraph) -> Sequence[int]:
    found = json.loads(metadata.get(WRITTEN, "null"))
    if found is None:  # nothing writes to an expanded tensor
        return [n for n, meta in enumerate(graph.inputs) if 0 not in meta.stride]
    if type(found) is not list or not all(type(n) is int and n in range(len(graph.inputs)) for n in found):
        raise malformed("inputs that are written to", found)
    return found


_NAME = "cgtool-[0-9a-f]{16}"


class _Folder(msgspec.Struct):
    """A private folder that is there.

    Args:
        process: What made it.
        owner: What removes it; None: it stays until the process ends.
        held: The descriptor that holds it.
    """

    process: int
    owner: weakref.ref[Packages] | None
    held: list[int] = []


#: Ctrl-C may fall into the midst of making or removing one: then it goes with the next, or as the process ends.
_folders: dict[Path, _Folder] = {}


def _new_folder(parent: str, owner: Packages) -> Path:
    _sweep(parent)
    folder = Path(parent) / f"cgtool-{os.urandom(8).hex()}"
    made = _folders[folder] = _Folder(process=os.getpid(), owner=weakref.ref(owner))
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        del _folders[folder]  # not ours
        raise
    with contextlib.suppress(OSError):  # without a lock on it, its youth protects it
        hold_folder(folder, made.held)
    return folder


def _sweep(parent: str) -> None:
    """Remove what killed processes of this user left, and what interrupted loads of this process did."""
    for folder, made in list(_folders.items()):
        if made.process == os.getpid() and made.owner is not None and made.owner() is None:
            _remove(folder)
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):  # noqa: PTH208 - names alone
            if not name.startswith("cgtool-") or not re.fullmatch(_NAME, name):
                continue
            folder = Path(parent, name)
            if folder not in _folders and folder.lstat().st_uid == os.getuid() and is_abandoned(folder):
                _remove(folder)


def _remove(folder: Path) -> None:
    if folder in _folders:  # first: its descriptor may be the one that listing the folder lacks
        closing(_folders[folder].held)
    with contextlib.suppress(OSError):
        # Not rmtree: Ctrl-C may have it keep a descriptor, or fail with another error.
        for base, _, names in os.walk(folder, topdown=False):
            for name in names:
                Path(base, name).unlink()
            Path(base).rmdir()
    if not folder.exists():  # else no descriptor was left to list it with: it goes as the process ends
        _folders.pop(folder, None)


@atexit.register
def _remove_all() -> None:
    for folder, made in list(_folders.items()):
        if made.process == os.getpid():  # a fork leaves alone what its parent uses
            _remove(folder)


def _open_archive(package: Package, device_index: int | None) -> Any:
    data = archive_with_source(package)
    with _unpacking, _in_memory(data) as path:
        kept = bool(package.kernels)  # torch reads them when they first run; code that is mapped needs no file
        before = set() if kept else _unpacked_folders()
        loader = _open_on_disk(data, device_index) if path is None else private.open_package(path, device_index)
        if not kept:
            for folder in _unpacked_folders() - before:
                shutil.rmtree(folder, ignore_errors=True)
    return loader


def _open_on_disk(archive: bytes, device_index: int | None) -> Any:
    try:
        with tempfile.NamedTemporaryFile(prefix="cgtool-", suffix=".pt2") as file:
            file.write(archive)
            file.flush()
            return private.open_package(file.name, device_index)
    except OSError as error:
        raise _no_room(error) from error


def _unpacked_folders() -> set[str]:
    """Return the folders into which torch unpacked the packages that are open."""
    # thousands of lines, where there is a GPU
    return set(re.findall(_UNPACKED, Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")))


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str | None]:
    """Yield a path that leads to these bytes in memory, or None where the system keeps code out of memory files."""
    for flags in (os.MFD_CLOEXEC | _MFD_EXEC, os.MFD_CLOEXEC):
        try:
            [descriptor] = opening(os.memfd_create, "cgtool-package", flags)
        except OSError as error:
            _log.debug("No memory file with flags %#x: %s", flags, error)
            continue
        try:
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(data)
            except OSError as error:
                raise _no_memory_file(error, len(data)) from error
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    yield None


def _no_room(error: OSError | None) -> NoRoomError:
    said = error.strerror if error is not None else "there is none"
    if error is not None and error.errno in {errno.EMFILE, errno.ENFILE}:
        return NoRoomError(f"A package cannot be opened: {said}. {_MORE_FILES}", actual=str(error))
    return NoRoomError(
        f"No temporary folder takes the few hundred bytes that opening a package needs ({said}). Set TMPDIR to a "
        "folder that can be written.",
        actual=str(error),
    )


def _no_memory_file(error: OSError, size_bytes: int) -> NoRoomError:
    said = FILE_LIMIT if error.errno == errno.EFBIG else f"{error.strerror}. Free some memory"
    msg = f"A package of {size_bytes} bytes cannot be opened from a file in memory: {said}."
    return NoRoomError(msg, actual=str(error))


def _cannot_open(error: RuntimeError) -> ArtifactError:
    said = first_line(error) or "no reason given"
    if "failed to map segment" in said or "Operation not permitted" in said:
        advice = "Code may not run from where torch unpacks packages, /tmp: mount it without noexec, or use torch 2.13."
        return NoRoomError(f"Torch could not open a package: {said}. {advice}", actual=said)
    if "out of memory" in said or "allocate memory" in said:
        return NoRoomError(f"Torch could not open a package: {said}. Free some memory, and load again.", actual=said)
    if os.strerror(errno.EMFILE) in said or os.strerror(errno.ENFILE) in said:
        return NoRoomError(f"Torch could not open a package: {said}. {_MORE_FILES}", actual=said)
    if "undefined symbol" in said:
        advice = "It was compiled for another build of torch: warm again with this one."
    elif "chema" in said or "perator" in said:
        advice = "It calls a custom op that nothing has registered yet: import the module that does, then load."
    else:
        advice = "Warm again with what is here now."
    return ArtifactError(f"Torch could not open a package: {said}. {advice}", actual=said)


#: The metadata's name for how outputs are made.
OUTPUTS = "CGTOOL_OUTPUTS"
_SOURCES = frozenset({"input", "native"})
_SYMBOL = r"s(0|[1-9][0-9]*)"
_WHOLE, _VIEW, _VIEW_AS = 2, 5, 6


def with_views(run: Boxed, outputs: str, graph: PieceGraph, *, num_constants: int) -> Boxed:
    """Return `run` as a function that gives the piece's outputs.

    Args:
        run: The native code.
        outputs: The JSON of the grammar above.
        graph: The piece.
        num_constants: How many constants `run` takes after the piece's inputs.

    Raises:
        ArtifactError: `outputs` is outside the grammar.
    """
    recipe = _parsed(outputs, graph)
    code = Code("outputs")
    symbols = _bind_inputs(code, recipe, graph, len(graph.inputs) + num_constants)
    code.add(f"outs = {code.constant(run)}(args)")
    parts = [_part(entry, code, symbols) for entry in recipe]
    code.add(f"return [{', '.join(parts)}]")
    return code.define("outputs", ["args"])


def _parsed(outputs: str, graph: PieceGraph) -> list[Any]:
    try:
        recipe = json.loads(outputs)
    except (ValueError, RecursionError) as error:
        raise malformed("list of outputs", outputs) from error
    if type(recipe) is not list or len(recipe) != len(graph.outputs):
        raise malformed("list of outputs", outputs)
    for entry in recipe:
        whole = type(entry) is list and len(entry) in {_WHOLE, _VIEW, _VIEW_AS}
        if not whole or type(entry[1]) is not int or entry[1] < 0:
            raise malformed("output", entry)
        if type(entry[0]) is not str or entry[0] not in _SOURCES:
            raise malformed("output", entry)
        if len(entry) > _WHOLE and not (all(type(part) is list for part in entry[2:4]) and _are_dims(entry)):
            raise malformed("output", entry)
    return recipe


def _are_dims(entry: list[Any]) -> bool:
    return all(type(dim) in {int, str} for dim in (*entry[2], *entry[3], entry[4]))


def _bind_inputs(code: Code, recipe: list[Any], graph: PieceGraph, num_inputs: int) -> tuple[str, ...]:
    """Keep the inputs that views are taken of, and the sizes that these are taken by; return the sizes' names.

    Native code empties the list of inputs.
    """
    for index in sorted({entry[1] for entry in recipe if entry[0] == "input"}):
        if index >= num_inputs:
            raise malformed("output", ["input", index])
        code.add(f"i{index} = args[{index}]")
    if all(len(entry) == _WHOLE for entry in recipe):
        return ()
    places = {dim: (n, axis) for n, meta in enumerate(graph.inputs) for axis, dim in enumerate(meta.shape)}
    symbols = tuple(symbol.name for symbol in graph.symbols if symbol.name in places)
    for name in symbols:
        if not re.fullmatch(_SYMBOL, name):
            raise malformed("symbol", name)
        code.add(f"{name} = args[{places[name][0]}].shape[{places[name][1]}]")
    return symbols


def _part(entry: list[Json], code: Code, symbols: tuple[str, ...]) -> str:
    source = f"i{entry[1]}" if entry[0] == "input" else f"outs[{entry[1]}]"
    if len(entry) == _WHOLE:
        return source
    shape, stride = (tuple_source(expression(dim, symbols) for dim in part) for part in entry[2:4])
    offset = expression(entry[4], symbols)
    if len(entry) == _VIEW_AS:
        dtype = code.constant(dtype_of(entry[5]))
        return f"{code.constant(_viewed_as)}({source}, {dtype}, {shape}, {stride}, {offset})"
    return f"{code.constant(torch.as_strided)}({source}, {shape}, {stride}, {source}.storage_offset() + {offset})"


def _viewed_as(
    source: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return the memory of `source` as elements of a dtype that is no larger."""
    memory = torch.empty(0, dtype=dtype, device=source.device).set_(source.untyped_storage())
    begin = source.storage_offset() * (source.itemsize // dtype.itemsize)
    return memory.as_strided(shape, stride, begin + offset)  # within the memory, else it raises
