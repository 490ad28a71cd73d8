"""What the first call of a model does by itself and no later one: cached properties are computed, hooks installed."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

#: Where transformers installs hooks, under a lock, as a model is first asked for hidden states; how it marks that.
_CAPTURING, INSTALLS = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"
_MARK = "._output_capturing_hooks_installed"


def value_of_cached(held: Any, name: str) -> Any:
    """Return what a `functools.cached_property` of an object gives, and keep nothing: it may change until then."""
    member = inspect.getattr_static(type(held), name, None)
    if name in vars(held) or not isinstance(member, functools.cached_property):
        return vars(held).get(name)
    before = set(vars(held))
    try:
        return member.func(held)
    finally:
        for other in vars(held).keys() - before:  # what it asked for in turn
            del vars(held)[other]


def install_hooks(part: Any) -> bool:
    """Have transformers install its hooks on one of its models, as its first call would; return whether it had none.

    Source:
        `transformers.utils.output_capturing`, read in 5.17 and 5.23. A hook does nothing while nobody asks.
    """
    install = getattr(sys.modules.get(_CAPTURING), INSTALLS, None)
    if part is None or install is None or getattr(part, _MARK[1:], False):
        return False
    install(part)
    return True


def with_hooks(sources: Iterable[str]) -> Iterator[str]:
    """Yield the models that had their hooks, of those that these sources of guards speak of, the outermost first."""
    yield from sorted({source.removesuffix(_MARK) for source in sources if source.endswith(_MARK)}, key=len)
