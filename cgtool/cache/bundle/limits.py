"""How much a bundle may make of little: limits against bombs. Must not import torch."""

from __future__ import annotations

from cgtool.records import dataclass

_GIB = 2**30


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
    max_index_bytes: int = 256 * 2**20
    ratio_from_bytes: int = 32 * 2**20


#: bundle.sig holds a few hundred bytes for each signature.
MAX_SIGNATURE_BYTES = 2**16
#: JSON that is parsed whole: keys, manifests and plans.
MAX_RECORD_BYTES = 256 * 2**20
#: Packages are opened from memory, by load too.
MAX_PACKAGE_BYTES = 4 * _GIB
#: A plan writes runs of numbers and shared beginnings of texts short; this is how much they may come to.
MAX_PLAN_NUMBERS = 8_000_000
MAX_PLAN_CHARACTERS = 256 * 2**20
