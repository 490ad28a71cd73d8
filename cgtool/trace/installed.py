"""Records which modules and distributions traced code looks up; Dynamo makes the lookup and keeps only its result.

`importlib.util.find_spec` and `importlib.metadata.version` walk `sys.meta_path`, so a finder in the first position sees
every requested name, constant or computed, and finds nothing itself. `sys.meta_path` is not searched for modules that
are imported already, so if code makes lookups, all imported modules that its strings name count too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Collection, Iterator
from typing import Any

from cgtool.guards.files import normalised

#: Functions by which code looks up modules.
_LOOKUPS = frozenset({"find_spec", "find_loader", "get_loader"})
#: The modules that make the lookups of traced code.
_TRACER = "torch._dynamo.variables."
#: Stack depth from the finder past `importlib._bootstrap` to `find_spec`, and to its caller.
_TO_FIND_SPEC, _TO_CALLER = 2, 3


class Asked:
    """A finder that finds nothing and records the names that traced code looks up.

    Attributes:
        modules: The modules, by dotted name.
        distributions: The distributions, by normalised name.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.distributions: set[str] = set()

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        """Record a module that traced code looks up, but not one that is being imported."""
        frame = sys._getframe(_TO_FIND_SPEC)  # noqa: SLF001 - the only way to identify the caller
        if frame.f_code is importlib.util.find_spec.__code__:
            caller = sys._getframe(_TO_CALLER)  # noqa: SLF001 - as above
            if caller.f_globals.get("__name__", "").startswith(_TRACER):
                self.modules.add(name)

    def find_distributions(self, context: Any) -> Iterator[Any]:
        """Record a distribution; a context without a name lists all of them, which no trace does."""
        if context.name is not None:
            self.distributions.add(normalised(context.name))
        return iter(())

    def add_imported(self, names: Collection[str]) -> None:
        """Record the imported modules that traced code with these names and strings could have looked up."""
        if not _LOOKUPS.isdisjoint(names):
            self.modules.update(name for name in names if name in sys.modules)


@contextlib.contextmanager
def recorded_lookups() -> Iterator[Asked]:
    """Record the lookups made while the block runs."""
    asked = Asked()
    sys.meta_path.insert(0, asked)
    try:
        yield asked
    finally:
        sys.meta_path.remove(asked)
