"""Registering a custom op through `torch.library.Library`, so that neither Dynamo nor Inductor is ever imported for it.

Owns `direct_register_custom_op`, the libraries that hold the definitions, and the record of who registered what. Must
not import torch._dynamo or torch._inductor, nor use `torch.library.custom_op`: an op made by that imports Dynamo at its
first call (1 s on a CPU, 4 s beside a GPU), which is what a process that starts from a cache wants to be free of.
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

#: Where an op goes when its author names no namespace.
DEFAULT_NAMESPACE: Final = "cgtool"


class CustomOp(msgspec.Struct, frozen=True, kw_only=True):
    """An op that `direct_register_custom_op` registered.

    Args:
        name: `ns::op`.
        schema: Its schema as `torch.library.infer_schema` writes it, without the name.
        dispatch_key: The key that `function` is registered for.
        module: The module whose import registers it: what a fresh process must import to have the op.
        function: The kernel.
        fake: What tells the shapes of its outputs without running it, if anything does.
    """

    name: str
    schema: str
    dispatch_key: str
    module: str
    function: Callable[..., Any]
    fake: Callable[..., Any] | None


_ops: dict[str, CustomOp] = {}
# A Library takes its definitions back when it is collected: those of cgtool live as long as the process, and one for
# each op lets a registration that fails halfway leave nothing behind.
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

    A module that is imported again registers the same op again: that changes nothing, as long as the code of both
    functions and the schema are what they were.

    Args:
        op_name: The name without its namespace.
        op_func: The kernel. Its annotations give the schema.
        mutates_args: Names of the arguments that the kernel writes to.
        fake_impl: Takes what the kernel takes and returns empty tensors like its outputs. An op that returns nothing
            needs none. Without one the kernel itself is run on fake tensors, which only plain torch code survives.
        namespace: The part before `::`. `target_lib` overrides it with its own.
        dispatch_key: For which tensors the kernel serves. The default, `"CompositeExplicitAutograd"`, is every device:
            the kernel of such an op may pick what it calls by the device of its arguments. (ATOM's default is
            `"CUDA"`: pass it to leave other devices without a kernel.)
        splitting: Whether graphs are split at this op when `splitting_ops` is None.
        target_lib: The library to define it in; by default one of cgtool's own that lives as long as the process.

    Returns:
        What was registered, now or earlier.

    Raises:
        UsageError: The names or annotations make no schema, or another op has that name already.

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
        # A library that was collected took its op away; the record alone is then no op.
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
    """Return the module that registered `ns::op` through `direct_register_custom_op`, or None where none did."""
    with _lock:
        known = _ops.get(name)
    return None if known is None else known.module


def _new_library(namespace: str) -> torch.library.Library:
    """Return a fragment of `namespace` to define one op in."""
    if not namespace.isidentifier():
        msg = f"{namespace!r} cannot be the namespace of a custom op. Use a plain identifier."
        raise UsageError(msg, expected="an identifier", actual=namespace)
    try:
        return torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except (ValueError, RuntimeError) as error:
        msg = f"{namespace!r} cannot be the namespace of a custom op: {error}. Choose another."
        raise UsageError(msg, actual=namespace) from error


def _schema(op_name: str, function: Callable[..., Any], mutates_args: Sequence[str]) -> str:
    """Infer the schema from the kernel's annotations, with torch's complaint as a sentence."""
    if not op_name.isidentifier():
        msg = f"{op_name!r} cannot name a custom op. Use a plain identifier, and give the namespace by `namespace`."
        raise UsageError(msg, expected="an identifier", actual=op_name)
    try:
        return str(torch.library.infer_schema(function, mutates_args=mutates_args))
    except (ValueError, TypeError) as error:
        msg = (
            f"The custom op {op_name} has no schema: {error} Annotate every argument and the result with types that "
            "torch.library.infer_schema knows, and name in mutates_args only arguments of the function."
        )
        raise UsageError(msg, path=op_name) from error


def _define(library: Any, op_name: str, op: CustomOp) -> None:
    """Define the op, its kernel and its fake. A `torch.library.Library` is Any here: its methods have no types."""
    fake = op.fake
    if fake is None and op.schema.endswith("-> ()"):
        fake = _returns_nothing
    try:
        library.define(op_name + op.schema)
        library.impl(op_name, op.function, op.dispatch_key)
        if fake is not None:
            torch.library.register_fake(op.name, fake, lib=library)
    except RuntimeError as error:
        msg = f"torch refused the custom op {op.name} ({op.dispatch_key}): {error} Change what it names."
        raise UsageError(msg, path=op.name) from error


def _returns_nothing(*_args: object, **_kwargs: object) -> None:
    """Serve as the fake of an op that only writes into its arguments."""


def _same_or_raise(known: CustomOp | None, new: CustomOp) -> CustomOp:
    """Return the record of an op that exists already if `new` says the same, else raise."""
    if known is None:
        msg = f"{new.name} is registered already, and not by direct_register_custom_op. Give yours another name."
        raise UsageError(msg, path=new.name)
    for what, before, now in (
        ("schema", known.schema, new.schema),
        ("dispatch key", known.dispatch_key, new.dispatch_key),
        ("kernel", _fingerprint(known.function), _fingerprint(new.function)),
        ("fake implementation", _fingerprint(known.fake), _fingerprint(new.fake)),
    ):
        if before != now:
            msg = (
                f"{new.name} is registered already by {known.module}, with another {what}, and {new.module} registers "
                "it again. Give one of them another name or namespace; after editing a kernel, start a new process."
            )
            raise UsageError(msg, path=new.name, expected=str(before), actual=str(now))
    return known


def _fingerprint(function: Callable[..., Any] | None) -> object:
    """Return what two functions share when the same lines made them.

    A digest knows the objects of a closure by their type alone: those must be the very same ones. Anything but a Python
    function is equal to nothing but itself.
    """
    if not isinstance(function, types.FunctionType):
        return id(function)
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    strangers = tuple(id(value) for value in held if not isinstance(value, _TOLD_BY_DIGEST))
    return code_digest(function, follow_globals=True), strangers


_TOLD_BY_DIGEST = (bool, int, float, str, bytes, type(None), type, types.ModuleType, types.FunctionType)
