"""Open AOTInductor packages as functions, with torch alone.

torch's loader opens paths. It is given a private folder in which the native code is a symlink to an in-memory file with
the verified bytes. Nothing is unpacked to disk, so a full, tiny or noexec temporary folder is good enough, and the
folder is removed once the package is open. A torch that cannot open folders (before 2.13) unpacks the package itself,
into /tmp; those files are also removed once the package is open. A folder left behind by a killed process is removed by
the next process that creates one in the same place.

Outputs that are views of the native code's inputs or outputs are described in the package's metadata as JSON::

    outputs = [output...]                          the piece's outputs, in order
    output  = [source, index]                      a whole tensor: "native" 0 is the native code's first output,
                                                   "input" 1 the piece's second input (its constants come last)
            | [source, index, [dim...], [dim...], dim]   a view of it by sizes, strides and an offset, in elements
            | [source, index, [dim...], [dim...], dim, dtype]   the same, with elements of another dtype
    dim     = int | an expression over the piece's symbols (`cgtool.graph.expressions`)

Code for accelerators copies an input that is not aligned to 16 bytes, which is correct only for inputs that it does not
write to. The metadata lists the inputs that are written to, and writes to their copies are copied back::

    written = [index...]                           absent in packages of older builds: any input may be written to
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
from cgtool.runtime.dispatch import ALIGNMENT, UNALIGNED_DEVICES, Boxed
from cgtool.runtime.generate import Code, expression, malformed, tuple_source
from cgtool.store.artifacts import NATIVE_FILE, Package, archive_with_source, unpack
from cgtool.store.files import FILE_LIMIT
from cgtool.store.leases import hold_folder, is_abandoned
from cgtool.threads import ForkedLock

_log = logging.getLogger(__name__)

#: The path of the model's files within a package.
_INNER = Path("data/aotinductor/model")
#: Linux 6.3 and newer: allows code in the file even if the system's default does not.
_MFD_EXEC = 0x10
#: A line of /proc/self/maps for native code that torch's loader unpacked, and the folder that the loader created.
_UNPACKED = rf" (/tmp/(?:aotinductor_)?[A-Za-z0-9]{{6}})/piece/{_INNER}/{re.escape(NATIVE_FILE)}\n"
_MORE_FILES = "Close some of this process's open files, or raise the limit with `ulimit -n`."
#: Parents for a private folder, tried in order; a few hundred bytes are enough. None is the system's default.
_PARENTS = ("/dev/shm", None, "/tmp", "/var/tmp")  # noqa: S108 - a private folder is created inside
#: Held while torch unpacks, so that new folders can be attributed to the thread that holds it.
_unpacking = ForkedLock()
#: Numbers the packages of this process: the dynamic linker takes two libraries with one path for the same library.
_numbers = itertools.count()


def open_package(data: bytes, graph: PieceGraph, *, device_index: int | None = None) -> Boxed:
    """Open a single package as a function; see `Packages.open`."""
    with Packages(device_index=device_index) as packages:
        return packages.open(data, graph)


class Packages:
    """Opens packages. In a `with` block they share a private folder, which is removed at the end of the block.

    Outside the block, each package uses a separate folder. Only one thread at a time may be in the block.

    Args:
        device_index: The device that a device without an index refers to ("cuda" → "cuda:1"); None means the current
            device.
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
        """Open a package as a function.

        Args:
            data: The package's bytes, whose digest was verified.
            graph: The piece that was compiled.

        Returns:
            A boxed function: it takes a list of tensors, which it empties, and returns a list of the piece's outputs.
            It holds the GIL while it runs, so any thread may call it at any time. It does not check its inputs.

        Raises:
            ArtifactError: The bytes are not a package, or cannot be opened on this machine.
        """
        if not self._is_entered:
            return open_package(data, graph, device_index=self.device_index)
        package = unpack(data, verified=True)
        try:
            if private.opens_folders():
                loader = self._open_in_folder(package)
            else:
                loader = _open_archive(package, self.device_index)
        except RuntimeError as error:  # the only error of torch's loader
            raise _cannot_open(error) from error
        run: Boxed = loader.boxed_run
        if any(meta.device not in UNALIGNED_DEVICES for meta in graph.inputs):
            run = with_write_back(run, _written(package.metadata, graph))
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
        if package.kernels and self._folder is not None:  # torch reads kernels when they first run
            self._keeps_kernels = True
            _folders[self._folder].owner = None
        return loader

    def _filled(self, files: Mapping[str, bytes]) -> str:
        """Write a package's files to a folder that only this user can enter; return the path of the model's files."""
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
            except OSError as failed:  # missing, full or read-only: try the next parent
                error = error or failed
                if self._folder is not None and not self._keeps_kernels:
                    _remove(self._folder)
                self._folder = None
            else:
                return inner


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:  # noqa: PTH123 - a Path costs as much as the write, and start-up has many
        file.write(data)


def _with_constants(run: Boxed, constants: list[torch.Tensor]) -> Boxed:
    def with_constants(inputs: list[Any]) -> Any:
        inputs.extend(constants)
        return run(inputs)

    return with_constants


#: The metadata key of the inputs that are written to.
WRITTEN = "CGTOOL_WRITTEN"


def with_write_back(run: Boxed, written: Sequence[int]) -> Boxed:
    """Wrap `run` so that its writes reach unaligned inputs."""
    if not written:
        return run

    def write_back(inputs: list[Any]) -> Any:
        unaligned = [n for n in written if inputs[n].data_ptr() % ALIGNMENT]
        if not unaligned:
            return run(inputs)
        originals = [inputs[n] for n in unaligned]
        # Ordinary tensors, which a custom op in Python can write outside inference mode, too.
        with torch.inference_mode(mode=False), torch.no_grad():
            copies = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in originals
            ]
        for n, tensor in zip(unaligned, copies, strict=True):
            inputs[n] = tensor
        outputs = run(inputs)
        with torch.inference_mode():  # allows writes to any tensor, as native code does
            for tensor, copy in zip(originals, copies, strict=True):
                tensor.copy_(copy)
        return outputs

    return write_back


def _written(metadata: Mapping[str, str], graph: PieceGraph) -> Sequence[int]:
    written = json.loads(metadata.get(WRITTEN, "null"))
    if written is None:  # no code writes to an expanded tensor
        return [n for n, meta in enumerate(graph.inputs) if 0 not in meta.stride]
    if type(written) is not list or not all(type(n) is int and n in range(len(graph.inputs)) for n in written):
        raise malformed("list of written inputs", written)
    return written


_NAME = "cgtool-[0-9a-f]{16}"


class _Folder(msgspec.Struct):
    """A private folder that exists.

    Args:
        process: The process that created it.
        owner: The object that removes it; None keeps it until the process exits.
        held: The descriptor that holds its lease.
    """

    process: int
    owner: weakref.ref[Packages] | None
    held: list[int] = []


#: If Ctrl-C interrupts creating or removing a folder, the next load or the end of the process removes it.
_folders: dict[Path, _Folder] = {}


def _new_folder(parent: str, owner: Packages) -> Path:
    _sweep(parent)
    folder = Path(parent) / f"cgtool-{os.urandom(8).hex()}"
    record = _folders[folder] = _Folder(process=os.getpid(), owner=weakref.ref(owner))
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        del _folders[folder]  # not ours
        raise
    with contextlib.suppress(OSError):  # an unlocked folder is protected by its age
        hold_folder(folder, record.held)
    return folder


def _sweep(parent: str) -> None:
    """Remove folders left behind by killed processes of this user and by interrupted loads of this process."""
    for folder, record in list(_folders.items()):
        if record.process == os.getpid() and record.owner is not None and record.owner() is None:
            _remove(folder)
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):  # noqa: PTH208 - only names are needed
            if not name.startswith("cgtool-") or not re.fullmatch(_NAME, name):
                continue
            folder = Path(parent, name)
            if folder not in _folders and folder.lstat().st_uid == os.getuid() and is_abandoned(folder):
                _remove(folder)


def _remove(folder: Path) -> None:
    if folder in _folders:  # first: this may free the descriptor that listing the folder needs
        closing(_folders[folder].held)
    with contextlib.suppress(OSError):
        # Not rmtree: interrupted by Ctrl-C, it may leak a descriptor or fail with another error.
        for base, _, names in os.walk(folder, topdown=False):
            for name in names:
                Path(base, name).unlink()
            Path(base).rmdir()
    if not folder.exists():  # otherwise no descriptor was free to list it: it is removed when the process exits
        _folders.pop(folder, None)


@atexit.register
def _remove_all() -> None:
    for folder, record in list(_folders.items()):
        if record.process == os.getpid():  # a forked child must not remove its parent's folders
            _remove(folder)


def _open_archive(package: Package, device_index: int | None) -> Any:
    data = archive_with_source(package)
    with _unpacking, _in_memory(data) as path:
        kept = bool(package.kernels)  # torch reads kernels when they first run; mapped code needs no file
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
    """Return the folders into which torch unpacked the open packages."""
    # One regular expression over the whole file: with a GPU, it has thousands of lines.
    return set(re.findall(_UNPACKED, Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")))


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str | None]:
    """Yield the path of an in-memory file with these bytes, or None if the system does not allow code in such files."""
    for flags in (os.MFD_CLOEXEC | _MFD_EXEC, os.MFD_CLOEXEC):
        try:
            [descriptor] = opening(os.memfd_create, "cgtool-package", flags)
        except OSError as error:
            _log.debug("memfd_create with flags %#x failed: %s", flags, error)
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
    reason = error.strerror if error is not None else "no folder exists"
    if error is not None and error.errno in {errno.EMFILE, errno.ENFILE}:
        return NoRoomError(f"A compiled package cannot be opened: {reason}. {_MORE_FILES}", actual=str(error))
    return NoRoomError(
        "Opening a compiled package needs a few hundred bytes in a temporary folder, and none can be written to "
        f"({reason}). Set TMPDIR to a writable folder.",
        actual=str(error),
    )


def _no_memory_file(error: OSError, size_bytes: int) -> NoRoomError:
    reason = FILE_LIMIT if error.errno == errno.EFBIG else f"{error.strerror}. Free some memory"
    msg = f"A compiled package of {size_bytes} bytes cannot be opened from an in-memory file: {reason}."
    return NoRoomError(msg, actual=str(error))


def _cannot_open(error: RuntimeError) -> ArtifactError:
    reason = first_line(error) or "no reason given"
    advice = None
    if "failed to map segment" in reason or "Operation not permitted" in reason:
        advice = "torch unpacks packages to /tmp, where code cannot run: mount it without noexec, or use torch 2.13."
    elif "out of memory" in reason or "allocate memory" in reason:
        advice = "Free some memory, then load again."
    elif os.strerror(errno.EMFILE) in reason or os.strerror(errno.ENFILE) in reason:
        advice = _MORE_FILES
    if advice is not None:
        return NoRoomError(f"torch could not open a compiled package: {reason}. {advice}", actual=reason)
    if "undefined symbol" in reason:
        advice = "It was compiled for a different build of torch. Warm the model again with this build."
    elif "chema" in reason or "perator" in reason:
        advice = "It calls a custom op that is not registered. Import the module that registers the op, then load."
    else:
        advice = "Warm the model again in this environment."
    return ArtifactError(f"torch could not open a compiled package: {reason}. {advice}", actual=reason)


#: The metadata key of the outputs' descriptions.
OUTPUTS = "CGTOOL_OUTPUTS"
_SOURCES = frozenset({"input", "native"})
_SYMBOL = r"s(0|[1-9][0-9]*)"
_WHOLE, _VIEW, _VIEW_AS = 2, 5, 6


def with_views(run: Boxed, outputs: str, graph: PieceGraph, *, num_constants: int) -> Boxed:
    """Wrap `run` so that it returns the piece's outputs.

    Args:
        run: The native code.
        outputs: JSON of the grammar in the module's docstring.
        graph: The piece.
        num_constants: The number of constants that `run` takes after the piece's inputs.

    Raises:
        ArtifactError: `outputs` violates the grammar.
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
    """Save the inputs and sizes that views need, since native code empties its input list; return the sizes' names."""
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
    """Return a view of the memory of `source` with elements of an equal or smaller dtype."""
    memory = torch.empty(0, dtype=dtype, device=source.device).set_(source.untyped_storage())
    begin = source.storage_offset() * (source.itemsize // dtype.itemsize)
    return memory.as_strided(shape, stride, begin + offset)  # raises if the view exceeds the memory
