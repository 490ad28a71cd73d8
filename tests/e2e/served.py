"""The fixtures as most tests serve them, with as little to compile as shows the same."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
if str(FIXTURES) not in sys.path:
    sys.path.insert(0, str(FIXTURES))

import tiny_llama  # noqa: E402
import tiny_vision  # noqa: E402


def llama():
    """Four layers, two tokens or more: one variant of three unique pieces."""
    spec = tiny_llama.build()
    return dataclasses.replace(spec, dynamic={name: {0: ("num_tokens", 2, None)} for name in spec.dynamic})


def vision():
    """No layer between stem and head, any number of images: two variants, one of them for a single image."""
    return tiny_vision.build(num_layers=0)
