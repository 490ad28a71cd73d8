"""What `import` would refuse is not exported: the same checks, before anything is written. Must not import torch.

How many bytes a bundle may hold in all, and how well it may pack, is for who imports to say, and not asked here.
"""

from __future__ import annotations

from collections.abc import Mapping

from cgtool.errors import CacheError, RefusedError
from cgtool.store.bundle_index import (
    INDEX_FILE,
    MAX_RECORD_VALUES,
    Index,
    Limits,
    check_members,
    check_number,
    check_values,
    refused,
    without_advice,
)
from cgtool.toolkit.bundle.content import check_growth
from cgtool.toolkit.bundle.tar import header_bytes

_ADVICE = "Choose other entries, or fewer of them."


def check_importable(
    index: Index, index_bytes: bytes, records: Mapping[str, bytes], *, limits: Limits | None = None
) -> None:
    """Check what is to become a bundle.

    Args:
        index: All of its members.
        index_bytes: The text of it.
        records: The bytes of the members that are no artifacts, by name.
        limits: What `import` takes; None: what it takes where nobody says otherwise.

    Raises:
        CacheError: `import` would refuse it, or a tar archive cannot hold it.
    """
    limits = limits or Limits()
    try:
        check_number(len(index.members), limits)
        check_values(index_bytes, member=INDEX_FILE, most=MAX_RECORD_VALUES)
        if len(index_bytes) > limits.max_index_bytes:
            why = f"has {len(index_bytes)} bytes, and {limits.max_index_bytes} are allowed"
            raise refused("too_large", why, member=INDEX_FILE, expected=limits.max_index_bytes, actual=len(index_bytes))
        check_members(index.members)
        for name, data in records.items():
            check_growth(data, name)
    except RefusedError as error:
        message = f"Nothing was exported, for import would refuse it. {without_advice(error)} {_ADVICE}"
        raise CacheError(message, path=error.path, expected=error.expected, actual=error.actual) from error
    for member in index.members:
        header_bytes(member.path, member.size_bytes, member.mode)
