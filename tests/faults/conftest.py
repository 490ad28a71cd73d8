"""The sample entries of the cache's tests are there for the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "cache"), str(Path(__file__).parent.parent / "cache" / "prune")]
