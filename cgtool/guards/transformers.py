"""Special cases for transformers: probes of the machine, and the hooks that a model installs at its first call."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from cgtool.guards.kinds import NoRuleError, encode_literal
from cgtool.guards.sources import qualified_name
from cgtool.plan.pieces import Json

#: The module in which transformers probes what is installed and what the machine has. Its functions are marked as
#: constants for Dynamo, which calls them and records no guard. They are the only functions that a plan may have called.
PROBES = "transformers.utils.import_utils"
#: Where transformers installs hooks, under a lock, when a model is first asked for hidden states, and its mark for it.
_CAPTURING, INSTALLS = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"
_MARK = "_output_capturing_hooks_installed"


def answers(value: Any) -> Json:
    """Return the results of a probe for each combination of its flags.

    Raises:
        NoRuleError: The function is not a probe, or takes arguments other than flags.
    """
    if getattr(value, "__module__", None) != PROBES or not getattr(value, "_dynamo_marked_constant", False):
        msg = f"{qualified_name(value)} is not a transformers probe, and cgtool calls no other function."
        raise NoRuleError(msg)
    parameters = inspect.signature(value).parameters.values()
    if not all(isinstance(parameter.default, bool) for parameter in parameters):
        msg = f"{qualified_name(value)} takes arguments other than flags, so its results cannot be enumerated."
        raise NoRuleError(msg)
    return [encode_literal(value(*flags)) for flags in itertools.product((False, True), repeat=len(parameters))]


def install_hooks(part: Any) -> bool:
    """Have transformers install its hooks on a model, as its first call would; return whether it had none.

    Source:
        `transformers.utils.output_capturing`, read in 5.17 and 5.23. A hook does nothing unless outputs are requested.
    """
    install = getattr(sys.modules.get(_CAPTURING), INSTALLS, None)
    if part is None or install is None or getattr(part, _MARK, False):
        return False
    install(part)
    return True


def models_with_hooks(sources: Iterable[str]) -> Iterator[str]:
    """Yield the models that had their hooks installed, judging by these guard sources, the outermost first."""
    suffix = f".{_MARK}"
    yield from sorted({source.removesuffix(suffix) for source in sources if source.endswith(suffix)}, key=len)
