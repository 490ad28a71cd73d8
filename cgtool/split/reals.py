"""Real numbers that sizes are computed with: torch may take their operations in another order than the model does.

torch keeps `n * 0.1 * 3` as `0.3 * n`, which is another number where that rounds otherwise: rounded up, 4 and not 3 for
an n of 10. What one operation gives is the same in any order, and torch leaves divisions as they are. So a size, and
what is asked of sizes, may come from a real number that one operation of the graph gives, or divisions alone, and not
from more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from cgtool.errors import SplitError
from cgtool.split import _torch as private
from cgtool.split.nodes import example, numbers_in, user_line

#: What gives a number as it is, or with the other sign.
_EXACT = frozenset({"sym_float", "neg", "pos", "abs"})


def refuse_reordered(nodes: Iterable[fx.Node], shape_env: Any) -> None:
    """Refuse a graph in which sizes depend on a real number that takes several operations.

    Raises:
        SplitError: They do; the message has the user's line.
    """
    once: set[Any] = set()
    chains: dict[Any, fx.Node] = {}
    depths: dict[fx.Node, int] = {}
    shown: dict[Any, str] = {}
    for node in nodes:
        value = example(node)
        if isinstance(value, torch.SymFloat):
            before = max((depths.get(taken, 0) for taken in node.all_input_nodes), default=0)
            depths[node] = before + (getattr(node.target, "__name__", "") not in _EXACT)
            if depths[node] > 1:
                chains.setdefault(private.expr_of(value), node)
            else:
                once.add(private.expr_of(value))
        for part in value if isinstance(value, tuple | list) else (value,):
            is_tensor = isinstance(part, torch.Tensor)
            for size in numbers_in(part):
                if isinstance(size, torch.SymInt | torch.SymBool):
                    found = [real for real in private.reals_in(private.expr_of(size)) if real not in shown]
                    shown.update(dict.fromkeys(found, user_line(node) or ""))
                    once.update(found if is_tensor else ())  # an op of torch computes its own sizes
    for expr, line in private.guards_of(shape_env):
        shown.update({real: line for real in private.reals_in(expr) if real not in shown})
    for real, line in shown.items():
        if (real not in once or real in chains) and not private.only_divides(real):
            where = user_line(chains[real]) if real in chains else line
            msg = (
                f"A size or a branch depends on {real}, a real number that may take several operations, which torch "
                "takes in any order: that can round to another size. Compute with integers, such as n * 3 // 10 "
                f"({where})."
            )
            raise SplitError(msg, actual=str(real))
