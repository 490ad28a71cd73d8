"""Register custom ops through `torch.library.Library`, without importing Dynamo or Inductor.

Owns `direct_register_custom_op`, the libraries that hold the definitions, and the record of registered ops. Must not
import torch._dynamo or torch._inductor, nor use `torch.library.custom_op`: an op defined that way imports Dynamo at its
first call (1 s on a CPU, 4 s with a GPU), which a process that starts from a cache must avoid.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from cgtool.errors import UsageError
from cgtool.guards.code import code_digest
from cgtool.ops import register_splitting_op
from cgtool.threads import ForkedLock

#: The namespace of ops registered without one.
DEFAULT_NAMESPACE: Final = "cgtool"


class CustomOp(msgspec.Struct, frozen=True, kw_only=True):
    """An op that `direct_register_custom_op` registered.

    Args:
        name: `ns::op`.
        schema: The schema from `torch.library.infer_schema`, without the name.
        dispatch_key: The key that `function` is registered for.
        module: The module whose import registers the op; a new process must import it to have the op.
        function: The kernel.
        fake: The fake implementation, which computes output shapes without running the kernel, if there is one.
    """

    name: str
    schema: str
    dispatch_key: str
    module: str
    function: Callable[..., Any]
    fake: Callable[..., Any] | None


_ops: dict[str, CustomOp] = {}
# A Library removes its definitions when it is garbage collected, so cgtool's libraries live as long as the process.
# Each op has a separate library, so that a registration that fails halfway leaves nothing behind.
_libraries: dict[str, torch.library.Library] = {}
_lock = ForkedLock()


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str] = (),
    fake_impl: Callable[..., Any] | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    dispatch_key: str = "CompositeExplicitAutograd",
    splitting: bool = False,
    target_lib: torch.library.Library | None = None,
) -> CustomOp:
    """Register a Python function as the custom op `namespace::op_name`.

    Registering the same op again, as a module that is imported twice does, has no effect if the code of both functions
    and the schema are unchanged.

    Args:
        op_name: The name without its namespace.
        op_func: The kernel. Its annotations define the schema.
        mutates_args: Names of the arguments that the kernel writes to.
        fake_impl: Takes the kernel's arguments and returns empty tensors like its outputs. Not needed for an op that
            returns nothing. Without it, the kernel itself runs on fake tensors, which works only for plain torch code.
        namespace: The part before `::`. The namespace of `target_lib` takes precedence.
        dispatch_key: The dispatch key of the kernel. The default, `"CompositeExplicitAutograd"`, covers every device;
            such a kernel may choose what to call by the device of its arguments. (ATOM's default is `"CUDA"`, which
            leaves other devices without a kernel.)
        splitting: Whether graphs are split at this op if `splitting_ops` is None.
        target_lib: The library to define the op in. The default is a library that lives as long as the process.

    Returns:
        The record of the op, whether it was registered now or earlier.

    Raises:
        UsageError: A name is invalid, no schema can be inferred, or a different op has that name already.

    Source:
        The function of that name in ATOM (`atom/utils/custom_register.py`) and in vLLM.
    """
    library = target_lib if target_lib is not None else _new_library(namespace)
    op = CustomOp(
        name=f"{library.ns}::{op_name}",
        schema=_schema(op_name, op_func, mutates_args),
        dispatch_key=dispatch_key,
        module=getattr(op_func, "__module__", None) or "__main__",
        function=op_func,
        fake=fake_impl,
    )
    with _lock:
        known = _ops.get(op.name)
        # If a library was garbage collected, its op is gone although its record is still here.
        if hasattr(getattr(torch.ops, library.ns), op_name):
            known = _same_or_raise(known, op)
        else:
            _define(library, op_name, op)
            _ops[op.name] = known = op
            _libraries[op.name] = library
    if splitting:
        register_splitting_op(op.name)
    return known


def provider_of(name: str) -> str | None:
    """Return the module that registered `ns::op` through `direct_register_custom_op`, or None if there is none."""
    with _lock:
        known = _ops.get(name)
    return None if known is None else known.module


def _new_library(namespace: str) -> torch.library.Library:
    """Return a fragment of `namespace` to define one op in."""
    if not namespace.isidentifier():
        msg = f"{namespace!r} is not a valid namespace for a custom op. Use a Python identifier."
        raise UsageError(msg, expected="an identifier", actual=namespace)
    try:
        return torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except (ValueError, RuntimeError) as error:
        msg = f"{namespace!r} cannot be the namespace of a custom op: {error}. Choose another namespace."
        raise UsageError(msg, actual=namespace) from error


def _schema(op_name: str, function: Callable[..., Any], mutates_args: Sequence[str]) -> str:
    """Infer the schema from the kernel's annotations; wrap torch's error."""
    if not op_name.isidentifier():
        msg = (
            f"{op_name!r} is not a valid name for a custom op. Use a Python identifier, and pass the namespace as "
            "`namespace`."
        )
        raise UsageError(msg, expected="an identifier", actual=op_name)
    try:
        return str(torch.library.infer_schema(function, mutates_args=mutates_args))
    except (ValueError, TypeError) as error:
        msg = (
            f"Cannot infer a schema for the custom op {op_name}: {error} Annotate every argument and the result with "
            "types that torch.library.infer_schema supports, and list only arguments of the function in mutates_args."
        )
        raise UsageError(msg, path=op_name) from error


def _define(library: Any, op_name: str, op: CustomOp) -> None:
    """Define the op, its kernel and its fake. `library` is Any because torch.library.Library has untyped methods."""
    fake = op.fake
    if fake is None and op.schema.endswith("-> ()"):
        fake = _returns_nothing
    try:
        library.define(op_name + op.schema)
        library.impl(op_name, op.function, op.dispatch_key)
        if fake is not None:
            torch.library.register_fake(op.name, fake, lib=library)
    except RuntimeError as error:
        msg = f"torch rejected the custom op {op.name} ({op.dispatch_key}): {error} Correct its name or dispatch key."
        raise UsageError(msg, path=op.name) from error


def _returns_nothing(*_args: object, **_kwargs: object) -> None:
    """Fake implementation of an op that only writes into its arguments."""


def _same_or_raise(known: CustomOp | None, new: CustomOp) -> CustomOp:
    """Return the record of an existing op if `new` is the same op, else raise."""
    if known is None:
        msg = f"{new.name} is already registered, but not by direct_register_custom_op. Choose another name."
        raise UsageError(msg, path=new.name)
    for what, before, now in (
        ("schema", known.schema, new.schema),
        ("dispatch key", known.dispatch_key, new.dispatch_key),
        ("kernel", _fingerprint(known.function), _fingerprint(new.function)),
        ("fake implementation", _fingerprint(known.fake), _fingerprint(new.fake)),
    ):
        if before != now:
            msg = (
                f"{new.module} registers {new.name}, which {known.module} already registered with a different {what}. "
                "Rename one of the ops or change its namespace. If you edited the kernel, start a new process."
            )
            raise UsageError(msg, path=new.name, expected=str(before), actual=str(now))
    return known


def _fingerprint(function: Callable[..., Any] | None) -> object:
    """Return a value that is equal for two functions defined by the same source.

    The code digest covers some objects of a closure by type only; those must be identical. Anything but a Python
    function is equal only to itself.
    """
    if not isinstance(function, types.FunctionType):
        return id(function)
    closure = [cell.cell_contents for cell in function.__closure__ or ()]
    by_identity = tuple(id(value) for value in closure if not isinstance(value, _COVERED_BY_DIGEST))
    return code_digest(function, follow_globals=True), by_identity


_COVERED_BY_DIGEST = (bool, int, float, str, bytes, type(None), type, types.ModuleType, types.FunctionType)
