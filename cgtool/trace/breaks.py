"""Dynamo's refusals as sentences for the user: their own line, what broke there, and what to do about it."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from typing import Any

from cgtool.errors import CgtoolError, GraphBreakError, TraceError
from cgtool.trace import _torch as private

_HINTS = (
    (r"print|logging|warnings", "Remove the call from forward, or guard it with `if not torch.compiler.is_compiling()`."),
    (r"\.item\(\)|_local_scalar_dense|tolist|data.dependent|GuardOnDataDependent|nonzero|Dynamic shape operator",
     "Compute it before the call and pass it in, or keep it a tensor (torch.where, masks of a fixed size)."),
    (r"builtin|skipfiles|skip function|C/C\+\+|Attempted to call function marked as skipped",
     "Wrap the call into a custom op with `cgtool.direct_register_custom_op`."),
)
_DEFAULT_HINT = "Rewrite that line with tensor operations, or wrap it into a custom op with `cgtool.direct_register_custom_op`."


@contextlib.contextmanager
def explained(method: Callable[..., Any]) -> Iterator[None]:
    """Turn what Dynamo raises into a `GraphBreakError` or a `TraceError` with the user's own line."""
    try:
        yield
    except CgtoolError:
        raise
    except private.ConstraintViolationError as error:
        raise _specialised(error) from error
    except private.TorchDynamoException as error:
        cause = error.__cause__
        if isinstance(cause, CgtoolError):
            raise cause from None
        if "Constraints violated" in str(error) or "ConstraintViolation" in type(error).__name__:
            raise _specialised(error) from error
        raise _graph_break(error, method) from error
    except Exception as error:
        where = _user_line(error, method)
        msg = f"The model's forward failed on the example: {type(error).__name__}: {error}{where}\nCorrect the example or the model."
        raise TraceError(msg) from error


def _specialised(error: Exception) -> TraceError:
    text = re.sub(r"\s+", " ", str(error))
    found = re.findall(r"You marked (L\[.*?\]\.size\(\)\[\d+\]) as dynamic but your code specialized it to be a constant \((\d+)\)", text)
    places = "; ".join(f"{_spoken(place)} is always {size} in this model" for place, size in found)
    msg = (
        f"A dimension that should be dynamic is not: {places or text[:600]}. Take it out of `dynamic`, or change the code "
        "that fixes it."
    )
    return TraceError(msg)


def _spoken(place: str) -> str:
    return re.sub(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", r"\1, dimension \2,", place)


def _graph_break(error: Exception, method: Callable[..., Any]) -> GraphBreakError:
    what = str(getattr(error, "msg", "") or error)
    what = what.split("\nfrom user code:")[0].split("\n\nfrom user code")[0].strip()
    brief = "\n  ".join(line.strip() for line in what.splitlines()[:6] if line.strip())
    hint = next((advice for pattern, advice in _HINTS if re.search(pattern, what)), _DEFAULT_HINT)
    msg = f"The model cannot be traced into one graph.{_user_line(error, method)}\n  {brief}\n{hint}"
    return GraphBreakError(msg, actual=what)


def _user_line(error: Exception, method: Callable[..., Any]) -> str:
    """Return '\\n  file.py:12, in forward: the line' of the innermost frame that is the user's, as Dynamo or Python saw it."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in getattr(error, "real_stack", None) or ()]
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    own = inspect.getsourcefile(getattr(method, "__func__", method)) or ""
    for only in (lambda name: name == own, lambda name: "/torch/" not in name and "/cgtool/" not in name):
        chosen = [frame for frame in frames if only(frame[0])]
        if chosen:
            filename, line, name = chosen[-1]
            return f"\n  {filename}:{line}, in {name}: {linecache.getline(filename, line).strip()}"
    return ""
