"""`python -m cgtool`: the command line, for environments where the `cgtool` script is not on PATH."""

from __future__ import annotations

import sys

from cgtool.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
