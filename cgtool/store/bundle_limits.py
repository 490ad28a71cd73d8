"""How much a bundle may make of little: limits against bombs. Must not import torch."""

from __future__ import annotations

from cgtool.records import dataclass
from cgtool.store.refusals import refused

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is read of a bundle before it is refused.

    Args:
        max_bytes: The size of all members together.
        max_ratio: Bytes unpacked for one byte packed, looked at once `ratio_from_bytes` were unpacked.
        max_members: How many members there may be.
        max_index_bytes: The size of bundle.json.
        ratio_from_bytes: Small bundles may pack well.
    """

    max_bytes: int = 64 * _GIB
    max_ratio: float = 250.0
    max_members: int = 1_000_000
    max_index_bytes: int = 32 * _MIB
    ratio_from_bytes: int = 32 * _MIB


#: bundle.sig holds a few hundred bytes for each signature.
MAX_SIGNATURE_BYTES = 2**16
#: JSON that is parsed whole: the index, keys and manifests. Python makes thirty bytes of each one of "{},{},...".
MAX_RECORD_BYTES = 32 * _MIB
MAX_RECORD_VALUES = 2_000_000
MAX_PLAN_BYTES = 64 * _MIB
MAX_PLAN_VALUES = 4_000_000
#: Text that nobody parses.
MAX_TEXT_BYTES = 256 * _MIB
#: Packages are opened from memory, by load too.
MAX_PACKAGE_BYTES = 4 * _GIB


def check_values(data: bytes, *, member: str, most: int) -> None:
    """Check, before it is parsed, that JSON makes no more values than a record of cgtool's has.

    Args:
        data: The JSON; what is in its strings counts too.
        member: The file that it is.
        most: How many lists, objects and commas it may hold.

    Raises:
        RefusedError: bomb.
    """
    found = data.count(b"{") + data.count(b"[") + data.count(b",")
    if found > most:
        why = "is a record that grows out of all proportion"
        raise refused("bomb", why, member=member, expected=most, actual=found)
