"""Running code of the user: importing the module of a factory, calling it, and saying where it went wrong.

Must not catch what is not an `Exception`, save for `SystemExit`: a script that ends the process while it is imported.
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

#: Parameters that no `--arg name=value` can mean.
_NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def import_file(path: Path) -> ModuleType:
    """Import a file under the name by which its author would: the dotted one in a package, else its stem.

    The folder that the name starts from is put on `sys.path`, so that its neighbours can be imported too.
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
        msg = f"{path} has a name that no import statement can spell. Rename the file (and its folders) to plain words."
        raise UsageError(msg, path=path)
    add_to_path([folder])
    module = import_module(".".join(parts), file=path)
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != path:
        msg = (
            f"{path} would be imported as {module.__name__}, and that is {origin or 'built into Python'} already. "
            "Rename the file, or name the module itself: package.module:factory."
        )
        raise ModelError(msg, path=path, expected=str(path), actual=origin)
    return module


def import_module(name: str, *, file: Path | None = None) -> ModuleType:
    """Import a module by its dotted name; `file` is what the user named where that was its file."""
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
            f"There is no module {error.name}. Name one that can be imported from here (--pythonpath FOLDER adds a "
            "place to look), or a file: path/to/file.py:factory."
        )
        raise ModelError(msg, path=name, expected="an importable module") from error
    except Exception as error:  # the user's module raises what it likes
        raise failure(f"{file or name} could not be imported", error, file, "Mend the file.") from error
    except SystemExit as error:
        advice = 'Put what a script does under `if __name__ == "__main__":`.'
        raise failure(f"{file or name} ended the process while it was imported", error, file, advice) from error


def find_factory(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the callable that `name` (dots allowed) means in `module`."""
    value: Any = module
    where = getattr(module, "__file__", None) or module.__name__
    for part in name.split("."):
        if not hasattr(value, part):
            own = sorted(
                key
                for key, item in vars(module).items()
                if inspect.isroutine(item) and getattr(item, "__module__", None) == module.__name__
                if not key.startswith("_")
            )
            near = _nearest(part, own)
            names = f" It defines {', '.join(own)}." if own and not near else ""
            msg = f"{where} has no factory {name}.{near}{names} Name the function that returns the model."
            raise ModelError(msg, path=where, expected=name, actual=own)
        value = getattr(value, part)
    if not callable(value):
        kind = type(value).__name__
        msg = f"{name} of {where} is a {kind} and cannot be called. Name a function that returns the model."
        raise ModelError(msg, path=where, expected="a function", actual=kind)
    return value  # type: ignore[no-any-return]  # hasattr and callable are all that is known of it


def check_arguments(factory: Callable[..., Any], name: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments that the factory does not take, or lacks, before any of its code runs."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # a callable of C has no signature to ask; calling it will tell
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = [key for key, parameter in signature.parameters.items() if parameter.kind not in _NOT_BY_NAME]
        unknown = [key for key in arguments if key not in known]
        near = _nearest(unknown[0], known) if unknown else ""
        taken = f"It takes {', '.join(known)}" if known else "It takes none"
        msg = f"{name} cannot be called with these arguments: {error}.{near} {taken}: pass them by --arg name=value."
        raise UsageError(msg, path=name, expected=known, actual=sorted(arguments)) from error


def add_to_path(folders: Sequence[Path]) -> None:
    """Put folders at the head of `sys.path`, the first one first, each once."""
    for folder in reversed(folders):
        text = str(folder)
        if text not in sys.path:
            sys.path.insert(0, text)


@contextmanager
def running_user_code() -> Iterator[None]:
    """Send what the user's code prints to standard error: standard output carries our data."""
    with redirect_stdout(sys.stderr):
        yield


def failure(what: str, error: BaseException, file: Path | str | None, advice: str) -> ModelError:
    """Return an error that says what could not be done, shows the user's own line and ends with what he can do.

    Without a file of the user's, the line is the innermost one outside of installed packages.
    """
    if isinstance(error, SyntaxError):
        said = f"{type(error).__name__}: {error.msg}"  # str() repeats the place, which is shown below
    else:
        said = "".join(traceback.format_exception_only(error)).strip()
    where = user_line(error, file)
    shown = "" if where is None else f"\n  {where[0]}:{where[1]}: {where[2]}"
    path = None if where is None else f"{where[0]}:{where[1]}"
    return ModelError(f"{what}: {said}{shown}\n{advice}", path=path or file, actual=type(error).__name__)


def user_line(error: BaseException, file: Path | str | None) -> tuple[str, int, str] | None:
    """Return (file, line, text) of the innermost frame in the user's file, or None if the error has no such frame."""
    if isinstance(error, SyntaxError) and error.filename is not None and error.lineno is not None:
        return error.filename, error.lineno, (error.text or "").strip()
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    wanted = None if file is None else os.path.realpath(file)
    own = [frame for frame in frames if os.path.realpath(frame[0]) == wanted]
    if not own:
        own = [frame for frame in frames if not _is_installed(frame[0])]
    if not own:
        return None
    name, line = own[-1]
    return name, line, linecache.getline(name, line).strip()


def _is_installed(filename: str) -> bool:
    """Tell whether a frame is of an installed package, of Python itself, or of cgtool: of no interest to the user."""
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", str(Path(os.__file__).parent))
    here = str(Path(__file__).parent.parent)
    return filename.startswith(("<", here)) or any(part in filename for part in installed)


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return ' Did you mean …?' or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
