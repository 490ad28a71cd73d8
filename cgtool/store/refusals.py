"""The words in which a bundle is refused. Must not import torch.

Each refusal has a stable reason for programs; it names the member that it is about, cut where a stranger made it long.
The reasons, which `cgtool import --json` prints::

    not_trusted unsigned untrusted_key wrong_signature tampered bad_signature_file            who made it
    not_a_bundle unknown_schema bad_index bad_compression bad_header truncated trailing_data  what it is
    parent_path absolute_name strange_name outside_layout unknown_kind                        names
    duplicate_member case_collision unicode_collision
    link device fifo folder_member sparse pax_header strange_type                             types
    too_large bomb size_mismatch digest_mismatch                                              sizes and bytes
    missing_member unlisted_member missing_artifact unnamed_artifact                          what is there
    corrupt_key corrupt_manifest corrupt_plan strange_package strange_artifact pickle         what is in it
    unsupported other_plan other_schema_here link_here                                        what is here

Load adds (`cgtool.store.trust`): foreign_owner writable_by_others changed.
"""

from __future__ import annotations

from typing import Any

from cgtool.errors import RefusedError

_SHOWN_CHARACTERS = 160
_ADVICE = "Nothing was changed. Ask whoever made the bundle for a whole one."


def shown(name: str) -> str:
    """Return a member's name as people may be shown it: quoted, escaped and cut."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…")


def without_advice(error: RefusedError) -> str:
    """Return what is wrong, without what whoever imports can do about it."""
    return str(error).removesuffix(f" {_ADVICE}")


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
