"""The sample entries and the maker of large caches, of the folder above, are there for the tests of this one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
