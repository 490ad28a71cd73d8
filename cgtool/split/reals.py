"""Refusal of sizes computed from real numbers whose operations torch may reorder.

torch simplifies `n * 0.1 * 3` to `0.3 * n`, which can round differently: for n = 10, rounding up gives 4 and not 3. A
single operation cannot be reordered, and torch preserves the order of divisions. So sizes, and guards on them, may
depend on a real number only if it is the result of one operation or of divisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from cgtool.errors import SplitError
from cgtool.split import _torch as private
from cgtool.split.nodes import example, numbers_in, user_line

#: Operations that at most change the sign of a number.
_EXACT = frozenset({"sym_float", "neg", "pos", "abs"})


def refuse_reordered(nodes: Iterable[fx.Node], shape_env: Any) -> None:
    """Check that no size depends on a real number that takes several operations.

    Raises:
        SplitError: A size does; the message contains the user's line.
    """
    single: set[Any] = set()
    chains: dict[Any, fx.Node] = {}
    depths: dict[fx.Node, int] = {}
    lines: dict[Any, str] = {}
    for node in nodes:
        value = example(node)
        if isinstance(value, torch.SymFloat):
            depth = max((depths.get(argument, 0) for argument in node.all_input_nodes), default=0)
            depths[node] = depth + (getattr(node.target, "__name__", "") not in _EXACT)
            if depths[node] > 1:
                chains.setdefault(private.expr_of(value), node)
            else:
                single.add(private.expr_of(value))
        for part in value if isinstance(value, tuple | list) else (value,):
            is_tensor = isinstance(part, torch.Tensor)
            for size in numbers_in(part):
                if isinstance(size, torch.SymInt | torch.SymBool):
                    reals = [real for real in private.reals_in(private.expr_of(size)) if real not in lines]
                    lines.update(dict.fromkeys(reals, user_line(node) or ""))
                    single.update(reals if is_tensor else ())  # torch computes the sizes of its ops' results itself
    for expr, line in private.guards_of(shape_env):
        lines.update({real: line for real in private.reals_in(expr) if real not in lines})
    for real, line in lines.items():
        if (real not in single or real in chains) and not private.only_divides(real):
            where = user_line(chains[real]) if real in chains else line
            msg = (
                f"A size or a branch depends on {real}, a real number that may take several operations. torch may "
                "reorder them, which can round to another size. Compute with integers, such as n * 3 // 10 "
                f"({where})."
            )
            raise SplitError(msg, actual=str(real))
