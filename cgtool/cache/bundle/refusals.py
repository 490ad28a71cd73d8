"""The words in which a bundle is refused. Must not import torch.

Each refusal has a stable reason for programs; it names the member that it is about, cut where a stranger made it long.
"""

from __future__ import annotations

from typing import Any

from cgtool.errors import RefusedError

_SHOWN_CHARACTERS = 160
_ADVICE = "Nothing was changed. Ask whoever made the bundle for a whole one."


def shown(name: str) -> str:
    """Return a member's name as people may be shown it: quoted, escaped and cut."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…")


def refused(
    reason: str, why: str, *, member: str | None = None, expected: Any = None, actual: Any = None, advice: str = _ADVICE
) -> RefusedError:
    """Return the error for a bundle that is not believed.

    Args:
        reason: A stable word for programs.
        why: What is wrong, as the end of a sentence: "holds a link".
        member: The member that it is about; None for the bundle as a whole.
        expected: What should have been there.
        actual: What was there.
        advice: What the user can do.
    """
    about = "The bundle" if member is None else f"The member {shown(member)} of the bundle"
    path = None if member is None else member[:_SHOWN_CHARACTERS]
    return RefusedError(f"{about} {why}. {advice}", reason=reason, path=path, expected=expected, actual=actual)
