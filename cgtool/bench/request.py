"""What a process of a bench is told, and what it answers: JSON files with a schema.

Must not import torch. A request is written by the bench before the process starts; the answer is written whole by the
process when its work is over, and is missing where the process crashed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cgtool.errors import CgtoolError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """The model, as the user named it.

    Args:
        text: MODEL of the command line.
        factory_args: Keyword arguments for the factory.
        device: Where it is built; None leaves it to the factory.
        dtype: Its default floating dtype; likewise.
        pythonpath: Folders put on `sys.path` first.
        warm_weights: "fake" or "real": how the model is built to be warmed. Starts always build it for real.
    """

    text: str
    factory_args: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    pythonpath: tuple[str, ...] = ()
    warm_weights: str = "fake"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one process does.

    Args:
        action: "start" builds the model and starts it; "warm" fills cgtool's cache, "precompile" torch's AOT file.
        kind: Of a start: how (`ways.Kind`).
        model: The model.
        config: cgtool's configuration, as JSON.
        seed: Fixes the weights of a factory that draws them from torch's or Python's generator.
        tokens: Sizes of the dynamic dimension whose steps are timed.
        dimension: Which dynamic dimension they are sizes of; None takes the only or the last one.
        repeats: How many steps of each size are timed.
        cache: cgtool's cache.
        artifact: The file of the mega-cache or of the AOT precompile.
        save_artifacts: Write torch's cache artifacts into `artifact` at the end.
        reference: The folder with eager's outputs.
        write_reference: This process is eager and writes them.
        answer: Where the answer goes.
    """

    action: Literal["start", "warm", "precompile"]
    kind: str
    model: ModelText
    config: Mapping[str, Any]
    seed: int
    tokens: tuple[int, ...]
    dimension: str | None
    repeats: int
    cache: str
    artifact: str
    save_artifacts: bool = False
    reference: str
    write_reference: bool = False
    answer: str

    def to_json(self) -> dict[str, Any]:
        """Return the document of the file."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read a request.

        Raises:
            CgtoolError: It was written by another version of cgtool.
        """
        document = read_document(path)
        model = document.pop("model")
        model["pythonpath"] = tuple(model["pythonpath"])
        document["tokens"] = tuple(document["tokens"])
        return cls(**document, model=ModelText(**model))


def read_document(path: Path) -> dict[str, Any]:
    """Return a file's document without its schema.

    Raises:
        CgtoolError: The schema is another one.
    """
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = document.pop("schema", None)
    if found != SCHEMA:
        message = f"{path} has schema {found!r}, and {SCHEMA} is known here. Bench again into a new folder."
        raise CgtoolError(message, path=str(path), expected=SCHEMA, actual=found)
    return document


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document so that a reader finds it whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"schema": SCHEMA, **document}, indent=1), encoding="utf-8")
    partial.replace(path)
