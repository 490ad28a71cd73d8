"""What the compiler believes of a custom op, as a digest: its schema and its fake implementation.

A piece that calls an op is compiled from these beliefs; the kernel behind it is called by name and may change freely.
The fake implementation counts with the helpers and constants of its module. A fake kernel that lives in C++, and a
Python function given to `Library.impl` under a dispatch key, cannot be seen: only that it exists enters.
"""

from __future__ import annotations

from cgtool.errors import SplitError
from cgtool.guards import _torch as private
from cgtool.guards.code import code_digest
from cgtool.plan.grammar import digest_of

_KEYS = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")


def is_composite(name: str) -> bool:
    """Return whether a compiler takes the op `ns::op.overload` apart into the ops that its kernel calls."""
    op = private.find_op(name)
    return op is not None and private.has_kernel(op, "CompositeImplicitAutograd")


def op_digest(name: str) -> str:
    """Return the SHA-256 of what the compiler believes of an op, as 64 hexadecimal digits.

    Args:
        name: `ns::op.overload`, or `ns::op` for its default overload.

    Raises:
        SplitError: No library that is imported provides the op.
    """
    op = private.find_op(name)
    if op is None:
        raise SplitError(f"no library that is imported provides the op {name}; import the one that does", expected=name)
    fake = private.fake_implementation(op)
    return digest_of(
        {
            "schema": str(private.schema_of(op)),
            "tags": sorted(str(tag) for tag in op.tags),
            "fake": None if fake is None else code_digest(fake, follow_globals=True),
            "kernels": [key for key in _KEYS if private.has_kernel(op, key)],
            "python": {
                key: code_digest(function, follow_globals=True)
                for key, function in sorted(private.python_kernels(op).items())
            },
        }
    )
