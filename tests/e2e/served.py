"""The fixtures as tests serve them: without layers where depth changes nothing, so that there is less to compile."""

from __future__ import annotations

import sys
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
if str(FIXTURES) not in sys.path:
    sys.path.insert(0, str(FIXTURES))

import tiny_llama  # noqa: E402
import tiny_vision  # noqa: E402


def llama():
    """Four layers, any number of tokens."""
    return tiny_llama.build()


def vision():
    """No layer between stem and head, any number of images: two variants, for a batch of one needs its own."""
    return tiny_vision.build(num_layers=0)
