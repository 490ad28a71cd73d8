"""Turns Dynamo's errors into messages for the user: the line of their code, the cause, and what to do."""

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
        "Draw random numbers with torch (torch.rand): those of `random` and NumPy would be the same in every call.",
    ),
    (
        r"print|logging|warnings",
        "Remove the call from forward, or guard it with `if not torch.compiler.is_compiling()`.",
    ),
    (
        r"\.item\(\)|_local_scalar_dense|tolist|data.dependent|OnDataDependent|nonzero|Dynamic shape|PendingUnbacked",
        "Compute it before the call and pass it in, or keep it a tensor (torch.where, masks of a fixed size).",
    ),
    (r"nn\.Parameter\(\)", "Create parameters and modules when the model is built, not in forward."),
    (r"builtin|skipfiles|skip function|C/C\+\+|marked as skipped", f"Move the call out of forward, or {_WRAP}"),
)
#: The files that a trace enters when the model calls a model that is compiled already.
_COMPILED_CALLS = frozenset(str(Path(__file__).parents[1] / "runtime" / name) for name in ("call.py", "otherwise.py"))
_DEFAULT_HINT = f"Rewrite that line with tensor operations, or {_WRAP}"
#: How Dynamo quotes an error of the model itself, which eager would raise too.
_OWN_ERROR = re.compile(r"Dynamo failed to run FX node with fake tensors: .*?got (\w+)\([\"'](.*?)[\"']\)", re.DOTALL)
#: How Dynamo reports an exception that the model's code raises and does not catch.
_RAISED = re.compile(r"Observed exception.*raised exception (\w+)\(([^\n]*)\)", re.DOTALL)
#: How Dynamo reports a marked dimension that the code specializes, and the stack that explains it.
_SPECIALISED = re.compile(
    r"You marked L(?:\['kwargs'\])?\['(\w+)'\]\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((\d+)\)"
)
_STACK = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)
_RAISED_TEXT = re.compile(r"ConstantVariable\(str: ['\"](.*?)['\"]\)")
#: Raised by torch if a branch or a number depends on data: a limit of Dynamo, not a fault of the example.
_DATA_DEPENDENT = "GuardOnDataDependentSymNode"
#: Beginnings of lines in torch's messages that are useless next to the user's line.
_NOISE = ("Caused by: ", "For more information, ", "For extended logs ", "If you suspect the guard", "For more debug")
#: How many lines of Dynamo's message are shown.
_MAX_LINES = 5


class FixedDimensionError(TraceError):
    """The model's code fixes dimensions that should be dynamic.

    Attributes:
        fixed: (parameter, dimension) → its only size.
        because: The user's line, if Dynamo reports it.
    """

    def __init__(self, message: str, *, fixed: Mapping[tuple[str, int], int], because: str) -> None:
        super().__init__(message, actual=fixed)
        self.fixed = fixed
        self.because = because


@contextlib.contextmanager
def explain_errors(method: Callable[..., Any]) -> Iterator[None]:
    """Turn Dynamo's exceptions into a `GraphBreakError` or a `TraceError` with the user's line."""
    try:
        yield
    except CgtoolError:
        raise
    except private.ConstraintViolationError as error:
        raise _fixed_dimension_error(error) from error
    except private.TorchDynamoException as error:
        cause = getattr(error, "inner_exception", None) or error.__cause__
        if isinstance(cause, CgtoolError):
            raise cause from None
        if "Constraints violated" in str(error) or "ConstraintViolation" in type(error).__name__:
            raise _fixed_dimension_error(error) from error
        raise _graph_break(error, method) from error
    except Exception as error:  # the model's code can raise anything
        if type(error).__name__ == _DATA_DEPENDENT:
            raise _graph_break(error, method) from error
        raise _model_error(type(error).__name__, str(error), error, method) from error


def _model_error(kind: str, text: str, error: Exception, method: Callable[..., Any]) -> TraceError:
    where = _user_line(error, method)
    msg = f"The model fails on the example: {kind}: {text}{where}\nCorrect the example or the model."
    return TraceError(msg, actual=text)


def _fixed_dimension_error(error: Exception) -> TraceError:
    text = re.sub(r"\s+", " ", str(error))
    fixed = {(parameter, int(dim)): int(size) for parameter, dim, size in _SPECIALISED.findall(text)}
    places = "; ".join(f"{parameter}, dimension {dim}, is always {size}" for (parameter, dim), size in fixed.items())
    lines = [(file, line) for file, line in _STACK.findall(str(error)) if not is_covered_by_versions(file)]
    file, line = (lines or _STACK.findall(str(error)) or [("", "0")])[-1]
    because = f"`{linecache.getline(file, int(line)).strip()}` ({Path(file).name}:{line})" if file else ""
    msg = (
        f"A dimension that should be dynamic is not: {places or text[:600]} in this model"
        f"{f' because of {because}' if because else ''}. Remove it from `dynamic`, or change the code that fixes it."
    )
    return FixedDimensionError(msg, fixed=fixed, because=because)


def _graph_break(error: Exception, method: Callable[..., Any]) -> TraceError:
    full = what = str(getattr(error, "msg", "") or error)
    for end in ("\nfrom user code", "Developer debug context", "User Stack"):
        what = what.partition(end)[0].strip()
    own = _OWN_ERROR.search(what)
    if own is not None and own[1] != _DATA_DEPENDENT:
        return _model_error(own[1], own[2], error, method)
    raised = _RAISED.search(full)
    if raised is not None:
        text = ", ".join(_RAISED_TEXT.findall(raised[2])) or raised[2].strip("'\"")
        return _model_error(raised[1], text, error, method)
    if any(file in _COMPILED_CALLS for file, _, _ in _frames(error)):
        msg = (
            f"The model calls a model that cgtool has compiled already.{_user_line(error, method)}\nCompile the whole "
            "with the original module in its place, or call the compiled parts one after the other."
        )
        return GraphBreakError(msg, actual=what)
    if "RecursionError" in what:
        what = "Dynamo recurses endlessly on an object here, such as a decimal.Decimal. Store a plain number."
    lines = [line.strip() for line in what.splitlines() if line.strip() and "report an issue" not in line]
    lines = [line for line in lines if not line.startswith(_NOISE)]
    brief = "\n  ".join(lines[:_MAX_LINES])
    # Dynamo's own hints and examples name functions that the model may not even use.
    relevant = re.sub(r"\(e\.g\..*?\)", "", "\n".join(line for line in lines if not line.startswith("Hint:")))
    hint = next((advice for pattern, advice in _HINTS if re.search(pattern, relevant)), _DEFAULT_HINT)
    msg = f"The model cannot be traced into one graph.{_user_line(error, method)}\n  {brief}\n{hint}"
    return GraphBreakError(msg, actual=what)


def _user_line(error: Exception, method: Callable[..., Any]) -> str:
    """Return the innermost frame of the user's code, from Dynamo or the traceback, on a separate line."""
    walked = traceback.walk_tb(error.__traceback__)
    frames = _frames(error) + [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
    own = inspect.getsourcefile(getattr(method, "__func__", method)) or ""
    return line_of(frames, own)


def _frames(error: Exception) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of the traced frames at an error, the outermost first."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in getattr(error, "real_stack", None) or ()]
    return frames or list(private.translated_lines(error))


def local_of(error: GraphBreakError, function: str, name: str) -> Any:
    """Return the value of a function's local, if a trace failed inside that function; else None."""
    return private.value_of_local(error.__cause__, function, name) if error.__cause__ is not None else None


def line_of_return(method: Callable[..., Any]) -> str:
    """Return the line on which a method returns, or its first line if there are several returns."""
    code = getattr(method, "__func__", method).__code__
    steps = (step for step in dis.get_instructions(code) if step.opname.startswith("RETURN_"))
    lines = {step.positions.lineno for step in steps if step.positions is not None}
    line = lines.pop() if len(lines) == 1 else None
    return line_of([(code.co_filename, line or code.co_firstlineno, code.co_name)], code.co_filename)


def line_of(frames: Iterable[tuple[str, int, str]], own: str = "") -> str:
    """Return the innermost frame of the user's code as text on a separate line.

    Args:
        frames: (file, line, function), the outermost first.
        own: A file that counts as the user's regardless of its location.
    """
    chosen = [frame for frame in frames if frame[0] == own or _is_users(frame[0])]
    if not chosen:
        return ""
    filename, line, name = chosen[-1]
    return f"\n  {filename}:{line}, in {name}: {linecache.getline(filename, line).strip()}"


def _is_users(filename: str) -> bool:
    return not is_covered_by_versions(filename) and "/cgtool/" not in filename
