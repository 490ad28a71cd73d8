"""Split: one full graph becomes pieces as data, with identities that no process, path or name enters."""

from __future__ import annotations

from cgtool.split.splitter import SplitResult, split_graph
from cgtool.split.text import graph_text

__all__ = ["SplitResult", "graph_text", "split_graph"]
