"""A unit of compile work and what came of it, as files of one folder. Must not import torch.

The folder of a unit, the same on any machine::

    unit.json       in:  {"schema": 1, "key": digest, "graph": piece graph, "adaptor": str, "options": {...},
                          "max_autotune": bool, "compiler": digest, "imports": [import...], "settings": {...}}
    artifact        out: the bytes, where `result.json` says "done"
    log.txt         out: what the compiler, the host's compiler and a crash wrote to stdout and stderr
    result.json     out, written last: {"schema": 1, "key": digest, "status": status, "kernels": int,
                          "compile_secs": float, "guards": [expr...], "reason": str}
    import = {"module": name, "file": path|null}     see `cgtool.build.imports`
    status = "done" | "refused" (it is not for this machine or process; compile it elsewhere)
           | "rejected" (the compiler does not take the piece) | "failed" (the machine's fault: memory, disk, a bug)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from cgtool.digests import canonical_json
from cgtool.errors import CgtoolError
from cgtool.pieces import Json, PieceGraph

SCHEMA = 1

UNIT_FILE = "unit.json"
ARTIFACT_FILE = "artifact"
LOG_FILE = "log.txt"
RESULT_FILE = "result.json"

Status = Literal["done", "refused", "rejected", "failed"]


class StaysHereError(CgtoolError):
    """A unit cannot leave this process, or no worker takes it: here it may compile all the same."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One piece to compile.

    Args:
        key: The unit's key in `cgtool.cache.units`.
        graph: The piece, specialised or restricted to the shape.
        adaptor: The adaptor's name.
        options: The user's options for the compiler.
        max_autotune: Whether the compiler may try variants of each kernel.
        compiler: The adaptor's `compute_hash` where the unit was written: a worker with another refuses the unit.
        imports: Modules to import first.
        settings: What of torch's and Inductor's global state was changed, see `cgtool.build.workers.settings`.
    """

    key: str
    graph: PieceGraph
    adaptor: str
    options: Mapping[str, Json]
    max_autotune: bool
    compiler: str
    imports: tuple[Mapping[str, Json], ...] = ()
    settings: Mapping[str, Json] = field(default_factory=dict)

    def to_json(self) -> Json:
        """Return the unit as JSON; the grammar stands at the head of this module."""
        return {
            "schema": SCHEMA,
            "key": self.key,
            "graph": self.graph.to_json(),
            "adaptor": self.adaptor,
            "options": dict(self.options),
            "max_autotune": self.max_autotune,
            "compiler": self.compiler,
            "imports": [dict(item) for item in self.imports],
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, data: Json) -> Unit:
        """Return the unit of `data`.

        Raises:
            CgtoolError: Another version wrote it, or a field is missing.
        """
        _check_schema(data, "unit")
        try:
            return cls(
                key=data["key"],
                graph=PieceGraph.from_json(data["graph"]),
                adaptor=data["adaptor"],
                options=dict(data["options"]),
                max_autotune=bool(data["max_autotune"]),
                compiler=data["compiler"],
                imports=tuple({"module": item["module"], "file": item["file"]} for item in data["imports"]),
                settings=dict(data["settings"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _torn("unit", error) from error

    def write(self, folder: Path) -> None:
        """Write `unit.json` into a folder that exists.

        Raises:
            OSError: It cannot be written.
        """
        (folder / UNIT_FILE).write_bytes(canonical_json(self.to_json()))


def read_unit(folder: Path) -> Unit:
    """Return the unit in a folder.

    Raises:
        CgtoolError: It is torn, or of another version.
        OSError: It cannot be read.
    """
    return Unit.from_json(_parsed(folder / UNIT_FILE, "unit"))


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """What a worker says of a unit.

    Args:
        key: The unit's key.
        status: "done", "refused", "rejected" or "failed".
        kernels: How many kernels were generated.
        compile_secs: How long it took, in seconds.
        guards: Facts over the graph's symbols that the compiler relies on.
        reason: Why it is not done: a sentence.
    """

    key: str
    status: Status
    kernels: int = 0
    compile_secs: float = 0.0
    guards: tuple[str, ...] = ()
    reason: str = ""

    def write(self, folder: Path) -> None:
        """Write `result.json`.

        Raises:
            OSError: It cannot be written.
        """
        document = {
            "schema": SCHEMA,
            "key": self.key,
            "status": self.status,
            "kernels": self.kernels,
            "compile_secs": self.compile_secs,
            "guards": list(self.guards),
            "reason": self.reason,
        }
        (folder / RESULT_FILE).write_bytes(canonical_json(document))


def read_report(folder: Path) -> UnitReport:
    """Return what a worker said of the unit in a folder.

    Raises:
        CgtoolError: It is torn, or of another version.
        OSError: It cannot be read, or there is none.
    """
    data = _parsed(folder / RESULT_FILE, "result")
    _check_schema(data, "result")
    try:
        if data["status"] not in get_args(Status):
            raise _torn("result", ValueError(data["status"]))
        return UnitReport(
            key=str(data["key"]),
            status=data["status"],
            kernels=int(data["kernels"]),
            compile_secs=float(data["compile_secs"]),
            guards=tuple(map(str, data["guards"])),
            reason=str(data["reason"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _torn("result", error) from error


def _parsed(path: Path, what: str) -> Json:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise _torn(what, error) from error


def _check_schema(data: Json, what: str) -> None:
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise CgtoolError(
            f"This {what} of compile work has schema {found!r} and this cgtool reads {SCHEMA}. Use one version of "
            "cgtool on both sides.",
            expected=SCHEMA,
            actual=found,
        )


def _torn(what: str, error: Exception) -> CgtoolError:
    return CgtoolError(f"A {what} of compile work is torn: {error!r}. Warm again.", actual=str(error))
