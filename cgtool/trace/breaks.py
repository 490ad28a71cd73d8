"""Dynamo's refusals as sentences for the user: their own line, what broke there, and what to do about it."""

from __future__ import annotations

import contextlib
import dis
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cgtool.errors import CgtoolError, GraphBreakError, TraceError
from cgtool.trace import _torch as private
from cgtool.trace.closure import is_covered_by_versions

_WRAP = "wrap it into a custom op with `cgtool.direct_register_custom_op`."
_HINTS = (
    (
        r"\brandom\b|RandomValueSource",
        "Draw random numbers with torch (torch.rand): those of `random` and numpy would be the same in every call.",
    ),
    (
        r"print|logging|warnings",
        "Remove the call from forward, or guard it with `if not torch.compiler.is_compiling()`.",
    ),
    (
        r"\.item\(\)|_local_scalar_dense|tolist|data.dependent|OnDataDependent|nonzero|Dynamic shape|PendingUnbacked",
        "Compute it before the call and pass it in, or keep it a tensor (torch.where, masks of a fixed size).",
    ),
    (r"nn\.Parameter\(\)", "Make parameters and modules when the model is built, and not in forward."),
    (r"builtin|skipfiles|skip function|C/C\+\+|marked as skipped", f"Take the call out of forward, or {_WRAP}"),
)
_DEFAULT_HINT = f"Rewrite that line with tensor operations, or {_WRAP}"
#: How Dynamo quotes an error of the model itself, which eager would raise too.
_OWN_ERROR = re.compile(r"Dynamo failed to run FX node with fake tensors: .*?got (\w+)\([\"'](.*?)[\"']\)", re.DOTALL)
#: How Dynamo reports an exception that the model's code raises and does not catch.
_RAISED = re.compile(r"Observed exception.*raised exception (\w+)\(([^\n]*)\)", re.DOTALL)
#: What Dynamo says of a dimension that was marked and has one size only, and where it says why.
_SPECIALISED = re.compile(
    r"You marked L(?:\['kwargs'\])?\['(\w+)'\]\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((\d+)\)"
)
_STACK = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)
_SAID = re.compile(r"ConstantVariable\(str: ['\"](.*?)['\"]\)")
#: What torch raises where a branch or a number depends on data: Dynamo's limit, and no fault of the example.
_OF_DATA = "GuardOnDataDependentSymNode"
#: How lines of torch's begin that help nobody who has the user's line.
_NOISE = ("Caused by: ", "For more information, ", "For extended logs ", "If you suspect the guard", "For more debug")
#: How much of Dynamo's own words is shown, in lines.
_MAX_LINES = 5


class FixedDimensionError(TraceError):
    """The model's code fixes dimensions that should be dynamic.

    Attributes:
        fixed: Parameter and dimension → its only size.
        because: The user's line, where Dynamo tells it.
    """

    def __init__(self, message: str, *, fixed: Mapping[tuple[str, int], int], because: str) -> None:
        super().__init__(message, actual=fixed)
        self.fixed = fixed
        self.because = because


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
        cause = getattr(error, "inner_exception", None) or error.__cause__
        if isinstance(cause, CgtoolError):
            raise cause from None
        if "Constraints violated" in str(error) or "ConstraintViolation" in type(error).__name__:
            raise _specialised(error) from error
        raise _graph_break(error, method) from error
    except Exception as error:  # the model's code raises what it likes
        if type(error).__name__ == _OF_DATA:
            raise _graph_break(error, method) from error
        raise _failed(type(error).__name__, str(error), error, method) from error


def _failed(kind: str, text: str, error: Exception, method: Callable[..., Any]) -> TraceError:
    where = _user_line(error, method)
    msg = f"The model fails on the example: {kind}: {text}{where}\nCorrect the example or the model."
    return TraceError(msg, actual=text)


def _specialised(error: Exception) -> TraceError:
    text = re.sub(r"\s+", " ", str(error))
    fixed = {(parameter, int(dim)): int(size) for parameter, dim, size in _SPECIALISED.findall(text)}
    places = "; ".join(f"{parameter}, dimension {dim}, is always {size}" for (parameter, dim), size in fixed.items())
    lines = [(file, line) for file, line in _STACK.findall(str(error)) if not is_covered_by_versions(file)]
    file, line = (lines or _STACK.findall(str(error)) or [("", "0")])[-1]
    because = f"`{linecache.getline(file, int(line)).strip()}` ({Path(file).name}:{line})" if file else ""
    msg = (
        f"A dimension that should be dynamic is not: {places or text[:600]} in this model"
        f"{f' because of {because}' if because else ''}. Take it out of `dynamic`, or change the code that fixes it."
    )
    return FixedDimensionError(msg, fixed=fixed, because=because)


def _graph_break(error: Exception, method: Callable[..., Any]) -> TraceError:
    full = what = str(getattr(error, "msg", "") or error)
    for end in ("\nfrom user code", "Developer debug context", "User Stack"):
        what = what.partition(end)[0].strip()
    own = _OWN_ERROR.search(what)
    if own is not None and own[1] != _OF_DATA:
        return _failed(own[1], own[2], error, method)
    raised = _RAISED.search(full)
    if raised is not None:
        return _failed(raised[1], ", ".join(_SAID.findall(raised[2])) or raised[2].strip("'\""), error, method)
    if "RecursionError" in what:
        what = (
            "Dynamo loops without end on an object here, such as a decimal.Decimal. Keep the value as a plain number."
        )
    lines = [line.strip() for line in what.splitlines() if line.strip() and "report an issue" not in line]
    lines = [line for line in lines if not line.startswith(_NOISE)]
    brief = "\n  ".join(lines[:_MAX_LINES])
    # Dynamo's own hints and examples name things that the model may not even use.
    said = re.sub(r"\(e\.g\..*?\)", "", "\n".join(line for line in lines if not line.startswith("Hint:")))
    hint = next((advice for pattern, advice in _HINTS if re.search(pattern, said)), _DEFAULT_HINT)
    msg = f"The model cannot be traced into one graph.{_user_line(error, method)}\n  {brief}\n{hint}"
    return GraphBreakError(msg, actual=what)


def _user_line(error: Exception, method: Callable[..., Any]) -> str:
    """Return where it happened, on a line of its own: the innermost frame of the user's, as Dynamo or Python saw it."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in getattr(error, "real_stack", None) or ()]
    frames = frames or list(private.translated_lines(error))
    walked = traceback.walk_tb(error.__traceback__)
    frames += [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
    own = inspect.getsourcefile(getattr(method, "__func__", method)) or ""
    return line_of(frames, own)


def local_of(error: GraphBreakError, function: str, name: str) -> Any:
    """Return what a local of a function is, if a trace failed within that; else None."""
    return private.value_of_local(error.__cause__, function, name) if error.__cause__ is not None else None


def line_of_return(method: Callable[..., Any]) -> str:
    """Return the line at which a method returns, or that of its head where it returns at several."""
    code = getattr(method, "__func__", method).__code__
    steps = (step for step in dis.get_instructions(code) if step.opname.startswith("RETURN_"))
    lines = {step.positions.lineno for step in steps if step.positions is not None}
    line = lines.pop() if len(lines) == 1 else None
    return line_of([(code.co_filename, line or code.co_firstlineno, code.co_name)], code.co_filename)


def line_of(frames: Iterable[tuple[str, int, str]], own: str = "") -> str:
    """Return the innermost frame (file, line, function) of the user's, on a line of its own.

    Args:
        frames: The outermost first.
        own: A file that is the user's wherever it lies.
    """
    chosen = [frame for frame in frames if frame[0] == own or _is_users(frame[0])]
    if not chosen:
        return ""
    filename, line, name = chosen[-1]
    return f"\n  {filename}:{line}, in {name}: {linecache.getline(filename, line).strip()}"


def _is_users(filename: str) -> bool:
    return not is_covered_by_versions(filename) and "/cgtool/" not in filename
