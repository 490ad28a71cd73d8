"""The values of configuration fields: the enums of levels and CUDA graph modes, and a check for each field.

Must not import torch or msgspec. A check looks at one value alone; it returns the value's canonical form, or raises
`WrongValueError`, whose text completes the sentence "<field> is <value>: ...".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum, IntEnum
from itertools import pairwise
from typing import Any

from cgtool.adaptor_registry import adaptor_names, is_adaptor
from cgtool.plan.grammar import canonical_json


class CUDAGraphMode(Enum):
    """What to capture as CUDA graphs.

    A single mode applies to every batch. The value of a pair is (mode of decode batches, mode of mixed prefill and
    decode batches). At run time each batch has a single mode: NONE, PIECEWISE or FULL.

    Attributes:
        NONE: Nothing is captured.
        PIECEWISE: Each compiled piece is captured; splitting pieces run between the graphs.
        FULL: The whole model is captured.
        FULL_DECODE_ONLY: FULL for decode batches, NONE for mixed ones.
        FULL_AND_PIECEWISE: FULL for decode batches, PIECEWISE for mixed ones.

    Source: names, values and helpers are those of ATOM and vLLM, which their users know.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def separate_routine(self) -> bool:
        """Return whether decode and mixed batches have different modes."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """Return the single mode of decode batches."""
        return CUDAGraphMode(self._halves()[0])

    def mixed_mode(self) -> CUDAGraphMode:
        """Return the single mode of batches that contain prefills."""
        return CUDAGraphMode(self._halves()[1])

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Return whether decode or mixed batches run under `mode`.

        Raises:
            ValueError: `mode` is a pair.
        """
        if mode.separate_routine():
            names = ", ".join(sorted(m.name for m in self.valid_runtime_modes()))
            message = f"{mode.name} is a pair of modes. Pass one of {names}."
            raise ValueError(message)
        return mode.value in self._halves()

    def requires_piecewise_compilation(self) -> bool:
        """Return whether the graph must be compiled piecewise for this mode."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def has_piecewise_cudagraphs(self) -> bool:
        """Return whether any batch runs piecewise CUDA graphs."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def has_full_cudagraphs(self) -> bool:
        """Return whether any batch runs a CUDA graph of the whole model."""
        return self.has_mode(CUDAGraphMode.FULL)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """Return the higher of the modes of decode and mixed batches."""
        return CUDAGraphMode(max(self._halves()))

    def without_piecewise(self) -> CUDAGraphMode:
        """Return this mode with NONE in place of PIECEWISE, for a model without pieces."""
        if self is CUDAGraphMode.PIECEWISE:
            return CUDAGraphMode.NONE
        return CUDAGraphMode.FULL_DECODE_ONLY if self is CUDAGraphMode.FULL_AND_PIECEWISE else self

    def is_valid_runtime_mode(self) -> bool:
        """Return whether this is a single mode, which a batch can have."""
        return not self.separate_routine()

    @classmethod
    def valid_runtime_modes(cls) -> frozenset[CUDAGraphMode]:
        """Return the single modes, which a batch can have."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})

    def _halves(self) -> tuple[int, int]:
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)


def default_capture_sizes(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8 and the multiples of 16, up to `limit`.

    Args:
        limit: The largest size, in sequences.

    Source: ATOM's pattern, which excludes `limit` itself unless it is a multiple of 16.
    """
    return tuple(size for size in (1, 2, 4, 8, *range(16, limit + 1, 16)) if size <= limit)


#: When a loaded model checks its live objects.
RECHECKS = ("load", "call")
#: In `compile_sizes`: all sizes that are captured as CUDA graphs.
CAPTURE_SIZES = "cudagraph_capture_sizes"

_OP_NAME = re.compile(r"[A-Za-z_]\w*(?:(?:::|\.)\w+)+", re.ASCII)


class CompilationLevel(IntEnum):
    """How `torch.compile` is applied.

    Attributes:
        NO_COMPILATION: 0, plain eager.
        DYNAMO_AS_IS: 1, Dynamo's graph run eagerly, to check that the model can be traced.
        DYNAMO_ONCE: 2, one graph, compiled whole.
        PIECEWISE: 3, split at the splitting ops and compiled in pieces.
    """

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


class WrongValueError(ValueError):
    """A field's value is invalid; the message describes the valid ones."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the member of `known` with the spelling nearest to `name`, ignoring case and hyphens."""
    plain = {word.lower().replace("-", "_"): word for word in known}
    return plain[(get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=0.0) or list(plain))[0]]


def check_bool(value: Any) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise WrongValueError("it must be true or false")
    return value


def check_optional_bool(value: Any) -> bool | None:
    """Return a bool; None stays None."""
    return None if value is None else check_bool(value)


def check_level(value: Any) -> CompilationLevel:
    """Return a compilation level, given by number or name."""
    by_name = {level.name: level for level in CompilationLevel}
    if isinstance(value, str) and value.upper() in by_name:
        return by_name[value.upper()]
    if type(value) is bool or not isinstance(value, int) or value not in list(CompilationLevel):
        levels = ", ".join(f"{level.value} ({level.name})" for level in CompilationLevel)
        message = f"levels are {levels}"
        raise WrongValueError(message)
    return CompilationLevel(value)


def check_mode(value: Any) -> CUDAGraphMode | None:
    """Return a CUDA graph mode, given as such, by name or by value; None stays None."""
    if value is None or isinstance(value, CUDAGraphMode):
        return value
    by_name = {mode.name: mode for mode in CUDAGraphMode}
    if isinstance(value, str) and value.upper() in by_name:
        return by_name[value.upper()]
    halves = tuple(value) if isinstance(value, (list, tuple)) else value
    for mode in CUDAGraphMode:
        if type(halves) is not bool and not isinstance(halves, float) and halves == mode.value:
            return mode
    message = f"modes are {', '.join(by_name)}, or nothing for the default mode of the level"
    raise WrongValueError(message)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _items(value: Any, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple, range)):
        message = f"it must be a list of {what}"
        raise WrongValueError(message)
    return list(value)


def check_capture_sizes(value: Any) -> tuple[int, ...] | None:
    """Return batch sizes in ascending order without duplicates; None stays None."""
    if value is None:
        return None
    what = "one or more batch sizes, each a positive integer"
    sizes = _items(value, what)
    if not sizes or not all(map(_positive, sizes)):
        message = f"it must be a list of {what}"
        raise WrongValueError(message)
    return tuple(sorted(set(sizes)))


def check_graph_sizes(value: Any) -> tuple[int, ...]:
    """Return one limit, or batch sizes in ascending order."""
    sizes = check_capture_sizes([] if value is None else value) or ()
    if len(sizes) != len(value):  # without duplicates, [8, 8] would become [8], which is a limit
        raise WrongValueError("no size may be listed twice")
    return sizes


def check_ops(value: Any) -> tuple[str, ...] | None:
    """Return names of ops without duplicates; None stays None. Overloads are not resolved: that needs the graph."""
    if value is None:
        return None
    names = _items(value, "names of ops")
    for name in names:
        if not isinstance(name, str) or not _OP_NAME.fullmatch(name):
            message = (
                f"an op is written as ns::op, ns.op or the dotted name of a function, and {name!r} is none of these"
            )
            raise WrongValueError(message)
    return tuple(dict.fromkeys(names))


def check_sizes(value: Any) -> tuple[Any, ...] | None:
    """Return compile sizes: integers in ascending order, then the word, then mappings; None stays None."""
    if value is None:
        return None
    what = f'positive integers, the word "{CAPTURE_SIZES}", or mappings of dimension to size such as {{"batch": 8}}'
    numbers: set[int] = set()
    words: set[str] = set()
    mappings: dict[bytes, dict[str, int]] = {}
    for item in _items(value, what):
        if _positive(item):
            numbers.add(item)
        elif item == CAPTURE_SIZES:
            words.add(item)
        elif isinstance(item, Mapping) and item and all(_is_dim(k) and _positive(v) for k, v in item.items()):
            mappings[canonical_json(dict(item))] = dict(sorted(item.items()))
        else:
            message = f"sizes are {what}, and {item!r} is none of these"
            raise WrongValueError(message)
    return (*sorted(numbers), *words, *(mappings[text] for text in sorted(mappings)))


def _is_dim(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier()


def check_ranges(value: Any) -> tuple[tuple[int, int], ...]:
    """Return inclusive ranges in ascending order."""
    what = "inclusive [start, end] of positive integers with start below end"
    ranges: list[tuple[int, int]] = []
    for item in _items(value, what):
        bounds = list(item) if isinstance(item, (list, tuple)) else []
        if len(bounds) != 2 or not all(map(_positive, bounds)) or bounds[0] >= bounds[1]:  # noqa: PLR2004  start and end
            message = f"ranges are {what}, and {item!r} is not one (write a single size in compile_sizes)"
            raise WrongValueError(message)
        ranges.append((bounds[0], bounds[1]))
    ranges.sort()
    for (start, end), (next_start, next_end) in pairwise(ranges):
        if next_start <= end:
            message = f"ranges must not overlap, and [{start}, {end}] and [{next_start}, {next_end}] do"
            raise WrongValueError(message)
    return tuple(ranges)


def check_dim(value: Any) -> str | None:
    """Return the name of a dynamic dimension; None stays None."""
    if value is not None and not _is_dim(value):
        raise WrongValueError("it must be the name of a dynamic dimension, such as num_tokens")
    return value  # type: ignore[no-any-return]  # checked above


def check_adaptor(value: Any) -> str:
    """Return the name of an adaptor; if empty, `use_inductor` selects it."""
    if not isinstance(value, str) or (value and not is_adaptor(value)):
        names = adaptor_names()
        message = f"adaptors are {', '.join(names)}; the nearest is {nearest(str(value), names)}"
        raise WrongValueError(message)
    return value


def check_recheck(value: Any) -> str:
    """Return when a loaded model checks its live objects."""
    if value not in RECHECKS:
        message = f"it must be {' or '.join(map(repr, RECHECKS))}"
        raise WrongValueError(message)
    return str(value)


def check_json_mapping(value: Any) -> dict[str, Any]:
    """Return a copy of a mapping of Inductor options."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise WrongValueError("it must map names of Inductor options to JSON values")
    _check_keys(value)
    try:
        copy: dict[str, Any] = json.loads(canonical_json(dict(value)))
    except (TypeError, ValueError) as error:
        message = f"it must map names of Inductor options to JSON values ({error})"
        raise WrongValueError(message) from error
    return copy


def _check_keys(value: Any) -> None:
    # JSON converts the key 1 to "1", which would make two different mappings equal
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                message = f"keys of a JSON mapping are strings, and {key!r} is not"
                raise WrongValueError(message)
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def check_jobs(value: Any) -> int | None:
    """Return a number of workers; None stays None."""
    if value is not None and (type(value) is not int or value < 0):
        raise WrongValueError("it must be a number of workers: 1 or more, 0 for none, or nothing for one per core")
    return value


def check_executor(value: Any) -> str:
    """Return the URL of an executor, or ""."""
    if not isinstance(value, str) or not re.fullmatch(r"([A-Za-z][A-Za-z0-9_.-]{0,39}(:[^\s]*)?)?", value):
        raise WrongValueError("it must name an executor, with its address after a colon: dask://10.0.0.1:8786, mpi")
    return value


def check_secs(value: Any) -> float | None:
    """Return a number of seconds above 0; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise WrongValueError("it must be a number of seconds above 0, or nothing for no limit")
    return float(value)


def check_path(value: Any) -> str:
    """Return a path as text."""
    if not isinstance(value, (str, os.PathLike)):
        raise WrongValueError("it must be a path, or empty")
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text:
        raise WrongValueError("it must be a path as text, without a zero byte")
    return text


def check_urls(value: Any) -> tuple[str, ...]:
    """Return URLs as text."""
    urls = tuple(check_path(item) for item in _items([] if value is None else value, "URLs"))
    if not all("://" in url for url in urls):
        raise WrongValueError("it must be a list of URLs such as s3://BUCKET/FOLDER")
    return urls


def check_paths(value: Any) -> tuple[str, ...]:
    """Return non-empty paths as text."""
    paths = tuple(check_path(item) for item in _items([] if value is None else value, "paths"))
    if not all(paths):
        raise WrongValueError("it must be a list of paths, none of which is empty")
    return paths
