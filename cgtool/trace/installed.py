"""What code asks of what is installed, while it is traced: Dynamo asks in its place and keeps the answer alone.

`importlib.util.find_spec` and `importlib.metadata.version` walk `sys.meta_path`, so a finder that stands there first
hears every name that is asked for, constant or computed, and finds nothing itself. A module that is imported already is
not looked for; where code asks at all, those that its strings name count too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Collection, Iterator
from typing import Any

from cgtool.guards.files import normalised

#: Names by which code asks for modules.
_ASKING = frozenset({"find_spec", "find_loader", "get_loader"})
#: Who asks in the place of traced code.
_TRACER = "torch._dynamo.variables."
#: From the finder past `importlib._bootstrap` to `find_spec`, and from there to who called it.
_TO_FIND_SPEC, _TO_CALLER = 2, 3


class Asked:
    """A finder that finds nothing, and remembers for what traced code asked.

    Attributes:
        modules: The modules, by dotted name.
        distributions: The distributions, by normalised name.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.distributions: set[str] = set()

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        """Take in the name of a module that traced code asked for, and not one that is being imported."""
        asking = sys._getframe(_TO_FIND_SPEC)  # noqa: SLF001 - the one way to tell who asks
        if asking.f_code is importlib.util.find_spec.__code__:
            caller = sys._getframe(_TO_CALLER)  # noqa: SLF001 - as above
            if caller.f_globals.get("__name__", "").startswith(_TRACER):
                self.modules.add(name)

    def find_distributions(self, context: Any) -> Iterator[Any]:
        """Take in the name of a distribution; one without a name is a listing of all, which no trace asks for."""
        if context.name is not None:
            self.distributions.add(normalised(context.name))
        return iter(())

    def add_imported(self, names: Collection[str]) -> None:
        """Take in the imported modules that traced code with these names and strings could have asked for."""
        if not _ASKING.isdisjoint(names):
            self.modules.update(name for name in names if name in sys.modules)


@contextlib.contextmanager
def listening() -> Iterator[Asked]:
    """Hear what is asked for meanwhile."""
    asked = Asked()
    sys.meta_path.insert(0, asked)
    try:
        yield asked
    finally:
        sys.meta_path.remove(asked)
