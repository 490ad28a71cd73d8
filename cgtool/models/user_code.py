"""Import and run the user's code, and report where it failed.

Must not catch anything but `Exception`, except for the `SystemExit` of a script that ends the process on import.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from cgtool.errors import ModelError, UsageError

#: Parameters that `--arg name=value` cannot set.
_NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def import_file(path: Path) -> ModuleType:
    """Import a file under its usual name: dotted if it is in a package, otherwise its stem.

    The folder that the name starts from is put on `sys.path`, so that neighbouring modules can be imported too.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = _nearest(path.name, [entry.name for entry in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        msg = f"{path} {what}.{near} MODEL is path/to/file.py:factory: name the file that defines the factory."
        raise ModelError(msg, path=path, expected="a Python file", actual=what)
    path = path.resolve()
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or any("." in part for part in parts):
        msg = f"{path} cannot be imported under a valid module name. Rename the file (and its folders) to identifiers."
        raise UsageError(msg, path=path)
    add_to_path([folder])
    module = import_module(".".join(parts), file=path)
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != path:
        msg = (
            f"{path} would be imported as {module.__name__}, which is already {origin or 'built into Python'}. "
            "Rename the file, or name the module instead: package.module:factory."
        )
        raise ModelError(msg, path=path, expected=str(path), actual=origin)
    return module


def import_module(name: str, *, file: Path | None = None) -> ModuleType:
    """Import a module by its dotted name; `file` is its path if the user named the file."""
    importlib.invalidate_caches()
    try:
        with running_user_code():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise failure(
                f"{file or name} could not be imported", error, file, "Install it, or add its folder with --pythonpath."
            ) from error
        msg = (
            f"There is no module {error.name}. Add its folder with --pythonpath DIR, or name the file instead: "
            "path/to/file.py:factory."
        )
        raise ModelError(msg, path=name, expected="an importable module") from error
    except Exception as error:  # the user's module may raise anything
        raise failure(f"{file or name} could not be imported", error, file, "Fix the file.") from error
    except SystemExit as error:
        advice = 'Move the code of the script under `if __name__ == "__main__":`.'
        raise failure(f"{file or name} ended the process while it was imported", error, file, advice) from error


def find_factory(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the callable that `name` (dots allowed) refers to in `module`."""
    value: Any = module
    where = getattr(module, "__file__", None) or module.__name__
    for part in name.split("."):
        if not hasattr(value, part):
            functions = sorted(
                key
                for key, item in vars(module).items()
                if inspect.isroutine(item) and getattr(item, "__module__", None) == module.__name__
                if not key.startswith("_")
            )
            near = _nearest(part, functions)
            names = f" It defines {', '.join(functions)}." if functions and not near else ""
            msg = f"{where} has no factory {name}.{near}{names} Name the function that returns the model."
            raise ModelError(msg, path=where, expected=name, actual=functions)
        value = getattr(value, part)
    if not callable(value):
        kind = type(value).__name__
        msg = f"{name} in {where} is a {kind} and cannot be called. Name a function that returns the model."
        raise ModelError(msg, path=where, expected="a function", actual=kind)
    return value  # type: ignore[no-any-return]  # only known to be callable


def check_arguments(factory: Callable[..., Any], name: str, arguments: dict[str, Any]) -> None:
    """Raise a UsageError for unknown or missing arguments before the factory runs."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # a C callable without a signature: the call itself reports wrong arguments
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = [key for key, parameter in signature.parameters.items() if parameter.kind not in _NOT_BY_NAME]
        unknown = [key for key in arguments if key not in known]
        near = _nearest(unknown[0], known) if unknown else ""
        taken = f"It takes {', '.join(known)}: pass them with --arg name=value." if known else "It takes no arguments."
        msg = f"{name} cannot be called with these arguments: {error}.{near} {taken}"
        raise UsageError(msg, path=name, expected=known, actual=sorted(arguments)) from error


def add_to_path(folders: Sequence[Path]) -> None:
    """Insert folders at the start of `sys.path` in the given order, each once."""
    for folder in reversed(folders):
        text = str(folder)
        if text not in sys.path:
            sys.path.insert(0, text)


@contextmanager
def running_user_code() -> Iterator[None]:
    """Redirect what the user's code prints to stderr: stdout is reserved for the report."""
    with redirect_stdout(sys.stderr):
        yield


def failure(what: str, error: BaseException, file: Path | str | None, advice: str) -> ModelError:
    """Return an error with what failed, the cause, the responsible line of the user's code and advice."""
    if isinstance(error, SyntaxError):
        cause = f"{type(error).__name__}: {error.msg}"  # str() repeats the location, which is shown below
    else:
        cause = "".join(traceback.format_exception_only(error)).strip()
    where = user_line(error, file)
    line = "" if where is None else f"\n  {where[0]}:{where[1]}: {where[2]}"
    path = None if where is None else f"{where[0]}:{where[1]}"
    return ModelError(f"{what}: {cause}{line}\n{advice}", path=path or file, actual=type(error).__name__)


def user_line(error: BaseException, file: Path | str | None) -> tuple[str, int, str] | None:
    """Return (file, line, text) of the innermost frame in the user's file; None if the error has no such frame.

    If no frame is in `file`, the innermost frame outside of installed packages counts.
    """
    if isinstance(error, SyntaxError) and error.filename is not None and error.lineno is not None:
        return error.filename, error.lineno, (error.text or "").strip()
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user_file = None if file is None else os.path.realpath(file)
    candidates = [frame for frame in frames if os.path.realpath(frame[0]) == user_file]
    if not candidates:
        candidates = [frame for frame in frames if not _is_installed(frame[0])]
    if not candidates:
        return None
    name, line = candidates[-1]
    return name, line, linecache.getline(name, line).strip()


def _is_installed(filename: str) -> bool:
    """Return whether a frame belongs to an installed package, the standard library or cgtool."""
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", str(Path(os.__file__).parent))
    here = str(Path(__file__).parent.parent)
    return filename.startswith(("<", here)) or any(part in filename for part in installed)


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return " Did you mean …?", or "" if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
