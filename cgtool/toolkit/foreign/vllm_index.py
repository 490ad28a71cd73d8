"""`vllm_compile_cache.py`: the index that vLLM and ATOM keep of what they compiled, a Python literal. No torch.

    index   = { (shape, piece, compiler): handle, ... }
    shape   = None (general) | size | (start, end)          start = end is one size, compiled as such
    piece   = its number among the compiled pieces
    handle  = (name, path)                                          older vLLM, and ATOM
            | {"graph_handle": (name, path), "cache_key": text}     newer vLLM
    name    = the file or folder beside the index ("inductor_standalone"), or the key of a compiled graph ("inductor")
    path    = where that lay when it was written, absolute; with "inductor", of the generated code

Source: vllm/compilation/backends.py, atom/utils/backends.py.
"""

from __future__ import annotations

from typing import Any

from cgtool.plan.shapes import Shape
from cgtool.records import dataclass
from cgtool.toolkit.foreign.literals import NotLiteralError, parse_literal
from cgtool.toolkit.foreign.words import shown

INDEX_FILE = "vllm_compile_cache.py"
_MOST_NUMBER = 1 << 53


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """One row of an index.

    Args:
        shape: What was compiled for.
        piece_index: Which piece.
        compiler: "inductor_standalone", "inductor" or another's name.
        name: The first half of the handle.
        path: The second half: where it lay when it was written.
        cache_key: What the artifact is looked up by; None in the older form.
    """

    shape: Shape
    piece_index: int
    compiler: str
    name: str
    path: str
    cache_key: str | None


@dataclass(frozen=True, kw_only=True)
class Index:
    """An index.

    Args:
        form: "ranges" or "shapes" (the older one); None of no rows.
        rows: In the order of the file.
        problems: Rows that were skipped.
    """

    form: str | None
    rows: tuple[IndexRow, ...]
    problems: tuple[str, ...]


def parse_index(data: bytes) -> Index:
    """Return the index in the text of such a file.

    Raises:
        NotLiteralError: It is no literal of a dictionary, or is over a limit.
    """
    value = parse_literal(data)
    if not isinstance(value, dict):
        raise NotLiteralError("it is no dictionary")
    rows: list[IndexRow] = []
    problems: list[str] = []
    forms: set[str] = set()
    for key, handle in value.items():
        try:
            rows.append(_row(key, handle))
        except (ValueError, TypeError):
            problems.append(f"a row of the index was skipped, for it has no known form: {shown(ascii((key, handle)))}")
        else:
            forms.add("ranges" if isinstance(handle, dict) or isinstance(key[0], tuple) else "shapes")
    return Index(form=min(forms, default=None), rows=tuple(rows), problems=tuple(problems))


def tokens(low: int, high: int | None = None) -> Shape:
    """Return the shape of a size or a range: vLLM has them of one dimension, the tokens of a batch."""
    return {"num_tokens": (low, low if high is None else high)}


def _row(key: Any, handle: Any) -> IndexRow:
    shape, piece_index, compiler = key
    cache_key = None
    if isinstance(handle, dict):
        cache_key = handle.get("cache_key")
        handle = handle.get("graph_handle")
    name, path = handle
    texts = (compiler, name, path, *(() if cache_key is None else (cache_key,)))
    if not all(isinstance(text, str) for text in texts) or not _is_number(piece_index):
        raise TypeError
    return IndexRow(
        shape=_shape(shape), piece_index=piece_index, compiler=compiler, name=name, path=path, cache_key=cache_key
    )


def _shape(value: Any) -> Shape:
    if value is None:
        return {}
    if _is_number(value):
        return tokens(int(value))
    start, end = value
    if not (_is_number(start) and _is_number(end) and start <= end):
        raise ValueError
    return tokens(int(start), int(end))


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_NUMBER
